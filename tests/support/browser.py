"""A browser in front of a daemon: Chromium, driven by Playwright, with all that it complains of.

from tests.support.browser import Browser, browser, shared_browser  # fixtures

def test_nothing_is_wrong(browser: Browser, desk: Desk) -> None:
    screen = browser.open(desk.pod.url)
    screen.log_in(desk.pod.secrets["viewer"])
    screen.go("alarms")
    screen.shows("No alarms stand")
    assert screen.complaints == []
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

PATIENCE_MS = 30_000  # only a test that fails waits so long
# Reports of the content policy, kept where they happen.
REPORTS = """
window.reports = [];
document.addEventListener("securitypolicyviolation", (e) =>
  window.reports.push(`${e.violatedDirective} ${e.blockedURI}`));
"""
SHOWN = "(w) => document.body.innerText.toLowerCase().includes(w)"


@dataclass
class Screen:
    """One page of the browser, and what it complained of."""

    page: Any
    url: str
    complaints: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.add_init_script(REPORTS)
        self.page.on("console", lambda m: m.type == "error" and self.complaints.append(m.text))
        self.page.on("pageerror", lambda e: self.complaints.append(str(e)))
        self.page.on("dialog", lambda d: (self.dialogs.append(d.message), d.dismiss()))

    def log_in(self, token: str) -> None:
        """Open the link that holds the token, and wait for the first state."""
        self.page.goto(f"{self.url}/#token={token}")
        self.page.wait_for_selector("nav a")
        self.page.wait_for_selector("main h1", state="attached")

    def go(self, path: str) -> None:
        """Another page of the application, once its heading is there and nothing is being read."""
        self.page.evaluate("(to) => { location.hash = '#/' + to; }", path)
        self.page.wait_for_selector("main h1", state="attached")
        self.page.wait_for_function(
            "() => !/Reading …|Waiting for/.test(document.querySelector('main').innerText)"
        )

    def text(self) -> str:
        """All that the page shows."""
        shown: str = self.page.inner_text("body")
        return shown

    def shows(self, *words: str) -> None:
        """Wait until the page shows these words, whatever their case."""
        for word in words:
            try:
                self.page.wait_for_function(SHOWN, arg=word.lower())
            except Exception:
                raise AssertionError(f"{word!r} is not shown; the page says: {self.text()[:3000]}") from None

    def reports(self) -> list[str]:
        """Violations of the content policy."""
        found: list[str] = self.page.evaluate("window.reports")
        return found

    def act(self, button: str, fields: dict[str, str], within: str = "main") -> None:
        """Press a button, fill its dialog, send it, and wait until it is closed."""
        self.page.locator(within).get_by_role("button", name=button, exact=True).first.click()
        dialog = self.page.locator("dialog[open]")
        for name, value in fields.items():
            place = dialog.locator(f"[name={name}]")
            if place.evaluate("e => e.tagName") == "SELECT":
                place.select_option(value)
            else:
                place.fill(value)
        dialog.locator("button[type=submit]").click()
        dialog.wait_for(state="hidden")


@dataclass
class Browser:
    """A running Chromium."""

    chromium: Any

    def open(self, url: str, width: int = 1366, scheme: str = "light") -> Screen:
        """A fresh page in a context of its own."""
        context = self.chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        return Screen(context.new_page(), url)

    def close_pages(self) -> None:
        """Close all pages, and forget what they kept."""
        for context in self.chromium.contexts:
            context.close()


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A browser: the one on the PATH, else Playwright's own."""
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not here: run `make test`")
    arguments = ["--disable-gpu", "--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with driver.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        try:
            yield Browser(running)
        finally:
            running.close()


@pytest.fixture(scope="module")
def shared_browser() -> Iterator[Browser]:
    """A browser for all tests of a file."""
    with chromium() as made:
        yield made


@pytest.fixture
def browser(server: Callable[..., Path], request: pytest.FixtureRequest) -> Iterator[Browser]:
    """A browser without pages; the test is skipped by name, or fails in CI, where Chromium is absent."""
    server("chromium")
    made: Browser = request.getfixturevalue("shared_browser")
    yield made
    made.close_pages()
