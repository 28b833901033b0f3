"""Files, checkpoints and copies of planned models."""

import copy
import pickle
import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import layers as L

import keras_sn
from keras_sn.settings import Settings

RANDOM = np.random.default_rng(3)
X, Y = RANDOM.normal(size=(8, 6)).astype("float32"), RANDOM.normal(size=(8, 2)).astype("float32")


def build(**settings):
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,), name="x")
    x = L.BatchNormalization()(L.Dense(8, activation="relu")(inputs))
    model = keras_sn.SNModel(inputs, L.Dense(2)(L.Dense(8)(x)), policy={"dense*": "recompute"}, **settings)
    model.compile("adam", "mse", jit_compile=False)
    return model


def fit(model, epochs, **arguments):
    return model.fit(X, Y, batch_size=4, epochs=epochs, shuffle=False, verbose=0, **arguments).history["loss"]


@keras.saving.register_keras_serializable("test_files")
class Guide(keras_sn.SNModel):
    """The subclass that the guide shows."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.block, self.out = L.Dense(8, activation="gelu"), L.Dense(2)

    def call(self, x):
        return self.out(self.block(x))


@keras.saving.register_keras_serializable("test_files")
class Named(Guide):
    """Names a setting, with another default than the model's."""

    def __init__(self, policy="none", **kwargs):
        super().__init__(policy=policy, **kwargs)


@keras.saving.register_keras_serializable("test_files")
class Extended(Guide):
    """Adds to Keras' config."""

    def __init__(self, width=8, **kwargs):
        super().__init__(**kwargs)
        self.block, self.width = L.Dense(width, activation="gelu"), width

    def get_config(self):
        return super().get_config() | {"width": self.width}


@keras.saving.register_keras_serializable("test_files")
class Strict(Guide):
    """Takes nothing, sets everything by itself, and writes its own config."""

    def __init__(self):
        super().__init__(policy="recompute", memory_budget="2GiB")

    def get_config(self):
        return {}


class _Plain(keras.Model):
    def get_config(self):
        return {}

    @classmethod
    def from_config(cls, config):
        return cls(**config)


@keras.saving.register_keras_serializable("test_files")
class Mixed(_Plain, Guide):
    """Its methods for files come from a class that knows nothing of settings."""


@keras.saving.register_keras_serializable("test_files")
class Graph(keras_sn.SNModel):
    """Makes a graph in its constructor."""

    def __init__(self, width=8, **kwargs):
        inputs = keras.Input((6,))
        super().__init__(inputs, L.Dense(2)(L.Dense(width, activation="gelu")(inputs)), **kwargs)
        self.width = width

    def get_config(self):
        return {"width": self.width}


class Unregistered(Guide):
    pass


@keras.saving.register_keras_serializable("test_files")
class Scaled(keras.Model):
    """A user's functional model."""

    scale = 2.0

    def compute_loss(self, *args, **kwargs):
        return self.scale * super().compute_loss(*args, **kwargs)


@keras.saving.register_keras_serializable("test_files")
class Built(Scaled):
    """A user's functional model that makes its graph by itself."""

    def __init__(self, scale, **kwargs):
        inputs = keras.Input((6,))
        super().__init__(inputs, L.Dense(2)(L.Dense(8, activation="gelu")(inputs)), **kwargs)
        self.scale = scale

    def get_config(self):
        return {"scale": self.scale}


class UnregisteredScaled(Scaled):
    pass


def converted(own=Scaled, by=keras_sn.SNModel):
    inputs = keras.Input((6,))
    plain = own(3.0) if own is Built else own(inputs, L.Dense(2)(L.Dense(8, activation="gelu")(inputs)))
    return by.from_model(plain, policy="recompute", memory_budget="2GiB", host_budget="1MiB")


def through_file(model, path, **arguments):
    fit(model, 1, callbacks=[keras.callbacks.ModelCheckpoint(path / "model.keras")])
    return keras.saving.load_model(path / "model.keras", **arguments)


def through_pickle(model, path):
    fit(model, 1)
    return pickle.loads(pickle.dumps(model))


def through_deepcopy(model, path):
    fit(model, 1)
    return copy.deepcopy(model)


def through_clone(model, path):
    fit(model, 1)
    model.compile("adam", "mse", jit_compile=False)  # a clone's optimizer is new
    clone = keras.models.clone_model(model)
    clone.build((None, 6))
    clone.set_weights(model.get_weights())
    return clone


WAYS = (through_file, through_pickle, through_deepcopy, through_clone)


def goes_on(model, way, path):
    """Checks that a copy has the settings and trains on as its original does; returns it."""
    model.compile("adam", "mse", jit_compile=False)
    again = way(model, path)
    assert isinstance(again, keras_sn.SNModel)
    assert again is not model
    assert again.settings == model.settings != Settings()
    assert fit(again, 2) == fit(model, 2)
    assert any(region.recompute for region in again.plan.regions)
    assert [one.recompute for one in again.plan.regions] == [one.recompute for one in model.plan.regions]
    return again


