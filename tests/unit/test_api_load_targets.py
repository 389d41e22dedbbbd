"""Load targets over the interface: who may set one, what is refused, and what is said of the load."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from policies.power_capping.external_limits import targets_now
from tests.support.builders import START_NS, Twin, two_racks
from tests.support.in_process_daemon import Pod, serve
from twin.catalogue import NS
from twin.contracts import LoadTarget
from twin.telemetry import LoadTargetSet
from twin.wiring import load_now

AT = "/api/v1/load-targets"
FEEDERS = ["lab/h/a", "lab/h/b"]
BODY: dict[str, Any] = {"name": "night", "limit_w": 250_000, "feeders": ["a", "lab/h/b"], "for_s": 3600}


def test_a_target_is_set_seen_replaced_and_withdrawn(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        now_ns = pod.twin.now_ns
        status, done = await pod.ask("POST", AT, "operator", BODY)
        assert (status, done["name"], done["end_ns"]) == (200, "night", now_ns + 3600 * NS)
        (held,) = pod.twin.engine.view(1.0).load_targets()
        assert (held.author, held.kind, held.feeders.tolist()) == ("operator-1", "operator", [0, 1])
        pod.tick({"rack.power_w": 100_000.0, "feeder.power_w": [240_000.0, 260_000.0]})
        _, tree = await pod.ask("GET", AT)
        (told,) = tree["targets"]
        assert (told["within"], told["over"], told["unknown"], told["runs"]) == (False, 1, 0, True)
        assert [(p["feeder"], p["load_w"], p["left_w"]) for p in told["places"]] == [
            ("lab/h/b", 260_000, -10_000), ("lab/h/a", 240_000, 10_000)]  # fmt: skip
        # Under the same name: another takes its place
        await pod.ask("POST", AT, "operator", {"name": "night", "limit_w": 2e5, "kind": "utility"})
        _, tree = await pod.ask("GET", AT)
        (told,) = tree["targets"]
        assert (told["site"], told["kind"], told["end_ns"], told["within"]) == (True, "utility", None, True)
        assert tree["site"] == {"load_w": 200_000.0, "unheard_racks": 0}
        assert (await pod.ask("DELETE", f"{AT}/night", "operator"))[0] == 200
        assert (await pod.ask("GET", AT))[1]["targets"] == []
        assert (await pod.ask("DELETE", f"{AT}/night", "operator"))[0] == 404

    serve(tmp_path, check)


def test_what_is_to_come_does_not_run_and_names_may_hold_slashes(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        start_ns = pod.twin.now_ns + 60 * NS
        body = {"name": "a/b c#1", "limit_w": 1.0, "start_ns": start_ns, "for_s": 30}
        assert (await pod.ask("POST", AT, "operator", body))[1]["end_ns"] == start_ns + 30 * NS
        (told,) = (await pod.ask("GET", AT))[1]["targets"]
        assert (told["runs"], told["start_ns"]) == (False, start_ns)
        assert (await pod.ask("DELETE", f"{AT}/a%2Fb%20c%231", "operator"))[0] == 200

    serve(tmp_path, check)


BAD: list[tuple[Any, int, str]] = [
    (BODY | {"name": ""}, 400, "name: expected 1 to 200"),
    (BODY | {"name": "x" * 201}, 400, "name: expected 1 to 200"),
    (BODY | {"name": "a\nb"}, 400, "name: expected 1 to 200 printable"),
    (BODY | {"limit_w": -1}, 400, "limit_w: expected W from 0"),
    (BODY | {"limit_w": 1e12}, 400, "limit_w: expected W from 0"),
    (BODY | {"limit_w": "500kW"}, 400, "the body is not valid"),
    (BODY | {"feeders": ["x"]}, 404, "no feeder x; expected one of the site file, such as lab/h/a"),
    (BODY | {"feeders": ["a"] * 10_001}, 400, "feeders: expected at most"),
    (BODY | {"start_ns": -1}, 400, "start_ns: expected ns since 1970"),
    (BODY | {"start_ns": START_NS + 400 * 86_400 * NS}, 400, "start_ns: expected ns since 1970"),
    (BODY | {"for_s": 0}, 400, "for_s: expected seconds"),
    (BODY | {"end_ns": 5}, 400, "expected one of them"),
    ({"name": "n", "limit_w": 1, "end_ns": START_NS - NS}, 409, "over already"),
    ({"name": "n", "limit_w": 1, "start_ns": START_NS + 9 * NS, "end_ns": START_NS + 8 * NS}, 409,
     "ends before"),
    (BODY | {"kind": "weather"}, 400, "the body is not valid"),
    (BODY | {"feeder": "a"}, 400, "the body is not valid"),
]  # fmt: skip


@pytest.mark.parametrize("body, status, words", BAD)
def test_what_is_refused(tmp_path: Path, body: Any, status: int, words: str) -> None:
    async def check(pod: Pod) -> None:
        got, tree = await pod.ask("POST", AT, "operator", body)
        assert (got, words in tree["error"]) == (status, True), tree
        assert (await pod.ask("GET", AT))[1]["targets"] == []

    serve(tmp_path, check)


def test_unknown_is_not_within(tmp_path: Path) -> None:
    """One rack of two is heard: that its load is small says nothing, that it is large says all."""
    twin = Twin(two_racks())
    twin.tick({"rack.power_w": [90_000.0, np.nan]}, LoadTargetSet(author="a", target="t", limit_w=1e5),
              LoadTargetSet(author="a", target="u", limit_w=8e4))  # fmt: skip
    load = load_now(twin.engine)
    assert (load.site_w, load.unheard_racks) == (90_000.0, 1)

    async def check(pod: Pod) -> None:
        pod.tick({"rack.power_w": [90_000.0, np.nan], "gpu.power_w": np.nan})
        for name, limit_w in (("t", 1e6), ("u", 8e4)):
            await pod.ask("POST", AT, "operator", {"name": name, "limit_w": limit_w})
        pod.twin.engine.state.tables["gpu"].value[:] = np.nan
        _, tree = await pod.ask("GET", AT)
        assert {t["name"]: t["within"] for t in tree["targets"]}["u"] is False

    serve(tmp_path, check)
    quiet = Twin(two_racks())
    quiet.tick(None)
    assert np.isnan(load_now(quiet.engine).site_w)


def test_the_least_of_all_that_run_counts() -> None:
    def target(limit_w: float, feeders: list[int] | None, start_s: int = 0) -> LoadTarget:
        index = None if feeders is None else np.array(feeders, np.int32)
        return LoadTarget("t", "a", "flex", limit_w, start_s * NS, None, index)

    held = (target(5.0, None), target(3.0, None), target(1.0, None, 9), target(7.0, [0, 1]), target(6.0, [1]))

    def now(held: tuple[LoadTarget, ...], n: int, now_ns: int) -> tuple[float, np.ndarray]:
        site = SimpleNamespace(sizes={"feeder": n})
        view: Any = SimpleNamespace(site=site, now_ns=now_ns, load_targets=lambda: held)
        return targets_now(view)

    site_w, feeder_w = now(held, 3, NS)
    assert (site_w, feeder_w.tolist()) == (3.0, [7.0, 6.0, np.inf])
    assert now(held, 3, 9 * NS)[0] == 1.0
    assert now((), 1, NS) == (np.inf, np.array([np.inf]))
