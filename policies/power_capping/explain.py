"""Explanations of power_cap: headroom, held caps, their price, room for more racks, metrics, page section."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from policies.power_capping.demand import CLASS_NAMES, HORIZON_S, Tenant, inference_jobs, requests_growth
from policies.power_capping.feeds import carried_now, feed_loads, feed_rows, shed_rows
from policies.power_capping.headroom import (
    KINDS,
    PowerState,
    capped_counts,
    first_to_bind,
    fullest,
    limits_at,
    notes_of,
    place_rows,
    policies_of,
    power_state,
)
from policies.power_capping.held_caps import HeldCaps, held_caps, job_caps
from policies.power_capping.rack_fit import MIN_DAYS, FitPlaces, PowerHistory, RackFit, fit
from policies.power_capping.savings import NAMES, CapAccount, cap_costs
from twin.catalogue import I32, NS, clean, text
from twin.contracts import (
    DataTable,
    ExplainRequest,
    Explanation,
    ExplanationRefused,
    FigureMetric,
    KeyFigure,
    Sentence,
    SeriesWanted,
    TableColumn,
    Topic,
    TopicOption,
    Value,
    View,
    finite,
    table_of,
)

MOST_ROWS = 1000
NEARLY_FULL_PU = 0.9  # of a limit, from which on what is drawn or expected is a warning. source: estimate
SHOWN_RACKS, SHOWN_FEW = 8, 8
CLASS_TEXTS = {"waited_for": "waited for"}
MOST_HOURS, MOST_DAYS = 192.0, 366.0
MAX_PLACES = 1000  # of the metrics
KIND_NAMES = {"site": "site", "feeder": "feeder", "cdu": "CDU", "loop": "loop", "rack": "rack"}

TOPICS = (
    Topic(
        "headroom",
        "Headroom of every budget now, if side A or B fails, and by the upper band of the forecast: "
        "feeders, CDUs, loops, the site and the fullest racks.",
        (
            TopicOption("kind", "rack, feeder, cdu, loop, site; commas between", default=""),
            TopicOption("limit", "racks at most, the fullest first", "integer", 20, 0, MOST_ROWS),
        ),
        "power",
    ),
    Topic(
        "why",
        "Why a rack, node, GPU, job or feeder is capped: policy, reason, budget, class, what would lift it.",
        (TopicOption("name", "a rack, node, GPU, job or feeder; needed"),),
        "power/why",
    ),
    Topic(
        "cost",
        "What caps cost in work and saved in energy over the last hours: of the site, by class, by job.",
        (TopicOption("hours", "how far back", "number", 24.0, 0.25, MOST_HOURS),),
        "power/cost",
    ),
    Topic(
        "fit",
        "How many more racks fit on a feeder, by nameplate, by peaks, and at a risk per hour with diversity.",
        (
            TopicOption("feeder", "needed"),
            TopicOption("racks", "profile of the new racks; default: of those that are there"),
            TopicOption("risk", "chance per hour that a limit is exceeded", "number", 0.01, 1e-6, 0.5),
            TopicOption("nameplate_w", "the most that a new rack draws; default: its profile's", "number",
                        None, 1.0, 1e7),
            TopicOption("days", "of history", "number", 31.0, 1.0, MOST_DAYS),
        ),
        "power/fit",
    ),
    Topic(
        "feeds",
        "The load of the site and of each feeder, and the least and the most that caps allow it to be.",
    ),
    Topic(
        "sheddable",
        "Nodes whose GPUs could be cut to their least, in the order of the cuts, until they cover an excess.",
        (
            TopicOption("feeder", "full name; none: the site", default=""),
            TopicOption("excess_w", "the excess power to remove", "number", 0.0, 0.0, 1e12),
        ),
    ),
    Topic("metrics", "The figures for Prometheus."),
    Topic("page", "Its part of the overview: what binds first, and the fullest places."),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PowerExplainer:
    """Explainer of power_cap, with its settings."""

    policy: str
    failover: bool
    high_priority: int
    tenants: dict[str, Tenant]

    def explain(self, view: View, request: ExplainRequest) -> Explanation | Callable[[], Explanation]:
        """The explanation of a request. Raises ExplanationRefused."""
        if request.topic == "feeds":
            return self._feeds(view)
        if request.topic == "sheddable":
            return self._sheddable(view, request)
        state = power_state(view, request, self.failover, self.high_priority)
        match request.topic:
            case "why":
                return self._why(state, str(request.options["name"] or ""))
            case "cost":
                return self._cost(state, _float(request.options["hours"]))
            case "fit":
                return self._fit(state)
            case "metrics":
                return self._made(state, figures=[*_headroom_metrics(state), *_account_metrics(state)])
            case "page":
                return self._page(state)
            case "headroom":
                kinds = [k for k in str(request.options["kind"]).split(",") if k]
                limit = request.options["limit"]
                return self._headroom(state, kinds, limit if isinstance(limit, int) else SHOWN_RACKS)
        if request.entity:
            return self._why(state, request.entity)
        return self._headroom(state, [], SHOWN_RACKS)

    def _feeds(self, view: View) -> Explanation:
        """Loads for those who watch over feeds; what is only feared counts as unread."""
        carried = carried_now(view)
        loads = feed_loads(view, carried)
        names = (
            "feeder",
            ("load_w", "W"),
            "metered",
            ("age_s", "s"),
            ("least_w", "W"),
            ("most_w", "W"),
            "held_back",
        )
        return Explanation(
            policy=self.policy,
            now_ns=view.now_ns,
            figures=(
                KeyFigure("site_w", finite(loads.site_w), "W", "power of all racks"),
                KeyFigure("unheard_racks", loads.unheard_racks, "count", "racks that have never reported"),
            ),
            tables=(table_of("feeds", names, feed_rows(view, carried, loads), "the site, then its feeders"),),
        )

    def _sheddable(self, view: View, request: ExplainRequest) -> Explanation:
        name = str(request.options["feeder"] or "")
        feeder = view.site.entity("feeder", name) if name else None
        if name and feeder is None:
            raise ExplanationRefused(f"no feeder {clean(name, 120)}", "unknown")
        excess_w = _float(request.options["excess_w"])
        rows = shed_rows(view, feeder, excess_w, self.high_priority, self.tenants)
        table = table_of("nodes", ("node", "class", ("keeps_w", "W")), rows, "nodes in the order of the cuts")
        return Explanation(policy=self.policy, now_ns=view.now_ns, tables=(table,))

    def _made(
        self,
        state: PowerState,
        entity: str = "",
        sentences: Sequence[Sentence] = (),
        figures: Sequence[KeyFigure] = (),
        tables: Sequence[DataTable] = (),
    ) -> Explanation:
        return Explanation(
            policy=self.policy,
            now_ns=state.view.now_ns,
            entity=entity,
            sentences=tuple(sentences),
            figures=tuple(figures),
            tables=tuple(tables),
        )

    def _headroom(self, state: PowerState, kinds: list[str], limit: int) -> Explanation:
        if strange := [k for k in kinds if k not in KINDS]:
            expected = ", ".join(KINDS)
            raise ExplanationRefused(
                f"kind: {clean(strange[0], 40)!r} is unknown; expected some of {expected}"
            )
        rows = place_rows(state, fullest(state, max(limit, SHOWN_FEW)))
        first, n_rack = first_to_bind(rows), state.view.site.sizes["rack"]
        shown = _shown(rows, kinds, limit)
        racks = sum(1 for r in shown if r["kind"] == "rack")
        notes = notes_of(state, rows)
        if racks < n_rack and racks:
            notes.insert(0, f"the {racks} fullest of {n_rack:,} racks; `limit` shows more")
        if limits := _limits_from(shown):
            notes.insert(0, limits)
        if sources := sorted({s["from"] for r in rows for s in r["ahead"] if s["from"]}):
            notes.insert(0, f"forecast loads: upper ends of 90 % bands, of {' and of '.join(sources)}; sums "
                            "of bands count them as if all came at once: a bound, no forecast")  # fmt: skip
        counts = capped_counts(state)
        sentences = [*_first_sentences(state, rows), _capped_sentence(state)]
        figures = [
            KeyFigure("failover", state.failover), KeyFigure("racks_total", n_rack),
            KeyFigure("capped.gpus", counts.gpus, "count"),
            KeyFigure("capped.of", counts.of), KeyFigure("capped.advised_gpus", counts.advised_gpus),
            *(KeyFigure(f"capped.by_policy.{name}", n) for name, n in counts.by_policy.items()),
            *_first_figures(first),
        ]  # fmt: skip
        tables = [_policies_table(state), _places_table(shown), _ahead_table(shown)]
        return self._made(state, "", [*sentences, *_noted(notes)], figures, tables)

    def _page(self, state: PowerState) -> Explanation:
        """The fullest places that are no racks, and what binds first."""
        rows = place_rows(state, fullest(state, 1)[: MOST_ROWS // 4])
        few = sorted(rows, key=lambda r: -(r["use_pu"] if r["use_pu"] is not None else -1.0))
        few = [r for r in few if r["kind"] != "rack" and (r["use_pu"] is not None or r["dead"])][:SHOWN_FEW]
        sentences = [*_first_sentences(state, rows), _capped_sentence(state)]
        policies = policies_of(state.request)
        if policies and not any(p["authority"] == "act" for p in policies):
            sentences.append(Sentence("no power policy may act: they only advise", "note"))
        names = (
            "place",
            ("limit_w", "W"),
            ("load_w", "W"),
            ("lost_w", "W"),
            ("left_w", "W"),
            ("use_pu", "1"),
        )
        table = table_of("places", names, few, "the fullest places") if few else None
        return self._made(state, "", sentences if few else [], (), [table] if table else [])

    def _why(self, state: PowerState, name: str) -> Explanation:
        if not name:
            raise ExplanationRefused("name: expected a rack, node, GPU, job or feeder")
        caps = held_caps(state, name)
        sentences = [Sentence(_caps_words(caps))]
        sentences += [Sentence(_group_words(alike)) for alike in _alike(caps.groups).values()]
        if caps.groups:
            sentences.append(Sentence(self._order_words(caps)))
        if caps.kind == "job" and (lost := _lost_words(state, caps)):
            sentences.append(Sentence(lost))
        if caps.first is not None:
            sentences.append(Sentence(f"of the places that carry it: {first_words(caps.first)}", "note"))
        for a in caps.advised:
            sentences.append(Sentence(
                f"{a['gpus']:,} GPUs would be capped to {_watts(a['cap_low_w'], a['cap_high_w'])} by "
                f"{a['policy']}, which may only {a['authority']}: {a['reason']}"))  # fmt: skip
        if not caps.capped_gpus and not caps.advised and caps.gpus:
            sentences.append(Sentence("no cap is commanded here, and none is proposed"))
        figures = [
            KeyFigure("name", caps.name), KeyFigure("kind", caps.kind), KeyFigure("gpus", caps.gpus),
            KeyFigure("capped_gpus", caps.capped_gpus), KeyFigure("groups_total", caps.groups_total),
            *_first_figures(caps.first),
        ]  # fmt: skip
        tables = [
            _policies_table(state),
            table_of("groups", GROUP_COLUMNS, caps.groups, "GPUs that are capped alike", caps.groups_total),
            table_of(
                "advised", ADVISED_COLUMNS, caps.advised, "preview: caps that are advised, not commanded"
            ),
            table_of("nodes", NODE_COLUMNS, caps.nodes, "nodes that are capped as a whole"),
        ]
        if caps.kind == "job":
            tables.insert(
                0, table_of("jobs", JOB_COLUMNS, job_caps(state), "all jobs, in reverse order of the cuts")
            )
        return self._made(state, caps.name, [*sentences, *_noted(caps.notes)], figures, tables)

    def _order_words(self, caps: HeldCaps) -> str:
        """The order in which GPUs are cut, and the classes of these."""
        mine = dict.fromkeys(g["class"] for g in caps.groups)
        order = (
            "GPUs are cut in this order: idle, usual, high "
            f"(priority {self.high_priority} and above), waited for (inference)"
        )
        return f"{order}; these are {' and '.join(CLASS_TEXTS.get(c, c) for c in mine)}"

    def _cost(self, state: PowerState, hours: float) -> Explanation:
        found = cap_costs(state.view, _account(state), hours)
        total = found.total
        sentences = [Sentence(f"caps of the last {hours:g} h")]
        figures = [KeyFigure("hours", hours), KeyFigure("watched_h", found.watched_h)]
        if total is None:
            figures.append(KeyFigure("total", None))
        else:
            figures += [KeyFigure(f"total.{k}", v, *COST_TEXTS.get(k, ())) for k, v in total.items()]
            sentences.append(Sentence(COST_WORDS, "note"))
        tables = [
            table_of("classes", ("class", *COST_COLUMNS), found.classes, "by class"),
            table_of("jobs", ("job", *COST_COLUMNS), found.jobs, "by job"),
        ]
        return self._made(state, "", [*sentences, *_noted(found.notes)], figures, tables)

    def _fit(self, state: PowerState) -> Callable[[], Explanation]:
        """The function that counts how many more racks fit; the counts take a second or so."""
        query, site = _fit_query(state), state.view.site
        names, lost, now = _fit_places(state, query.template)
        series, notes = state.request.series, list[str]()
        if state.request.series_note:
            notes.append(state.request.series_note)
        before = None
        if series is not None:
            notes.insert(0, f"each slot of {series.step_s / 60:.0f} min counts with its highest reading of "
                            "every rack")  # fmt: skip
            racks = _fit_racks(state, query, lost)
            power_w = np.full((len(series.t_ns), site.sizes["rack"]), np.nan)
            power_w[:, racks] = series.value
            t_s = series.t_ns // NS
            before = PowerHistory(power_w, t_s // 3600, t_s // 86_400)
        nameplate_w = np.asarray(site.design.rack_max_w, np.float64)
        if not len(names):
            notes.append("no place above these racks has a budget: the number that fits is unknown")
        if not math.isfinite(query.new_w):
            notes.append(
                "the maximum power of a new rack is unknown: give nameplate_w, or a profile with rack_max_w"
            )
        elif not np.isfinite(nameplate_w[(lost.share > 0).any(axis=0)]).all():
            notes.append("some racks have no profile with a maximum power: no count by nameplate")
        if before is not None:
            notes += _censored(state)

        def counted() -> Explanation:
            by_case = {
                case: fit(places, before, nameplate_w, query.new_w, query.donors, query.risk_pu)
                for case, places in (("lost", lost), ("both", now))
            }
            return self._fit_answer(state, query, names, by_case, notes)

        return counted

    def _fit_answer(
        self,
        state: PowerState,
        query: _FitQuery,
        names: list[dict[str, Value]],
        by_case: dict[str, RackFit],
        notes: list[str],
    ) -> Explanation:
        site = state.view.site
        like = site.name("rack", query.template)
        feeder, lost = site.name("feeder", query.feeder), by_case["lost"]
        plate = f"at most {_kw(query.new_w)} each" if math.isfinite(query.new_w) else "of unknown nameplate"
        sentences = [
            Sentence(f"how many more racks fit on {feeder}, at a risk of {100 * query.risk_pu:g} % per hour"),
            Sentence(
                f"racks like {like} ({query.profile or 'no profile'}), {plate}; {query.there} are there"
            ),
        ]
        if lost.why_not:
            sentences.append(Sentence(f"by nameplate alone: {lost.why_not}", "warning"))
        else:
            learned = (
                f"from {lost.hours:,} hours of {lost.days} days, {len(query.donors)} racks to learn from"
            )
            sentence = f"{learned}; low to high: 90 % by days drawn anew, plan with the lower end"
            sentences.append(Sentence(sentence, "note"))
        figures = [
            KeyFigure("feeder", feeder), KeyFigure("profile", query.profile), KeyFigure("like", like),
            KeyFigure("nameplate_w", finite(query.new_w)), KeyFigure("risk_pu", query.risk_pu),
            KeyFigure("donors", len(query.donors)), KeyFigure("racks_there", query.there),
            KeyFigure("min_days", MIN_DAYS),
        ]  # fmt: skip
        cases: dict[str, dict[str, Value]] = {
            case: _fit_fields(found, names) for case, found in by_case.items()
        }
        figures += [KeyFigure(f"{c}.{k}", v) for c, fields in cases.items() for k, v in fields.items()]
        titles = {"lost": "if one side fails", "both": "while both sides live"}
        columns = ("case", "nameplate", "peaks", "diverse", "low", "high", "stops")
        rows: list[dict[str, Value]] = [
            {"case": titles[c], **{k: fields[k] for k in columns[1:]}} for c, fields in cases.items()
        ]
        tables = [
            table_of("counts", columns, rows, "racks that fit"),
            table_of("places", ("place", "kind", ("limit_w", "W"), "share", ("load_w", "W")), names,
                     "places above a new rack"),
        ]  # fmt: skip
        return self._made(state, feeder, [*sentences, *_noted(notes)], figures, tables)


PLACE_COLUMNS = (
    TableColumn("place"), TableColumn("kind"), TableColumn("dead", detail=True),
    TableColumn("limit_w", "W"), TableColumn("limit_from", detail=True),
    TableColumn("target_w", "W"), TableColumn("target"),
    TableColumn("load_w", "W", "load now"), TableColumn("lost_w", "W", "load if A/B fails"),
    TableColumn("left_w", "W", "left now"), TableColumn("use_pu", "1", "used now"),
    TableColumn("coming_w", "W", "load forecast"), TableColumn("coming_left_w", "W", "left by forecast"),
    TableColumn("peak_w", "W", detail=True), TableColumn("peak_lost_w", "W", detail=True),
    TableColumn("peak_s", "s", detail=True), TableColumn("metered", detail=True),
    TableColumn("unheard_racks", "", "racks unreported"), TableColumn("capped_gpus", "", "capped"),
)  # fmt: skip
STEP_COLUMNS = ("limit_w", "limit_from", "target_w", "load_w", "lost_w", "left_w", "use_pu")
GROUP_COLUMNS = (
    TableColumn("rack"), TableColumn("gpus", text="GPUs"), TableColumn("first", detail=True),
    TableColumn("cap_low_w", "W", detail=True), TableColumn("cap_high_w", "W", "cap"),
    TableColumn("most_w", "W", "of"), TableColumn("floor_w", "W", detail=True),
    TableColumn("read_back_w", "W", "reads back"), TableColumn("power_w", "W", "draws"),
    TableColumn("states"), TableColumn("since_ns", "ns", detail=True),
    TableColumn("expires_ns", "ns", detail=True), TableColumn("policy"), TableColumn("reason", detail=True),
    TableColumn("releasing", detail=True), TableColumn("class"), TableColumn("class_words", detail=True),
    TableColumn("job"), TableColumn("priority"), TableColumn("place", detail=True),
    TableColumn("place_kind", detail=True), TableColumn("place_limit_w", "W", detail=True),
    TableColumn("place_limit_from", detail=True),
    TableColumn("place_load_w", "W", detail=True), TableColumn("place_lost_w", "W", detail=True),
    TableColumn("lift", detail=True),
)  # fmt: skip
JOB_COLUMNS = (
    "job", "class", ("priority", "count"), TableColumn("gpus", text="GPUs"), "capped",
    TableColumn("cap_w", "W", "cap of a GPU"), TableColumn("power_w", "W", "a GPU draws"),
)  # fmt: skip
ADVISED_COLUMNS = ("policy", "authority", "gpus", ("cap_low_w", "W"), ("cap_high_w", "W"), "reason")
NODE_COLUMNS = ("node", ("cap_w", "W"), ("most_w", "W"), "policy")
COST_COLUMNS = (
    TableColumn("lost_gpu_h", "GPU-h", "work lost"), TableColumn("lost_most_gpu_h", "GPU-h", "at most"),
    TableColumn("lost_pu", "1", "of its work"), TableColumn("busy_gpu_h", "GPU-h", detail=True),
    TableColumn("saved_kwh", "kWh", "not drawn"), TableColumn("net_kwh", "kWh", "net"),
    TableColumn("held_gpu_h", "GPU-h", "at their cap"), TableColumn("capped_gpu_h", "GPU-h", detail=True),
    TableColumn("guessed_gpu_h", "GPU-h", detail=True), TableColumn("unheard_gpu_h", "GPU-h", detail=True),
)  # fmt: skip
COST_WORDS = (
    "At most: if all GPUs at their caps wanted all they may have. Net: energy saved minus the energy to redo "
    "the lost work. Share: of the job's work while capped."
)
COST_TEXTS = {
    "lost_gpu_h": ("GPU-h", "work lost"),
    "saved_kwh": ("kWh", "energy not drawn"),
    "net_kwh": ("kWh", "net: that minus the energy to redo the lost work"),
}


def _float(value: Value) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _account(state: PowerState) -> CapAccount | None:
    account = state.request.account
    return account if isinstance(account, CapAccount) else None


def _caps_words(caps: HeldCaps) -> str:
    """The caps of a place in one sentence: GPUs, power, since when."""
    words = f"{caps.kind} {caps.name}: {caps.capped_gpus:,} of {caps.gpus:,} GPUs capped"
    if not caps.groups:
        return words
    low, high = min(g["cap_low_w"] for g in caps.groups), max(g["cap_high_w"] for g in caps.groups)
    words += f" to {_watts(low, high)} of {max(g['most_w'] for g in caps.groups):,.0f} W"
    begun_ns = min(g["since_ns"] for g in caps.groups)
    return f"{words}, without a break since {text.utc(begun_ns)} UTC" if begun_ns else words


def _lost_words(state: PowerState, caps: HeldCaps) -> str:
    """The work that caps cost a job so far, and the time that this makes; "" where none is counted."""
    rows = cap_costs(state.view, _account(state), MOST_HOURS).jobs
    cost = next((row for row in rows if row["job"] == caps.name), None)
    if cost is None or not caps.gpus:
        return ""
    late_s = 3600.0 * cost["lost_gpu_h"] / caps.gpus
    return (
        f"caps cost it {100 * cost['lost_pu']:.0f} % of its work while it had them, {cost['lost_gpu_h']:.3g} "
        f"GPU-h: it is about {text.duration(round(late_s))} late"
    )


def _kw(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value / 1e3:,.1f} kW" if abs(value) < 999_950 else f"{value / 1e3:,.0f} kW"


def _watts(low: float, high: float) -> str:
    return f"{low:,.0f} W" if round(low) == round(high) else f"{low:,.0f} to {high:,.0f} W"


def _noted(notes: list[str]) -> list[Sentence]:
    return [Sentence(note, "note") for note in notes]


def first_words(first: dict[str, Any]) -> str:
    """Return a sentence on the first binding place."""
    place = "the site" if first["kind"] == "site" else f"{KIND_NAMES[first['kind']]} {first['place']}"
    limit = f"its {_kw(first['limit_w'])} ({first['limit_from']})"
    if first["target"]:
        limit = f"load target {first['target']} of {_kw(first['limit_w'])}"
    at, verb = "now", "is"
    if first["in_s"]:
        at, verb = f"forecast in {text.duration(first['in_s'])}, upper end of its 90 % band", "may be"
        if first["bound"]:
            at = f"worst case in {text.duration(first['in_s'])}, not a forecast "
            at += "(all racks reach the upper ends of their 90 % bands at once)"
    lost = " if the other side fails" if first["lost"] else ""
    if first["over"]:
        return f"{at}: {place} {verb} beyond its limit{lost}, {_kw(-first['left_w'])} above {limit}"
    left = f"{_kw(first['left_w'])} left of {limit}, {_pct(first['use_pu'])} used"
    return f"{at}: {place} binds first{lost}: {left}"


def _limits_from(rows: list[dict[str, Any]]) -> str:
    """The sources of the limits of these places by kind, as a sentence; "" without a limit."""
    of: dict[str, list[str]] = {}
    for row in rows:
        if row["limit_w"] is not None and row["limit_from"] not in of.setdefault(row["kind"], []):
            of[row["kind"]].append(row["limit_from"])
    parts = [f"{KIND_NAMES[kind]}: {', '.join(found[:3])}" for kind, found in of.items() if found]
    return f"limits come from: {'; '.join(parts)}" if parts else ""


def _pct(share: float) -> str:
    return f"{100 * share:.0f} %" if share < 9.99 else "> 999 %"


def _first_sentences(state: PowerState, rows: list[dict[str, Any]]) -> list[Sentence]:
    """Sentences on the first place to bind. A bound is no warning, and hides none."""
    first, expected = first_to_bind(rows), first_to_bind(rows, bounds=False)
    out: list[Sentence] = []
    if dead := [row["place"] for row in rows if row["dead"]]:
        more = f" and {len(dead) - 3} more" if len(dead) > 3 else ""
        words = "has no voltage, or its breaker is open: the other side carries its load"
        if len(dead) > 1:
            words = "have no voltage, or their breakers are open: the other side carries their load"
        out.append(Sentence(f"feeder {', '.join(dead[:3])}{more} {words}", "warning"))
    if first is None:
        words = "no binding limit is known: no place has both a limit and a load"
        return [*out, Sentence(words, "warning")]
    if expected is not None and expected["use_pu"] >= NEARLY_FULL_PU:
        out.append(Sentence(first_words(expected), "warning"))
    if first["bound"] or expected is None or expected["use_pu"] < NEARLY_FULL_PU:
        out.append(Sentence(first_words(first)))
    acts = any(p["authority"] == "act" and not p["suspended"] for p in policies_of(state.request))
    if state.request.role == "leader" and first["over"] and first["in_s"] and acts:
        words = "The forecast ignores future caps; armed policies will cap before this happens."
        out.append(Sentence(words))
    view = state.view
    growth = requests_growth(view)
    if growth > 1.0 and inference_jobs(view).any():
        words = f"requests may rise to {growth:.2g} times the present rate within {text.duration(HORIZON_S)}"
        out.append(Sentence(f"{words}: GPUs of inference jobs are planned with that", "note"))
    return out


def _first_figures(first: dict[str, Any] | None) -> list[KeyFigure]:
    if first is None:
        return [KeyFigure("first", None)]
    return [KeyFigure(f"first.{k}", v) for k, v in first.items()]


def _capped_sentence(state: PowerState) -> Sentence:
    counts = capped_counts(state)
    by = ", ".join(f"{n:,} by {clean(p, 40) or 'an earlier run'}" for p, n in counts.by_policy.items())
    sentence = f"capped: {counts.gpus:,} of {counts.of:,} GPUs" + (f" ({by})" if by else "")
    if counts.advised_gpus:
        sentence += f"; {counts.advised_gpus:,} more only by advice (preview, not commanded)"
    return Sentence(sentence)


def _shown(rows: list[dict[str, Any]], kinds: list[str], limit: int) -> list[dict[str, Any]]:
    """Return rows of these kinds, the site first, and only the fullest racks."""
    shown: list[dict[str, Any]] = []
    for kind in reversed(KINDS):
        if kinds and kind not in kinds:
            continue
        mine = [r for r in rows if r["kind"] == kind]
        if kind == "rack":
            mine = sorted(mine, key=lambda r: -(r["use_pu"] if r["use_pu"] is not None else -1.0))[:limit]
        shown += mine
    return shown


def _policies_table(state: PowerState) -> DataTable:
    return table_of("policies", ("policy", "authority", "suspended"), policies_of(state.request), "policies")


def _places_table(rows: list[dict[str, Any]]) -> DataTable:
    """The places, with the highest load and the least that is left by any forecast."""
    made, ahead_s = list[dict[str, Any]](), 0.0
    for row in rows:
        coming = [s["lost_w"] if s["lost_w"] is not None else s["load_w"] for s in row["ahead"]]
        left = [s["left_w"] for s in row["ahead"] if s["left_w"] is not None]
        most_w = max((w for w in coming if w is not None), default=None)
        made.append(row | {"coming_w": most_w, "coming_left_w": min(left, default=None)})
        ahead_s = max([ahead_s, *(s["horizon_s"] for s in row["ahead"])])
    words = "places; left and used: of the limit, of a feeder with the other side lost, or of the target"
    if ahead_s:
        words += f"; forecast: the worst within {text.duration(ahead_s)}, upper ends of 90 % bands"
    return table_of("places", PLACE_COLUMNS, made, words)


def _ahead_table(rows: list[dict[str, Any]]) -> DataTable:
    steps = [{"place": row["place"]} | step for row in rows for step in row["ahead"]]
    names = [TableColumn(n, detail=True) for n in ("place", "horizon_s", "from", "bound", *STEP_COLUMNS)]
    return table_of("places.ahead", names, steps)


def _alike(groups: list[dict[str, Any]]) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    blocks: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for group in groups:
        blocks.setdefault((group["policy"], group["reason"], group["lift"]), []).append(group)
    return blocks


def _group_words(groups: list[dict[str, Any]]) -> str:
    """GPUs that the same policy holds for the same reason, in a sentence."""
    g, count = groups[0], sum(x["gpus"] for x in groups)
    sentence = f"{count:,} GPU{'s' if count > 1 else ''} by {g['policy']}"
    sentence += ", being given back" if g["releasing"] else f": {g['reason']}"
    if g["place"]:
        place = "the site" if g["place_kind"] == "site" else f"{KIND_NAMES[g['place_kind']]} {g['place']}"
        sentence += f"; {place} carries {_kw(g['place_load_w'])}"
        if g["place_lost_w"] is not None:
            sentence += f", {_kw(g['place_lost_w'])} if the other side fails"
        if g["place_limit_w"] is not None:
            sentence += f"; it may carry {_kw(g['place_limit_w'])} ({g['place_limit_from']})"
    return f"{sentence}; {g['lift']}"


def _headroom_metrics(state: PowerState) -> list[KeyFigure]:
    """Budget and headroom of feeders, CDUs, loops and the site, and capped GPUs."""
    site, loads = state.view.site, state.loads
    if not site.sizes["rack"]:
        return []
    limits, kinds = limits_at(state, state.view.now_ns), np.array(loads.kind)
    known = np.flatnonzero(np.isfinite(limits.budget_w) & np.isfinite(loads.now_w) & (kinds != "rack"))
    what = "budget less load; case: as fed now, or if the other side fails"
    out = []
    for place in known[:MAX_PLACES].tolist():
        name, kind = state.now.name(site, place), loads.kind[place]
        budget_w, of = finite(limits.budget_w[place]), {"kind": kind, "name": name}
        out.append(_metric("power_budget_watts", budget_w, "its maximum load", of))
        for case, load_w in (("now", loads.now_w), ("lost", loads.lost_w)):
            if case == "now" or kind == "feeder":
                labels = {"kind": kind, "name": name, "case": case}
                left_w = finite(limits.budget_w[place] - load_w[place])
                out.append(_metric("power_headroom_watts", left_w, what, labels))
    counts = capped_counts(state)
    out.append(_metric("power_headroom_left_out", max(0, len(known) - MAX_PLACES), "places beyond the bound"))
    for policy, count in counts.by_policy.items():
        out.append(_metric("power_capped_gpus", count, "GPUs held below their maximum", {"policy": policy}))
    advised = "GPUs that their policies would cap with authority act"
    out.append(_metric("power_advised_gpus", counts.advised_gpus, advised))
    return out


def _account_metrics(state: PowerState) -> list[KeyFigure]:
    """Costs since the account began; the net saving may fall, so that it is a gauge."""
    account, out = _account(state), list[KeyFigure]()
    if account is None or not state.view.site.sizes["rack"]:
        return out
    for name in CLASS_NAMES:
        row = dict(zip(NAMES, account.totals.get(f"class/{name}", [0.0] * len(NAMES)), strict=True))
        lost, of = "work lost to caps", {"class": name}
        for case, column in (("expected", "lost_gpu_s"), ("most", "lost_most_gpu_s")):
            labels = of | {"case": case}
            out.append(_metric("power_lost_gpu_hours", row[column] / 3600, lost, labels, counter=True))
        saved_kwh = max(0.0, row["saved_ws"]) / 3.6e6
        out.append(_metric("power_saved_kwh", saved_kwh, "energy not drawn under caps", of, counter=True))
        net = "energy saved minus the energy to redo the lost work"
        out.append(_metric("power_net_kwh", row["net_ws"] / 3.6e6, net, of))
    return out


def _metric(
    name: str, value: Value, what: str, labels: dict[str, str] | None = None, counter: bool = False
) -> KeyFigure:
    metric = FigureMetric(name, "counter" if counter else "gauge", labels or {})
    return KeyFigure(name, value, text=what, metric=metric)


@dataclass(frozen=True, slots=True)
class _FitQuery:
    """Query of rack fit: the rack whose feeds a new one shares, and the donor racks of its power."""

    feeder: int
    template: int
    profile: str | None
    donors: np.ndarray
    new_w: float  # nameplate; NaN unknown
    risk_pu: float
    days: float
    there: int


def _fit_query(state: PowerState) -> _FitQuery:
    """Return the query of a request. Raises ExplanationRefused."""
    site, options = state.view.site, state.request.options
    name = str(options["feeder"] or "")
    feeder = site.entity("feeder", name)
    if feeder is None:
        why = f"no feeder {clean(name, 120)}; `racktwin power show --kind feeder` lists them"
        raise ExplanationRefused(why, "unknown")
    there = site.racks_below(feeder)
    if not len(there):
        why = f"{site.name('feeder', feeder)} feeds no rack: the place of a new rack is unknown"
        raise ExplanationRefused(why, "impossible")
    profile = None if options["racks"] is None else str(options["racks"])
    given_w = _float(options["nameplate_w"])
    fed = {r: (*site.feeders_of_rack.of_row(r).tolist(), int(site.cdu_of_rack[r])) for r in there.tolist()}
    common = max(set(fed.values()), key=lambda f: (sum(1 for v in fed.values() if v == f), f))
    template = min(r for r, f in fed.items() if f == common)
    nodes = np.diff(site.node_start_of_rack)
    if profile is None:
        busy = [r for r, f in fed.items() if f == common and nodes[r] > 0]
        template = busy[0] if busy else template
        profile = site.profile_of_rack[template]
    known = sorted({p for p in site.profile_of_rack if p})
    if profile is not None and profile not in known and not math.isfinite(given_w):
        why = f"racks: no rack here has the profile {clean(profile, 60)}; expected one of "
        raise ExplanationRefused(f"{why}{', '.join(known) or 'none'}, or nameplate_w beside it", "unknown")
    alike = np.array([p == profile for p in site.profile_of_rack], np.bool_) & (nodes > 0)
    alike &= profile is not None
    new_w, stated_w = given_w, site.design.rack_max_w[alike]
    if not math.isfinite(new_w) and np.isfinite(stated_w).any():
        new_w = float(np.nanmax(stated_w))
    return _FitQuery(
        feeder, template, profile, np.flatnonzero(alike), new_w,
        _float(options["risk"]), _float(options["days"]), len(there),
    )  # fmt: skip


def _fit_places(state: PowerState, template: int) -> tuple[list[dict[str, Value]], FitPlaces, FitPlaces]:
    """(places with a limit above a new rack, their loads with the other side lost, and with both)."""
    site, n = state.view.site, len(state.loads.now_w)
    limits = limits_at(state, state.view.now_ns)
    bound = np.isfinite(limits.budget_w)
    kinds = np.array([k not in ("rack",) for k in state.loads.kind], np.bool_)
    shares = []
    for carried in (state.lost, state.now):
        share = np.zeros((n, site.sizes["rack"]))
        mine = carried.pairs.place < n
        share[carried.pairs.place[mine], carried.pairs.rack[mine]] = carried.pairs.share[mine]
        shares.append(share)
    at = np.flatnonzero((shares[0][:, template] > 0) & bound & kinds)
    names: list[dict[str, Value]] = [
        {
            "place": state.now.name(site, int(p)),
            "kind": state.loads.kind[int(p)],
            "limit_w": float(limits.budget_w[p]),
            "share": float(shares[0][p, template]),
            "load_w": finite(state.loads.lost_w[p]),
        }
        for p in at
    ]
    lost, now = (FitPlaces(limits.budget_w[at].astype(np.float64), s[at], s[at, template]) for s in shares)
    return names, lost, now


def _fit_racks(state: PowerState, query: _FitQuery, lost: FitPlaces) -> I32:
    """Racks with a history that counts: the present ones, and those that stand for a new one."""
    every = np.arange(state.view.site.sizes["rack"])
    return np.flatnonzero((lost.share > 0).any(axis=0) | np.isin(every, query.donors)).astype(np.int32)


def fit_series(state: PowerState) -> SeriesWanted:
    """The recorded power that the topic `fit` needs. Raises ExplanationRefused."""
    query = _fit_query(state)
    _, lost, _ = _fit_places(state, query.template)
    return SeriesWanted("rack.power_w", _fit_racks(state, query, lost), query.days)


def _fit_fields(found: RackFit, names: list[dict[str, Value]]) -> dict[str, Value]:
    """The counts as figures, with the name of the place that stops the next rack."""
    fields: dict[str, Value] = asdict(found)
    binds = found.binds
    del fields["binds"]
    return fields | {"stops": names[binds]["place"] if 0 <= binds < len(names) else None}


def _censored(state: PowerState) -> list[str]:
    """Return a note if caps reduced the recorded power, which then shows less than the demand."""
    total = cap_costs(state.view, _account(state), MOST_HOURS).total
    if not total or total["held_gpu_h"] <= 0.001 * total["busy_gpu_h"] or total["busy_gpu_h"] <= 0:
        return []
    share = f"{100 * total['held_gpu_h'] / total['busy_gpu_h']:.1f} %"
    sentence = (
        f"caps held {share} of the busy GPU-hours that were counted: demand was higher than the history "
    )
    return [f"{sentence}shows, and fewer racks fit than diversity says"]
