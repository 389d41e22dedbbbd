"""`racktwin top` as a person sees it: it shows what the API says, drills down, and outlives a restart."""

from __future__ import annotations

import asyncio
import os
import pty
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Static

from tests.sim.test_page import HOT, BeatingDesk
from tests.support.in_process_daemon import serving_aside
from tests.support.patience import PATIENCE_S
from twin.api import connect
from twin.api.tokens import revoke_token
from twin.cli.main import main
from twin.cli.top.app import TopApp
from twin.cli.top.table import SteadyTable
from twin.config import Api
from twin.telemetry import events as ev

pytestmark = pytest.mark.slow
HOSTILE = "[red]x[/red]\x1b[31m\u202ey"


def app_of(desk: BeatingDesk, **more: Any) -> TopApp:
    return TopApp(connect(desk.pod.url, None, str(desk.token_file("viewer"))), **more)


def seen(app: TopApp) -> str:
    """All text on the screen."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip) for strip in strips)


async def shows(app: TopApp, *words: str) -> str:
    """Wait until all of this is on the screen."""
    async with asyncio.timeout(PATIENCE_S):
        while not all(word in seen(app) for word in words):
            await asyncio.sleep(0.05)
    return seen(app)


def watch(
    desk: BeatingDesk,
    check: Callable[[TopApp, Any], Awaitable[None]],
    size: tuple[int, int] = (80, 24),
    **more: Any,
) -> None:
    """Run a check against the application on a screen of this size."""
    app = app_of(desk, **more)

    async def run() -> None:
        async with app.run_test(size=size) as pilot:
            await check(app, pilot)

    asyncio.run(run())


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A daemon whose GPUs are hot."""
    with serving_aside(tmp_path, monkeypatch, BeatingDesk) as made:
        made.do(made.start)
        yield made


@pytest.mark.parametrize("size", [(80, 24), (160, 48)])
def test_it_shows_what_the_api_says_and_what_changes(desk: BeatingDesk, size: tuple[int, int]) -> None:
    async def check(app: TopApp, _: Any) -> None:
        words = ("160 kW", "GPUs 144 of 144", "▲ 1 critical", "▲ r1", "▲ r2", "80 kW", "95 °C", "leader")
        text = await shows(app, *words)
        assert all(len(line) <= size[0] for line in text.splitlines())
        desk.readings = HOT | {"rack.power_w": 40_000.0, "gpu.temp_c": 60.0}  # type: ignore[misc]
        await shows(app, "80 kW of", "✓ none", "✓ r1", "40 kW", "60 °C")

    watch(desk, check, size)


@pytest.mark.long
def test_from_a_rack_to_a_gpu_and_back(desk: BeatingDesk) -> None:
    async def check(app: TopApp, pilot: Any) -> None:
        await shows(app, "▲ r1")
        await pilot.press("enter")
        await shows(app, "rack r1", "node0", "Measured beside expected", "expected", "residual")
        await pilot.press("enter")
        await shows(app, "node r1/node0", "gpu0", "Health")
        await pilot.press("down", "enter")
        await shows(app, "GPU r1/node0/gpu1", "95 °C", "Commands")
        await pilot.press("escape", "escape", "escape")
        await shows(app, "Racks 2")
        await pilot.press("tab", "enter")
        await shows(app, "How bad", "Where", "racktwin does", "You", "not acknowledged")
        await pilot.press("escape", "question_mark")
        await shows(app, "▲ critical  ◆ warning  ● notice  ✓ well  ? unknown")
        await pilot.press("escape", "slash", *"r2/node3")
        await shows(app, "lab/h/r2/node3")
        await pilot.press("enter")
        await shows(app, "node r2/node3")

    watch(desk, check)


