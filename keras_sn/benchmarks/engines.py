"""The engines: who trains a network in a benchmark, by name, with `-xla` where XLA compiles.

- `keras-graph` and `keras-xla`: plain Keras, what the others are compared with.
- A policy of `SNModel`; `auto@0.4` is `auto` with a budget of that share of the activations that plain Keras is planned to hold,
  and what is reserved.
- `keras-remat` and `keras-recompute-grad`: what Keras and TensorFlow have themselves to recompute; see `keras_rivals`.
- `torch-…` and `jax-…`: other libraries; see `torch_rival` and `jax_rival`. Those run by a script of their own.
"""

import re
from collections.abc import Sequence

from keras_sn.errors import KerasSNError
from keras_sn.policies import POLICIES

PLAIN = ("keras-graph", "keras-xla")
KERAS_RIVALS = ("keras-remat", "keras-remat-xla", "keras-recompute-grad", "keras-recompute-grad-xla")
RIVALS = (
    *("torch-eager", "torch-compile", "torch-checkpoint", "torch-save-on-cpu"),
    *("jax-plain", "jax-dots", "jax-nothing", "jax-offload"),
)
"""Engines without Keras."""
ENGINES = (*PLAIN, *POLICIES, *(f"{policy}-xla" for policy in POLICIES), *KERAS_RIVALS, *RIVALS)
_AUTO_SHARE = re.compile(r"auto@(0?\.\d+)(-xla)?")
_WITH_SHARE = re.compile(rf"{_AUTO_SHARE.pattern}|torch-compile@0?\.\d+")


def check_engines(engines: Sequence[str]) -> None:
    """Raises `KerasSNError` if one of them is none."""
    for engine in engines:
        if engine not in ENGINES and not _WITH_SHARE.fullmatch(engine):
            names = ", ".join((*ENGINES, "auto@SHARE", "torch-compile@SHARE"))
            raise KerasSNError(f"An engine is one of {names}. Received: {engine!r}")


def share_of(engine: str) -> float | None:
    """The share in an engine such as `auto@0.55-xla`; None if it has none, or is another library's."""
    found = _AUTO_SHARE.fullmatch(engine)
    return float(found[1]) if found else None


def is_ours(engine: str) -> bool:
    """Whether `SNModel` trains."""
    return not engine.startswith(("keras-", "torch-", "jax-"))
