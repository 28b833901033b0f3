"""Everything that a training has changed in a model, for `parity.assert_equal`; names of variables differ between models."""

from typing import Any

import keras
import numpy as np


def trained_state(model: keras.Model, history: Any) -> dict[str, np.ndarray]:
    """The loss history, and all variables of the model and of its optimizer in their order."""
    state = {f"history/{key}": np.array(values) for key, values in history.history.items()}
    variables = {"model": model.variables, "optimizer": model.optimizer.variables}
    for kind, of_kind in variables.items():
        state |= {
            f"{kind}/{place}": np.asarray(keras.ops.convert_to_numpy(v)).astype("float64") for place, v in enumerate(of_kind)
        }
    return state
