"""How to build every public layer of Keras on tiny shapes, for the tests of the rules."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import keras
import numpy as np
from keras import layers as L

from keras_sn.graph import TensorSpec

LINE, IMAGE, VOLUME = (2, 8, 4), (2, 8, 6, 4), (2, 6, 4, 8, 3)
ROW, PICTURE = (2, 6), (2, 8, 8, 3)
ACTIVATIONS = (
    *("relu", "relu6", "sigmoid", "tanh", "softplus", "softsign", "elu", "selu", "softmax", "log_softmax", "gelu", "silu"),
    *("exponential", "hard_sigmoid", "hard_silu", "hard_tanh", "hard_shrink", "soft_shrink", "tanh_shrink", "leaky_relu"),
    *("mish", "celu", "squareplus", "sparse_plus", "sparse_sigmoid", "log_sigmoid", "glu", "threshold", "sparsemax", "linear"),
)


@dataclass(frozen=True)
class Case:
    build: Callable[[], Any]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str = "float32"
    how: str = "tensors"
    """What the layer takes: `"tensors"`, one `"list"` of tensors, or a tensor and a list of `"states"`."""
    kwargs: dict = field(default_factory=dict)

    def make(self) -> tuple[Any, list[TensorSpec], list[TensorSpec], Callable]:
        """The built layer, the specifications of its inputs and outputs, and how to call it."""
        layer = self.build()

        def call(tensors):
            first, *rest = tensors
            arguments = {"tensors": tensors, "list": [list(tensors)], "states": [first, rest]}[self.how]
            return layer(*arguments, **self.kwargs)

        symbolic = [keras.Input(batch_shape=shape, dtype=self.dtype) for shape in self.shapes]
        outputs = keras.tree.flatten(call(symbolic))
        specs = [TensorSpec(f"x{place}", shape, self.dtype) for place, shape in enumerate(self.shapes)]
        return layer, specs, [spec_of(f"y{place}", y) for place, y in enumerate(outputs)], call


def spec_of(name: str, tensor: Any) -> TensorSpec:
    return TensorSpec(name, tuple(tensor.shape), keras.backend.standardize_dtype(tensor.dtype))


def one(build: Callable[[], Any], *shapes: tuple[int, ...], **options: Any) -> tuple[Case, ...]:
    return (Case(build, shapes, **options),)


def each(builds: list[Callable[[], Any]], *shapes: tuple[int, ...], **options: Any) -> tuple[Case, ...]:
    return tuple(Case(build, shapes, **options) for build in builds)


def activated(make: Callable[..., Any], *shapes: tuple[int, ...]) -> tuple[Case, ...]:
    """A layer with each of some activations, with and without bias."""
    kinds = (None, "relu", "sigmoid", "gelu", "silu", "softplus", "elu", "softmax", "hard_sigmoid", "mish")
    cases = [Case(lambda kind=kind: make(activation=kind), shapes) for kind in kinds]
    return (*cases, Case(lambda: make(use_bias=False, activation="tanh"), shapes))


def merged(make: Callable[[], Any], *, of_three: bool = True) -> tuple[Case, ...]:
    three = Case(make, (LINE, (2, 1, 4), LINE), how="list")
    return (Case(make, (LINE, LINE), how="list"), *([three] if of_three else []))


def _threshold(x):
    return keras.activations.threshold(x, 0.5, 0.0)


def _adapted():
    layer = L.Normalization()
    layer.adapt(np.arange(12.0).reshape(2, 6))
    return layer


CASES: dict[str, tuple[Case, ...]] = {
    "Activation": tuple(
        Case(lambda kind=kind: L.Activation(kind if kind != "threshold" else _threshold), (LINE,)) for kind in ACTIVATIONS
    ),
    "ActivityRegularization": each([lambda: L.ActivityRegularization(l2=0.1), L.ActivityRegularization], LINE),
    "Add": merged(L.Add),
    "AdditiveAttention": one(L.AdditiveAttention, LINE, LINE, how="list"),
    "AlphaDropout": one(lambda: L.AlphaDropout(0.3), LINE),
    "Attention": one(L.Attention, LINE, LINE, how="list"),
    "Average": merged(L.Average),
    "BatchNormalization": (
        *one(L.BatchNormalization, IMAGE),
        *one(L.BatchNormalization, LINE),
        *one(lambda: L.BatchNormalization(axis=1), IMAGE),
        *one(lambda: L.BatchNormalization(scale=False, center=False), ROW),
        *one(lambda: L.BatchNormalization(trainable=False), IMAGE),
    ),
    "Bidirectional": one(lambda: L.Bidirectional(L.GRU(3)), LINE),
    "CategoryEncoding": one(lambda: L.CategoryEncoding(5), ROW, dtype="int32"),
    "CenterCrop": one(lambda: L.CenterCrop(4, 4), PICTURE),
    "Concatenate": merged(L.Concatenate, of_three=False),
    "Dense": (*activated(lambda **kw: L.Dense(5, **kw), LINE), *activated(lambda **kw: L.Dense(5, **kw), ROW)),
    "Discretization": one(lambda: L.Discretization(bin_boundaries=[0.0, 1.0]), ROW),
    "Dot": (
        *one(lambda: L.Dot(axes=1), ROW, ROW, how="list"),
        *one(lambda: L.Dot(axes=2, normalize=True), LINE, LINE, how="list"),
    ),
    "Dropout": each([lambda: L.Dropout(0.3), lambda: L.Dropout(0.0), lambda: L.Dropout(0.3, noise_shape=(None, 1, 4))], LINE),
    "EinsumDense": (
        *activated(
            lambda use_bias=True, **kw: L.EinsumDense("abc,cd->abd", (8, 5), bias_axes="d" * use_bias or None, **kw), LINE
        ),
        *one(lambda: L.EinsumDense("abc,cde->abde", (8, 2, 5), bias_axes="de"), LINE),
    ),
    "ELU": each([L.ELU, lambda: L.ELU(0.5)], LINE),
    "Embedding": each([lambda: L.Embedding(9, 4), lambda: L.Embedding(9, 4, mask_zero=True)], ROW, dtype="int32"),
    "Flatten": one(L.Flatten, IMAGE),
    "GRU": each([lambda: L.GRU(3), lambda: L.GRU(3, return_sequences=True, dropout=0.2)], LINE),
    "GRUCell": one(lambda: L.GRUCell(3), ROW, (2, 3)),
    "GaussianDropout": one(lambda: L.GaussianDropout(0.3), LINE),
    "GaussianNoise": one(lambda: L.GaussianNoise(0.3), LINE),
    "GroupNormalization": (
        *one(lambda: L.GroupNormalization(2), IMAGE),
        *one(lambda: L.GroupNormalization(-1, scale=False), IMAGE),
        *one(lambda: L.GroupNormalization(2, axis=1), IMAGE),
    ),
    "GroupedQueryAttention": one(lambda: L.GroupQueryAttention(4, 4, 2, dropout=0.1), LINE, LINE),
    "Hashing": one(lambda: L.Hashing(5), ROW, dtype="int32"),
    "Identity": one(L.Identity, LINE),
    "IntegerLookup": one(lambda: L.IntegerLookup(vocabulary=[1, 2, 3]), ROW, dtype="int32"),
    "LSTM": each([lambda: L.LSTM(3), lambda: L.LSTM(3, return_state=True, recurrent_dropout=0.2)], LINE),
    "LSTMCell": one(lambda: L.LSTMCell(3), ROW, (2, 3), (2, 3), how="states"),
    "Lambda": one(lambda: L.Lambda(lambda x: keras.ops.exp(x) * x), LINE),
    "LayerNormalization": (
        *one(L.LayerNormalization, LINE),
        *one(lambda: L.LayerNormalization(center=False, scale=False), LINE),
        *one(lambda: L.LayerNormalization(axis=(1, 2)), IMAGE),
    ),
    "LeakyReLU": each([L.LeakyReLU, lambda: L.LeakyReLU(0.0)], LINE),
    "Masking": one(L.Masking, LINE),
    "Maximum": merged(L.Maximum),
    "MelSpectrogram": one(lambda: L.MelSpectrogram(fft_length=16, sequence_stride=8, num_mel_bins=4), (2, 64)),
    "Minimum": merged(L.Minimum),
    "MultiHeadAttention": (
        *one(lambda: L.MultiHeadAttention(2, 4, dropout=0.1), LINE, LINE),
        *one(lambda: L.MultiHeadAttention(2, 4), LINE, (2, 5, 8), (2, 5, 8)),
    ),
    "Multiply": merged(L.Multiply),
    "Normalization": each([lambda: L.Normalization(mean=1.0, variance=2.0), _adapted], ROW),
    "PReLU": each([L.PReLU, lambda: L.PReLU(shared_axes=[1])], LINE),
    "Permute": one(lambda: L.Permute((2, 1)), LINE),
    "RMSNormalization": each([L.RMSNormalization], LINE),
    "RNN": one(lambda: L.RNN([L.LSTMCell(3), L.SimpleRNNCell(2)]), LINE),
    "ReLU": each(
        [
            *(L.ReLU, lambda: L.ReLU(6.0), lambda: L.ReLU(3.0), lambda: L.ReLU(negative_slope=0.1)),
            *(lambda: L.ReLU(threshold=0.5), lambda: L.ReLU(negative_slope=0.1, threshold=0.5, max_value=2.0)),
            lambda: L.ReLU(negative_slope=0.1, max_value=2.0),
        ],
        LINE,
    ),
    "RepeatVector": one(lambda: L.RepeatVector(3), ROW),
    "Rescaling": each([lambda: L.Rescaling(0.1, 1.0), lambda: L.Rescaling([0.1, 0.2, 0.3])], PICTURE),
    "Reshape": one(lambda: L.Reshape((4, 8)), LINE),
    "Resizing": each([lambda: L.Resizing(4, 4), lambda: L.Resizing(12, 12, "nearest")], PICTURE),
    "ReversibleEmbedding": (
        *one(lambda: L.ReversibleEmbedding(9, 4), ROW, dtype="int32"),
        *one(lambda: L.ReversibleEmbedding(9, 4), LINE, kwargs={"reverse": True}),
        *one(lambda: L.ReversibleEmbedding(9, 4, tie_weights=False, logit_soft_cap=5.0), LINE, kwargs={"reverse": True}),
    ),
    "STFTSpectrogram": one(lambda: L.STFTSpectrogram(frame_length=16, frame_step=8), (2, 64, 1)),
    "SimpleRNN": one(lambda: L.SimpleRNN(3), LINE),
    "SimpleRNNCell": one(lambda: L.SimpleRNNCell(3), ROW, (2, 3)),
    "Softmax": each([L.Softmax, lambda: L.Softmax(axis=1), lambda: L.Softmax(axis=(1, 2))], LINE),
    "SpectralNormalization": one(lambda: L.SpectralNormalization(L.Dense(4)), ROW),
    "StackedRNNCells": one(
        lambda: L.StackedRNNCells([L.SimpleRNNCell(3), L.SimpleRNNCell(3)]), ROW, (2, 3), (2, 3), how="states"
    ),
    "Subtract": merged(L.Subtract, of_three=False),
    "TimeDistributed": one(lambda: L.TimeDistributed(L.Dense(3, activation="gelu")), LINE),
    "UnitNormalization": one(L.UnitNormalization, LINE),
    "AugMix": one(L.AugMix, PICTURE),
    "Pipeline": one(lambda: L.Pipeline([L.Rescaling(0.5), L.RandomFlip()]), PICTURE),
}


for _rank, _shape in ((1, LINE), (2, IMAGE), (3, VOLUME)):
    _make, _width = getattr(L, f"Conv{_rank}D"), _shape[-1]
    CASES[f"Conv{_rank}D"] = (
        *activated(partial(_make, 5, 3), _shape),
        *each([partial(_make, 5, 3, strides=2, padding="same"), partial(_make, 5, 2, dilation_rate=2)], _shape),
        *each([partial(_make, 2 * _width, 3, groups=_width), partial(_make, 5, 3, trainable=False)], _shape),
    )
    CASES[f"Conv{_rank}DTranspose"] = activated(partial(getattr(L, f"Conv{_rank}DTranspose"), 5, 3, strides=2), _shape)
    _steps = (2, 3, *(4,) * _rank, 2)
    CASES[f"ConvLSTM{_rank}D"] = one(partial(getattr(L, f"ConvLSTM{_rank}D"), 2, 3, padding="same"), _steps)
    for _kind in ("Max", "Average"):
        _make = getattr(L, f"{_kind}Pooling{_rank}D")
        CASES[f"{_kind}Pooling{_rank}D"] = each([partial(_make, 2), partial(_make, 2, strides=1, padding="same")], _shape)
        _make = getattr(L, f"Global{_kind}Pooling{_rank}D")
        CASES[f"Global{_kind}Pooling{_rank}D"] = each([_make, partial(_make, keepdims=True)], _shape)
        CASES[f"Adaptive{_kind}Pooling{_rank}D"] = one(partial(getattr(L, f"Adaptive{_kind}Pooling{_rank}D"), 2), _shape)
    for _kind, _argument in (("Cropping", 1), ("ZeroPadding", 1), ("UpSampling", 2), ("SpatialDropout", 0.3)):
        CASES[f"{_kind}{_rank}D"] = one(partial(getattr(L, f"{_kind}{_rank}D"), _argument), _shape)
for _rank, _shape in ((1, LINE), (2, IMAGE)):
    for _kind, _arguments in (("Depthwise", (3,)), ("Separable", (5, 3))):
        _make = partial(getattr(L, f"{_kind}Conv{_rank}D"), *_arguments)
        CASES[f"{_kind}Conv{_rank}D"] = (
            *activated(_make, _shape),
            *one(partial(_make, depth_multiplier=2, padding="same"), _shape),
        )
CASES["UpSampling2D"] += one(lambda: L.UpSampling2D(2, interpolation="bilinear"), IMAGE)
CASES["Conv2D"] += one(lambda: L.Conv2D(5, 3, data_format="channels_first"), IMAGE)

_AUGMENTATION = {
    **{name: {} for name in ("AutoContrast", "CutMix", "Equalization", "MixUp", "RandAugment", "Solarization")},
    **{"ContrastLimitedAdaptiveHistogramEqualization": {}, "RandomGrayscale": {}, "RandomColorJitter": {}},
    **{name: {"factor": 0.3} for name in ("RandomBrightness", "RandomColorDegeneration", "RandomContrast", "RandomErasing")},
    **{name: {"factor": 0.3} for name in ("RandomElasticTransform", "RandomHue", "RandomInvert", "RandomPerspective")},
    **{name: {"factor": 0.3} for name in ("RandomRotation", "RandomSaturation", "RandomSharpness", "RandomGaussianBlur")},
    **{"RandomPosterization": {"factor": 4}, "RandomFlip": {}, "RandomShear": {"x_factor": 0.3}},
    **{"RandomTranslation": {"height_factor": 0.2, "width_factor": 0.2}, "RandomZoom": {"height_factor": 0.2}},
    **{"RandomCrop": {"height": 4, "width": 4}},
}
for _name, _options in _AUGMENTATION.items():
    CASES[_name] = one(partial(getattr(L, _name), **_options), PICTURE)

NOT_COVERED = {
    "FlaxLayer": "needs JAX",
    "HashedCrossing": "its outputs are integers and it takes two integer or string inputs: no backward step",
    "InputLayer": "is no layer call",
    "InputSpec": "is no layer",
    "JaxLayer": "needs JAX",
    "Layer": "is abstract",
    "MaxNumBoundingBoxes": "works on bounding boxes, which are dictionaries",
    "StringLookup": "reads strings",
    "TFSMLayer": "needs a saved model on disk",
    "TextVectorization": "reads strings",
    "TorchModuleWrapper": "needs PyTorch",
    "Wrapper": "is abstract",
}
