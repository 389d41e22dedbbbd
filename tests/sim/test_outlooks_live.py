"""A real daemon that fetches outlooks from a server that stands in for the services."""

from __future__ import annotations

import json
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.support.builders import two_racks
from tests.support.daemon_process import RunningDaemon
from tests.support.thread_server import http_thread

pytestmark = pytest.mark.slow
KEY, CARBON = "a-key", "site.grid_carbon_g_per_kwh"


class Stand(BaseHTTPRequestHandler):
    """Electricity Maps, as far as it is asked; it knows `keys`."""

    keys: ClassVar[set[str]] = {KEY}

    def do_GET(self) -> None:
        good = self.headers.get("auth-token") in self.keys
        hour = int(time.time()) // 3600 * 3600
        rows = [
            {
                "carbonIntensity": 200 + h,
                "datetime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(hour + 3600 * h)),
            }
            for h in range(24)
            if h != 5
        ]
        body = rows[0] if "latest" in self.path else {"zone": "DE", "forecast": rows}
        text = json.dumps(body if good else {"error": "Invalid auth-token"}).encode()
        self.send_response(200 if good else 401)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None: ...


@pytest.mark.long
def test_carbon_comes_by_itself_with_its_gaps_told_and_a_wrong_key_is_an_alarm(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    key = tmp_path / "d" / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    with http_thread(Stand) as port:
        service = {"service": "electricity_maps", "zone": "DE", "token_file": "key", "period_s": 60,
                   "url": f"http://127.0.0.1:{port}"}  # fmt: skip
        site = two_racks(racks="r1")
        with RunningDaemon(tmp_path / "d", "embedded", site, simulated=True, outlooks=[service]) as daemon:
            daemon.start()
            rows = daemon.until(lambda: daemon.get("/api/v1/outlooks")["outlooks"], what="an outlook")
            assert [row["quantity"] for row in rows] == [CARBON]
            sources = json.dumps(daemon.get("/api/v1/sources?name=outlook"))
            assert "outlook electricity_maps DE" in sources
            assert "1 of 24 values" in sources
            key.write_text("another")
            daemon.config["outlooks"][0]["timeout_s"] = 19
            daemon.write_config()
            daemon.post("/api/v1/reload", {})

            def alarms() -> list[str]:
                return [a["id"] for a in daemon.get("/api/v1/alarms")["alarms"]]

            daemon.until(lambda: "outside/outlook electricity_maps DE" in alarms(), what="the alarm")
            assert daemon.get("/api/v1/outlooks")["outlooks"], "what was told before holds"
            assert KEY not in daemon.log.read_text()
