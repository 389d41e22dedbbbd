"""Cases of a parametrized test that run in `make test`; the others run in `make test-long`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Return all cases; those that are not kept are long.

    A case that is a plain tuple holds one value per parameter.

    Raises:
        ValueError: a kept case is not among the cases.
    """
    cases = list(cases)
    if missing := [case for case in kept if case not in cases]:
        raise ValueError(f"kept cases {missing} are not among {cases}")
    return [case if case in kept else _long(case) for case in cases]


def _long(case: Any) -> Any:
    values = case if type(case) is tuple else (case,)
    return pytest.param(*values, marks=pytest.mark.long)
