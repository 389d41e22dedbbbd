"""Labelled series as readings: a mapping names the entity by labels, and the signal by the series name.

What Prometheus exporters, Telegraf and Sparkplug devices send has one form: a name, labels (tags), a number,
perhaps an instant. A mapping (`connectors.series_map`) says what to make of it; units are converted here.
Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np

from connectors.files import conversion
from connectors.gauge_parts import FRESH_S, Cell, GaugeParts, GaugeReport, SeriesGrowth
from connectors.series_map import Measure, SeriesJoin, SeriesMap, SeriesRule
from connectors.slurm import expand_names
from twin.catalogue import F32, TABLES, ConfigError, Signal, from_dbm
from twin.telemetry import Block, Names, Reading, nowhere

DBM = "dBm"
MAX_LABEL = 256  # characters of a label that may name an entity
MAX_PLACES, MAX_STRANGERS = 200_000, 2_000  # label sets that are remembered: of entities, of none
MAX_PARTS = 500_000  # counters that are parts of sums
SLICE = 200  # samples that are read at a stretch
MAX_FAULTS = 200  # kinds of fault between two looks at them
UNKNOWN_NAME = (
    "add it to the site file, or give its name there under `names` of a mapping file (`map`, `broker.maps`)"
)
UNKNOWN_LABELS = "let the publisher name its host, give the scrape a `place`, or map its labels"
_NO_LABEL = "no label names"
MIN_BLOCK = 8  # cells from which a block costs less than single readings
_FIELD = re.compile(r"\{(\w+)\}")


class SeriesSample(NamedTuple):
    """One number of a report; `t_ns` None: the instant of the report. `lent`: some of its labels are
    joined."""

    name: str
    labels: Mapping[str, str]
    value: float | int | str | bool | None
    t_ns: int | None = None
    measurement: str | None = None
    lent: bool = False


class SeriesFaults:
    """Faults in reports that were otherwise read; the caller takes and counts them."""

    def __init__(self) -> None:
        self.kinds: dict[str, int] = {}

    def add(self, why: str) -> None:
        """Add one of this kind; beyond MAX_FAULTS kinds they are counted as one."""
        if why not in self.kinds and len(self.kinds) >= MAX_FAULTS:
            why = "more, too many to list"
        self.kinds[why] = self.kinds.get(why, 0) + 1

    def take(self) -> list[tuple[str, int]]:
        """Return (reason, count) since the last call."""
        taken, self.kinds = list(self.kinds.items()), {}
        return taken


def remedy_of(stranger: str) -> str:
    """Return advice on one of the `strangers` of a table."""
    return UNKNOWN_LABELS if stranger.startswith(_NO_LABEL) else UNKNOWN_NAME


class Sums:
    """Counters that are sums of parts, kept by growth, so that a new or lost part makes no jump.

    One instance may serve several sources whose parts feed the same entity. Totals begin at zero with the
    process, which the Inbox takes for a reset. `gauges` are those that are made of parts.
    """

    def __init__(self, fresh_s: float = FRESH_S) -> None:
        self._last: dict[tuple[Any, ...], int] = {}
        self._total: dict[Cell, int] = {}
        self.gauges = GaugeParts(fresh_s)

    def add(self, cell: Cell, part: tuple[Any, ...], value: int) -> int | None:
        """Return the total of a cell after `value` of one of its parts; None beyond the maximum of parts."""
        key = (*cell, part)
        last = self._last.get(key)
        if last is None and len(self._last) >= MAX_PARTS:
            return None
        self._last[key] = value
        growth = 0 if last is None else max(0, value - last)
        self._total[cell] = total = self._total.get(cell, 0) + growth
        return total


class _Line(NamedTuple):
    """Effect of one series of one rule."""

    rule: _Rule
    measure: Measure
    signal: Signal
    factor: float
    offset: float

    @property
    def is_part(self) -> bool:
        """Return True if it has a part of a gauge."""
        measure = self.measure
        return self.signal.kind != "counter" and (measure.add or measure.rate or measure.most)


class _Rule:
    """A checked rule: its patterns, and the labels that select the entity."""

    def __init__(self, rule: SeriesRule, at: str, faults: list[str]) -> None:
        self.table, self.templates = rule.table, rule.entity
        self.ratios, self.numbers = rule.ratios, rule.numbers
        self.grows = any(ratio.growth for ratio in rule.ratios)
        self.where: dict[str, re.Pattern[str]] = {}
        groups: set[str] = set()
        for label, pattern in rule.where.items():
            try:
                self.where[label] = re.compile(pattern)
                groups |= set(self.where[label].groupindex)
            except re.error as error:
                faults.append(f"{at}.where.{label}: {error}")
        fields = {f for t in rule.entity for f in _FIELD.findall(t)}
        self.labels = tuple(sorted(((fields | set(rule.numbers)) - groups) | set(rule.where)))
        if rule.table not in TABLES:
            faults.append(f"{at}.table: expected one of {', '.join(TABLES)}, got {rule.table[:60]!r}")
        if not rule.entity and rule.table != "site":
            faults.append(f"{at}.entity: expected at least one template, such as '{{host}}/gpu{{index}}'")
        if any(n.divide < 1 for n in rule.numbers.values()):
            faults.append(f"{at}.numbers: expected a whole number >= 1 to divide by")

    def fits(self, labels: Mapping[str, str]) -> dict[str, str] | None:
        """Return the labels with the matches of the patterns; None if one of them fails."""
        groups: dict[str, str] = {}
        for label, pattern in self.where.items():
            text = labels.get(label, "")
            match = pattern.fullmatch(text) if len(text) <= MAX_LABEL else None
            if match is None:
                return None
            groups |= {k: v for k, v in match.groupdict().items() if v is not None}
        return {**labels, **groups}

    def names(self, labels: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """Return (first part, rest) of the templates filled with these labels; nothing if a pattern fails."""
        known = self.fits(labels)
        if known is None:
            return
        for label, number in self.numbers.items():
            text = known.get(label, "")
            if not (text.isascii() and text.isdigit() and len(text) <= 9) or int(text) < number.subtract:
                return
            known[label] = str((int(text) - number.subtract) // number.divide)
        for template in self.templates:
            fields = _FIELD.findall(template)
            if all(0 < len(known.get(f, "")) <= MAX_LABEL for f in fields):
                head, _, tail = template.partition("/")
                yield _filled(head, known), _filled(tail, known)


def _filled(template: str, labels: Mapping[str, str]) -> str:
    return _FIELD.sub(lambda m: labels[m[1]], template)


@dataclass(slots=True)
class _Report:
    """The parts of a report, as far as it was read."""

    readings: list[Reading] = field(default_factory=list)
    shares: dict[tuple[int, int], tuple[_Rule, int, int, dict[str, float]]] = field(default_factory=dict)
    sums: dict[Cell, tuple[int, int]] = field(default_factory=dict)
    gauges: dict[int, GaugeReport] = field(default_factory=dict)  # by source
    grown: dict[tuple[int, int], dict[str, float]] = field(default_factory=dict)
    strange: dict[str, None] = field(default_factory=dict)


class SeriesTable:
    """A checked mapping for one site: turns the samples of a report into readings and blocks.

    `place` is a label of that name which every sample has: the entity that a source stands for. `faults` has
    what was wrong with single samples, `strangers` those whose labels name nothing of the site.
    """

    def __init__(
        self,
        mapping: SeriesMap,
        site: Names,
        file: str = "mapping",
        place: str | None = None,
        sums: Sums | None = None,
    ) -> None:
        self.faults, self.strangers = SeriesFaults(), SeriesFaults()
        self._site, self._place, self._sums = site, place, sums or Sums()
        self._elsewhere: Callable[[str], bool] = getattr(site, "is_elsewhere", nowhere)
        self._growth = SeriesGrowth()
        self._blank = frozenset(mapping.blank)
        self._lines: dict[tuple[str | None, str], list[_Line]] = {}
        self._parts: dict[tuple[str | None, str], list[_Rule]] = {}  # of ratios
        self._places: dict[tuple[Any, ...], int] = {}
        self._strangers: dict[tuple[Any, ...], str] = {}  # of label sets of no entity: what they name
        faults: list[str] = []
        try:
            self._names = expand_names(mapping.names, f"{file}: $.names")
        except ConfigError as error:
            faults += error.problems
        for i, given in enumerate(mapping.rules):
            for rule in given.sides():
                self._add(rule, f"{file}: $.rules[{i}]", faults)
        if faults:
            raise ConfigError(faults)
        every = [line for some in self._lines.values() for line in some]
        places = {line.rule.where["place"] for line in every if "place" in line.rule.where}
        self._odd_place = ""  # why no rule is of this place
        if places and not any(pattern.fullmatch(place or "") for pattern in places):
            wanted = " or ".join(sorted(pattern.pattern for pattern in places))
            self._odd_place = f"the place {(place or '')[:160]!r} is none of {wanted[:160]}"
        whole = [line for (m, _), some in self._lines.items() for line in some if m is None]
        self._source = self._sums.gauges.source({line.signal.table for line in whole if line.is_part})
        self._pieces: dict[tuple[Any, ...], int] = {}  # numbers of sources that are one series each
        self._joins = mapping.joins
        joined = (join.series for join in mapping.joins)
        self.wanted = frozenset((*(name for _, name in (*self._lines, *self._parts)), *joined))
        """Names of series that some rule reads."""
        self.measurements = frozenset(m for m, _ in (*self._lines, *self._parts) if m is not None)

    def _add(self, rule: SeriesRule, at: str, faults: list[str]) -> None:
        made = _Rule(rule, at, faults)
        table = TABLES.get(rule.table)
        signals = table.by_name if table else {}
        own = {s.key: s.name for s in signals.values()} if rule.own else {}
        for name, given in {**own, **rule.signals}.items():
            measure = Measure(signal=given) if isinstance(given, str) else given
            signal = signals.get(measure.signal)
            factor = (measure.factor, measure.offset)
            if signal is None:
                faults.append(f"{at}.signals.{name}: {rule.table} has no signal {measure.signal[:60]!r}")
                continue
            if measure.unit == DBM and signal.unit == "W" and factor == (1.0, 0.0):
                pass  # not linear: converted reading by reading
            elif measure.unit is not None:
                units = conversion(measure.unit, signal.unit)
                if units is None or factor != (1.0, 0.0):
                    faults.append(
                        f"{at}.signals.{name}.unit: cannot turn {measure.unit!r} into {signal.unit!r}"
                    )
                factor = units or factor
            if signal.kind == "counter" and (measure.rate or measure.most):
                faults.append(f"{at}.signals.{name}: expected a gauge, {signal.key} is a counter")
            if measure.add and measure.most:
                faults.append(f"{at}.signals.{name}: expected one of `add` and `most`")
            self._lines.setdefault((rule.measurement, name), []).append(_Line(made, measure, signal, *factor))
        for k, ratio in enumerate(rule.ratios):
            to = signals.get(ratio.signal)
            if to is None or to.kind == "counter" or (to.unit != "1" and not ratio.growth):
                faults.append(
                    f"{at}.ratios[{k}].signal: expected a signal in 0..1, got {ratio.signal[:60]!r}"
                )
        for name in dict.fromkeys(n for ratio in rule.ratios for n in (ratio.part, *ratio.of)):
            self._parts.setdefault((rule.measurement, name), []).append(made)

    def read(self, samples: Iterable[SeriesSample], t_ns: int) -> list[Reading]:
        """Return the readings of one report that arrived at `t_ns`."""
        steps = self.steps(samples, t_ns)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return cast(list[Reading], end.value)

    def steps(self, samples: Iterable[SeriesSample], t_ns: int) -> Generator[None, None, list[Reading]]:
        """Read one report some samples at a time, so that a large one holds up no loop."""
        report = _Report()
        self._growth.begin(t_ns)
        for number, sample in enumerate(_joined(samples, self._joins) if self._joins else samples):
            if number % SLICE == SLICE - 1:
                yield
            self._take(report, sample, t_ns if sample.t_ns is None else sample.t_ns)
        for named in report.strange:
            self.strangers.add(named)
        out = report.readings
        for (table, entity, name), (total, at) in report.sums.items():
            out.append(Reading(table, entity, name, total, at))
        for rule, entity, at, parts in report.shares.values():
            out += _shares(rule, entity, parts, at)
            if rule.grows:
                gauge = report.gauges.setdefault(self._source, GaugeReport())
                _mean_growth(gauge, rule, entity, report.grown.get((id(rule), entity), {}))
        gauges: dict[Cell, float | None] = {}
        for source, gauge in report.gauges.items():
            gauges |= self._sums.gauges.join(source, gauge, t_ns) if gauge.values else {}
        out += (Reading(*cell, joint, t_ns) for cell, joint in gauges.items())
        return out

    def _take(self, report: _Report, sample: SeriesSample, at: int) -> None:
        """Add one sample to its report."""
        key = (sample.measurement, sample.name)
        named, found = "", False
        for line in self._lines.get(key, ()):
            entity = self._entity(line.rule, sample.labels)
            if entity is None:
                named = named or self._stranger(line.rule, sample.labels)
                continue
            found = found or line.signal.table != "site"  # which has all series, of whomever
            signal, value = line.signal, self._value(line, sample)
            cell = (signal.table, entity, signal.name)
            if line.is_part:
                self._take_part(report.gauges, cell, line, sample, value, at)
            elif not line.measure.add:
                report.readings.append(Reading(*cell, value, at))
            elif value is not None:
                # Exporters of a place count for themselves, though their labels may be the same
                source = None if self._place is None else self._source
                part = (*key, source, *sorted(sample.labels.items()))
                total = self._sums.add(cell, part, int(value))
                if total is None:
                    self.faults.add(_too_many(sample))
                else:
                    report.sums[cell] = total, at
        for rule in self._parts.get(key, ()):
            entity = self._entity(rule, sample.labels)
            if entity is None:
                named = named or self._stranger(rule, sample.labels)
                continue
            found = True
            if isinstance(sample.value, int | float) and abs(sample.value) < 1e300:
                if rule.grows:
                    self._grow(report.grown.setdefault((id(rule), entity), {}), sample, at)
                parts = report.shares.setdefault((id(rule), entity), (rule, entity, at, {}))[3]
                parts[sample.name] = parts.get(sample.name, 0.0) + float(sample.value)
        if named and not found:
            report.strange[named] = None

    def _take_part(
        self,
        reports: dict[int, GaugeReport],
        cell: Cell,
        line: _Line,
        sample: SeriesSample,
        value: float | None,
        at: int,
    ) -> None:
        """Add the part of a gauge that a sample is, or that its growth is."""
        piece = sample.measurement is not None  # agents send their series one by one
        source = self._piece(sample) if piece else self._source
        if source is None:
            return
        if value is not None and line.measure.rate:
            # One whose labels are lent may be older than what lends them
            found = self._growth.of(_series(sample), value, at, piece or sample.lent)
            if found is not None and found[1] <= 0.0:
                return
            value = math.nan if found is None else found[0] / found[1]
        report = reports.setdefault(source, GaugeReport())
        if line.measure.most:
            report.most(cell, value)
        elif value is not None:
            report.add(cell, value)

    def _piece(self, sample: SeriesSample) -> int | None:
        """Return the number of the source that a series is by itself; None beyond the maximum."""
        key = _series(sample)
        found = self._pieces.get(key)
        if found is None:
            if len(self._pieces) >= MAX_PARTS:
                self.faults.add(_too_many(sample))
                return None
            found = self._pieces[key] = self._sums.gauges.source(())
        return found

    def _grow(self, grown: dict[str, float], sample: SeriesSample, at: int) -> None:
        """Add the growth of a counter to that of its name."""
        found = self._growth.of(_series(sample), float(cast(float, sample.value)), at)
        if found is not None:
            grown[sample.name] = grown.get(sample.name, 0.0) + found[0]

    def _entity(self, rule: _Rule, labels: Mapping[str, str]) -> int | None:
        if rule.table == "site":
            return 0 if rule.fits(labels) is not None else None
        key: tuple[Any, ...] = (id(rule), *map(labels.get, rule.labels))
        found = self._places.get(key)
        if found is not None:
            return found
        if key in self._strangers:
            return None
        given = labels if self._place is None else {"place": self._place, **labels}
        names = list(rule.names(given))
        for head, tail in names:
            head = self._names.get(head) or self._names.get(head.partition(".")[0], head)
            found = self._site.entity(rule.table, f"{head}/{tail}" if tail else head)
            if found is not None:
                break
        if found is None:
            if len(self._strangers) >= MAX_STRANGERS:
                self._strangers.clear()
            if sum(map(len, filter(None, key[1:]))) <= 4 * MAX_LABEL:
                self._strangers[key] = self._what_is_strange(rule, given, names)
        elif len(self._places) < MAX_PLACES:
            self._places[key] = found
        return found

    def _stranger(self, rule: _Rule, labels: Mapping[str, str]) -> str:
        """Return the reason why these labels name no entity of the site; "" where that is routine."""
        return self._strangers.get((id(rule), *map(labels.get, rule.labels)), "")

    def _what_is_strange(
        self, rule: _Rule, labels: Mapping[str, str], names: Sequence[tuple[str, str]]
    ) -> str:
        """Return the reason that no entity was found.

        It is routine that a site file lists no fans or disks of a known node, and that another daemon of a
        divided site mirrors the entity.
        """
        if names:
            heads = {self._names.get(head, head) for head, _ in names}
            below = rule.table != "gpu" and any(tail for _, tail in names)
            if below and any(self._site.entity(t, h) is not None for t in ("node", "rack") for h in heads):
                return ""
            if any(map(self._elsewhere, heads)):
                return ""
            text = " or ".join(dict.fromkeys(f"{h}/{t}" if t else h for h, t in names))
            return f"no {rule.table} {text[:160]!r} in the site file"
        if not rule.fits(labels):
            return self._odd_place
        wanted = " or ".join(rule.templates)
        has = ", ".join(f"{k}={v!r}" for k, v in list(labels.items())[:6])[:160]
        return f"{_NO_LABEL} the {rule.table}: expected those of {wanted[:160]}, got {has or 'none'}"

    def _value(self, line: _Line, sample: SeriesSample) -> float | None:
        """Return the value in the core unit, None for "no reading"; an unreadable value is a fault."""
        raw, measure = sample.value, line.measure
        if measure.states:
            word = raw if isinstance(raw, str) else f"{raw:g}" if isinstance(raw, int | float) else "null"
            if word not in measure.states:
                known = ", ".join(measure.states)[:80]
                self.faults.add(f"{sample.name[:80]}: {word[:40]!r} is none of {known}")
            return measure.states.get(word)
        if raw is None:
            return None
        if isinstance(raw, str):
            self.faults.add(f"{sample.name[:80]}: {raw[:40]!r}; expected a number")
            return None
        try:
            number = float(raw)
        except OverflowError:
            number = math.inf
        if math.isnan(number) or number in self._blank or number in measure.blank:
            return None
        if line.signal.kind != "counter":
            return from_dbm(number) if measure.unit == DBM else number * line.factor + line.offset
        if line.factor != 1.0 or line.offset != 0.0 or isinstance(raw, float):
            raw = number * line.factor + line.offset
        if not 0 <= raw < 2**63:
            self.faults.add(f"{sample.name[:80]}: {number:g}; expected a count from 0 to 2^63")
            return None
        return round(raw)


def _series(sample: SeriesSample) -> tuple[Any, ...]:
    """Return the identity of a series among those of its source."""
    return sample.measurement, sample.name, *sorted(sample.labels.items())


def _too_many(sample: SeriesSample) -> str:
    return f"more than {MAX_PARTS} parts of sums; {sample.name[:80]} is left out"


def _joined(samples: Iterable[SeriesSample], joins: Sequence[SeriesJoin]) -> list[SeriesSample]:
    """Return the samples with labels from other series of the report with the same label."""
    out = list(samples)
    for join in joins:
        known: dict[str, dict[str, str]] = {}
        for s in out:
            if s.name == join.series and s.labels.get(join.by):
                known.setdefault(s.labels[join.by], {k: s.labels[k] for k in join.take if k in s.labels})
        for i, s in enumerate(out):
            more = known.get(s.labels.get(join.by, ""))
            if more:
                out[i] = s._replace(labels={**more, **s.labels}, lent=True)
    return out


def _mean_growth(report: GaugeReport, rule: _Rule, entity: int, grown: Mapping[str, float]) -> None:
    """Add the ratios of what counters grew by; none where they stood still."""
    for ratio in rule.ratios:
        if ratio.growth and ratio.part in grown:
            whole = sum(grown.get(name, 0.0) for name in ratio.of)
            value = ratio.factor * grown[ratio.part] / whole if whole > 0 else None
            report.most((rule.table, entity, ratio.signal), value)


def _shares(rule: _Rule, entity: int, parts: dict[str, float], t_ns: int) -> Iterator[Reading]:
    for ratio in rule.ratios:
        if ratio.growth or ratio.part not in parts or any(name not in parts for name in ratio.of):
            continue
        whole = sum(parts[name] for name in ratio.of)
        share = parts[ratio.part] / whole if 0 < whole < math.inf else math.nan
        if not math.isnan(share):
            yield Reading(rule.table, entity, ratio.signal, 1 - share if ratio.complement else share, t_ns)


def packed(readings: list[Reading]) -> list[Reading | Block]:
    """Return the same readings with runs of equal neighbours as blocks; a second reading of a cell stays
    separate."""
    out: list[Reading | Block] = []
    rows: dict[tuple[str, int], dict[int, dict[str, float | None]]] = {}
    rest: list[Reading] = []
    for r in readings:
        cells = rows.setdefault((r.table, r.t_ns), {}).setdefault(r.entity, {})
        if r.signal in cells or not r.trusted:
            rest.append(r)
        else:
            cells[r.signal] = r.value
    for (table, t_ns), entities in rows.items():
        run: list[int] = []
        for entity in sorted(entities):
            if run and (entity != run[-1] + 1 or entities[entity].keys() != entities[run[0]].keys()):
                out += _block(table, t_ns, run, entities)
                run = []
            run.append(entity)
        out += _block(table, t_ns, run, entities)
    return out + rest


def _block(
    table: str, t_ns: int, run: list[int], entities: dict[int, dict[str, float | None]]
) -> list[Reading | Block]:
    names, n = sorted(entities[run[0]]), len(run)
    if len(names) * n < MIN_BLOCK:
        return [Reading(table, e, s, v, t_ns) for e in run for s, v in entities[e].items()]
    kinds = TABLES[table].by_name
    signals = tuple(s for s in names if kinds[s].kind != "counter")
    counters = tuple(s for s in names if kinds[s].kind == "counter")
    values = np.array([[_number(entities[e][s], math.nan) for e in run] for s in signals], np.float64)
    counts = np.array([[_number(entities[e][s], -1) for e in run] for s in counters], np.int64)
    # beyond float32: the largest, to be judged out of range
    narrow = cast(F32, np.clip(values, -1e38, 1e38).astype(np.float32).reshape(len(signals), n))
    return [Block(table, run[0], signals, narrow, counters, counts.reshape(len(counters), n), t_ns)]


def _number(value: float | None, none: float) -> float:
    return none if value is None else value
