"""Output of `ipmitool dcmi power`, good and bad."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from connectors.bmc.dcmi import DcmiLimit, parse_limit, parse_power
from twin.catalogue import ConnectorError

LIMIT = """
    Current Limit State: Power Limit Active
    Exception actions:   Hard Power Off & Log Event to SEL
    Power Limit:         4800 Watts
    Correction time:     1000 milliseconds
    Sampling period:     60 seconds

"""
POWER = """
    Instantaneous power reading:                   200 Watts
    Minimum during sampling period:                100 Watts
    Maximum during sampling period:                300 Watts
    Average power reading over sample period:      210 Watts
    IPMI timestamp:                           11/14/23 22:13:20 UTC    Sampling period:               00000001 Seconds.
    Power reading state is:                   activated

"""  # noqa: E501


def test_a_limit_that_is_active_and_one_that_is_not() -> None:
    expected = DcmiLimit(True, 4800.0, "Hard Power Off & Log Event to SEL", 1000, 60)
    assert parse_limit(LIMIT) == expected
    off = LIMIT.replace("Power Limit Active", "No Active Power Limit")
    assert parse_limit(off) == expected._replace(active=False)
    assert parse_limit(LIMIT.replace("\n", "\r\n").replace("4800 Watts", "4800   Watts")) == expected


@pytest.mark.parametrize(
    "old, new",
    [
        ("Power Limit Active", "Perhaps"), ("4800 Watts", "4800"),
        ("Correction time", "Corr"), ("60 seconds", "?"), (LIMIT, ""), ("4800 Watts", "four Watts"),
    ],
)  # fmt: skip
def test_what_is_no_limit(old: str, new: str) -> None:
    with pytest.raises(ConnectorError, match="expected a power limit"):
        parse_limit(LIMIT.replace(old, new))


def test_power_where_it_is_measured_and_where_not() -> None:
    assert parse_power(POWER) == 200.0
    assert parse_power(POWER.replace(" activated", " deactivated")) is None
    with pytest.raises(ConnectorError, match="expected a power reading"):
        parse_power("Get Device ID command failed")


@given(st.text(), st.integers(0, 400))
def test_nonsense_is_told_and_nothing_else_happens(text: str, cut: int) -> None:
    said = []
    for some in (text, LIMIT[:cut] + text, POWER[:cut] + text):
        for parse in (parse_limit, parse_power):
            try:
                parse(some)
            except ConnectorError as error:
                said.append(str(error))
    assert all(len(words) < 400 for words in said)
