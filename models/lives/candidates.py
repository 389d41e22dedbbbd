"""Candidates: hazards to select by likelihood on past lives, and simpler rivals.

The hazard with position is chosen with age or without, with effects per class of fault or shared. The blind
one is the same without anything that knows of positions; the one by age alone knows the age and the level of
the fleet.
"""

from __future__ import annotations

from dataclasses import replace

from models.lives.cells import LifeCells, batch_groups, position_groups
from models.lives.life_hazard import FLEET, INSTALLED, SERIAL, HazardTerms, LifeHazard
from twin.catalogue import F64

BY_POSITION, BLIND, BY_AGE = "position", "blind", "age"


def trained(
    cells: LifeCells, upto: int, chosen: HazardTerms | None = None
) -> dict[str, tuple[LifeHazard, list[F64]]]:
    """By name: hazards trained on the steps before `upto`, with the rates that they forecast for them.

    `chosen`: take these terms for the one with position instead of choosing.
    """
    groups = (FLEET, INSTALLED, *batch_groups(cells.log), *position_groups(cells.log), SERIAL)
    terms = HazardTerms(BY_POSITION, position=True, age=True, groups=groups, by_class=False)
    best = _best(cells, upto, (chosen,) if chosen else (terms, replace(terms, age=False)))
    if not chosen and len(cells.log.classes) > 1:
        other = _best(cells, upto, (replace(best[0].terms, by_class=True),))
        best = max(best, other, key=lambda found: found[0].likelihood)
    blind = replace(best[0].terms, name=BLIND, position=False, groups=(FLEET, INSTALLED, SERIAL))
    by_age = HazardTerms(BY_AGE, position=False, age=True, groups=(FLEET,), by_class=False)
    return {
        BY_POSITION: best,
        BLIND: _best(cells, upto, (blind,)),
        BY_AGE: _best(cells, upto, (by_age,)),
    }


def _best(cells: LifeCells, upto: int, candidates: tuple[HazardTerms, ...]) -> tuple[LifeHazard, list[F64]]:
    """The likeliest of some, as their forecasts were issued."""
    tried = []
    for terms in candidates:
        hazard = LifeHazard(cells, terms)
        tried.append((hazard, hazard.train(upto)))
    return max(tried, key=lambda found: found[0].likelihood)