SETTINGS = {"policy": {"*": "recompute"}, "memory_budget": "2GiB", "host_budget": 1024, "verify": "first_step"}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [Guide, Named, Extended, Strict, Unregistered])
def test_a_subclass_keeps_its_settings(kind, way, tmp_path):
    if kind is Unregistered and way is through_file:
        pytest.skip("Keras loads registered classes")
    model = kind() if kind is Strict else kind(width=5, **SETTINGS) if kind is Extended else kind(**SETTINGS)
    again = goes_on(model, way, tmp_path)
    assert type(again) is kind
    assert again.get_config() == model.get_config()


@pytest.mark.parametrize("kind", [Mixed, Graph])
def test_a_subclass_with_methods_that_know_no_settings(kind, tmp_path):
    for way in (through_file, through_pickle):
        assert type(goes_on(kind(**SETTINGS), way, tmp_path)) is kind


def test_a_plan_is_kept(tmp_path):
    first = build()
    model = build(plan=first.build_plan(4))
    loaded = through_file(model, tmp_path)
    assert loaded.settings.plan == model.settings.plan
    assert fit(loaded, 1) == fit(model, 1)
    assert loaded.plan.regions == first.plan.regions


def test_keras_records_constructor_arguments_as_in_its_own_models():
    class Plain(keras.Model):
        def __init__(self, width=8, **kwargs):
            super().__init__(**kwargs)

    class Planned(keras_sn.SNModel):
        def __init__(self, width=8, **kwargs):
            super().__init__(**kwargs)

    config = Planned(name="net").get_config()
    assert next(iter(config)) == "keras_sn"  # errors print it first
    assert {name: value for name, value in config.items() if name != "keras_sn"} == Plain(name="net").get_config()
    assert config["width"] == 8


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("own", [Scaled, UnregisteredScaled])
def test_a_converted_model_keeps_its_class_and_settings(own, way, tmp_path):
    if own is UnregisteredScaled and way is through_file:

        def way(model, path):
            return through_file(model, path, custom_objects={"UnregisteredScaled": UnregisteredScaled})

    model = converted(own)
    assert type(goes_on(model, way, tmp_path)) is type(model)
    assert isinstance(model, own)


@pytest.mark.parametrize("way", WAYS)
def test_a_converted_model_that_makes_its_graph_is_made_again(way, tmp_path):
    model = converted(Built)
    if way is through_clone:  # Keras' clone is no `Built` either, since nobody tells its constructor `scale`
        model.compile("adam", "mse", jit_compile=False)
        clone = way(model, tmp_path)
        assert clone.settings == model.settings
        assert not isinstance(clone, Built)
        assert type(keras.models.clone_model(Built(3.0))) is not Built
    else:
        again = goes_on(model, way, tmp_path)
        assert type(again) is type(model)
        assert again.scale == 3.0


def test_a_converted_model_inside_another(tmp_path):
    inner = converted()
    outer = keras.Model(inner.input, L.Dense(2)(inner(inner.input)))
    outer.save(tmp_path / "outer.keras")
    for again in (keras.saving.load_model(tmp_path / "outer.keras"), keras.models.clone_model(outer)):
        assert type(again.layers[1]) is type(inner)
        assert again.layers[1].settings == inner.settings


def test_a_model_converted_by_a_subclass(tmp_path):
    @keras.saving.register_keras_serializable("test_files")
    class Planner(keras_sn.SNModel):
        pass

    class Unknown(keras_sn.SNModel):
        pass

    assert isinstance(goes_on(converted(by=Planner), through_file, tmp_path), Planner)
    converted(by=Unknown).save(tmp_path / "unknown.keras")
    with pytest.raises(TypeError, match=r"'Unknown'[\s\S]*not known here[\s\S]*register_keras_serializable"):
        keras.saving.load_model(tmp_path / "unknown.keras")


def test_converting_again_keeps_the_class():
    model = converted()
    assert type(keras_sn.SNModel.from_model(model)) is type(model)


def test_a_pickle_is_read_inside_a_scope_of_custom_objects():
    class Double(L.Layer):
        def call(self, x):
            return 2 * x

    inputs = keras.Input((6,))
    model = keras_sn.SNModel.from_model(UnregisteredScaled(inputs, Double()(inputs)), policy="recompute")
    with keras.saving.custom_object_scope({"Double": Double}):
        assert isinstance(pickle.loads(pickle.dumps(model)), UnregisteredScaled)


