"""Bytes as people write them (`"12GiB"`) to `int`, and back. Inside the library a size is always an `int` of bytes."""

import re
from numbers import Real

from keras_sn.errors import BudgetError

_FACTORS = {"": 1, "B": 1}
_FACTORS |= {f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGTP", start=1)}
_FACTORS |= {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGTP", start=1)}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*")


def parse_bytes(size: int | float | str, *, argument: str) -> int:
    """Reads a size in bytes.

    Args:
        size: A number of bytes, or text such as `"12GiB"` (2**30), `"12GB"` (10**9) or `"800 MiB"`.
        argument: The name of the argument, for the error message.

    Returns:
        The size in bytes.

    Raises:
        BudgetError: `size` is not a size, or not greater than zero.
    """
    number = None
    if isinstance(size, str) and (match := _SIZE.fullmatch(size)):
        units = {unit.lower(): factor for unit, factor in _FACTORS.items()}
        if (factor := units.get(match[2].lower())) is not None:
            number = float(match[1]) * factor
    elif isinstance(size, Real) and not isinstance(size, bool):
        number = float(size)
    if number is None or number != number or number in (float("inf"), float("-inf")):
        raise BudgetError(
            f"`{argument}` must be a number of bytes or a text such as '12GiB', '12GB' or '800MiB'. Received: {argument}={size!r}"
        )
    if number < 1:
        raise BudgetError(f"`{argument}` must be at least one byte. Received: {argument}={size!r}")
    return int(number)


def format_bytes(size: int | float) -> str:
    """Shows a size in binary units, three significant digits (`"1.50 GiB"`)."""
    size = float(size)
    unit = next((one for power, one in enumerate(_UNITS) if abs(size) < 1024 ** (power + 1)), _UNITS[-1])
    size /= 1024 ** _UNITS.index(unit)
    digits = 0 if unit == "B" else 2 if abs(size) < 10 else 1 if abs(size) < 100 else 0
    return f"{size:.{digits}f} {unit}"
