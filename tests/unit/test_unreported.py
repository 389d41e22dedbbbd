"""A device that never reported is an alarm after a minute, once for each table, except under maintenance."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.builders import Twin, eight_nodes, spec_of, two_racks
from tests.support.journal_bodies import bodies_of
from twin.alerts import reported_counts
from twin.catalogue import NS
from twin.contracts import Finding
from twin.telemetry import Inbox, events as ev


def unheard(twin: Twin) -> dict[str, Finding]:
    return {f.id.partition("/")[2]: f for f in twin.decision.findings if f.id.startswith("unheard/")}


def journaled(twin: Twin) -> list[str]:
    return [r["id"] for r in bodies_of(twin.decision) if str(r.get("id", "")).startswith("unheard/")]


def some(n: int, of: int, value: float = 50.0) -> dict[str, Any]:
    """A temperature of the first `n` GPUs, nothing of the others."""
    return {"gpu.temp_c": np.where(np.arange(of) < n, value, np.nan)}


@pytest.mark.long
def test_what_is_declared_and_never_spoke_is_told_once_per_table_after_a_minute() -> None:
    twin = Twin(two_racks())
    told = []
    for second in range(1, 200):
        twin.tick(some(4, 144) | {"rack.power_w": [90e3, np.nan]})
        told += [(second, i) for i in journaled(twin)]
    assert sorted(i for _, i in told) == [f"unheard/{t}" for t in ("cdu", "feeder", "gpu", "node", "rack")]
    assert {i.partition("/")[2]: s for s, i in told} == {
        "gpu": 61, "node": 91, "rack": 151, "cdu": 151, "feeder": 151
    }, "after a minute, or one and a half periods"  # fmt: skip
    found = unheard(twin)
    assert found["gpu"].title == "140 of 144 GPUs have never reported"
    assert found["gpu"].entities[0] == "lab/h/r1/node1/gpu0"
    assert found["node"].count == 35, "a node whose GPUs speak is heard"
    assert found["rack"].entities == ("lab/h/r2",)
    counts = reported_counts(twin.site, twin.engine.state, {})["gpu"]
    assert counts == {"heard": 4, "of": 144, "silent": 0, "learning": 0}


def test_where_no_source_of_a_kind_is_connected_it_is_no_alarm() -> None:
    twin = Twin(two_racks())
    twin.run(160, {"rack.power_w": [90e3, np.nan]})
    severity = {table: finding.severity for table, finding in unheard(twin).items()}
    assert severity == {"rack": "warning", "gpu": "info", "node": "info", "cdu": "info", "feeder": "info"}
    assert "Connect a source of readings of GPUs" in unheard(twin)["gpu"].action
    twin.run(10, some(4, 144))
    assert unheard(twin)["gpu"].severity == "warning"


def test_nothing_is_expected_of_what_has_no_meter() -> None:
    tree = two_racks()
    hall = tree["halls"][0]
    hall["racks"].append({"name": "r9", "profile": None, "reports": False})
    hall["feeders"][1]["reports"] = False
    twin = Twin(tree)
    twin.run(160, {"rack.power_w": [90e3, 90e3, np.nan], "feeder.power_w": [9e4, np.nan]})
    assert unheard(twin).keys() == {"cdu", "gpu", "node"}


def test_it_is_over_when_the_last_one_speaks() -> None:
    twin = Twin(eight_nodes())
    twin.run(70, some(3, 8))
    assert unheard(twin)["gpu"].count == 5
    twin.run(11, some(8, 8))
    assert "gpu" not in unheard(twin)
    twin.run(100)
    assert "gpu" not in unheard(twin), "what fell silent is told as silent"


def test_a_reading_that_is_no_good_is_heard_all_the_same() -> None:
    twin = Twin(eight_nodes())
    twin.run(80, {"gpu.temp_c": 4000.0})
    assert "gpu" not in unheard(twin)


@pytest.mark.long
def test_where_people_work_nobody_is_waited_for() -> None:
    twin = Twin(two_racks(periods_s={"rack": 1.0}))
    begun = ev.MaintenanceBegun(id="w", table="rack", names=("r1",), author="x", reason="y",
                                until_ns=twin.now_ns + 200 * NS)  # fmt: skip
    twin.tick(None, begun)
    twin.run(100)
    assert unheard(twin)["rack"].entities == ("lab/h/r2",)
    assert unheard(twin)["gpu"].count == 72
    twin.run(120)
    assert unheard(twin)["rack"].entities == ("lab/h/r2",), "the minute begins when the work is over"
    twin.run(80)
    assert unheard(twin)["rack"].count == 2


def test_a_restart_goes_on_waiting_and_a_gap_is_not_waiting() -> None:
    twin = Twin(eight_nodes())
    twin.run(20)
    back = twin.restarted(eight_nodes(), [])
    assert back.engine.checksum() == twin.engine.checksum()
    back.tick(dt_s=3600.0)
    assert unheard(back) == {}, "nobody listened for an hour"
    back.run(40)
    assert unheard(back)["gpu"].count == 8


def test_on_a_changed_site_only_who_is_new_has_time() -> None:
    often = {"rack": 1.0}
    twin = Twin(two_racks(periods_s=often))
    twin.run(70)
    assert unheard(twin)["rack"].count == 2
    spec = spec_of(two_racks(racks="r[1-3]", periods_s=often))
    twin.tick(None, ev.SiteChanged(site_hash=spec.digest(), spec=spec.packed()))
    twin.site = twin.engine.site
    twin.inbox = Inbox(twin.site.sizes)
    twin.run(15)
    assert unheard(twin)["rack"].entities == ("lab/h/r1", "lab/h/r2")
    twin.run(70)
    assert unheard(twin)["rack"].count == 3


def test_nothing_is_expected_of_a_spare_rack() -> None:
    tree = two_racks()
    tree["halls"][0]["racks"] = [{"name": "r[1-2]", "profile": "gb200-nvl72", "spare": True}]
    twin = Twin(tree)
    twin.run(170)
    assert set(unheard(twin)) == {"cdu", "feeder"}
