"""What files, pickles and copies of a model hold besides what Keras writes: its settings, and the class it was converted from.

They stand under one name in the model's config, which a user's constructor and `from_config()` never see.
"""

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import keras

from keras_sn.settings import Settings

ENTRY = "keras_sn"
"""The name in a config. Keras' own functional models take no notice of it."""

name_in_files = keras.saving.register_keras_serializable(package="keras_sn", name="SNModel")
"""Gives a class the name under which files are found where keras_sn is imported; the class that gets it last loads them all."""


def made_with() -> str:
    """What those read who load a file without keras_sn: Keras prints the config of a class that it does not find."""
    from keras_sn import __version__  # here, because the package imports this module before it has a version

    return f"keras_sn {__version__}: `pip install keras-sn`, then `import keras_sn` before loading"


def keep_settings(cls: type) -> None:
    """Makes a class keep the settings whose `get_config()` or `from_config()` is its user's, and may know nothing of them."""
    if not hasattr(cls.get_config, "keeps_settings"):
        cls.get_config = writes_settings(cls.get_config)
    if not hasattr(cls.from_config, "keeps_settings"):
        cls.from_config = reads_settings(inspect.getattr_static(cls, "from_config"))


def writes_settings(get_config: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """Decorates a `get_config()`."""

    @functools.wraps(get_config)
    def wrapper(self: Any) -> dict[str, Any]:
        config = get_config(self)
        # First, because errors print it in this order, and the layers may fill pages.
        return {ENTRY: _entry(self)} | {name: value for name, value in config.items() if name != ENTRY}

    wrapper.keeps_settings = True
    return wrapper


def reads_settings(from_config: Any) -> Any:
    """Decorates a class method (or static method) `from_config()`."""

    @functools.wraps(from_config.__func__)
    def wrapper(cls: type, config: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        config = dict(config)
        entry = config.pop(ENTRY, None)
        if entry is not None and "converted" in entry:
            return _converted(cls, entry, config)
        model = from_config.__get__(None, cls)(config, *args, **kwargs)
        if entry is not None:
            model.settings = Settings.taken_from(dict(entry))
        return model

    wrapper.keeps_settings = True
    return classmethod(wrapper)


def _entry(model: Any) -> dict[str, Any]:
    entry = {"made_with": made_with(), **model.settings.config()}
    if (origin := _origin(type(model))) is not None:
        own, planned = origin
        names = {"module": own.__module__, "class_name": own.__name__, "registered_name": _name(own)}
        entry |= {"converted": names, "planned": _name(planned)}
    return entry


def _converted(cls: type, entry: dict[str, Any], config: dict[str, Any]) -> Any:
    """The user's model, made by Keras as from a file of it, and converted again."""
    known = _by_name(_origin(cls) or ())
    model = keras.saving.deserialize_keras_object({**entry["converted"], "config": config}, custom_objects=known)
    planned = keras.saving.get_registered_object(entry["planned"], custom_objects=known)
    if planned is None:
        raise TypeError(
            f"The model was converted by the class {entry['planned']!r}, which is not known here: decorate it with "
            "`@keras.saving.register_keras_serializable()`, and import its module before loading. "
            f"Received: a config made with {entry['made_with']}"
        )
    return planned.from_model(model, **Settings.taken_from(dict(entry)).config())


# --- the classes of converted models


@functools.cache  # a copy is of the class of its original
def converted_class(own: type, planned: type) -> type:
    """A class with the methods of a user's functional model over those of a planned one.

    Args:
        own: The user's class.
        planned: `FunctionalSNModel`, or a class derived from it.

    Returns:
        The class, which looks like the user's. No module has it, so configs and pickles name the two that it was made of.
    """
    namespace = {name: getattr(own, name) for name in ("__module__", "__qualname__")}
    namespace |= {"_keras_sn_origin": (own, planned), "get_config": lambda self: _seen_as(own, self).get_config()}
    if hasattr(own, "save_to_preset"):  # keras-hub makes models of its own classes again of a preset
        namespace["save_to_preset"] = lambda self, *args, **kwargs: _seen_as(own, self).save_to_preset(*args, **kwargs)
    if not _takes_a_graph(own):
        # `clone_model` knows the graph and no other argument: as Keras gives a plain model then, this is a plain planned one.
        namespace |= {"__new__": lambda cls, *args, **kwargs: planned(*args, **kwargs), "__init__": planned.__init__}
    return type(own.__name__, (own, planned), namespace)


def user_class(cls: type) -> type:
    """The class that a converted model's was made of; the class itself for others."""
    origin = _origin(cls)
    return cls if origin is None else origin[0]


def _seen_as(own: type, model: Any) -> Any:
    """The model's state under its user's class, to be asked what an unconverted model would say. It is no copy."""
    seen = object.__new__(own)
    vars(seen).update(vars(model))
    return seen


def _origin(cls: type) -> tuple[type, type] | None:
    return getattr(cls, "_keras_sn_origin", None)


def _takes_a_graph(own: type) -> bool:
    """Whether Keras takes `own(inputs, outputs, name=...)` for a way to make such a model; this is its own rule."""
    signature = inspect.getfullargspec(own.__init__)
    return signature.args[1:] == ["inputs", "outputs", "name"] or None not in (signature.varargs, signature.varkw)


# --- pickles and deep copies


def reduced(model: Any, load: Any, arguments: tuple) -> tuple:
    """What Keras tells pickle, with the classes that loading needs; pickle finds a class only under its own name.

    Args:
        model: The model.
        load: Keras' function, bound to the model's class.
        arguments: Of the function: the file.
    """
    classes = _origin(type(model)) or (type(model),)
    return _unpickled, (classes, MethodType(load.__func__, classes[0]), *arguments)


def _unpickled(classes: tuple[type, ...], load: Callable[..., Any], *arguments: Any) -> Any:
    scope = keras.saving.custom_object_scope
    with scope({}) as outer, scope(outer.backup | _by_name(classes)):  # a scope hides the one around it
        return load(*arguments)


def _by_name(classes: tuple[type, ...]) -> dict[str, type]:
    """The classes by the names in files, for Keras to find also those that nobody has registered."""
    return {_name(one): one for one in classes}


def _name(cls: type) -> str:
    return keras.saving.get_registered_name(cls)
