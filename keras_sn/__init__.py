"""keras_sn trains Keras 3 models that do not fit into the GPU's memory, with the numbers of plain Keras."""

from keras_sn import backend as backend
from keras_sn import callbacks as callbacks
from keras_sn import functional as functional  # Keras finds the class that files name only once it is imported
from keras_sn import layers as layers
from keras_sn.device import configure_gpu as configure_gpu
from keras_sn.errors import BudgetError as BudgetError
from keras_sn.errors import KerasSNError as KerasSNError
from keras_sn.errors import PlanError as PlanError
from keras_sn.errors import UnsupportedModelError as UnsupportedModelError
from keras_sn.errors import VerificationError as VerificationError
from keras_sn.legacy import from_tf_keras as from_tf_keras
from keras_sn.model import SNModel as SNModel
from keras_sn.plan import Plan as Plan
from keras_sn.rules import register_rule as register_rule

__version__ = "0.1.0"
