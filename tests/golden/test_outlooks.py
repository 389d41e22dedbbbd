"""The trace holds every outlook: a replay has the same ones, across a change of the site."""

from __future__ import annotations

import numpy as np

from tests.golden.conftest import Run
from tests.support.golden_story import CHANGED_AT, OUTLOOK_FROM, START_NS
from tests.support.journal_bodies import bodies_of
from twin.catalogue import NS


def test_outlooks_are_told_refused_kept_and_forgotten(run: Run) -> None:
    said = {r["event"]["id"]: r.get("refused") for d in run.kept.decisions for r in bodies_of(d)
            if r["kind"] == "event" and r["event"]["type"] == "OutlookTold"}  # fmt: skip
    assert said == {"o1": None, "o2": None, "o3": "no rack r9"}
    # The weather was over after 90 s; the plan of r1 went along when it became rack 1.
    assert OUTLOOK_FROM + 90 < CHANGED_AT
    (held,) = run.engine.intake.outlooks.entries()
    assert (held.quantity, held.name) == ("rack.power_w", "golden/h1/r1")
    at_ns = START_NS + (OUTLOOK_FROM + 300) * NS
    found = run.engine.intake.outlooks.at("rack.power_w", at_ns, run.engine.site)
    assert np.array_equal(found, [np.nan, 9000.0], equal_nan=True)
