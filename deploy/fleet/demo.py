"""Fleet demo: two simulated halls and their hub on this machine; a feeder that both share is lost.

`make fleet-demo` runs it. It starts nats-server three times (hub, and a leaf beside each hall), two simulated
halls, their daemons and the daemon of the hub. Once both halls are lent more than they are guaranteed, feeder
B is lost: both give way, the lower priority more. Then the feeder returns. It goes on so, twice a minute,
until Ctrl-C, for those who watch the page; with --once it ends.
"""

from __future__ import annotations

import argparse
import contextlib
import http.server
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
FEEDER_W, GUARANTEED_W, MOST_W = 57_000.0, 27_000.0, 41_000.0
PRIORITY = {"hall-a": 2, "hall-b": 0}
WAIT_S = 100.0
ROUND_S = 30.0  # for which the feeder is there, and then lost, while somebody watches
HALL_SITE = f"""\
site: {{hall}}
halls:
  - name: room
    racks: [{{{{name: "r[1-4]", profile: hgx-h100}}}}]
    feeders:
      - {{{{name: main, external: true, guaranteed_w: {GUARANTEED_W:g}, serves: ["r[1-4]"]}}}}
periods_s: {{{{rack: 5}}}}
controls:
  gpu.power_cap_w: {{{{safe: 250}}}}  # what GPUs draw without a daemon fits the guaranteed share
policies:
  power_guard: {{{{authority: act}}}}
  power_cap: {{{{authority: act}}}}
"""
HUB_SITE = f"""\
site: fleet
halls:
  - name: campus
    racks:
      - {{name: hall-a, priority: 2, guaranteed_w: {GUARANTEED_W:g}, max_w: {MOST_W:g}}}
      - {{name: hall-b, priority: 0, guaranteed_w: {GUARANTEED_W:g}, max_w: {MOST_W:g}}}
    feeders:
      - {{name: feeder-a, side: A, budget_w: {FEEDER_W:g}, serves: [hall-a, hall-b]}}
      - {{name: feeder-b, side: B, budget_w: {FEEDER_W:g}, serves: [hall-a, hall-b]}}
policies:
  # failover false: the halls may use both feeds, and give way when one is lost
  hall_budgets: {{authority: act, settings: {{failover: false}}}}
"""
# All GPUs work all the time, so that each hall wants more than half of a feeder
SCENARIO = "name: busy\nhours: 1\nworkload: {constant_pu: 0.95}\n"
FEEDER_MAP = """\
rules:
  - {table: feeder, entity: ["{name}"], signals: {feeder_lost: energised_state}}
"""


LOOK = """\

Open in a browser: {link}
  Look at this: feeder-b is lost and returns, each for 30 s. "What is wrong" names it. In "2 halls" the
  budgets (light) fall and the power (green) follows, that of hall-b (priority 0) down to its guaranteed
  share, that of hall-a (priority 2) less far. "Who holds which part" shows feeder-a full, and why each hall
  has what it has.
The pages of the halls, with their tokens:{pages}
Ctrl-C ends it."""


