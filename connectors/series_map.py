"""Mapping files of labelled series: their schema and their parser.

The packaged ones are `exporters/*.yaml`. A mapping says which labels of a series name the entity, and which
signal it is; `connectors.series` applies it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from connectors.files import MappingPart, read_tree
from twin.catalogue import ConfigError
from twin.site import convert

EXPORTERS = Path(__file__).parent / "exporters"


class Measure(MappingPart, frozen=True):
    """Meaning of a series. `unit` as on the wire, or `factor` and `offset` to the core unit.

    `states` reads words or numbers (null: no reading); `blank` are numbers that mean "no reading". `add`:
    several series, of several exporters too, are parts of one counter, or of one gauge. `rate`: the series is
    a counter and the gauge its growth per second. `most`: the gauge is the greatest of several series.
    """

    signal: str
    unit: str | None = None
    factor: float = 1.0
    offset: float = 0.0
    states: dict[str, float | None] = msgspec.field(default_factory=dict)
    blank: list[float] = msgspec.field(default_factory=list)
    add: bool = False
    rate: bool = False
    most: bool = False


class SeriesRatio(MappingPart, frozen=True):
    """A share: `part` over the sum of `of`, of one entity and report; `complement` is one minus it.

    `growth`: of what counters grew by since the last report, such as a mean of seconds by a count of them;
    the gauge is the greatest of several exporters.
    """

    signal: str
    part: str
    of: list[str]
    complement: bool = False
    growth: bool = False
    factor: float = 1.0


class Number(MappingPart, frozen=True):
    """A conversion of numbers: (label - subtract) // divide, such as cores -> devices or ports from one
    on."""

    subtract: int = 0
    divide: int = 1


class SeriesRule(MappingPart, frozen=True):
    """Series of one table. The first of the `entity` templates that names an entity of the site decides; the
    table `site` has one alone, and needs none.

    `where` are patterns that whole labels must match; their named groups are labels too. `measurement` is
    that of Influx lines. `own` reads series with the catalogue's keys, such as `cdu.flow_lpm`, as well.
    `{side}` in a signal and in the patterns makes two rules of it, for 1 and 2: of parts that come in pairs.
    """

    table: str
    entity: list[str] = msgspec.field(default_factory=list)
    signals: dict[str, str | Measure] = msgspec.field(default_factory=dict)
    ratios: list[SeriesRatio] = msgspec.field(default_factory=list)
    own: bool = False
    measurement: str | None = None
    where: dict[str, str] = msgspec.field(default_factory=dict)
    numbers: dict[str, Number] = msgspec.field(default_factory=dict)

    def sides(self) -> list[SeriesRule]:
        """Return the rule, or both of its parts."""
        measures = {n: Measure(signal=m) if isinstance(m, str) else m for n, m in self.signals.items()}
        if not any("{side}" in m.signal for m in measures.values()):
            return [self]
        return [
            msgspec.structs.replace(
                self,
                signals={n: msgspec.structs.replace(m, signal=m.signal.replace("{side}", side))
                         for n, m in measures.items()},
                where={label: pattern.replace("{side}", side) for label, pattern in self.where.items()},
            )
            for side in ("1", "2")
        ]  # fmt: skip


class SeriesJoin(MappingPart, frozen=True):
    """Labels that a series of the report adds to others: those of `take`, to all with its label `by`.

    Of several series with one such label the first lends; own labels hold. Later joins see earlier ones.
    """

    series: str
    by: str
    take: list[str]


class SeriesMap(MappingPart, frozen=True):
    """A mapping file. `names`: outside name -> entity, host lists both; `blank`: numbers for "no reading".

    `extends` names a packaged mapping whose rules follow the own ones.
    """

    rules: list[SeriesRule] = msgspec.field(default_factory=list)
    joins: list[SeriesJoin] = msgspec.field(default_factory=list)
    extends: str | None = None
    names: dict[str, str] = msgspec.field(default_factory=dict)
    blank: list[float] = msgspec.field(default_factory=list)


def load_map(name: str, folder: Path | None = None) -> tuple[SeriesMap, str]:
    """Return (the mapping, its file's name): a packaged one by name, or a file. Raises ConfigError."""
    if name in _packaged_names():
        return _packaged(name), f"{name}.yaml"
    path = (folder or Path()) / name
    if not path.is_file():
        raise ConfigError(
            f"{name}: no such mapping; expected a file, or one of {', '.join(_packaged_names())}"
        )
    mapping: SeriesMap = convert(SeriesMap, read_tree(path), path.name)
    if mapping.extends is None:
        return mapping, path.name
    if mapping.extends not in _packaged_names():
        raise ConfigError(f"{path.name}: $.extends: no packaged mapping {mapping.extends[:60]!r}")
    more = _packaged(mapping.extends)
    whole = SeriesMap(
        rules=[*mapping.rules, *more.rules],
        joins=[*mapping.joins, *more.joins],
        names={**more.names, **mapping.names},
        blank=[*mapping.blank, *more.blank],
    )
    return whole, path.name


@cache
def _packaged_names() -> tuple[str, ...]:
    return tuple(sorted(p.stem for p in EXPORTERS.glob("*.yaml")))


@cache
def _packaged(name: str) -> SeriesMap:
    """Return a mapping of the package, read once: a thousand scrapes share it."""
    path = EXPORTERS / f"{name}.yaml"
    mapping: SeriesMap = convert(SeriesMap, read_tree(path), path.name)
    return mapping


def mapping_of(tree: Any, file: str = "mapping") -> SeriesMap:
    """Return a mapping from a parsed tree. Raises ConfigError with every fault."""
    mapping: SeriesMap = convert(SeriesMap, tree, file)
    return mapping
