"""A daemon that caps by Redfish and by IPMI DCMI: set once, kept through a restart, given back as found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import dcmi_bmcs, redfish_service
from tests.support.builders import two_racks
from tests.support.daemon_process import RunningDaemon

pytestmark = [pytest.mark.slow, pytest.mark.long]
NODE = "lab/h/r1/node0"


def daemon_of(folder: Path, **sections: Any) -> RunningDaemon:
    """A daemon that an operator commands, with these sections."""
    site = two_racks(policies={"operator": {"authority": "act"}})
    return RunningDaemon(folder, "embedded", site, simulated=True, **sections)


def ask(daemon: RunningDaemon, control: str, name: str, cap_w: float) -> str:
    """An operator's request for a cap; its id."""
    body = {"control": control, "names": [name], "lo": 0.0, "hi": cap_w, "want": cap_w, "reason": "a test's"}
    return str(daemon.post("/api/v1/requests", body)["id"])


def test_redfish_is_set_once_kept_through_a_restart_and_given_back(tmp_path: Path) -> None:
    (tmp_path / "password").write_text(redfish_service.PASSWORD)
    (tmp_path / "password").chmod(0o600)
    with redfish_service.serving() as services:
        bmc = services[0]
        part = {"bmcs": {bmc.host: NODE}, "user": redfish_service.USER, "password_file": "password",
                "scheme": "http", "command": ["gpus", "node"], "period_s": 1}  # fmt: skip
        with daemon_of(tmp_path, redfish=[part]) as daemon:
            daemon.start()
            gpu, node = bmc.gpus[1], bmc.node
            assert node is not None
            gpu.value = 1100.0  # as found
            daemon.until(lambda: limit_of(daemon) == 1100)
            request = ask(daemon, "gpu.power_cap_w", f"{NODE}/gpu1", 700.0)
            ask(daemon, "node.power_cap_w", NODE, 5000.0)
            daemon.until(lambda: (gpu.value, node.value) == (700, 5000), what="both caps")
            daemon.until(lambda: limit_of(daemon) == 700)
            patches = bmc.patches()
            daemon.kill()
            daemon.start()
            looks = len(bmc.asked)
            daemon.until(lambda: len(bmc.asked) > looks + 40, what="looks after the restart")
            assert (bmc.patches(), gpu.value, node.value) == (patches, 700, 5000)
            daemon.ask("DELETE", f"/api/v1/requests/{request}")
            daemon.until(lambda: gpu.value == 1100, what="what was found")
            assert node.value == 5000
            assert daemon.stop() == 0
            assert redfish_service.PASSWORD not in daemon.log.read_text()
            assert bmc.tokens == {} or len(bmc.tokens) == 1  # the killed one's


def test_people_switch_a_node_off_and_on_by_redfish(tmp_path: Path) -> None:
    (tmp_path / "password").write_text(redfish_service.PASSWORD)
    (tmp_path / "password").chmod(0o600)
    with redfish_service.serving() as services:
        bmc = services[0]
        part = {"bmcs": {bmc.host: NODE}, "user": redfish_service.USER, "password_file": "password",
                "scheme": "http", "power": True, "period_s": 1}  # fmt: skip
        with daemon_of(tmp_path, redfish=[part]) as daemon:
            daemon.start()

            def order(level: float) -> str:
                body = {"control": "node.power_state", "names": [NODE], "lo": level, "hi": level,
                        "want": level, "reason": "a test's", "for_s": 600}  # fmt: skip
                return str(daemon.post("/api/v1/requests", body)["id"])

            daemon.until(lambda: bmc.asked, what="a look")
            request = order(2.0)
            daemon.until(lambda: bmc.power == "Off", what="off")
            daemon.ask("DELETE", f"/api/v1/requests/{request}")
            order(0.0)
            daemon.until(lambda: bmc.power == "On", what="on")
            assert bmc.resets == ["ForceOff", "On"]
            assert daemon.stop() == 0


def limit_of(daemon: RunningDaemon) -> Any:
    """The limit of the second GPU that is read back."""
    rows = daemon.get("/api/v1/state/gpu?signals=power_limit_w&limit=10")
    return rows["signals"]["power_limit_w"]["value"][1]


def test_dcmi_is_set_kept_through_a_restart_and_switched_off_again(
    tmp_path: Path, server: Callable[..., Path]
) -> None:
    (tmp_path / "password").write_text(dcmi_bmcs.PASSWORD)
    (tmp_path / "password").chmod(0o600)
    program = str(server("ipmitool"))
    with dcmi_bmcs.Bmcs() as bmcs:
        part = {"bmcs": {bmcs.host(0): NODE}, "user": dcmi_bmcs.USER, "password_file": "password",
                "command": True, "period_s": 5, "program": program}  # fmt: skip
        with daemon_of(tmp_path, dcmi=[part]) as daemon:
            daemon.start()
            daemon.until(lambda: cap_of(daemon) is not None, what="what is found")
            request = ask(daemon, "node.power_cap_w", NODE, 5000.0)
            daemon.until(lambda: bmcs.get(0)["limit_w"] == 5000 and bmcs.get(0)["active"], what="the cap")
            sets = bmcs.get(0)["sets"]
            daemon.kill()
            daemon.start()
            asked = bmcs.get(0)["asked"]
            daemon.until(lambda: bmcs.get(0)["asked"] > asked + 4, what="looks after the restart")
            assert (bmcs.get(0)["sets"], bmcs.get(0)["active"]) == (sets, True)
            daemon.ask("DELETE", f"/api/v1/requests/{request}")
            daemon.until(lambda: not bmcs.get(0)["active"], what="no limit, as found")
            assert daemon.stop() == 0
            assert dcmi_bmcs.PASSWORD not in daemon.log.read_text()


def cap_of(daemon: RunningDaemon) -> Any:
    """The cap of the first node that is read back."""
    rows = daemon.get("/api/v1/state/node?signals=power_cap_readback_w&limit=10")
    return rows["signals"]["power_cap_readback_w"]["value"][0]
