"""Pictures of the documentation, made from the demo's plant and a real browser: `make pictures`.

python -m tests.support.pictures              # into docs/images
python -m tests.support.pictures --check DIR  # every page at three widths, light and dark, to look at
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support.browser import Browser, Screen, chromium
from tests.support.staged_pod import StagedPod, staged_pod
from twin.cli.main import main as racktwin

IMAGES = Path(__file__).parents[2] / "docs" / "images"
WIDTH, WIDTHS = 1366, (390, 1366, 1920)
PAGES = {"overview": "", "alarms": "alarms", "decisions": "decisions", "power": "power", "cooling": "cooling",
         "policies": "policies", "jobs": "jobs", "replacement": "replacement", "ledger": "ledger",
         "whatif": "whatif", "setup": "setup", "rack": "e/rack/demo-pod/hall1/r1",
         "cdu": "e/cdu/demo-pod/hall1/cdu1",
         "gpu": "e/gpu/demo-pod/hall1/r1/node0/gpu0"}  # fmt: skip
FIGURES = "[aria-label='Figures of both']"
SETTLE_MS = 2500  # for charts and polls of a page


def opened(browser: Browser, stage: StagedPod, width: int, scheme: str = "light") -> Screen:
    """A screen that is logged in and has had its first updates."""
    screen = browser.open(stage.url, width=width, scheme=scheme)
    screen.log_in(stage.token)
    return screen


def shown(screen: Screen, path: str, picture: Path, whole: bool = False) -> None:
    """The picture of a page, once it has settled."""
    screen.go(path)
    screen.page.wait_for_timeout(SETTLE_MS)
    screen.page.screenshot(path=picture, full_page=whole)


def what_if(screen: Screen, picture: Path) -> None:
    """The outcome of a what-if that loses a feed."""
    screen.go("whatif")
    screen.page.locator("[name=horizon]").select_option("600")
    screen.page.get_by_role("button", name="Run it", exact=True).click()
    screen.page.wait_for_selector(FIGURES, timeout=600_000)
    screen.page.wait_for_timeout(SETTLE_MS)
    # The head stays at the top of the window, and would lie over what is below it
    screen.page.evaluate("document.querySelector('.top').style.position = 'static'; scrollTo(0, 0)")
    outcome = screen.page.locator("section.panel", has=screen.page.locator(FIGURES)).first
    screen.page.screenshot(path=picture, full_page=True, clip=outcome.bounding_box())


def report(browser: Browser, folder: Path, picture: Path) -> None:
    """The report of the simulated part of `racktwin demo --recorded`."""
    recordings = os.environ.pop("RACKTWIN_TRACES", None)
    os.environ["RACKTWIN_TRACES"] = str(folder / "none")
    try:
        if racktwin(["demo", "--recorded", "--out", str(folder / "demo")]):
            raise RuntimeError("the recorded demo failed")
    finally:
        os.environ.pop("RACKTWIN_TRACES")
        if recordings is not None:
            os.environ["RACKTWIN_TRACES"] = recordings
    screen = browser.open("", width=1100)
    screen.page.set_viewport_size({"width": 1100, "height": 1430})
    screen.page.goto((folder / "demo" / "simulated" / "report.html").as_uri())
    screen.page.screenshot(path=picture)


def documentation(browser: Browser, folder: Path, images: Path) -> None:
    """All pictures that the documentation shows."""
    with staged_pod(folder) as stage:
        screen = opened(browser, stage, WIDTH)
        shown(screen, "", images / "status.png")
        shown(opened(browser, stage, WIDTH, "dark"), "", images / "status-dark.png")
        what_if(screen, images / "whatif.png")
    report(browser, folder, images / "report.png")


def check(browser: Browser, folder: Path, images: Path) -> None:
    """Every page at three widths, light and dark."""
    images.mkdir(parents=True, exist_ok=True)
    with staged_pod(folder) as stage:
        for width in WIDTHS:
            for scheme in ("light", "dark"):
                screen = opened(browser, stage, width, scheme)
                for name, path in PAGES.items():
                    shown(screen, path, images / f"{name}-{width}-{scheme}.png", whole=True)
                if screen.complaints:
                    raise RuntimeError(f"{width} {scheme}: {screen.complaints}")


@contextlib.contextmanager
def stand() -> Iterator[tuple[Browser, Path]]:
    """A browser and a folder that goes afterwards."""
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        yield browser, Path(folder)


def run() -> None:
    """Make the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", type=Path, metavar="DIR")
    args = parser.parse_args()
    with stand() as (browser, folder):
        if args.check is not None:
            check(browser, folder, args.check)
        else:
            documentation(browser, folder, IMAGES)


if __name__ == "__main__":
    run()
