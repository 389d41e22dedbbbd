"""`GET /api/v1/ledger` and `racktwin ledger`: what a month took, and that a tenant reads its own alone."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.in_process_daemon import Desk, Pod, serve, serving_aside
from twin.api.routes import READING
from twin.api.tokens import add_token
from twin.telemetry import JobEnded, JobStarted

READ = {
    "node.power_w": 5000.0, "rack.power_w": 100_000.0, "feeder.power_w": 100_000.0, "gpu.power_w": 900.0,
    "gpu.sm_active_pu": 0.9, "site.grid_price_usd_per_kwh": 0.1,
}  # fmt: skip


def fill(pod: Pod) -> None:
    """Ten minutes in which two tenants run a job each."""
    site = pod.twin.site
    for job, tenant, nodes in (("lab:1", "alba", range(4)), ("lab:2", "brno", range(4, 6))):
        pod._put(JobStarted(id=job, job=job, tenant=tenant, queue=f"q-{tenant}",
                            nodes=tuple(site.name("node", n) for n in nodes)))  # fmt: skip
    for _ in range(20):
        pod.tick(READ, dt_s=30.0)
    pod._put(JobEnded(id="end", job="lab:2"))
    pod.tick(READ, dt_s=30.0)


def test_the_parts_of_a_month_make_its_whole(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        fill(pod)
        trees = {}
        for by in ("site", "hall", "queue", "tenant", "job"):
            status, tree = await pod.ask("GET", f"/api/v1/ledger?by={by}")
            assert status == 200, tree
            trees[by] = tree
            for name, ns in tree["total"]["gpu_ns"].items():
                assert sum(row["gpu_ns"][name] for row in tree["rows"]) == ns
            energy = sum(row["energy_kwh"] for row in tree["rows"])
            assert energy == pytest.approx(tree["total"]["energy_kwh"])
        assert len({json.dumps(t["total"]["gpu_ns"]) for t in trees.values()}) == 1
        jobs = {row["name"]: row for row in trees["job"]["rows"]}
        # Told with the second tick; the second job ended with the last one
        assert jobs["lab:1"]["granted_ns"] == 4 * 4 * 20 * 30 * 10**9
        assert jobs["lab:2"]["granted_ns"] == 2 * 4 * 20 * 30 * 10**9
        assert jobs["lab:1"]["tenant"] == "alba"
        # 4 nodes of 5 kW for 600 s at 0.1 USD per kWh
        assert jobs["lab:1"]["energy_kwh"] == pytest.approx(4 * 5.0 * 600 / 3600, rel=0.01)
        assert jobs["lab:1"]["cost_usd"] == pytest.approx(0.1 * jobs["lab:1"]["energy_kwh"])
        # Nobody tells of carbon: that is said, and not zero
        assert jobs["lab:1"]["uncounted_kwh"] == pytest.approx(jobs["lab:1"]["energy_kwh"])
        assert jobs["lab:1"]["carbon_kg"] is None
        # 16 GPUs of 900 W
        assert jobs["lab:1"]["gpu_energy_kwh"] == pytest.approx(16 * 0.9 * 600 / 3600, rel=0.06)
        assert (trees["site"]["pue"], trees["site"]["wue_l_per_kwh"]) == (None, None)
        status, tree = await pod.ask("GET", "/api/v1/ledger?month=2099-01")
        assert (status, "2099-01 has not begun" in tree["error"]) == (400, True)
        status, tree = await pod.ask("GET", "/api/v1/ledger?month=2026-13")
        assert (status, "2026-11" in tree["error"]) == (400, True)
        status, tree = await pod.ask("GET", "/api/v1/ledger?by=planet")
        assert status == 400
        status, tree = await pod.ask("GET", "/api/v1/ledger?month=2020-01")
        assert (status, tree["rows"], tree["hours"]) == (200, [], 0)

    serve(tmp_path, check)


@pytest.mark.parametrize("by", ["rack", "tenant"])
def test_what_is_not_known_is_null(tmp_path: Path, by: str) -> None:
    async def check(pod: Pod) -> None:
        for _ in range(20):
            pod.tick({"node.power_w": 5000.0, "rack.power_w": 100_000.0}, dt_s=30.0)
        _, tree = await pod.ask("GET", f"/api/v1/ledger?by={by}")
        unknown = {"gpu_energy_kwh", "cost_usd", "carbon_kg"}
        if by == "rack":
            unknown |= {"gpu_ns", "gpu_h", "granted_ns", "granted_h"}
            unknown |= {"ungauged_kwh", "unpriced_kwh", "uncounted_kwh"}
        rows = [row for row in tree["rows"] if row["energy_kwh"] > 0.0 and row["part"] != "rest"]
        assert rows
        for row in rows:
            assert {name for name, value in row.items() if value is None} == unknown, row["name"]
        assert {tree["total"][name] for name in ("cost_usd", "carbon_kg")} == {None}
        figures = {tree[name] for name in ("pue", "tue", "wue_l_per_kwh")}
        shares = {tree[f"{name}_known_pu"] for name in ("pue", "tue", "wue")}
        assert (figures, shares) == ({None}, {0.0})

    serve(tmp_path, check)


@pytest.mark.parametrize("by", ["site", "hall", "queue", "tenant", "job"])
def test_a_tenant_reads_its_own_rows_alone(tmp_path: Path, by: str) -> None:
    async def check(pod: Pod) -> None:
        for name in ("tenant.alba", "tenant.brno", "tenant.nobody", "job.lab:1", "stranger"):
            shown = name.replace(":", "-")
            pod.secrets[name] = add_token(pod.tokens_file, shown, "job")
        pod.tokens.reload()
        fill(pod)
        _, whole = await pod.ask("GET", "/api/v1/ledger?by=job")
        own = {row["tenant"]: row for row in whole["rows"] if row["part"] == "job"}
        for tenant, other in (("alba", "brno"), ("brno", "alba")):
            status, tree = await pod.ask("GET", f"/api/v1/ledger?by={by}", f"tenant.{tenant}")
            assert status == 200
            assert tree["total"]["granted_ns"] == own[tenant]["granted_ns"]
            assert tree["total"]["energy_kwh"] == pytest.approx(own[tenant]["energy_kwh"])
            text = json.dumps(tree)
            assert other not in text
            assert "lab:2" not in text if tenant == "alba" else "lab:1" not in text
            assert (tree["pue"], tree["unmetered_node_h"]) == (None, 0.0)
        status, tree = await pod.ask("GET", f"/api/v1/ledger?by={by}", "tenant.nobody")
        assert (status, tree["rows"], tree["total"]["energy_kwh"]) == (200, [], 0.0)
        status, tree = await pod.ask("GET", f"/api/v1/ledger?by={by}", "stranger")
        assert status == 403
        status, _ = await pod.ask("GET", "/api/v1/ledger?by=rack", "tenant.alba")
        assert status == 403
        status, _ = await pod.ask("GET", "/api/v1/ledger", "none")
        assert status == 401

    serve(tmp_path, check)


def test_no_path_of_the_interface_tells_a_tenant_of_another(tmp_path: Path) -> None:
    """Every route that reads, and the metrics: what a tenant may read does not name another, nor its job."""

    async def check(pod: Pod) -> None:
        pod.secrets["tenant.alba"] = add_token(pod.tokens_file, "tenant.alba", "job")
        pod.tokens.reload()
        fill(pod)
        pod._put(JobStarted(id="again", job="lab:3", tenant="brno", nodes=(pod.twin.site.name("node", 5),)))
        pod.tick(READ)
        place = {"table": "node", "name": pod.twin.site.name("node", 0), "job": "lab:3", "policy": "x"}
        read = []
        for route in READING:
            path = re.sub(r"{(\w+)}", lambda m: place.get(m[1], "1"), route.path)
            status, tree = await pod.ask("GET", path, "tenant.alba")
            text = json.dumps(tree).replace("lab:3 is another", "")
            assert not any(name in text for name in ("brno", "lab:2", "lab:3")), (path, text)
            assert status == (403 if route.role != "job" else status), path
            read += [route.path] * (status == 200)
        assert read == ["/api/v1/ledger", "/api/v1/whoami"]
        status, tree = await pod.ask("GET", "/metrics", "tenant.alba")
        assert status == 403

    serve(tmp_path, check)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    with serving_aside(tmp_path, monkeypatch, Desk, columns=120) as desk:
        yield desk


def test_the_command_shows_lines_csv_and_json(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    desk.do(lambda: fill(desk.pod))
    assert desk.run("ledger", "--by", "job", role="viewer") == 0
    text = " ".join(capsys.readouterr().out.split())
    for expected in (
        "lab:1",
        "idle nodes",
        "racks, other than nodes",
        "sum",
        "had no known carbon intensity",
    ):
        assert expected in text, (expected, text)
    assert desk.run("ledger", "--by", "tenant", "--format", "csv") == 0
    rows: list[dict[str, Any]] = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert {row["name"] for row in rows if row["part"] == "job"} == {"alba", "brno"}
    assert not any(name.endswith("_utc") for name in rows[0]), "GPU time is no instant"
    job_rows = [row for row in rows if row["part"] == "job"]
    assert {row["carbon_kg"] for row in job_rows} == {""}, "unknown is empty"
    assert desk.run("ledger", "--by", "rack", "--format", "csv") == 0
    racks: list[dict[str, Any]] = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert set(racks[0]) == set(rows[0])
    told = {name for row in racks for name, cell in row.items() if cell}
    assert told == {"name", "part", "energy_kwh", "energy_pm_kwh"}
    assert desk.run("ledger", "--by", "rack") == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if "/r1 " in x)
    assert line.count("–") == 6, line
    assert desk.run("ledger", "--json") == 0
    assert json.loads(capsys.readouterr().out)["by"] == "tenant"
    assert desk.run("ledger", "--month", "November") == 1
    assert "expected a month such as 2026-11" in capsys.readouterr().err
