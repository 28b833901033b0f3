"""Bytes as people write them (`"12GiB"`) to `int`, and back. Inside the library a size is always an `int` of bytes."""

import re
from math import isfinite
from numbers import Real
from typing import Any

from keras_sn.errors import BudgetError, shown

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
    number: Any = None if isinstance(size, str) else size
    if isinstance(size, str) and (match := _SIZE.fullmatch(size)):
        units = {unit.lower(): factor for unit, factor in _FACTORS.items()}
        if (factor := units.get(match[2].lower())) is not None:
            number = float(match[1]) * factor
    if not is_finite(number):
        raise BudgetError(
            f"`{argument}` must be a number of bytes, at most 1e308, or a text such as '12GiB', '12GB' or '800MiB'. "
            f"Received: {argument}={shown(size)}"
        )
    if number < 1:
        raise BudgetError(f"`{argument}` must be at least one byte. Received: {argument}={shown(size)}")
    return int(number)


def is_finite(number: Any) -> bool:
    """Whether something is a number, and one that a `float` holds (to 1.8e308): `10**400` bytes are as infinite as `inf`."""
    try:
        return isinstance(number, Real) and not isinstance(number, bool) and isfinite(number)
    except OverflowError:
        return False


def format_bytes(size: int | float) -> str:
    """Shows a size in binary units, three significant digits (`"1.50 GiB"`)."""
    size = float(size)
    unit = next((one for power, one in enumerate(_UNITS) if abs(size) < 1024 ** (power + 1)), _UNITS[-1])
    size /= 1024 ** _UNITS.index(unit)
    digits = 0 if unit == "B" else 2 if abs(size) < 10 else 1 if abs(size) < 100 else 0
    return f"{size:.{digits}f} {unit}"