def test_it_says_that_the_daemon_is_silent_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within three seconds of the last word, and all by itself when the daemon is there again."""
    secrets: dict[str, str] = {}
    first = serving_aside(tmp_path, monkeypatch, BeatingDesk)
    desk = first.__enter__()
    desk.do(desk.start)
    secrets.update(desk.pod.secrets)
    port = int(desk.pod.url.rpartition(":")[2])
    monkeypatch.setattr("tests.support.in_process_daemon.add_token", lambda path, name, role: secrets[role])

    async def check(app: TopApp, _: Any) -> None:
        await shows(app, "▲ r1")
        await asyncio.to_thread(first.__exit__, None, None, None)
        began = asyncio.get_running_loop().time()
        await shows(app, "No update from the daemon", "the values shown are old", "▲ r1")
        assert asyncio.get_running_loop().time() - began < 5.0
        assert app.screen.has_class("-old")
        again = serving_aside(tmp_path, monkeypatch, BeatingDesk, api=Api(port=port))
        back = await asyncio.to_thread(again.__enter__)
        try:
            back.readings = HOT | {"gpu.temp_c": 60.0}
            await asyncio.to_thread(back.do, back.start)
            await shows(app, "✓ r1")
            async with asyncio.timeout(PATIENCE_S):
                while app.screen.has_class("-old"):
                    await asyncio.sleep(0.05)
            assert "silent" not in seen(app)
            # Without its token it leaves, and says why
            pod = back.pod
            await asyncio.to_thread(
                back.do, lambda: (revoke_token(pod.tokens_file, "viewer-1"), pod.tokens.reload())
            )
        finally:
            await asyncio.to_thread(again.__exit__, None, None, None)

    watch(desk, check)


def test_names_from_outside_are_text(desk: BeatingDesk) -> None:
    pod = desk.pod

    def fill() -> None:
        for event in (
            ev.JobStarted(id="j2", job=f"job{HOSTILE}", nodes=("lab/h/r2/node0",), tenant=HOSTILE),
            ev.MaintenanceBegun(id="m1", author=HOSTILE, table="rack", names=("lab/h/r2",), reason=HOSTILE,
                                until_ns=pod.twin.now_ns + 3600 * 10**9),
        ):  # fmt: skip
            pod.live.put_event(event)
        pod.tick(HOT)

    async def check(app: TopApp, pilot: Any) -> None:
        text = await shows(app, "[red]x[/red]", "under maintenance")
        await pilot.press("slash", *"job")
        text += await shows(app, "job[red]x[/red]")
        await pilot.press("enter")
        text += await shows(app, "job job[red]x[/red]", "Commands")
        assert "\x1b" not in text
        assert "\u202e" not in text

    desk.do(fill)
    watch(desk, check, (120, 40))


def test_without_utf8_and_without_colour_it_stays_readable(
    desk: BeatingDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    async def check(app: TopApp, _: Any) -> None:
        text = await shows(app, "! r1", "! 1 critical", "95 'C")
        assert text.isascii()
        colours = {
            s.style.color for strip in app.screen._compositor.render_strips() for s in strip if s.style
        }
        assert {c.name for c in colours if c is not None} <= {"default"}

    watch(desk, check, signs_only=True)


def test_a_thousand_racks_change_without_a_rebuild(desk: BeatingDesk) -> None:
    """Only cells that changed and are seen are written; the cursor stays on its rack in another order."""

    async def check(app: TopApp, pilot: Any) -> None:
        await shows(app, "▲ r1")
        app.workers.cancel_all()
        n, layout = 1396, dict(app.mirror.layout)
        layout |= {"names": [f"lab/h/r{i}" for i in range(n)], "gpus": [72] * n, "power_guard_w": [132e3] * n,
                   "columns": {k: [v[0]] * n for k, v in app.mirror.columns.items()}}  # fmt: skip
        app.mirror.set_layout(layout)
        app.draw("racks")
        table = app.query_one("#racks", SteadyTable)
        await pilot.press("end")
        await pilot.pause()
        assert table.chosen == "lab/h/r1395"
        written: list[str] = []
        write = table.update_cell
        table.update_cell = lambda r, c, v: (written.append(f"{r} {c}"), write(r, c, v))  # type: ignore
        for power_w in (81_000, 81_500):
            part = {"at": [3, 1395], "to": [power_w, power_w]}
            tree = {"site_hash": layout["site_hash"], "columns": {"power_w": part}}
            app.draw("racks", app.mirror.take("racks", tree, 0.0).rows)
        assert {w.partition(" ")[0] for w in written} == {"lab/h/r1395"}, "r3 is not seen"
        assert len(written) <= 4, "of eleven columns, power and its share change"
        assert table.chosen == "lab/h/r1395"
        await pilot.press("home")
        await shows(app, "81.5 kW")
        await pilot.press("end")
        app.mirror.take(
            "racks", {"site_hash": layout["site_hash"], "columns": {"state": {"all": [1] * n}}}, 0.0
        )
        app.draw("racks", list(range(n)))
        assert (table.chosen, table.row_count) == ("lab/h/r1395", n)
        assert "1,396 well" in str(app.query_one("#racks-title", Static).render())

    watch(desk, check)


def test_without_a_terminal_it_names_the_command_that_prints_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top"]) == 2
    assert "`racktwin status` prints the same once" in capsys.readouterr().err


def test_a_wrong_token_is_refused_before_the_screen_opens(
    desk: BeatingDesk, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    master, slave = pty.openpty()
    with open(slave, "w", closefd=False) as terminal:
        for name in ("stdin", "stdout", "stderr"):
            monkeypatch.setattr(getattr(sys, name), "isatty", lambda: True)
        token = tmp_path / "wrong.token"
        token.write_text("rt_" + "x" * 43 + "\n")
        token.chmod(0o600)
        assert terminal.isatty()
        assert main(["top", "--url", desk.pod.url, "--token-file", str(token)]) == 1
    os.close(master)
    os.close(slave)
    assert "unknown here or has expired" in capsys.readouterr().err
