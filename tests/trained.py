"""Everything that a training has changed in a model, for `parity.assert_equal`."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np


def trained_state(model: keras.Model, history: Any) -> dict[str, np.ndarray]:
    """The loss history, and all variables of the model and of its optimizer in their order; names may differ between models."""
    return logged(history) | arrays("model", model.variables) | arrays("optimizer", model.optimizer.variables)


def logged(history: Any, label: str = "") -> dict[str, np.ndarray]:
    """What `fit` returned."""
    return {f"{label}history/{key}": np.array(values) for key, values in history.history.items()}


def arrays(kind: str, variables: Sequence[keras.Variable], *, by_path: bool = False) -> dict[str, np.ndarray]:
    """Variables as arrays, by their places, or also by their paths, which then must be equal too."""
    return {
        f"{kind}/{place} {variable.path}" if by_path else f"{kind}/{place}": array(variable)
        for place, variable in enumerate(variables)
    }


def array(variable: keras.Variable) -> np.ndarray:
    """Its value."""
    return np.asarray(keras.ops.convert_to_numpy(variable)).astype("float64")
