"""In which order to make the layer calls: a topological order that keeps few bytes alive, found without recursion."""

from collections import Counter, deque
from collections.abc import Collection, Sequence
from typing import Any

from keras_sn.graph import TensorSpec


def few_alive(calls: Sequence[Any], specs: dict[str, TensorSpec], outputs: list[str], in_turn: Collection[str] = ()) -> list[Any]:
    """Keras' order of the layer calls, or a greedy one if that keeps clearly fewer bytes alive.

    Args:
        calls: Calls with `operation`, `inputs` and `outputs`, in Keras' order.
        specs: The specification of each tensor.
        outputs: The tensors that the model returns.
        in_turn: Tensors whose readers keep their order.
    """
    greedy = _greedy_order(calls, specs, outputs, in_turn)
    return greedy if _peak_alive(greedy, specs, outputs) < 0.9 * _peak_alive(calls, specs, outputs) else list(calls)


def _peak_alive(calls: Sequence[Any], specs: dict[str, TensorSpec], outputs: list[str]) -> int:
    """The largest number of bytes alive at once when each tensor dies after its last reader."""
    last_use = {name: index for index, call in enumerate(calls) for name in call.inputs} | dict.fromkeys(outputs, len(calls))
    dying: dict[int, list[str]] = {}
    for name, index in last_use.items():
        dying.setdefault(index, []).append(name)
    alive = peak = 0
    for index, call in enumerate(calls):
        alive += sum(specs[name].nbytes for name in call.outputs if name in last_use)
        peak = max(peak, alive)
        alive -= sum(specs[name].nbytes for name in dying.get(index, ()) if specs[name].kind != "input")
    return peak


def _greedy_order(calls: Sequence[Any], specs: dict[str, TensorSpec], outputs: list[str], in_turn: Collection[str]) -> list[Any]:
    """Always the ready call that adds the fewest live bytes; of equals the one that became ready last.

    Calls of one layer, or of layers that share variables, keep their order: their state passes from one to the next.
    """
    producer = {name: index for index, call in enumerate(calls) for name in call.outputs}
    waits, followers = [0] * len(calls), [[] for _ in calls]
    readers = Counter(name for call in calls for name in call.inputs) + Counter(outputs)
    last_with: dict[Any, int] = {}
    for index, call in enumerate(calls):
        before = {producer[name] for name in call.inputs if name in producer}
        state = [id(variable) for variable in getattr(call.operation, "non_trainable_variables", [])]
        for key in (*state, *(name for name in call.inputs if name in in_turn)):
            if key in last_with:
                before.add(last_with[key])
            last_with[key] = index
        before.discard(index)
        waits[index] = len(before)
        for one in before:
            followers[one].append(index)
    ready = deque(index for index, count in enumerate(waits) if count == 0)
    order = []
    while ready:
        index = min(reversed(ready), key=lambda i: _live_change(calls[i], specs, readers))
        ready.remove(index)
        order.append(calls[index])
        readers.subtract(calls[index].inputs)
        for follower in followers[index]:
            waits[follower] -= 1
            if waits[follower] == 0:
                ready.append(follower)
    return order


def _live_change(call: Any, specs: dict[str, TensorSpec], readers: Counter) -> int:
    freed = sum(specs[name].nbytes for name in call.inputs if readers[name] == 1 and specs[name].kind != "input")
    return sum(specs[name].nbytes for name in call.outputs) - freed
