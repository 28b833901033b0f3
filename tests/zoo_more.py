"""More models of the zoo: the usual networks for images, volumes and sequences."""

import keras
from keras import layers as L


def mlp() -> keras.Model:
    inputs = keras.Input((8,), name="x")
    x = L.Dense(8, activation="relu", name="front_dense")(inputs)
    x = L.Dense(8, activation="gelu", bias_regularizer="l1", name="mid_dense")(x)
    x = L.Dense(8, activation="softplus", kernel_constraint="max_norm", name="mid_dense2")(x)
    return keras.Model(inputs, L.Dense(2, dtype="float32", name="head_dense")(x))


def conv_bn() -> keras.Model:
    blocks = []
    for place, name in enumerate(("front", "mid", "head")):
        blocks += [L.Conv2D(4 + place, 3, padding="same", strides=1 + place % 2, name=f"{name}_conv")]
        blocks += [L.BatchNormalization(momentum=0.9, name=f"{name}_bn"), L.LeakyReLU(name=f"{name}_relu")]
    tail = [L.MaxPooling2D(2, name="head_pool"), L.Flatten(name="head_flat"), L.Dense(3, dtype="float32", name="head_dense")]
    return keras.Sequential([keras.Input((8, 8, 3), name="image"), *blocks, *tail])


def _classified(inputs, x) -> keras.Model:
    x = L.GlobalAveragePooling2D(name="head_pool")(x)
    return keras.Model(inputs, L.Dense(3, dtype="float32", name="head_dense")(x))


def densenet() -> keras.Model:
    inputs = keras.Input((8, 8, 3), name="image")
    x = L.Conv2D(4, 3, padding="same", name="front_stem")(inputs)
    for name in ("front_a", "mid_b", "mid_c", "head_d"):
        y = L.ReLU(name=f"{name}_relu")(L.BatchNormalization(name=f"{name}_bn")(x))
        y = L.Conv2D(3, 3, padding="same", use_bias=False, name=f"{name}_conv")(y)
        x = L.Concatenate(name=f"{name}_join")([x, y])
    return _classified(inputs, x)


def dense_sums() -> keras.Model:
    """Each tensor is read by all later blocks by itself, not through a concatenation of concatenations."""
    inputs = keras.Input((8,), name="x")
    made = [L.Dense(4, name="front_dense")(inputs)]
    for name in ("front_a", "mid_b", "mid_c", "head_d"):
        joined = L.Concatenate(name=f"{name}_join")(made) if len(made) > 1 else made[0]
        made.append(L.Dense(4, activation="tanh", name=f"{name}_dense")(joined))
    return keras.Model(inputs, L.Dense(2, dtype="float32", name="head_dense")(L.Add(name="head_add")(made)))


def unet() -> keras.Model:
    inputs = keras.Input((8, 8, 3), name="image")
    first = L.Conv2D(4, 3, padding="same", activation="relu", name="front_down1")(inputs)
    second = L.Conv2D(6, 3, padding="same", activation="relu", name="front_down2")(L.MaxPooling2D(name="front_pool1")(first))
    x = L.Conv2D(8, 3, padding="same", activation="relu", name="mid_bottom")(L.AveragePooling2D(2, name="mid_pool2")(second))
    x = L.Concatenate(name="mid_join2")([second, L.UpSampling2D(name="mid_up2")(x)])
    x = L.Dropout(0.1, name="mid_drop")(L.Conv2D(6, 3, padding="same", activation="relu", name="mid_conv2")(x))
    x = L.Concatenate(name="head_join1")([L.UpSampling2D(interpolation="bilinear", name="head_up1")(x), first])
    return keras.Model(inputs, L.Conv2D(1, 1, dtype="float32", name="head_conv")(x))


def mobilenet() -> keras.Model:
    inputs = keras.Input((8, 8, 3), name="image")
    x = L.Conv2D(4, 3, strides=2, padding="same", use_bias=False, name="front_stem")(inputs)
    for name in ("front_a", "mid_b"):
        y = L.BatchNormalization(name=f"{name}_bn1")(L.Conv2D(8, 1, name=f"{name}_up")(x))
        y = L.ZeroPadding2D(1, name=f"{name}_pad")(L.ReLU(6.0, name=f"{name}_relu1")(y))
        y = L.DepthwiseConv2D(3, padding="same", use_bias=False, name=f"{name}_depthwise")(y)
        y = L.BatchNormalization(name=f"{name}_bn2")(L.Cropping2D(1, name=f"{name}_cut")(y))
        y = L.Activation("relu6", name=f"{name}_relu2")(y)
        x = L.Add(name=f"{name}_add")([x, L.Conv2D(4, 1, name=f"{name}_down")(y)])
    return _classified(inputs, L.SeparableConv2D(5, 3, padding="same", name="head_separable")(x))


def squeeze_excite() -> keras.Model:
    inputs = keras.Input((8, 8, 3), name="image")
    x = L.Conv2D(6, 3, padding="same", activation="silu", name="front_stem")(inputs)
    for name in ("front", "mid"):
        y = L.DepthwiseConv2D(3, padding="same", activation="silu", name=f"{name}_depthwise")(x)
        scale = L.Dense(3, activation="silu", name=f"{name}_squeeze")(
            L.GlobalAveragePooling2D(keepdims=True, name=f"{name}_pool")(y)
        )
        y = L.Multiply(name=f"{name}_scale")([y, L.Dense(6, activation="sigmoid", name=f"{name}_excite")(scale)])
        y = L.Dropout(0.2, noise_shape=(None, 1, 1, 1), name=f"{name}_depth")(L.Conv2D(6, 1, name=f"{name}_project")(y))
        x = L.Add(name=f"{name}_add")([y, x])
    return _classified(inputs, x)


