"""What the SuperNeurons paper prints (Wang et al. 2018), for `paper` to put ours beside. Its figures are digitised."""

from keras_sn.recompute import COST_AWARE, MEMORY_CENTRIC, SPEED_CENTRIC

TABLE_1_BATCH = {"AlexNet": 200, "ResNet50": 32, "ResNet101": 32}
"""The paper does not give that of the ResNets."""
TABLE_1 = {
    "AlexNet": {SPEED_CENTRIC: (14, 993.018), MEMORY_CENTRIC: (23, 886.23), COST_AWARE: (17, 886.23)},
    "ResNet50": {SPEED_CENTRIC: (84, 455.125), MEMORY_CENTRIC: (118, 401), COST_AWARE: (85, 401)},
    "ResNet101": {SPEED_CENTRIC: (169, 455.125), MEMORY_CENTRIC: (237, 401), COST_AWARE: (170, 401)},
}
TABLE_2 = {
    "AlexNet": (359.4, 401.6, 1.12),
    "VGG16": (12.1, 14.4, 1.19),
    "InceptionV4": (6.77, 10.0, 1.48),
    "ResNet50": (21.5, 32.9, 1.53),
    "ResNet101": (11.3, 18.95, 1.68),
    "ResNet152": (7.46, 13.2, 1.77),
}
"""Images per second with cudaMalloc, with the pool, and their ratio."""
TABLE_3 = {256: (2.56, 0.0), 384: (3.72, 0.0), 512: (4.88, 0.0), 640: (6.03, 0.0), 896: (8.35, 0.0), 1024: (9.50, 0.88)}
"""Batch -> GB per iteration without and with the cache."""
TABLE_4 = {"Caffe": (148, 12.9730), "MXNet": (480, 4.0), "Torch": (152, 12.6316), "TensorFlow": (592, 3.2432)}
"""Deepest ResNet, and how many times deeper SuperNeurons' 1920 is."""
TABLE_5 = {
    "AlexNet": (1792, 1408, 27.8),
    "VGG16": (224, 80, 54.5),
    "InceptionV4": (240, 64, 139),
    "ResNet50": (384, 128, 123),
    "ResNet101": (256, 80, 138),
    "ResNet152": (176, 48, 144),
}
"""Largest batch, that of the second best, and the baseline's GB at the largest (figure 13)."""
FIGURE_8 = {
    "AlexNet": {"CONV": 21, "ACT": 32, "LRN": 28, "POOL": 19},
    "VGG16": {"CONV": 37, "ACT": 47, "POOL": 16},
    "InceptionV4": {"CONV": 39, "ACT": 24, "BN": 24, "POOL": 12},
    "ResNet50": {"CONV": 34, "ACT": 30, "BN": 35},
}
"""Share of memory by layer type, in %."""
FIGURE_14_RESNET50 = (189, 98)
"""Images per second on a TITAN Xp: at its best batch (48), and at the largest plotted (160)."""
