"""A policy installed beside racktwin is checked, explained, exported and shown like one of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.builders import two_racks
from tests.support.in_process_daemon import Desk, serving_aside
from tests.tidy.tree import ROOT
from twin.cli.main import main
from twin.config import load_site, make_policies
from twin.daemon.policy_accounts import PolicyAccounts

SETTINGS = {"limit_c": 27.0, "floor_pu": 0.5}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example package, installed into a folder of its own, without a network."""
    target = tmp_path_factory.mktemp("outside")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps",
               "--no-index", "--target", str(target), str(ROOT / "deploy/examples/policy")]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return target


def site_file(folder: Path, **settings: Any) -> Path:
    path = folder / "site.yaml"
    entry = {"kind": "inlet_guard:InletGuard", "authority": "advise", "settings": settings}
    path.write_text(yaml.safe_dump(two_racks() | {"policies": {"inlet_guard": entry}}))
    return path


@pytest.mark.long
def test_it_needs_no_line_of_the_product(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(installed))
    # Its settings are checked by its own code
    assert main(["site", "check", str(site_file(tmp_path, **SETTINGS))]) == 0
    assert main(["site", "check", str(site_file(tmp_path, limit_c=99.0))]) == 1
    assert "$.policies.inlet_guard.settings: limit_c: expected 10 to 50 degC" in capsys.readouterr().err
    assert main(["site", "check", str(site_file(tmp_path, limit_k=1.0))]) == 1
    assert "there is no 'limit_k'; expected floor_pu, limit_c" in capsys.readouterr().err
    _, site = load_site(site_file(tmp_path, **SETTINGS))
    policy = next(p for p in make_policies(site.file)[0] if p.name == "inlet_guard")
    with serving_aside(tmp_path, monkeypatch, Desk, more=[policy]) as desk:
        for _ in range(6):
            desk.do(lambda: desk.pod.tick({"rack.inlet_temp_c": [25.0, 29.5], "gpu.power_limit_w": 1200.0}))
        desk.do(lambda: PolicyAccounts(desk.pod.live).observe())
        assert desk.run("policy", "explain", "inlet_guard", role="viewer") == 0
        text = capsys.readouterr().out
        for expected in ("1 of 2 racks are above 27 °C", "lab/h/r2", "29.5", "75 %", "inlet air above 27"):
            assert expected in text, (expected, text)
        in_force = desk.pod.twin.engine.in_force["inlet_guard"][0]
        assert float(in_force.hi[0]) == 900.0, "the cap that the explanation tells: 75 % of 1,200 W"
        # The overview has its section, and /metrics its series
        sections = {s.policy: s for s in desk.pod.live.sections}
        assert sections["inlet_guard"].table("racks") == [
            {"rack": "lab/h/r2", "inlet_c": 29.5, "cap_pu": 0.75}
        ]
        desk.do(lambda: None)
        from twin.api.metrics import explained_series

        series = {m.name: m for m in desk.do(lambda: list(explained_series(desk.pod.live)))}
        assert [s.value for s in series["racktwin_inlet_guard_racks"].samples] == [1.0]
