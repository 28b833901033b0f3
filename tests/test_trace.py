import keras
import pytest
from keras import layers as L

from keras_sn.errors import UnsupportedModelError
from keras_sn.keras_internals import nodes_in_execution_order
from keras_sn.model import SNModel
from keras_sn.trace import trace


def _names(model, batch_size=2):
    return [call.name for call in trace(model, batch_size).calls]


def test_sequential_and_functional():
    model = keras.Sequential([keras.Input((4,)), L.Dense(3, name="a"), L.ReLU(name="b")])
    graph = trace(model, 8).graph
    assert [layer.name for layer in graph.layers] == ["a", "b"]
    assert graph.tensors["a"].shape == (8, 3)
    assert graph.layers[0].flops == 2 * 8 * 4 * 3
    assert graph.layers[0].weight_bytes == (4 * 3 + 3) * 4
    assert graph.layers[0].is_costly
    assert not graph.layers[1].is_costly


def test_nested_models_are_flattened_and_shared_layers_have_several_calls():
    inner_in = keras.Input((4,))
    inner = keras.Model(inner_in, L.Dense(4, name="dense")(inner_in), name="inner")
    outer_in = keras.Input((4,))
    deeper = keras.Sequential([keras.Input((4,)), inner], name="deeper")
    model = keras.Model(outer_in, inner(deeper(outer_in)))
    traced = trace(model, 2)
    assert [call.name for call in traced.calls] == ["deeper/inner/dense", "inner/dense"]
    assert traced.calls[0].operation is traced.calls[1].operation
    assert [layer.weight_bytes for layer in traced.graph.layers] == [80, 0]


def test_a_nested_model_of_another_dtype_casts():
    inner_in = keras.Input((4,), dtype="float64")
    inner = keras.Model(inner_in, keras.ops.sum(inner_in, axis=-1), name="inner")
    outer_in = keras.Input((4,))
    assert "inner/CastTo" in _names(keras.Model(outer_in, inner(outer_in)))


def test_raw_operations_and_several_inputs_and_outputs():
    a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
    model = keras.Model({"a": a, "b": b}, {"sum": a + b, "parts": keras.ops.split(a, 2, axis=1)})
    graph = trace(model, 2).graph
    assert set(graph.inputs) == {"a", "b"}
    assert len(graph.outputs) == 3
    assert {layer.layer_type for layer in graph.layers} == {"Add", "Split"}


def test_the_order_keeps_few_tensors_alive():
    inputs = keras.Input((1000,))
    branches = [L.ReLU()(inputs) for _ in range(6)]  # Keras runs all wide ends first
    narrow = [L.Dense(1)(branch) for branch in branches]
    graph = trace(keras.Model(inputs, L.Concatenate()(narrow)), 1).graph
    types = [layer.layer_type for layer in graph.layers]
    assert types[:4] == ["ReLU", "Dense", "ReLU", "Dense"]


def test_calls_of_a_stateful_layer_keep_their_order():
    inputs = keras.Input((1000,))
    norm = L.BatchNormalization()
    wide = [L.ReLU(name=f"wide{i}")(inputs) for i in range(4)]
    outputs = [L.Dense(1)(norm(x)) for x in wide]
    model = keras.Model(inputs, L.Concatenate()(outputs))
    readers = [node for node in nodes_in_execution_order(model) if node.operation is norm]
    keras_order = [node.input_tensors[0]._keras_history.operation.name for node in readers]
    traced = trace(model, 1)
    assert traced.calls[1].operation is not traced.calls[0].operation  # reordered
    assert [call.inputs[0] for call in traced.calls if call.operation is norm] == keras_order


def test_thousands_of_layer_calls():
    inputs = keras.Input((4,))
    layer, x = L.ReLU(), inputs
    for _ in range(3_000):
        x = layer(x)
    model = SNModel(inputs, x)  # plain `keras.Model` exceeds Python's recursion limit here
    assert len(trace(model, 2).calls) == 3_000


def test_refused_models():
    class Own(keras.Model):
        def call(self, x):
            return x

    with pytest.raises(UnsupportedModelError, match=r"own `call\(\)`.*Received"):
        trace(Own(), 2)
    with pytest.raises(UnsupportedModelError, match=r"not built.*Received"):
        trace(keras.Sequential([L.Dense(2)]), 2)
    with pytest.raises(UnsupportedModelError, match=r"unknown axis.*Received: shape=\(2, None\)"):
        trace(keras.Model(x := keras.Input((None,)), x + 1), 2)
    with pytest.raises(UnsupportedModelError, match=r"sparse.*Received"):
        trace(keras.Model(x := keras.Input((4,), sparse=True), L.Dense(2)(x)), 2)
    with pytest.raises(UnsupportedModelError, match="Received: 3"):
        trace(3, 2)
