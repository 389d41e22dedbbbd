"""The catalogue of fault codes: what the packaged data say, and every fault that a file can have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import yaml
from racktwin_agent.node import CODE_OF_TRIGGER

from twin.catalogue import ConfigError
from twin.contracts import ACTIONS, DEGRADED, FAILED, HEALTHY, WATCH
from twin.health import find
from twin.health.fault_codes import CATALOGUE, CLASSES, Catalogue, parse

FATAL_EVERYWHERE = (12020, 22003, 22011, 23001, 23009, 23017, 10003)


@pytest.mark.parametrize(
    "wanted, codes",
    [
        ("restart_app", (13, 31, 68, 94, 105)),
        ("none", (43, 63, 92, 121, 137)),
        ("reset_gpu", (46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158)),
        ("reboot_node", (79,)),
        ("reset_gpu", (48, 74, *range(144, 151))),
        ("drain", (167, 168, 169)),
        ("reboot_node", FATAL_EVERYWHERE),
    ],
)
def test_what_the_vendor_asks_for_at_once(wanted: str, codes: tuple[int, ...]) -> None:
    for code in codes:
        entry = find(code, "gpu" if code < 10_000 else "node")
        assert (code, ACTIONS[entry.action]) == (code, wanted)
        assert entry.ignore == (wanted == "none")


@pytest.mark.parametrize(
    "code, kind, level",
    [
        (13, "app", WATCH),
        (43, "app", HEALTHY),
        (48, "memory", FAILED),
        (63, "memory", HEALTHY),
        (94, "memory", WATCH),
        (156, "memory", DEGRADED),
        (74, "nvlink", FAILED),
        (79, "bus", FAILED),
        (119, "firmware", FAILED),
        (163, "power", WATCH),
        (167, "pcie", FAILED),
        (10004, "thermal", WATCH),
        (11012, "fabric", HEALTHY),
        (20034, "nvlink", FAILED),
        (1_000_001, "power", WATCH),
    ],
)
def test_class_and_level_of_a_code(code: int, kind: str, level: int) -> None:
    entry = find(code, "node")
    assert (entry.kind, entry.level) == (kind, level)


def test_every_xid_is_known_with_words_and_a_source_of_its_own() -> None:
    for code in range(1, 173):
        entry = find(code, "gpu")
        assert entry.known, code
        assert entry.name
        assert entry.source
        assert entry.kind in CLASSES
        assert not (entry.grave and entry.ignore)
    assert {code for code in range(1, 173) if find(code, "gpu").hint} >= {13, 31, 43, 45, 68}


def test_an_unknown_code_is_never_dropped_nor_taken_for_harmless() -> None:
    for code, table in (
        (173, "gpu"),
        (0, "gpu"),
        (-5, "gpu"),
        (9_999, "node"),
        (79, "cdu"),
        (31_999, "switch"),
    ):
        entry = find(code, table)
        assert not entry.known
        assert (entry.level, ACTIONS[entry.action]) == (WATCH, "run_diagnostics")
        assert not entry.ignore
        assert entry.name == "not in the catalogue"
    assert [find(c, "node").label for c in (173, 31_999, 2_000_000)] == [
        "XID 173", "SXID 31999", "agent code 2000000",
    ]  # fmt: skip


def test_the_agents_own_codes_are_known_as_the_agent_numbers_them() -> None:
    assert {find(code, "node").known for code in CODE_OF_TRIGGER.values()} == {True}
    assert ACTIONS[find(CODE_OF_TRIGGER["psu_lost"], "node").action] == "check_facility"


@pytest.mark.parametrize(
    "code, detail, wanted, grave",
    [
        (149, "Xid 149 at 0018:01:00: NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x1)", "reset_gpu", True),
        (149, "Xid 149 at 0018:01:00: NETIR_LINK_EVT Nonfatal XC0 i0 Link 08", "watch", False),
        (149, "Xid 149 at 0018:01:00: NETIR_LINK_EVT Non-fatal XC0 i0 Link 08", "watch", False),
        (149, "", "reset_gpu", False),
        (20035, "SXid 20035 at 0000:c1:00.0: Fatal, Link 30 LTSSM Fault Down", "run_diagnostics", True),
        (154, "changed from 0x0 (None) to 0x2 (Node Reboot Required)", "reboot_node", True),
        (154, "changed from 0x4 (Drain and Reset) to 0x1 (GPU Reset Required)", "reset_gpu", True),
        (154, "GPU recovery action changed from 0x0 (None) to 0x3 (Drain P2P)", "drain", True),
        (154, "GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)", "reset_gpu", True),
        (154, "GPU recovery action changed from 0x2 (Node Reboot Required) to 0x0 (None)", "none", False),
        (154, "GPU recovery action changed from 0x0 (None) to 0x9 (Something New)", "watch", False),
        (154, "", "watch", False),
        (79, "Xid 79 at 0000:41:00: Non-fatal, as some joker writes", "reboot_node", True),
    ],
)  # fmt: skip
def test_the_words_of_a_report_count_where_the_catalogue_says_so(
    code: int, detail: str, wanted: str, grave: bool
) -> None:
    entry = find(code, "gpu", detail)
    assert (ACTIONS[entry.action], entry.grave) == (wanted, grave)


def test_columns_say_the_same_as_entries() -> None:
    codes = np.array([*range(-2, 200), *range(9_990, 31_000, 7), 12_020, 1_000_002, 2**31 - 1], np.int64)
    for table in ("gpu", "switch", "feeder"):
        rows = CATALOGUE.rows(codes, table)
        for code, row in zip(codes.tolist(), rows.tolist(), strict=True):
            entry = find(code, table)
            assert (row != 0) == entry.known
            assert CATALOGUE.action[row] == entry.action
            assert CATALOGUE.grave[row] == entry.grave
            assert CATALOGUE.ignore[row] == entry.ignore
            assert CLASSES[CATALOGUE.kind[row]] == entry.kind


def file_with(**row: Any) -> str:
    given = {
        "codes": [79],
        "name": "x",
        "class": "bus",
        "action": "reset_gpu",
        "next": "drain",
        "source": "a",
    }
    wanted = {k: v for k, v in (given | row).items() if v is not None}
    return yaml.safe_dump({"schema": 1, "sources": {"a": "a book"}, "rows": [wanted]})


def test_a_row_as_it_should_be() -> None:
    (entry,) = parse("a.yaml", file_with(grave=True))
    assert (entry.code, entry.kind, entry.grave, entry.source) == (79, "bus", True, "a book")


@pytest.mark.parametrize(
    "row, why",
    [
        ({"action": "pray"}, "Invalid enum value 'pray' - at `$.action`"),
        ({"class": "gremlins"}, "Invalid enum value 'gremlins' - at `$.class`"),
        ({"next": None}, "missing required field `next`"),
        ({"gravity": True}, "unknown field `gravity`"),
        ({"grave": "very"}, "Expected `bool`, got `str` - at `$.grave`"),
        ({"name": " "}, "at `$.name`"),
        ({"codes": []}, "at `$.codes`"),
        ({"codes": [0]}, "Expected `int` >= 1 - at `$.codes[0]`"),
        ({"codes": ["79"]}, "Expected `int`, got `str` - at `$.codes[0]`"),
        ({"codes": 79}, "Expected `array`"),
        ({"source": "b"}, "source 'b'; expected one of a"),
        ({"grave": True, "action": "watch"}, "grave, with watch; expected reset_gpu or more"),
        ({"ignore": True}, "ignore, with the action reset_gpu; expected none"),
        ({"text": "poem"}, "Invalid enum value 'poem' - at `$.text`"),
    ],
)
def test_a_fault_of_a_row_names_file_code_key_and_expectation(row: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse("a.yaml", file_with(**row))
    assert str(caught.value).startswith("a.yaml: row 1, codes ")
    assert why in str(caught.value)


@pytest.mark.parametrize("text", ["", "[", "schema: 2\nsources: {}\nrows: []", "schema: 1\nrows: []", "- 1"])
def test_a_file_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"a\.yaml: "):
        parse("a.yaml", text)


def test_a_code_stands_once() -> None:
    with pytest.raises(ConfigError, match="code 79: stands in two rows"):
        Catalogue(parse("a.yaml", file_with()) + parse("b.yaml", file_with()))
