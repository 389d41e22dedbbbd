"""Findings are raised once, kept while they last, cleared once. May import `twin`."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tests.support.builders import Twin, eight_nodes, two_racks
from tests.support.journal_bodies import bodies_of
from twin.alerts import Findings
from twin.alerts.findings import MAX_ACTIVE
from twin.contracts import ClearedRecord, Finding, FindingRecord
from twin.daemon.alarms import AlarmBook
from twin.daemon.services import Services


def kinds(twin: Twin) -> list[tuple[str, str]]:
    """Findings of the last tick, but for those about who never speaks in these stories."""
    said = [(r["kind"], r["id"]) for r in bodies_of(twin.decision) if r["kind"] in ("finding", "cleared")]
    return [s for s in said if not s[1].startswith("unheard/")]


def active(twin: Twin) -> list[Finding]:
    return [f for f in twin.decision.findings if not f.id.startswith("unheard/")]


def healthy(rng: np.random.Generator, bias: float = 1.0, flow: float = 1.0) -> dict[str, Any]:
    """Two racks; meters A and B of 0.4 % noise; `bias` is on meter a, `flow` on the flow of rack 1."""
    power = 100e3 * (1 + rng.normal(0, 0.01, 2))
    share = 0.5 * power.sum()
    meters = share * np.array([bias, 1.0]) * (1 + rng.normal(0, 0.004, 2))
    rise = 0.9 * power / (80 / 60e3 * 1012 * 3950)
    return {"feeder.power_w": meters, "rack.power_w": power, "rack.supply_temp_c": 32.0,
            "rack.flow_lpm": 80.0 * (1 + rng.normal(0, 0.003, 2)) * np.array([flow, 1.0]),
            "rack.return_temp_c": 32.0 + rise}  # fmt: skip


@functools.cache
def _run() -> tuple[Twin, np.random.Generator]:
    twin, rng = Twin(two_racks()), np.random.default_rng(7)
    for _ in range(300):
        twin.tick(healthy(rng))
        assert kinds(twin) == []
    return twin, rng


def settled() -> tuple[Twin, np.random.Generator]:
    """A twin of its own after five quiet minutes, and its dice."""
    return copy.deepcopy(_run())


@pytest.mark.long
def test_a_meter_that_goes_wrong_is_found_after_a_minute_and_cleared_when_mended() -> None:
    twin, rng = settled()
    raised = []
    for second in range(1, 250):
        twin.tick(healthy(rng, bias=1.08))
        raised += [(second, *k) for k in kinds(twin)]
    assert len(raised) == 1, "once, and it does not become normal"
    second, kind, name = raised[0]
    assert (kind, name) == ("finding", "fault/sensor_biased/lab/h/a/power_w")
    assert second <= 60
    (found,) = active(twin)
    assert found.entities == ("lab/h/a",)
    mended = []
    for _ in range(120):
        twin.tick(healthy(rng))
        mended += kinds(twin)
    assert mended == [("cleared", "fault/sensor_biased/lab/h/a/power_w")]
    assert active(twin) == []


def test_a_flow_reading_that_goes_wrong_is_found_on_its_rack() -> None:
    twin, rng = settled()
    raised = []
    for _ in range(100):
        twin.tick(healthy(rng, flow=1.4))
        raised += kinds(twin)
    assert ("finding", "heat/lab/h/r1") in raised, "which of four readings is wrong, nothing here says"
    assert not [r for r in raised if "r2" in r[1]]


@pytest.mark.long
def test_one_odd_reading_that_stands_for_long_is_still_one_reading() -> None:
    twin, rng = Twin(two_racks()), np.random.default_rng(9)
    for _ in range(60):
        twin.tick(healthy(rng), dt_s=100.0)
    twin.tick(healthy(rng, bias=1.2), dt_s=100.0)
    twin.run(99)
    assert active(twin) == []
    twin.tick(healthy(rng, bias=1.2))
    assert [f.id for f in active(twin)] == ["balance/a+b"], "the second one confirms it"


def test_silence_is_one_outage_and_only_of_what_once_spoke() -> None:
    twin = Twin(eight_nodes())
    twin.run(30)
    assert twin.decision.findings == (), "never heard is not fallen silent"
    twin.run(30, {"gpu.temp_c": 50.0})
    twin.run(15)
    (found,) = twin.decision.findings
    assert found.id == "silence/lab/h/r1"
    assert found.title.startswith("No data from rack lab/h/r1 since ")
    twin.run(11, {"gpu.temp_c": 50.0})
    assert twin.decision.findings == ()


@pytest.mark.parametrize("n", [1, 8, 9, 50])
def test_a_finding_names_a_few_and_counts_all(n: int) -> None:
    twin = Twin(two_racks())
    findings = twin.engine.findings
    names = tuple(twin.site.name("gpu", i) for i in range(n))
    (record,) = findings.mismatches(names, "gpu.power_cap_w", np.arange(n, dtype=np.int32))
    assert isinstance(record, FindingRecord)
    assert record.title.startswith(f"{n} GPU{'' if n == 1 else 's'} do")
    assert len(record.entities) == min(n, 8)


def test_active_findings_are_bounded_and_counted() -> None:
    twin = Twin(eight_nodes())
    findings = Findings(twin.site, twin.engine.estimator)
    for i in range(MAX_ACTIVE + 7):
        findings.raise_(Finding(f"x/{i}", "info", "", (), (), 1.0))
    assert len(findings.active) == MAX_ACTIVE
    assert findings.counts == {"dropped": 7}
    assert findings.raise_(Finding("x/0", "info", "", (), (), 1.0)) == [], "raised once"
    assert findings.clear("x/0") == [ClearedRecord(id="x/0")]
    assert findings.clear("x/0") == []


def test_a_critical_finding_takes_the_place_of_one_that_is_not_and_people_hear_that_others_are_left_out(
    tmp_path: Path,
) -> None:
    twin = Twin(eight_nodes())
    findings, book = twin.engine.findings, AlarmBook(tmp_path)
    findings.active.clear()
    nothing: Any = SimpleNamespace(
        alarms=book, history=SimpleNamespace(alarms=list), notifier=SimpleNamespace(faults=dict),
        energy_ledger=SimpleNamespace(fault=""), upkeep=SimpleNamespace(fault=""), dispatchers=[], _faults={},
        outside=SimpleNamespace(wrong=dict), links=None, _conditions_raised=set(), trace_fault="",
        live=SimpleNamespace(engine=twin.engine, started_ns=0),
    )  # fmt: skip
    Services._conditions(nothing, cast(Any, None), twin.decision)
    assert book._conditions == {}
    for i in range(MAX_ACTIVE):
        findings.raise_(Finding(f"x/{i}", "warning" if i else "critical", "", (), (), 1.0))
    Services._conditions(nothing, cast(Any, None), twin.decision)
    assert [f.severity for f in book._conditions.values()] == ["warning"]
    assert findings.raise_(Finding("y", "warning", "", (), (), 1.0)) == []
    cleared, _ = findings.raise_(Finding("z", "critical", "", (), (), 1.0))
    assert cleared == ClearedRecord(id="x/1")
    assert {"x/0", "z"} < findings.active.keys()
    assert len(findings.active) == MAX_ACTIVE


def test_a_reading_that_turns_at_whole_degrees_rings_once() -> None:
    """It is over once it is back by a degree, at the guard as at the limit; a rise to the limit is told."""
    twin = Twin(two_racks())
    guard, most = (float(getattr(twin.site.limits["gpu.temp_c"], n)[0]) for n in ("guard", "max"))
    for _ in range(5):
        for read_c in (guard + 1, guard):
            twin.tick({"gpu.temp_c": read_c})
            assert [f.id for f in active(twin)] == ["beyond/gpu.temp_c/guard"]
    (found,) = active(twin)
    assert f"over at {guard - 1:.4g} °C" in found.evidence[0]
    for _ in range(5):
        for read_c in (most + 1, most):
            twin.tick({"gpu.temp_c": read_c})
            assert [f.id for f in active(twin)] == ["beyond/gpu.temp_c/limit"]
    back = copy.deepcopy(twin)
    twin.tick({"gpu.temp_c": most - 1})
    assert [f.id for f in active(twin)] == ["beyond/gpu.temp_c/guard"]
    twin.tick({"gpu.temp_c": guard - 1})
    assert active(twin) == []
    twin.tick({"gpu.temp_c": guard})
    assert active(twin) == [], "what was not beyond begins beyond the guard"
    back.engine.restore(copy.deepcopy(back.engine.dump()))
    back.tick({"gpu.temp_c": most})
    assert [f.id for f in active(back)] == ["beyond/gpu.temp_c/limit"], "over a restart"
