"""A site that `racktwin site split` halved, end to end: one plant, real servers, and all of its daemons.

They mirror what one daemon of the whole site mirrors, and a lost feeder overloads none.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon_process import RunningDaemon
from tests.support.split_site import SplitSite, split_site
from twin.catalogue import find_signal

pytestmark = pytest.mark.slow
FEEDER_W = 245e3
HALL = {
    "name": "h",
    "racks": [{"name": "r[1-4]", "profile": "gb200-nvl72"}],
    "cdus": [{"name": "c[1-2]", "loop": "w", "serves": ["r[1-4]"]}],
    "feeders": [
        {"name": f"main-{side}", "side": side.upper(), "budget_w": FEEDER_W, "serves": ["r[1-4]"]}
        for side in "ab"
    ],
}
SITE: dict[str, Any] = {
    "site": "s",
    "loops": [{"name": "w", "cooling": "tower"}],
    "halls": [HALL],
    "controls": {"gpu.power_cap_w": {"safe": 200}},
    "policies": {name: {"authority": "act"} for name in ("power_guard", "power_cap")},
}
TABLES = ("gpu", "node", "rack", "cdu", "loop", "feeder", "hall")
Mirror = dict[tuple[str, str], float]


def mirror(daemon: RunningDaemon) -> tuple[Mirror, Mirror]:
    """Values by entity and signal: all that are known, and those that are good now.

    Counters are left out, as they begin with their daemon.
    """
    known: Mirror = {}
    good: Mirror = {}
    for table in TABLES:
        tree = daemon.get(f"/api/v1/state/{table}?limit=1000")
        for name, rows in tree["signals"].items():
            signal = find_signal(f"{table}.{name}")
            assert signal is not None
            if signal.kind == "counter":
                continue
            for entity, value, quality in zip(tree["names"], rows["value"], rows["quality"], strict=True):
                if quality != "missing":
                    known[entity, signal.key] = value
                if quality == "good":
                    good[entity, signal.key] = value
    return known, good


def halls(site: SplitSite) -> dict[str, dict[str, Any]]:
    """The parts as the hub knows them."""
    return {row["hall"]: row for row in site.hub.get("/api/v1/fleet")["halls"]}


def load_w(site: SplitSite) -> float:
    """The true power of both feeders."""
    return float(site.plant.feeder_w[-1].sum())


def check_mirrors(site: SplitSite) -> None:
    """Each value of the whole site is mirrored in one place, and is the same there."""
    site.plant.rest()
    time.sleep(1.5)  # so that a tick takes one round alone, and none a mean of two
    site.plant.round()
    time.sleep(1.5)
    (whole, new), *parts = (mirror(daemon) for daemon in (site.whole, *site.daemons))
    site.plant.go_on()
    assert len(new) > 4_000, Counter(key for _, key in new)
    count = Counter(key for known, _ in parts for key in known)
    twice = {key.partition(".")[0] for (_, key), places in count.items() if places > 1}
    assert twice <= {"hall"}, "each part has the air of its hall"
    union = {key: value for known, _ in parts for key, value in known.items()}
    assert {key for key, value in new.items() if union.get(key) != value} == set()
    told = {key for key in union if key[0].rpartition("/")[2] in site.parts}  # by parts, to the hub
    assert told, "the hub hears the parts"
    good = {key: value for _, values in parts for key, value in values.items() if key not in told}
    assert {key for key, value in good.items() if whole.get(key) != value} == set()


@pytest.mark.long
def test_a_split_site_is_the_site(server: Callable[..., Path], tmp_path: Path) -> None:
    with split_site(server, tmp_path, SITE) as site:
        roles = {one.folder.name: one.get("/api/v1/summary")["role"] for one in site.daemons}
        assert set(roles.values()) == {"leader"}, roles
        site.hub.until(lambda: all(h["budget_w"] == h["held_w"] == FEEDER_W for h in halls(site).values()))
        check_mirrors(site)
        site.plant.work()
        site.hub.until(lambda: load_w(site) > 1.3 * FEEDER_W, what="more load than one feeder carries")
        assert all(max(w) <= FEEDER_W for w in site.plant.feeder_w)
        site.plant.lose("main-b")

        def gave_way() -> bool:
            rows = halls(site).values()
            named = all("s/h/main-b is lost" in h["why"] for h in rows)
            return named and load_w(site) <= FEEDER_W and sum(h["held_w"] for h in rows) <= FEEDER_W

        site.hub.until(gave_way, what="both parts to give way")
        settled = len(site.plant.feeder_w)
        dead, alive = site.parts.values()
        dead.kill()
        site.hub.until(lambda: not halls(site)["part-1"]["heard"], what="the silence of the dead part")
        row, ticks = halls(site)["part-2"], alive.get("/api/v1/summary")["ticks"]["tick"]
        assert row["heard"]
        assert row["budget_w"] >= FEEDER_W / 2 - 1
        alive.until(lambda: alive.get("/api/v1/summary")["ticks"]["tick"] > ticks + 2, what="its ticks")
        assert len(mirror(alive)[1]) > 2_000, "what it hears is new"
        assert all(w[0] <= FEEDER_W for w in site.plant.feeder_w[settled:]), "never again above its budget"
        assert not any(what.startswith("not understood") for what in site.plant.counts)
