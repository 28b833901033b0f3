"""How deep a ResNet trains under one memory cap, with plain Keras and with keras_sn.

    python examples/depth_limits.py [--memory 12GiB] [--engines keras-graph recompute-xla]

Without a GPU the networks are small and the cap is 80 MiB. Writes depth.json and depth.png.
"""

import sys

from keras_sn.benchmarks import depth

if __name__ == "__main__":
    sys.exit(depth.main(sys.argv[1:]))
