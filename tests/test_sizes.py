import pytest

from keras_sn.errors import BudgetError
from keras_sn.sizes import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (1, 1),
        (12 * 2**30, 12 * 2**30),
        ("12GiB", 12 * 2**30),
        ("12 gb", 12 * 10**9),
        ("1.5MiB", 3 * 2**19),
        ("800", 800),
        (6e9, 6 * 10**9),
        (10**300, 10**300),
    ],
)
def test_reads_sizes(text, expected):
    assert parse_bytes(text, argument="memory_budget") == expected


HUGE = [pytest.param(size, id=name) for name, size in {"int": 10**400, "long": 10**5000, "text": "9" * 400 + "GiB"}.items()]


@pytest.mark.parametrize("bad", ["", "12 apples", "GiB", "-3GiB", 0, -1, float("nan"), float("inf"), True, None, [], "0B", *HUGE])
def test_refuses_what_is_no_size(bad):
    with pytest.raises(BudgetError, match="Received: memory_budget=") as raised:
        parse_bytes(bad, argument="memory_budget")
    assert len(str(raised.value)) < 300


def test_shows_sizes():
    assert [format_bytes(n) for n in (0, 1023, 1536, 12 * 2**30, 300 * 2**30)] == [
        "0 B",
        "1023 B",
        "1.50 KiB",
        "12.0 GiB",
        "300 GiB",
    ]
