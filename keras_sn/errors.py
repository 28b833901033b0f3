"""What can go wrong, as types. Every message says what is wrong, which number decided, what to do, and what was received."""


class KerasSNError(ValueError):
    """Base class of all errors of keras_sn."""


class BudgetError(KerasSNError):
    """No plan fits the memory budget, or the budget is not a size."""


class PlanError(KerasSNError):
    """A plan or a policy cannot be carried out."""


class UnsupportedModelError(KerasSNError):
    """The model cannot be trained by this version of keras_sn."""


class VerificationError(KerasSNError):
    """A training step by the plan differs from plain Keras'."""
