"""`racktwin simulation publish` as a process, and the state that a daemon has of its site.

with PlantProcess(tmp_path, broker.port, tree) as plant:
    good(daemon, "rack.flow_lpm"); plant.stop()
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tests.support.builders import two_racks
from tests.support.daemon_process import ROOT, RunningDaemon
from tests.support.patience import PATIENCE_S

CAP, TARGET, LIQUID = "gpu.power_cap_w", "cdu.supply_temp_target_c", "rack.liquid_isolation"
EVERY, SINCE = "job.checkpoint_interval_s", "job.checkpoint_since_s"
SAFE_W, LEASE_S = 400.0, 30.0
SITE = two_racks(
    controls={CAP: {"safe": SAFE_W}}, policies={"operator": {"authority": "act"}}, loops=[{"name": "fw1"}]
)
SITE["halls"][0]["cdus"][0]["loop"] = "fw1"


class PlantProcess:
    """`racktwin simulation publish` of a site; its words go to a file."""

    def __init__(self, folder: Path, port: int, site: dict[str, Any], *more: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path, self.log = folder / "site.yaml", folder / "plant.log"
        path.write_text(yaml.safe_dump(site), encoding="utf-8")
        args = [
            "simulation",
            "publish",
            "--site",
            str(path),
            "--broker",
            f"127.0.0.1:{port}",
            "--json",
            *more,
        ]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "twin", *args], cwd=ROOT, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip

    def __enter__(self) -> PlantProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        print(self.log.read_text())  # shown where a test failed
        assert self.process.stdout is not None
        self.process.stdout.close()

    def stop(self) -> dict[str, Any]:
        """As a service manager does; what it says of itself."""
        self.process.send_signal(signal.SIGTERM)
        said, _ = self.process.communicate(timeout=PATIENCE_S)
        assert self.process.returncode == 0, self.log.read_text()
        return dict(json.loads(said))


def good(daemon: RunningDaemon, key: str) -> float:
    """The share of entities whose reading of a signal is good."""
    table, _, name = key.partition(".")
    rows = daemon.get(f"/api/v1/state/{table}?signals={name}&limit=1000")["signals"][name]
    return float(np.mean([q.lower() == "good" for q in rows["quality"]]))


def done(daemon: RunningDaemon, control: str) -> set[str]:
    """Return the devices whose leases are carried out and read back."""
    leases = daemon.get(f"/api/v1/leases?control={control}&limit=1000")["leases"]
    return {row["name"] for row in leases if row["state"] == "done"}
