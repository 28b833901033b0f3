"""The functions of a model's regions: one for all regions of equal structure, run as the plan and the layers allow."""

from typing import Any

from keras_sn.bodies import RegionBody
from keras_sn.compiling import BackgroundCompiler
from keras_sn.regions import EAGER, XLA, RegionFunction
from keras_sn.structure import structure_of


class RegionLibrary:
    """Region functions by structure: equal regions get the same one.

    Args:
        compiler: Compiles them before they first run, in the background; None to leave it to TensorFlow.
    """

    def __init__(self, compiler: BackgroundCompiler | None = None):
        self._compiler = compiler
        self._by_structure: dict[Any, RegionFunction] = {}

    def function_for(self, body: RegionBody, mode: str, *, jit: bool, inline: bool) -> RegionFunction:
        """The functions to run a region with.

        Args:
            body: The region.
            mode: `"eager"`, or `"function"` for compiled functions.
            jit: Compile with XLA where all layers of the region allow it.
            inline: Without XLA, run the layers in the graph around the region, as Keras does: nothing is recomputed.
        """
        if mode != EAGER and jit and all(getattr(layer, "supports_jit", True) for layer in body.layers):
            mode = XLA
        elif inline:
            mode = EAGER
        structure = structure_of(body.calls, body.input_specs, (*body.outputs, *body.saved_inside), body.in_turn)
        is_shared = structure is not None and not body.borrowed
        key = (mode, structure if is_shared else id(body), len(body.outputs), body.autocast_dtype)
        if key not in self._by_structure:
            self._by_structure[key] = RegionFunction(body, mode, self._compiler)
        return self._by_structure[key]

    def __len__(self) -> int:
        return len(self._by_structure)


def autocast_dtype_of(layer: Any) -> str | None:
    """The compute dtype of a layer or model whose variables have another, else None."""
    return layer.compute_dtype if layer.compute_dtype != layer.variable_dtype else None
