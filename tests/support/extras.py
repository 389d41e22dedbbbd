"""Guards of tests that want an optional extra; such a test calls its guard first.

    def test_it() -> None:
        torch = needs_torch()

The test is skipped by name where the extra is absent, and fails where the run was asked for with it
(`make test EXTRAS=torch` tells by RACKTWIN_EXTRAS), so that nothing goes untested unnoticed.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any, NoReturn

import pytest


def asked_for() -> set[str]:
    """The extras that the run was started with."""
    return set(os.environ.get("RACKTWIN_EXTRAS", "").replace(",", " ").split())


def needs_torch() -> Any:
    """The module torch. At the top of a file it skips, or fails, the whole file."""
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":  # it is there, and broken
            raise
    _absent("torch", "PyTorch")


def needs_chdb() -> None:
    """Skip, or fail, a test that wants chdb; not imported: 560 MB belong into a process of their own."""
    if importlib.util.find_spec("chdb") is None:
        _absent("chdb", "ClickHouse in process")


def _absent(extra: str, what: str) -> NoReturn:
    message = f"{what} is not here: run `make test EXTRAS={extra}`"
    if extra in asked_for():
        pytest.fail(message, pytrace=False)
    pytest.skip(message, allow_module_level=True)
