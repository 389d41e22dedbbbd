"""Power over HTTP: headroom, why caps are as they are, what they cost, how many racks fit, metrics."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from policies.power_capping import CapAccount
from policies.power_capping.savings import NAMES, SLOT_S
from tests.support.builders import eight_nodes, two_racks
from tests.support.capped_pod import Rig, guards, job, lab
from tests.support.in_process_daemon import Pod, serve
from twin.catalogue import NS, utc
from twin.contracts import Forecast
from twin.daemon import policy_accounts
from twin.daemon.policy_accounts import PolicyAccounts, read_account, write_account
from twin.telemetry import LoadTargetSet
from twin.telemetry.events import BudgetGranted

DAY_S = 86_400


def target(pod: Pod, limit_w: float, *feeders: str, for_s: int = 10_800) -> LoadTargetSet:
    end_ns = pod.twin.now_ns + for_s * NS
    return LoadTargetSet(id=f"t{for_s}", author="grid", target="dr 7", limit_w=limit_w, feeders=feeders,
                         kind="flex", end_ns=end_ns)  # fmt: skip


def account_of(pod: Pod) -> CapAccount:
    account = pod.live.accounts["power_cap"]
    assert isinstance(account, CapAccount)
    return account


def by_place(tree: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {p["place"]: p for p in tree["places"]}


def test_headroom_of_every_place_now_and_with_the_other_side_lost(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        rig = Rig(pod)
        rig.run(3, 500.0)
        rack_w = 72 * 500.0 * 1.05 + 20_000
        status, tree = await pod.ask("GET", "/api/v1/power")
        at = by_place(tree)
        assert status == 200
        assert [p["kind"] for p in tree["places"]] == ["site", "cdu", "feeder", "feeder", "rack", "rack"]
        a = at["lab/h/a"]
        assert (a["load_w"], a["lost_w"]) == (pytest.approx(rack_w), pytest.approx(2 * rack_w))
        assert a["left_w"] == pytest.approx(150_000 - 2 * rack_w, abs=1)
        assert a["use_pu"] == pytest.approx(2 * rack_w / 150_000, abs=1e-3)
        assert (a["limit_w"], a["dead"], a["unheard_racks"], a["target"]) == (150_000, False, 0, "")
        assert at["lab/h/r1"]["load_w"] == pytest.approx(rack_w)
        assert at["lab/h/r1"]["left_w"] == pytest.approx(132_000 - rack_w, abs=1)
        assert at["lab/h/r1"]["limit_from"] == "profile gb200-nvl72, limit of rack power"
        assert a["limit_from"] == "site file, budget_w"
        assert any(n.startswith("limits come from: ") for n in tree["notes"])
        assert tree["first"]["place"] in ("lab/h/a", "lab/h/b")
        assert (tree["first"]["lost"], tree["first"]["over"]) == (True, False)
        assert a["peak_lost_w"] == a["lost_w"]
        assert any("no forecast of racks" in n for n in tree["notes"])
        _, few = await pod.ask("GET", "/api/v1/power?kind=feeder,rack&limit=1")
        assert [p["kind"] for p in few["places"]] == ["feeder", "feeder", "rack"]

    serve(tmp_path, check, tree=lab(), more=guards())


def test_the_upper_band_of_the_forecast_is_what_is_to_come(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        Rig(pod).run(3, 500.0)
        hi = np.array([70_000.0, 90_000.0])
        for horizon_s, more in ((900.0, 0.0), (3600.0, 5_000.0)):
            f = Forecast("rack.power_w", horizon_s, hi - 5_000, hi - 9_000, hi + more, model="test", basis="")
            pod.live.engine.forecasts["rack.power_w", horizon_s] = f
        _, tree = await pod.ask("GET", "/api/v1/power")
        a = by_place(tree)["lab/h/a"]
        assert [(s["horizon_s"], s["load_w"], s["lost_w"], s["left_w"]) for s in a["ahead"]] == [
            (900.0, 80_000.0, 160_000.0, -10_000.0), (3600.0, 85_000.0, 170_000.0, -20_000.0)]  # fmt: skip
        assert (tree["first"]["in_s"], tree["first"]["over"], tree["first"]["bound"]) == (900.0, True, True)
        assert not any("no forecast of racks" in n for n in tree["notes"])
        _, told = await pod.ask("GET", "/api/v1/power?form=explanation")
        worst = [s for s in told["sentences"] if s["text"].startswith("worst case in 15 min, not a")]
        assert [s["kind"] for s in worst] == ["summary"], "a bound is no warning"
        assert "warning" not in [s["kind"] for s in told["sentences"]]
        (table,) = [t for t in told["tables"] if t["name"] == "places"]
        assert table["text"].endswith("forecast: the worst within 1 h, upper ends of 90 % bands")
        names = [c["name"] for c in table["columns"]]
        (row,) = [dict(zip(names, r, strict=True)) for r in table["rows"] if "lab/h/a" in r]
        assert (row["coming_w"], row["coming_left_w"]) == (170_000.0, -20_000.0)
        assert row["left_w"] > 0.0, "what is left now is another column than what the forecast leaves"
        heads = {c["name"]: c.get("text", "") for c in table["columns"]}
        assert (heads["left_w"], heads["coming_left_w"]) == ("left now", "left by forecast")
        Rig(pod).run(3, 900.0)  # 88 kW a rack: with the other side lost, a feeder is beyond its 150 kW
        _, told = await pod.ask("GET", "/api/v1/power?form=explanation")
        (warning,) = [s["text"] for s in told["sentences"] if s["kind"] == "warning"]
        assert warning.startswith("now: feeder lab/h/"), "and it hides none"
        assert "is beyond its limit if the other side fails" in warning
        Rig(pod).run(3, 500.0)
        # A target that is over by then binds no more
        pod._events.append(target(pod, 60_000, "lab/h/a", for_s=800))
        pod.tick(None)
        _, tree = await pod.ask("GET", "/api/v1/power")
        a = by_place(tree)["lab/h/a"]
        assert (a["target_w"], a["target"], tree["first"]["target"]) == (60_000.0, "dr 7", "")
        pod._events.append(target(pod, 60_000, "lab/h/a", for_s=1000))
        pod.tick(None)
        _, tree = await pod.ask("GET", "/api/v1/power")
        first = tree["first"]
        assert (first["target"], first["in_s"], first["left_w"]) == ("dr 7", 900.0, -20_000.0)

    serve(tmp_path, check, tree=lab(), more=guards())


def test_each_limit_ahead_says_where_it_comes_from_by_then(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        Rig(pod).run(3, 500.0)
        expires_ns = pod.twin.now_ns + 600 * NS
        for horizon_s in (300.0, 900.0):
            hi = np.array([60_000.0, 70_000.0])
            f = Forecast("rack.power_w", horizon_s, hi - 5_000, hi - 9_000, hi, model="test", basis="")
            pod.live.engine.forecasts["rack.power_w", horizon_s] = f
        for budget_w, expected in (
            (140e3, "granted from outside for a limited time"),
            (1e6, "site file, budget_w"),
        ):
            grant = BudgetGranted(
                id=f"g{budget_w}", author="grid", feeder="lab/h/a", budget_w=budget_w, expires_ns=expires_ns
            )
            pod._events.append(grant)
            pod.tick(None)
            _, tree = await pod.ask("GET", "/api/v1/power")
            a = by_place(tree)["lab/h/a"]
            assert [x["limit_from"] for x in (a, *a["ahead"])] == [
                expected, expected, "site file, guaranteed_w"]  # fmt: skip
        first = tree["first"]
        assert (first["in_s"], first["limit_w"]) == (900.0, 100e3)
        assert first["limit_from"] == "site file, guaranteed_w"

    tree = lab()
    tree["halls"][0]["feeders"][0] |= {"external": True, "guaranteed_w": 100_000}
    serve(tmp_path, check, tree=tree, more=guards())


def test_a_band_without_evidence_tells_nothing_of_what_is_to_come(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        Rig(pod).run(3, 500.0)
        few = np.array([70_000.0, 90_000.0])
        f = Forecast("rack.power_w", 900.0, few, few * np.nan, few * np.nan, model="test", basis="")
        pod.live.engine.forecasts["rack.power_w", 900.0] = f
        _, tree = await pod.ask("GET", "/api/v1/power")
        assert all(place["ahead"] == [] for place in tree["places"])
        assert (tree["first"]["in_s"], tree["first"]["bound"]) == (0.0, False)
        assert any("no forecast of racks" in n for n in tree["notes"])

    serve(tmp_path, check, tree=lab(), more=guards())


def test_a_load_target_is_held_against_what_flows_and_not_against_a_loss(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        rig = Rig(pod)
        rig.run(3, 300.0, target(pod, 60_000, "lab/h/b"))
        _, tree = await pod.ask("GET", "/api/v1/power")
        a, b = (by_place(tree)[f"lab/h/{f}"] for f in "ab")
        assert b["left_w"] == pytest.approx(min(60_000 - b["load_w"], 150_000 - b["lost_w"]), abs=1)
        assert b["left_w"] == pytest.approx(60_000 - b["load_w"], abs=1)
        assert a["left_w"] == pytest.approx(150_000 - a["lost_w"], abs=1)
        assert (tree["first"]["place"], tree["first"]["target"]) == ("lab/h/b", "dr 7")
        assert tree["first"]["lost"] is False

    serve(tmp_path, check, tree=lab(), more=guards())


def test_feeders_that_nobody_guards_are_named(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        _, tree = await pod.ask("GET", "/api/v1/power")
        assert "not guarded, as the site file gives no `budget_w`: lab/h/b" in tree["notes"]

    bare = lab()
    del bare["halls"][0]["feeders"][1]["budget_w"]
    serve(tmp_path, check, tree=bare, more=guards())


def test_why_names_policy_budget_class_and_what_would_lift_it(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        rig = Rig(pod)
        jobs = job("pre", range(15), coupling="synchronous"), job("chat", range(18, 30), kind="inference")
        rig.run(30, 300.0, *jobs)
        rig.run(60, 1100.0)
        _, tree = await pod.ask("GET", "/api/v1/power/why?name=r1")
        assert (tree["kind"], tree["name"], tree["gpus"]) == ("rack", "lab/h/r1", 72)
        assert tree["capped_gpus"] == sum(g["gpus"] for g in tree["groups"]) > 0
        by = {(g["job"], g["policy"]): g for g in tree["groups"]}
        mine = by["pre", "power_cap"]
        assert (mine["class"], mine["rack"], mine["priority"]) == ("usual", "lab/h/r1", 0)
        assert mine["releasing"] is False
        assert mine["place"] in ("lab/h/a", "lab/h/b")
        assert mine["place"] in mine["reason"]
        assert (mine["place_limit_w"], mine["place_limit_from"]) == (150_000, "site file, budget_w")
        assert f"kW more at {mine['place']}" in mine["lift"]
        assert mine["cap_high_w"] == pytest.approx(mine["read_back_w"], abs=1.0)
        assert mine["cap_high_w"] < 1200.0
        idle = by[None, "power_cap"]
        assert (idle["class"], idle["cap_high_w"]) == ("idle", 200.0)
        for name, kind, gpus in (("chat", "job", 48), ("r2/node0", "node", 4),
                                 ("lab/h/r2/node0/gpu1", "gpu", 1), ("a", "feeder", 144),
                                 ("cdu1", "cdu", 144), ("lab", "site", 144)):  # fmt: skip
            status, tree = await pod.ask("GET", f"/api/v1/power/why?name={name}")
            assert (status, tree["kind"], tree["gpus"]) == (200, kind, gpus), name
        slot = pod.live.engine.jobs.slot_of["pre"]
        _, own = await pod.ask("GET", "/api/v1/explain/power_cap/pre")
        _, by_path = await pod.ask("GET", f"/api/v1/explain/power_cap/lab/job{slot}")
        assert own["sentences"] == by_path["sentences"], "a job is the same by its name and by its path"
        said = " ".join(s["text"] for s in own["sentences"])
        held = pod.live.engine.arbiter.leases["gpu.power_cap_w"]
        since = utc(int(held.begun_ns[held.running()][0]))
        for words in ("job pre: 60 of 60 GPUs capped to ", f"without a break since {since} UTC",
                      "these are usual", "of its work while it had them"):  # fmt: skip
            assert words in said, said
        (all_jobs,) = [t for t in own["tables"] if t["name"] == "jobs"]
        assert [(r[0], r[1], r[3], r[4]) for r in all_jobs["rows"]] == [
            ("chat", "waited_for", 48, 0), ("pre", "usual", 60, 60)]  # fmt: skip
        _, leases = await pod.ask("GET", f"/api/v1/leases?prefix=lab/job{slot}&limit=1000")
        assert {x["name"].rpartition("/")[0] for x in leases["leases"]} == {
            f"lab/h/r1/node{i}" for i in range(15)
        }
        _, page = await pod.ask("GET", f"/api/v1/entities/job/lab/job{slot}")
        assert (page["job"]["capped_gpus"], page["children"]["node"]["total"]) == (60, 15)
        for query, status in (("name=nowhere", 404), ("", 400), ("name=", 400), ("nam=r1", 400)):
            assert (await pod.ask("GET", f"/api/v1/power/why?{query}"))[0] == status
        _, refused = await pod.ask("GET", "/api/v1/power/why?name=lab/h/rack2/node0")
        assert "did you mean lab/h/r2/node0" in refused["error"]

    serve(tmp_path, check, tree=lab(), more=guards())


def test_a_cap_that_a_load_target_holds_says_until_when(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        rig = Rig(pod)
        rig.run(30, 600.0, job("pre", range(36)), target(pod, 90_000))
        rig.run(30)
        _, tree = await pod.ask("GET", "/api/v1/power/why?name=r1")
        assert tree["capped_gpus"] == 72
        held = [g for g in tree["groups"] if g["place_kind"] == "site"]
        assert held
        assert "load target dr 7 ends" in held[0]["lift"]

    serve(tmp_path, check, tree=lab(300_000), more=guards())


def test_what_is_only_advised_is_not_told_as_done(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        for name in ("power_cap", "power_guard"):
            pod.twin.engine.intake.authority[name] = "advise"
        rig = Rig(pod)
        rig.run(40, 1100.0)
        rig = Rig(pod)
        rig.run(5)
        _, tree = await pod.ask("GET", "/api/v1/power/why?name=r1")
        assert (tree["capped_gpus"], tree["groups"]) == (0, [])
        assert {a["policy"] for a in tree["advised"]} >= {"power_cap"}
        _, tree = await pod.ask("GET", "/api/v1/power")
        assert tree["capped"]["gpus"] == 0
        assert tree["capped"]["advised_gpus"] > 0
        assert any("no power policy may act" in n for n in tree["notes"])
        _, tree = await pod.ask("GET", "/api/v1/power/cost")
        assert tree["total"]["lost_gpu_h"] == 0

    serve(tmp_path, check, tree=lab(), more=guards())


def test_the_cost_of_a_cap_by_a_straight_line(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        rig = Rig(pod)
        rig.run(5, 800.0, job("solo", range(9)), job("sync", range(9, 18), coupling="synchronous"))
        account = account_of(pod)
        before = {k: list(v) for k, v in account.totals.items()}
        engine, site = pod.twin.engine, pod.twin.site
        lease = engine.arbiter.leases["gpu.power_cap_w"]
        # Eight GPUs of the job at 500 W, one of the synchronous job
        mine = [*range(8), 36]
        lease.value[mine], lease.owner[mine] = 500.0, 0
        gpu_w = np.full(144, 800.0)
        gpu_w[mine] = 500.0
        policies, engine.policies = engine.policies, []  # nobody else moves a cap
        values = {"gpu.power_w": gpu_w, "gpu.power_limit_w": np.where(gpu_w == 500, 500.0, 1200.0)}
        lease.expires_ns[mine] = 2**62
        pod.tick(values, dt_s=30.0)
        engine.policies = policies
        lease.value[mine] = 500.0
        rig.accounts.observe()
        grown = dict(zip(NAMES, np.subtract(account.totals["site"], before["site"]).tolist(), strict=True))
        idle_w = float(site.design.gpu_idle_w[0])
        loss = 1.0 - (500.0 - idle_w) / (800.0 - idle_w)
        assert grown["lost_gpu_s"] == pytest.approx(30.0 * loss * (8 + 36), rel=0.02), (
            "all wait for the slowest"
        )
        assert grown["held_gpu_s"] == pytest.approx(30.0 * 9)
        gain = 1.0 + float(site.design.node_loss_pu[0])
        assert grown["saved_ws"] == pytest.approx(30.0 * 9 * 300.0 * gain, rel=0.02)
        assert grown["lost_most_gpu_s"] > grown["lost_gpu_s"]
        assert grown["net_ws"] < grown["saved_ws"]
        _, tree = await pod.ask("GET", "/api/v1/power/cost?hours=1")
        assert {j["job"] for j in tree["jobs"]} >= {"solo", "sync"}
        assert sum(c["lost_gpu_h"] for c in tree["classes"]) == pytest.approx(tree["total"]["lost_gpu_h"])
        assert any("straight line" in n for n in tree["notes"])
        assert any("of these 1 h" in n for n in tree["notes"])

    serve(tmp_path, check, tree=lab(300_000), more=guards())


def test_a_curve_that_was_learned_says_what_a_cap_costs(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        rig = Rig(pod)
        rig.run(30, 300.0, job("pre", range(36)))
        rig.run(30, 1100.0)
        lost = []
        for share in (np.nan, 1.0, 0.3, 0.0):
            n = pod.twin.site.sizes["job"]
            mean = np.full(n, share)
            f = Forecast("job.compute_pu", 0.0, mean, mean, mean, model="test", basis="")
            pod.live.engine.forecasts["job.compute_pu", 0.0] = f
            before = account_of(pod).totals["site"][0]
            account_of(pod)._last_ns -= 10 * NS
            rig.accounts.observe()
            lost.append(account_of(pod).totals["site"][0] - before)
        line, computing, mixed, waiting = lost
        assert line > computing > mixed > waiting == 0.0

    serve(tmp_path, check, tree=lab(), more=guards())


def test_the_account_survives_a_restart_and_has_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "power-account.json"
    begin = int(1_700_000_000 // SLOT_S * SLOT_S)
    account = CapAccount()
    for k in range(900):
        account.slots[begin + (k - 900) * int(SLOT_S)] = {"site": [1.0] * len(NAMES), "watched_s": [900.0]}
    account.totals["site"] = [5.0] * len(NAMES)
    write_account(account, path, account.dump())
    again = CapAccount()
    read_account(again, path)
    assert len(again.slots) == 768
    assert max(again.slots) == begin - int(SLOT_S)
    assert again.totals == account.totals
    assert again.problem == ""

    async def check(pod: Pod) -> None:
        rig = Rig(pod, tmp_path)
        rig.run(20, 1100.0, *(job(f"j{k}", [k]) for k in range(36)))
        assert len(account_of(pod).slots) <= 768
        last = account_of(pod).slots[max(account_of(pod).slots)]
        assert sum(1 for who in last if who.startswith("job/")) <= 24
        _, tree = await pod.ask("GET", "/api/v1/power/cost?hours=1")
        assert tree["jobs"][-1]["job"] == "", "what is beyond the bound is summed"

    serve(tmp_path, check, tree=lab(), more=guards())


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 2}', json.dumps({
    "format": 1, "names": list(NAMES), "began_ns": 1, "totals": {}, "curved_s": 0, "straight_s": 0,
    "slots": {"900": {"site": [1.0]}}})])  # fmt: skip
def test_an_account_that_cannot_be_read_is_kept_aside_and_said(tmp_path: Path, text: str) -> None:
    path = tmp_path / "power-account.json"
    path.write_text(text)
    account = CapAccount()
    read_account(account, path)
    assert account.slots == {}
    assert "could not be read" in account.problem
    assert (tmp_path / "power-account.json.unread").read_text() == text

    async def check(pod: Pod) -> None:
        pod.live.accounts["power_cap"] = account
        PolicyAccounts(pod.live).observe()
        _, tree = await pod.ask("GET", "/api/v1/power/cost")
        assert any("could not be read" in n for n in tree["notes"])

    serve(tmp_path, check, more=guards())


class Kept:
    """A history of `days`, in which racks draw what a function of the hour says."""

    def __init__(self, power_w: Any, days: float) -> None:
        self.power_w, self.days = power_w, days

    async def query(
        self, key: str, names: list[str], since: int, until: int, step_s: float, most: int
    ) -> Any:
        assert key == "rack.power_w"
        t_ns = np.arange(max(since, until - round(self.days * DAY_S * NS)), until, round(step_s * NS))
        values = {n: [float(self.power_w(i, t / NS / 3600)) for t in t_ns] for i, n in enumerate(names)}
        return {"t_ns": t_ns.tolist(), "values": values, "max": values}


def test_how_many_more_racks_fit(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        Rig(pod).run(2, 300.0)
        pod.live.history = Kept(lambda i, hour: 60_000 + 20_000 * (int(hour) % 2 == i), 20)
        status, tree = await pod.ask("GET", "/api/v1/power/fit?feeder=a&risk=0.01")
        assert (status, tree["like"], tree["profile"]) == (200, "lab/h/r1", "gb200-nvl72")
        lost, both = tree["lost"], tree["both"]
        assert lost["why_not"] == ""
        # 1,000 kW: two racks of 140 kW together leave 860 kW for pairs of 140 kW, whatever the hour
        assert (lost["peaks"], lost["diverse"], lost["low"], lost["high"]) == (10, 12, 12, 12)
        assert lost["nameplate"] == int((1_000_000 - 264_000) / 132_000)
        assert both["nameplate"] > lost["nameplate"]
        assert both["diverse"] > lost["diverse"]
        assert lost["stops"] in ("lab/h/a", "lab/h/b")
        pod.live.history = Kept(lambda i, hour: 60_000, 5)
        _, tree = await pod.ask("GET", "/api/v1/power/fit?feeder=a")
        assert tree["lost"]["diverse"] is None
        assert "days in the history" in tree["lost"]["why_not"]
        _, tree = await pod.ask("GET", "/api/v1/power/fit?feeder=a&racks=own&nameplate_w=100000")
        assert tree["lost"]["nameplate"] == 7
        for query, status in (("feeder=z", 404), ("", 404), ("feeder=a&risk=0", 400),
                              ("feeder=a&racks=own", 404), ("feeder=a&days=x", 400),
                              ("feeder=a&nameplate_w=-1", 400)):  # fmt: skip
            assert (await pod.ask("GET", f"/api/v1/power/fit?{query}"))[0] == status, query

    tree = lab(1_000_000)
    tree["halls"][0].pop("cdus")
    serve(tmp_path, check, tree=tree)


def test_a_history_written_under_caps_is_said_to_show_less_than_is_wanted(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        Rig(pod).run(60, 1100.0, job("pre", range(36)))
        pod.live.history = Kept(lambda i, hour: 60_000, 20)
        _, tree = await pod.ask("GET", "/api/v1/power/fit?feeder=a")
        assert any("demand was higher than the history shows" in n for n in tree["notes"])

    serve(tmp_path, check, tree=lab(), more=guards())


def test_a_site_with_nothing_says_what_is_missing(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        status, tree = await pod.ask("GET", "/api/v1/power")
        text = " ".join(tree["notes"])
        assert status == 200
        for expected in ("no policy caps power here", "names no feeders", "no forecast of racks"):
            assert expected in text, (expected, text)
        status, tree = await pod.ask("GET", "/api/v1/power/why?name=r1")
        assert (status, tree["capped_gpus"]) == (200, 0)
        status, tree = await pod.ask("GET", "/api/v1/power/cost")
        assert (status, tree["total"]) == (200, None)
        assert "no account" in tree["notes"][0]
        assert (await pod.ask("GET", "/metrics"))[0] == 200

    serve(tmp_path, check, tree=eight_nodes())


def test_feeders_without_budgets_and_racks_that_are_silent(tmp_path: Path) -> None:
    tree = two_racks()
    for feeder in tree["halls"][0]["feeders"]:
        feeder.pop("budget_w")

    async def check(pod: Pod) -> None:
        status, got = await pod.ask("GET", "/api/v1/power")
        assert status == 200
        at = by_place(got)["lab/h/a"]
        assert (at["limit_w"], at["left_w"], at["use_pu"]) == (None, None, None)
        status, got = await pod.ask("GET", "/api/v1/power/fit?feeder=a")
        assert status == 200
        assert "no history of its own" in " ".join(got["notes"])

    serve(tmp_path, check, tree=tree)


def test_bad_queries_metrics_and_the_document(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        Rig(pod).run(40, 1100.0, job("pre", range(36)), target(pod, 10_000))
        for query in ("kind=pump", "limit=-1", "limit=1001", "x=1"):
            assert (await pod.ask("GET", f"/api/v1/power?{query}"))[0] == 400
        for query in ("hours=0", "hours=200", "hours=x"):
            assert (await pod.ask("GET", f"/api/v1/power/cost?{query}"))[0] == 400
        _, text = await pod.ask("GET", "/metrics")
        for line in ('racktwin_power_budget_watts{kind="feeder",name="lab/h/a"} 150000.0',
                     'racktwin_power_headroom_watts{case="lost",kind="feeder",name="lab/h/a"}',
                     'racktwin_power_capped_gpus{policy="power_cap"} 144.0',
                     'racktwin_power_lost_gpu_hours_total{case="expected",class="usual"}',
                     'racktwin_power_targets{state="exceeded"} 1.0',
                     "racktwin_power_target_excess_watts"):  # fmt: skip
            assert line in text, line
        assert "dr 7" not in text
        _, document = await pod.ask("GET", "/openapi.json")
        assert {"/api/v1/power", "/api/v1/power/why", "/api/v1/power/cost", "/api/v1/power/fit"} <= set(
            document["paths"]
        )

    serve(tmp_path, check, tree=lab(), more=guards())


def test_accounts_take_turns_so_that_others_run_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["first", "second", "third"]
    engine = SimpleNamespace(policies=[SimpleNamespace(name=name) for name in names])
    live: Any = SimpleNamespace(engine=engine, accounts={}, sections=[])
    told: list[str] = []
    monkeypatch.setattr(policy_accounts, "LOOK_S", 0.03)
    monkeypatch.setattr(PolicyAccounts, "_look", lambda self, policy: told.append(policy.name))

    async def between() -> None:
        task = asyncio.create_task(PolicyAccounts(live).run())
        while len(told) < 6:
            await asyncio.sleep(0)
            if told and told[-1] in names:
                told.append("a tick")
        task.cancel()

    asyncio.run(asyncio.wait_for(between(), 10.0))
    assert told[:6] == ["first", "a tick", "second", "a tick", "third", "a tick"]