def free_port() -> int:
    """Return a free port of loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class FleetDemo:
    """The processes of the demo, and the answers of the hub."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = {name: free_port() for name in ("nats", "leafnodes", "hub-api", "hub-mqtt")}
        for hall in PRIORITY:
            self.ports |= {f"{hall}{what}": free_port() for what in ("", "-api", "-mqtt", "-leaf-mqtt")}
        self.meter = FeederMeter()
        self._children: list[tuple[str, subprocess.Popen[bytes]]] = []

    def start(self) -> None:
        """Start all processes."""
        program = shutil.which("nats-server") or "/usr/sbin/nats-server"
        if not Path(program).is_file():
            raise SystemExit("fleet-demo: expected nats-server on the PATH: apt-get install nats-server")
        self._write("hub.conf", self._filled("hub.conf"))
        self._child("nats-hub", program, "-c", str(self.folder / "hub.conf"))
        for hall in PRIORITY:
            self._write(f"{hall}.conf", self._filled("leaf.conf", hall))
            self._child(f"nats-{hall}", program, "-c", str(self.folder / f"{hall}.conf"))
            self._start_hall(hall)
        self._start_hub()

    def _start_hall(self, hall: str) -> None:
        mqtt = self.ports[f"{hall}-mqtt"]
        self._write(f"{hall}/site.yaml", HALL_SITE.format(hall=hall))
        fleet = {
            "servers": [f"nats://127.0.0.1:{self.ports[hall]}"],
            "hall": hall,
            "feeder": "main",
            "every_s": 1,
            "username": "hall",
            "password_file": self._secret(f"{hall}/password", "CHANGE-DAEMON"),
        }
        self._configure(hall, mqtt, self.ports[f"{hall}-api"], fleet)
        self._child(hall, *_racktwin("daemon", "run", "--config", str(self.folder / hall / "racktwin.yaml")))
        _until(lambda: _listens(mqtt), f"the broker of {hall}")
        self._write("busy.yaml", SCENARIO)
        plant = ("simulation", "publish", "--site", str(self.folder / hall / "site.yaml"))
        where = ("--broker", f"127.0.0.1:{mqtt}", "--scenario", str(self.folder / "busy.yaml"))
        self._child(f"{hall}-plant", *_racktwin(*plant, *where))

    def _start_hub(self) -> None:
        self._write("hub/site.yaml", HUB_SITE)
        self._write("hub/feeders.yaml", FEEDER_MAP)
        fleet = {"servers": [f"nats://127.0.0.1:{self.ports['nats']}"], "username": "fleet",
                 "password_file": self._secret("hub/password", "CHANGE-FLEET")}  # fmt: skip
        self._configure("hub", self.ports["hub-mqtt"], self.ports["hub-api"], fleet)
        self._child("hub", *_racktwin("fleet", "run", "--config", str(self.folder / "hub" / "racktwin.yaml")))

    def _configure(self, name: str, mqtt: int, api: int, fleet: dict[str, Any]) -> None:
        tree: dict[str, Any] = {"site": "site.yaml", "broker": "embedded", "embedded_port": mqtt,
                                "simulated": True, "api": {"port": api}, "fleet": fleet}  # fmt: skip
        if name == "hub":
            url = f"http://127.0.0.1:{self.meter.server_address[1]}/metrics"
            fleet["pages"] = {hall: f"http://127.0.0.1:{self.ports[f'{hall}-api']}/" for hall in PRIORITY}
            tree["scrapes"] = [{"url": url, "map": "feeders.yaml", "period_s": 1}]
        self._write(f"{name}/racktwin.yaml", json.dumps(tree))  # JSON is YAML

    def _filled(self, name: str, hall: str = "hall-a") -> str:
        """A configuration of this folder with the ports and paths of the demo."""
        text = (HERE / name).read_text(encoding="utf-8")
        values = {"/var/lib/nats": str(self.folder / "jetstream"), "7422": str(self.ports["leafnodes"])}
        if name == "leaf.conf":
            values |= {"4223": str(self.ports[hall]), "1884": str(self.ports[f"{hall}-leaf-mqtt"])}
            values |= {"hall-a": hall, "HALL-A": hall.upper()}
        else:
            values["4222"] = str(self.ports["nats"])
        return re.sub("|".join(map(re.escape, values)), lambda found: values[found[0]], text)

    def _secret(self, name: str, word: str) -> str:
        self._write(name, f"{word}\n")
        (self.folder / name).chmod(0o600)
        return Path(name).name

    def _write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def _child(self, name: str, *words: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            # In a session of its own: Ctrl-C reaches this program alone, which then ends them in order
            process = subprocess.Popen(
                words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._children.append((name, process))

    def check(self) -> None:
        """Raises SystemExit for a process that ended."""
        for name, process in self._children:
            if process.poll() is not None:
                log = (self.folder / f"{name}.log").read_text(errors="replace")[-1500:]
                raise SystemExit(f"fleet-demo: {name} ended with {process.returncode}:\n{log}")

    def stop(self) -> None:
        """End all processes, the newest first."""
        for _, process in reversed(self._children):
            process.send_signal(signal.SIGTERM)
        for _, process in self._children:
            try:
                process.wait(8)
            except subprocess.TimeoutExpired:
                process.kill()

    def page(self, name: str) -> str:
        """The link to the page of the hub or a hall, with its token; waits until it answers."""
        port, token = self.ports[f"{name}-api"], self.folder / name / "state" / "admin.token"
        _until(lambda: self.check() or (_listens(port) and token.exists()), f"the page of {name}")
        return f"http://127.0.0.1:{port}/#token={token.read_text().strip()}"

    def account(self) -> dict[str, Any]:
        """The halls and feeders as the page of the hub has them; empty while it does not answer."""
        self.check()
        token = self.folder / "hub" / "state" / "admin.token"
        with contextlib.suppress(OSError, ValueError):
            url = f"http://127.0.0.1:{self.ports['hub-api']}/api/v1/fleet"
            head = {"Authorization": f"Bearer {token.read_text().strip()}"}
            with urllib.request.urlopen(urllib.request.Request(url, headers=head), timeout=5) as answer:
                found: dict[str, Any] = json.load(answer)
            return found
        return {}

    def halls(self) -> dict[str, dict[str, Any]]:
        """Each hall's row of the page."""
        return {row["hall"]: row for row in self.account().get("halls", ())}

    def lose(self, feeder: str, is_lost: bool) -> None:
        """Report to the hub that a feeder lost its power, or has it again, as its meter would."""
        self.meter.lost[feeder] = is_lost


class FeederMeter(http.server.ThreadingHTTPServer):
    """The meters of the shared feeders, as an exporter of Prometheus shows them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FeederPage)
        self.lost = {"feeder-a": False, "feeder-b": False}
        threading.Thread(target=self.serve_forever, daemon=True).start()


class FeederPage(http.server.BaseHTTPRequestHandler):
    """The page of the exporter."""

    server: FeederMeter

    def do_GET(self) -> None:
        """Answer with the state of both feeders."""
        lines = [f'feeder_lost{{name="{name}"}} {int(lost)}\n' for name, lost in self.server.lost.items()]
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write("".join(lines).encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def _racktwin(*words: str) -> tuple[str, ...]:
    return sys.executable, "-m", "twin", *words


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _until(holds: Callable[[], Any], what: str) -> Any:
    """Wait for a condition. Raises SystemExit where it does not come."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        if found := holds():
            return found
        time.sleep(0.25)
    raise SystemExit(f"fleet-demo: waited {WAIT_S:g} s for {what}")


def _said(halls: dict[str, dict[str, Any]]) -> str:
    parts = [
        f"{name} draws {(row['power_w'] or 0) / 1e3:.1f} kW of {row['budget_w'] / 1e3:.1f} kW"
        for name, row in sorted(halls.items())
    ]
    return "; ".join(parts)


@contextlib.contextmanager
def _folder(asked: Path | None) -> Iterator[Path]:
    folder = asked or ROOT / "build" / "fleet-demo"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    yield folder


def play(demo: FleetDemo, say: Callable[[str], None]) -> str:
    """Play the story; returns a line with the observations."""

    def lent() -> Any:
        halls = demo.halls()
        lent_w = [row["budget_w"] for row in halls.values() if (row["power_w"] or 0) > 0]
        return halls if len(lent_w) == len(PRIORITY) and min(lent_w) > FEEDER_W / 2 else None

    def gave_way() -> Any:
        halls = demo.halls()
        drawn_w = [max(row["held_w"], row["power_w"] or FEEDER_W) for row in halls.values()]
        named = all("is lost" in row["why"] for row in halls.values())
        if not drawn_w or sum(drawn_w) > FEEDER_W or not named:
            return None
        # A hall that starved of processor time reports a low demand at first, and is lent less
        return halls if halls["hall-a"]["budget_w"] >= halls["hall-b"]["budget_w"] else None

    before = _until(lent, "both halls to be lent more than their share of one feeder")
    say(f"both feeds: {_said(before)}")
    demo.lose("feeder-b", True)
    begun = time.monotonic()
    after = _until(gave_way, "both halls to give way")
    took_s = time.monotonic() - begun
    say(f"feeder-b is lost: {_said(after)}, {took_s:.1f} s later")
    demo.lose("feeder-b", False)
    again = _until(lent, "the budgets to be raised again")
    say(f"feeder-b is back: {_said(again)}")
    cut = {name: before[name]["budget_w"] - after[name]["budget_w"] for name in PRIORITY}
    if not cut["hall-b"] >= cut["hall-a"] > 0:
        raise SystemExit(f"fleet-demo: expected both halls to give way, hall-b more; got {cut}")
    return (
        f"seen (simulated): with feeder-b lost, hall-a (priority 2) gave up {cut['hall-a'] / 1e3:.1f} kW and "
        f"hall-b (priority 0) {cut['hall-b'] / 1e3:.1f} kW of budget; together they drew no more than the "
        f"{FEEDER_W / 1e3:g} kW of feeder-a {took_s:.1f} s later"
    )


def watch(demo: FleetDemo) -> None:
    """Lose the feeder and give it back until Ctrl-C."""
    begun = time.monotonic()
    while True:
        demo.lose("feeder-b", int((time.monotonic() - begun) / ROUND_S) % 2 == 1)
        time.sleep(1.0)
        demo.check()


def main() -> int:
    """Run the demo."""
    parser = argparse.ArgumentParser(prog="make fleet-demo", description=__doc__.partition("\n")[0])
    parser.add_argument("--once", action="store_true", help="end after the story")
    parser.add_argument("--out", type=Path, help="folder that is emptied and used; default: build/fleet-demo")
    args = parser.parse_args()
    with _folder(args.out) as folder:
        demo = FleetDemo(folder.resolve())
        try:
            demo.start()
            link = demo.page("hub")
            print(f"the page of the hub, with its token: {link}", flush=True)
            print(play(demo, lambda text: print(text, flush=True)), flush=True)
            if not args.once:
                print(
                    LOOK.format(link=link, pages="".join(f"\n  {h}: {demo.page(h)}" for h in PRIORITY)),
                    flush=True,
                )
                watch(demo)
        except KeyboardInterrupt:
            print("stopped", flush=True)
        finally:
            demo.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