def inception() -> keras.Model:
    inputs = keras.Input((8, 8, 3), name="image")
    x = L.Conv2D(4, 3, padding="same", name="front_stem")(inputs)
    for name in ("front", "mid"):
        branches = [
            L.Conv2D(2, 1, activation="relu", name=f"{name}_one")(x),
            L.Conv2D(2, 3, padding="same", name=f"{name}_three")(L.Conv2D(3, 1, activation="elu", name=f"{name}_before")(x)),
            L.Conv2D(2, 3, padding="same", dilation_rate=2, name=f"{name}_wide")(x),
            L.MaxPooling2D(3, strides=1, padding="same", name=f"{name}_pool")(x),
        ]
        x = L.Concatenate(name=f"{name}_join")(branches)
    return _classified(inputs, L.PReLU(shared_axes=(1, 2), name="head_prelu")(x))


def conv1d() -> keras.Model:
    inputs = keras.Input((8, 3), name="series")
    x = L.Conv1D(4, 3, padding="causal", activation="tanh", name="front_conv")(inputs)
    y = L.Conv1D(4, 3, padding="causal", dilation_rate=2, activation="sigmoid", name="mid_gate")(x)
    x = L.LayerNormalization(name="mid_norm")(x * y)
    x = L.SeparableConv1D(4, 3, strides=2, name="mid_separable")(x)
    return keras.Model(inputs, L.Dense(2, dtype="float32", name="head_dense")(L.Flatten(name="head_flat")(x)))


def conv3d() -> keras.Model:
    inputs = keras.Input((4, 4, 4, 2), name="volume")
    x = L.Conv3D(3, 3, padding="same", activation="relu", name="front_conv")(inputs)
    x = L.GroupNormalization(3, name="front_norm")(x)
    x = L.Conv3DTranspose(2, 2, strides=2, name="mid_up")(L.MaxPooling3D(2, name="mid_pool")(x))
    return keras.Model(inputs, L.Dense(2, dtype="float32", name="head_dense")(L.GlobalMaxPooling3D(name="head_pool")(x)))


def autoencoder() -> keras.Model:
    inputs = keras.Input((8, 8, 3), name="image")
    x = L.Conv2D(4, 3, strides=2, padding="same", activation="relu", name="front_down")(inputs)
    x = L.BatchNormalization(name="front_bn")(x)
    code = L.Dense(6, name="mid_code")(L.Flatten(name="front_flat")(x))
    x = L.Reshape((4, 4, 4), name="mid_shape")(L.Dense(64, activation="relu", name="mid_open")(code))
    x = L.Conv2DTranspose(4, 3, strides=2, padding="same", activation="selu", name="mid_up")(x)
    return keras.Model(inputs, L.Conv2DTranspose(1, 3, padding="same", dtype="float32", name="head_up")(x))


def recurrent() -> keras.Model:
    inputs = keras.Input((6, 3), name="series")
    x = L.Masking(name="front_mask")(inputs)
    x = L.Bidirectional(L.LSTM(4, return_sequences=True, dropout=0.1), name="front_both_ways")(x)
    x = L.Dense(5, activation="relu", name="mid_dense")(x)
    x, state = L.GRU(4, return_state=True, name="head_gru")(x)
    return keras.Model(inputs, L.Dense(2, dtype="float32", name="head_dense")(L.Average(name="head_mean")([x, state])))


def time_distributed() -> keras.Model:
    inputs = keras.Input((3, 6, 6, 2), name="frames")
    x = L.TimeDistributed(L.Conv2D(3, 3, activation="relu"), name="front_conv")(inputs)
    x = L.TimeDistributed(L.BatchNormalization(), name="front_bn")(x)
    x = L.TimeDistributed(L.Flatten(), name="mid_flat")(x)
    x = L.TimeDistributed(L.Dropout(0.2), name="mid_drop")(x)
    return keras.Model(inputs, L.Dense(2, dtype="float32", name="head_dense")(L.LSTM(4, name="head_lstm")(x)))


def conv_lstm() -> keras.Model:
    inputs = keras.Input((3, 6, 6, 2), name="frames")
    x = L.ConvLSTM2D(3, 3, padding="same", return_sequences=True, dropout=0.1, name="front_lstm")(inputs)
    x = L.BatchNormalization(name="mid_bn")(x)
    x = L.ConvLSTM2D(2, 3, name="mid_lstm")(x)
    return keras.Model(inputs, L.Dense(2, dtype="float32", name="head_dense")(L.GlobalMaxPooling2D(name="head_pool")(x)))


def _attend(x, others, name, **masks):
    attended = L.MultiHeadAttention(2, 4, dropout=0.1, name=f"{name}_attention")(x, others, **masks)
    return L.LayerNormalization(name=f"{name}_norm")(L.Add(name=f"{name}_add")([x, attended]))


def encoder_decoder() -> keras.Model:
    source, target = keras.Input((5,), dtype="int32", name="source"), keras.Input((4,), dtype="int32", name="target")
    x = L.Embedding(12, 8, mask_zero=True, name="front_source")(source)
    x = _attend(x, x, "front_encode")
    x = L.Add(name="front_feed_add")([x, L.Dense(8, activation="relu", name="front_feed")(x)])
    y = L.Embedding(12, 8, mask_zero=True, name="front_target")(target)
    y = _attend(y, y, "mid_decode", use_causal_mask=True)
    y = _attend(y, x, "mid_cross")
    return keras.Model({"source": source, "target": target}, L.Dense(12, dtype="float32", name="head_dense")(y))