@pytest.mark.parametrize("make", [lambda: build(), lambda: Guide(policy="recompute")], ids=["graph", "subclass"])
def test_a_resumed_training_equals_an_uninterrupted_one(make, tmp_path):
    class Interrupted(Exception):
        pass

    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise Interrupted

    def made():
        keras.utils.set_random_seed(1)
        model = make()
        model.compile("adam", "mse", jit_compile=False)
        return model

    whole = fit(made(), 4)
    backup = tmp_path / "backup"
    with pytest.raises(Interrupted):
        fit(made(), 4, callbacks=[keras.callbacks.BackupAndRestore(backup), Interrupt()])
    model = made()
    assert fit(model, 4, callbacks=[keras.callbacks.BackupAndRestore(backup)]) == whole[2:]
    assert model.plan.regions


def test_a_checkpoint_of_the_whole_model_goes_on(tmp_path):
    model = build(memory_budget="1GiB")
    fit(model, 1, callbacks=[keras.callbacks.ModelCheckpoint(tmp_path / "model.keras")])
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.settings == model.settings
    assert fit(loaded, 2) == fit(model, 2)
    assert loaded.plan.regions == model.plan.regions


def test_pickles_and_clones():
    model = build()
    fit(model, 1)
    copy = pickle.loads(pickle.dumps(model))
    assert isinstance(copy, keras_sn.SNModel)
    np.testing.assert_array_equal(copy.predict(X, verbose=0), model.predict(X, verbose=0))
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    assert clone.settings == model.settings
    np.testing.assert_array_equal(clone.predict(X, verbose=0), model.predict(X, verbose=0))


OWN_MODULE = """
import keras

@keras.saving.register_keras_serializable("own_module")
class Own(keras.Model):
    def train_step(self, data):
        return super().train_step(data)
"""

ELSEWHERE = """
import pathlib, pickle, sys
sys.modules["keras_sn"] = None  # not installed
import keras
from own_module import Own

def show(name, **custom_objects):
    try:
        model = keras.saving.load_model(name + ".keras", custom_objects=custom_objects)
        print(name, type(model).__name__, isinstance(model, Own), model.count_params(), getattr(model, "settings", None))
    except Exception as error:
        print(name, "refused", error)

for name in ("plain", "planned", "converted", "recompute"):
    show(name)
show("planned", **{"SNModel": keras.Model, "keras_sn>SNModel": keras.Model})
show("converted", **{"keras_sn>SNModel": Own})
del sys.modules["keras_sn"]
import keras_sn
for name in ("planned", "converted", "recompute"):
    show(name)
print("converted", pickle.loads(pathlib.Path("own.pickle").read_bytes()).settings)
"""


def test_files_in_a_process_without_keras_sn_and_then_with_it(tmp_path, monkeypatch):
    (tmp_path / "own_module.py").write_text(OWN_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    from own_module import Own

    planned, own = build(), converted(Own)
    planned.save(tmp_path / "planned.keras")
    own.save(tmp_path / "converted.keras")
    (tmp_path / "own.pickle").write_bytes(pickle.dumps(own))
    keras.Model(planned.inputs, planned.outputs).save(tmp_path / "plain.keras")
    inputs = keras.Input((6,))
    keras.Model(inputs, keras_sn.layers.Recompute(L.Dense(2))(inputs)).save(tmp_path / "recompute.keras")
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True, check=True, cwd=tmp_path)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("plain", "planned", "converted", "recompute"))]
    size, own_size = planned.count_params(), own.count_params()
    assert lines[0] == f"plain Functional False {size} None"
    what_to_do = f"'made_with': 'keras_sn {keras_sn.__version__}: `pip install keras-sn`, then `import keras_sn` before loading'"
    assert "planned refused" in lines[1]
    assert what_to_do in lines[1][:700]  # before the layers, which may fill pages
    assert "converted refused" in lines[2]
    assert what_to_do in lines[2][:700]
    assert what_to_do in done.stdout.partition("recompute refused")[2].partition("planned Functional")[0]
    assert lines[-6:] == [
        f"planned Functional False {size} None",
        f"converted Own True {own_size} None",
        f"planned FunctionalSNModel False {size} {planned.settings}",
        f"converted Own True {own_size} {own.settings}",
        "recompute Functional False 14 None",
        f"converted {own.settings}",
    ]


def test_a_subclass_saves_its_weights_and_loads(tmp_path):
    @keras.saving.register_keras_serializable("test_files")
    class Net(keras_sn.SNModel):
        def __init__(self, policy="recompute", **kwargs):
            super().__init__(policy=policy, **kwargs)
            self.block, self.out = keras.Sequential([L.Dense(8, activation="relu"), L.Dense(8)]), L.Dense(2)

        def call(self, x):
            return self.out(self.block(x))

    model = Net()
    model.compile("adam", "mse", jit_compile=False)
    fit(model, 1)
    model.save(tmp_path / "net.keras")
    loaded = keras.saving.load_model(tmp_path / "net.keras")
    assert loaded.settings.policy == "recompute"
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), model.predict(X, verbose=0))
    assert fit(loaded, 2) == fit(model, 2)
