"""Load targets through a change of leadership: two real daemons, a real broker and a real etcd."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.daemon_process import RunningDaemon
from tests.support.standby_pair import pair

pytestmark = pytest.mark.slow
AT = "/api/v1/load-targets"


def held(one: RunningDaemon) -> dict[str, float]:
    return {t["name"]: t["limit_w"] for t in one.get(AT)["targets"]}


def test_what_people_set_and_withdrew_holds_at_the_successor(
    server: Callable[..., Path], tmp_path: Path
) -> None:
    with pair(server, tmp_path) as two:
        two.start()
        a, b = two.a, two.b
        a.post(AT, {"name": "night", "limit_w": 4e5, "for_s": 3600})
        a.post(AT, {"name": "peak", "limit_w": 3e5})
        assert held(b) == {}
        two.until_leads(a)
        a.post(AT, {"name": "peak", "limit_w": 2e5})
        time.sleep(0.1)  # told to etcd nearly at the last moment
        a.kill()
        two.until_leads(b)
        b.until(lambda: held(b) == {"night": 4e5, "peak": 2e5}, what="the targets of the leader before")
        assert b.ask("DELETE", f"{AT}/night")[0] == 200
        a.start()  # knows both of its own targets, from before
        assert set(held(a)) == {"night", "peak"}
        assert b.stop() == 0
        two.until_leads(a)
        a.until(lambda: held(a) == {"peak": 2e5}, what="the end of what was withdrawn")
