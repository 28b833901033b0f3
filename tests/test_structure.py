import keras
import numpy as np
from keras import layers as L

from keras_sn.bodies import make_bodies
from keras_sn.planner import make_plan
from keras_sn.region_library import RegionLibrary
from keras_sn.regions import FUNCTION
from keras_sn.trace import trace


def _functions(*layers, shape=(4,)):
    """How many different functions the layers need when each is a region."""
    inputs = x = keras.Input(shape)
    for layer in layers:
        x = layer(x)
    traced = trace(keras.Model(inputs, x), 2)
    plan = make_plan(traced.graph, {"*": "recompute"}, batch_size=2, reserved_bytes=0)
    one_each = [region.__class__((name,), ()) for region in plan.regions for name in region.layers]
    library = RegionLibrary()
    for body in make_bodies(traced, one_each, None):
        library.function_for(body, FUNCTION, jit=False, inline=False)
    return len(library)


def test_equal_layers_share_whatever_their_names_and_seeds():
    assert _functions(L.Dense(4, name="a"), L.Dense(4, name="b", kernel_initializer=keras.initializers.HeNormal(seed=3))) == 2
    assert _functions(L.Dense(4, name="a"), L.Dense(4, name="b")) == 1
    assert _functions(L.Dropout(0.5, seed=1), L.Dropout(0.5, seed=2)) == 1


def test_different_layers_do_not_share():
    assert _functions(L.Dense(4), L.Dense(4, activation="relu")) == 2
    assert _functions(L.Dense(4), L.Dense(4, use_bias=False)) == 2
    assert _functions(L.Dense(4), L.Dense(4, trainable=False)) == 2
    assert _functions(L.Dropout(0.5), L.Dropout(0.4)) == 2
    assert _functions(L.Dense(5), L.Dense(4)) == 2  # other shapes


class Scaled(L.Layer):
    """A user's layer whose configuration leaves something out."""

    def __init__(self, factor, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor

    def call(self, x):
        return x * self.factor

    def get_config(self):
        return super().get_config()


def test_attributes_of_a_users_layer_count_too():
    assert _functions(Scaled(2.0), Scaled(2.0)) == 1
    assert _functions(Scaled(2.0), Scaled(3.0)) == 2
    assert _functions(Scaled(np.ones(4)), Scaled(np.zeros(4))) == 2


def test_what_cannot_be_compared_is_never_shared():
    assert _functions(L.Lambda(lambda x: x + 1), L.Lambda(lambda x: x + 1)) == 2


def test_constants_of_raw_operations_count():
    def graph(*factors):
        inputs = x = keras.Input((4,))
        for factor in factors:
            x = x * factor
        return keras.Model(inputs, x)

    def functions(model):
        traced = trace(model, 2)
        region = make_plan(traced.graph, {"*": "recompute"}, batch_size=2, reserved_bytes=0).regions[0].__class__
        library = RegionLibrary()
        for body in make_bodies(traced, [region((call.name,), ()) for call in traced.calls], None):
            library.function_for(body, FUNCTION, jit=False, inline=False)
        return len(library)

    assert functions(graph(2.0, 2.0)) == 1
    assert functions(graph(2.0, 3.0)) == 2
    assert functions(graph(np.ones(4), np.zeros(4))) == 2
