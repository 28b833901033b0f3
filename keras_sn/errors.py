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


def shown(value: object, most: int = 80) -> str:
    """What was received, as a message shows it: cut, because a plan or a number may be as long as a file."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python writes no integer of more than 4,300 digits
        text = f"<{type(value).__name__}, too long to write>"
    return text if len(text) <= most else f"{text[:most]}…"
