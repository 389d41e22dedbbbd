"""Health findings: the nodes that operators should look after and the reasons, one finding per node, not per
GPU.

A fault that the diagnosis reports is not reported twice, a disturbance by the facility is no GPU's fault, and
a storm ends in one finding that counts the rest. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from twin.catalogue import F64, I32, NS, U8, Bool
from twin.contracts import (
    ACTION_WORDS,
    ACTIONS,
    BY_FACILITY,
    BY_POWER,
    DEGRADED,
    FAILED,
    GRAVITY,
    LEVELS,
    PAIRED,
    PARTS,
    SAME_S,
    WATCH,
    Evidence,
    FailureLog,
    Fault,
    Finding,
    Forecast,
    Windows,
    action,
    is_failure,
    name_of_part,
    todo_words,
)
from twin.health.common_cause import JOIN_S
from twin.health.health import HealthState
from twin.health.rules import DIAGNOSIS, Rule
from twin.health.rules_node import RECURS
from twin.health.verdict_specs import SPECS
from twin.site import Site, lost_with, scale_up_domain

# Titles of findings are the texts of rules without their figures, which change; those are in the evidence.
_NOTE = ": {note}"
# Rules whose figures or notes move; what ends with a note is cut before it. A code, or what a GPU asks for,
# stays in the title.
_SAID = {
    "xid_repeated": "the same XID recurred within 24 h",
    "code_repeated": "the same code recurred within 24 h",
    "sxid_repeated": "the same SXID recurred within 24 h",
    "not_cured": "its faults remain after restarts of its node",
    "row_remap_growth": "rows of its memory were remapped",
    "ecc_dbe": "double-bit errors of its memory",
    "ecc_sbe": "many single-bit errors of its memory",
    "ecc_sbe_daily": "many single-bit errors of its memory",
    "nvlink_errors": "many errors of its NVLinks",
    "nvlink_replays": "many replays on its NVLinks",
    "nvlink_recoveries": "recoveries of its NVLinks",
    "nvlink_recovering": "an NVLink keeps recovering",
    "nvlink_recovered": "its NVLinks recovered far more often than others",
    "pcie_replays": "many replays on its PCIe link",
    "thermal_margin": "it is near its temperature limit",
    "thermal_limit": "it is above its slowdown temperature",
    "temp_residual": "it is hotter than its power and coolant explain",
    "clock_residual": "its clock is lower than its power and cap explain",
    "thermal_slowdown": "its hardware slows it down, but not its neighbours",
    "telemetry_gap": "it was silent at times within the last hour",
    "wear": "one of its learned parameters nears its limit",
    "cpu_temp": "its CPU is near its temperature limit",
    "inlet_temp": "its inlet air is warm",
    "dpu_temp": "it is near its shutdown temperature",
    "dpu_port_errors": "many errors on its ports",
    "reboots": "it restarted repeatedly",
    "ports_down": "more ports are down than usual",
    "errors": "many errors",
    "discards": "packets discarded: congestion",
    "link_ber": "many bits are wrong before correction",
    "link_dark": "its optics receive hardly any light",
    "switch_flaps": "many flaps of its ports",
    "link_flaps": "it went down and up again",
    "link_errors": "many errors",
    "link_symbols": "many symbol errors",
    "link_recoveries": "many recoveries",
    "link_discards": "packets discarded: congestion",
    "psu_lost": "it gives far less than the other one",
    "psu_empty": "it gives far less than the other one: its feed may be lost, or it is on standby",
}
TITLES: dict[str, str] = {
    rule.id: rule.words.removesuffix(_NOTE)
    for spec in SPECS.values()
    for rule in spec.rules
    if rule.words.endswith(_NOTE)
} | _SAID


def heading(evidence: Evidence) -> str:
    """Return the text of evidence without the figures that change."""
    return TITLES.get(evidence.rule, evidence.text)


CHANCE, DAY_S = "node.failure_pu", 86_400.0
# source: of alarms raised at a calibrated chance of one half or more, at least half come true, which is the
# precision that a drain needs to be worth it; below, most would be for nothing
LIKELY_PU = 0.5
STILL_LIKELY_PU = 0.4  # an alarm that stands is kept down to here, so that it does not flicker; estimate
WEARS_OUT_S = 14 * DAY_S  # time enough to order a part and plan the work; source: estimate
MOST = 200  # findings at once; the rest is counted in one more
MOST_LOOKED_AT = 4 * MOST  # suspects whose reasons are looked up, the gravest first
MOST_EVIDENCE, MOST_ENTITIES, MOST_TITLE = 6, 8, 160
_NOTHING_TO_CURE = (action("none"), action("watch"), action("check_facility"))
_OF_SOFTWARE = action("restart_app")
_RUNS_ON = ("psu_lost",)  # a part fails, and its node runs on: as grave as the diagnosis says


@dataclass(frozen=True, slots=True)
class _Reason:
    """An unhealthy part and the evidence against it."""

    table: str
    name: str  # within its node; "" for the node itself
    level: int
    action: int
    sure_pu: float
    evidence: tuple[Evidence, ...]


def findings(
    health: HealthState,
    forecasts: Mapping[tuple[str, float], Forecast],
    site: Site,
    windows: Windows,
    faults: Sequence[Fault] = (),
    active: Collection[str] = (),
) -> list[Finding]:
    """Return the health findings of this site now, the gravest first, at most MOST + 1.

    `faults` are those that the diagnosis reports anyway, or did lately; `active` the ids of the findings that
    stand. The result depends on nothing else. Parts under maintenance give no finding.
    """
    look = _Look(health, forecasts, site, windows, faults, active)
    found = [*look.nodes(), *look.shared(), *look.lemons(), *look.wear()]
    for part in ("switch", "link", "pump", "psu", "dpu"):
        found += look.single(part)
    found.sort(key=lambda f: -GRAVITY[f.severity])  # stable: in order of the site within a severity
    rest = len(found) - MOST + look.left_out if len(found) > MOST else look.left_out
    if rest <= 0:
        return found
    worst = found[MOST].severity if len(found) > MOST else "warning"
    return [*found[:MOST], _more(rest, worst)]


def _wet_below(fault: Fault, site: Site) -> list[tuple[str, int]]:
    """Return the nodes below a reported leak."""
    if fault.kind != "leak" or fault.table not in ("node", "rack"):
        return []
    if fault.table == "node":
        return [("node", int(node)) for node in site.nodes_below(fault.entity)]
    first, last = site.node_start_of_rack[fault.entity : fault.entity + 2].tolist()
    return [("node", node) for node in range(first, last)]


class _Look:
    """One pass over the verdicts."""

    def __init__(
        self,
        health: HealthState,
        forecasts: Mapping[tuple[str, float], Forecast],
        site: Site,
        windows: Windows,
        faults: Sequence[Fault],
        active: Collection[str],
    ) -> None:
        self.health, self.site, self.windows, self.active = health, site, windows, active
        self.left_out = 0
        held = forecasts.get((CHANCE, DAY_S))
        self.forecast = held if held is not None and len(held.mean) == site.sizes["node"] else None
        self._gravity_of: dict[tuple[str, int], dict[str, int]] = {}  # kinds and their gravity
        for fault in faults:
            if fault.signal:  # a sensor that reads wrong explains no device that is not well
                continue
            for place in ((fault.table, fault.entity), *_wet_below(fault, site)):
                kinds = self._gravity_of.setdefault(place, {})
                kinds[fault.kind] = max(kinds.get(fault.kind, 0), GRAVITY.get(fault.severity, 0))
        self.faults = faults
        self.facility_alarmed = any(f.severity == "critical" and f.table not in ("gpu", "node", "link")
                                 for f in faults)  # fmt: skip
        self._together: I32 | None = None
        self._followers: dict[int, I32] | None = None
        self._speaks: dict[str, dict[int, list[Evidence]]] = {}
        self._verdicts = cache(health.health)

    # -- nodes

    def nodes(self) -> list[Finding]:
        """Return a finding for each node that is unhealthy or likely to become so soon."""
        site, worst = self.site, self._worst()
        ill = np.flatnonzero(self._verdicts("gpu").level >= DEGRADED)
        likely = self._likely()
        concern = np.where(worst >= DEGRADED, worst, 0)
        if likely is not None:
            concern = np.where(likely & (concern < DEGRADED), DEGRADED, concern)
        suspects = self._unworked("node", np.flatnonzero(concern))
        if len(suspects) == 0:
            return []
        suspects = suspects[~np.isin(suspects, np.concatenate([self.together(), self._following()]))]
        order = suspects[np.argsort(-concern[suspects].astype(np.int64), kind="stable")]
        found: list[Finding] = []
        done = 0
        while done < min(len(order), MOST_LOOKED_AT) and len(found) < MOST:
            some = order[done : done + MOST]
            self._listen("node", some)
            self._listen("gpu", ill[np.isin(site.node_of_gpu[ill], some)])
            alarms = (self._node(i, likely is not None and bool(likely[i])) for i in some.tolist())
            found += [f for f in alarms if f is not None]
            done += len(some)
        self.left_out += len(order) - done
        return found

    def _worst(self) -> U8:
        """Return the level of each node, or of a GPU of it that is degraded or worse [n_node]."""
        out, level = self._verdicts("node").level.copy(), self._verdicts("gpu").level
        ill = np.flatnonzero(level >= DEGRADED)
        np.maximum.at(out, self.site.node_of_gpu[ill], level[ill])
        return out

    def _listen(self, part: str, index: np.ndarray) -> None:
        """Look up the evidence against these parts."""
        at = np.sort(index).astype(np.int32)
        self._speaks[part] = self.health.verdicts.reasons(part, at, DEGRADED) if len(at) else {}

    def _likely(self) -> Bool | None:
        """Return the nodes with a chance of failing within a day of at least one half [n]; None without a
        forecast."""
        if self.forecast is None:
            return None
        likely: Bool = self.forecast.mean >= np.float32(LIKELY_PU)
        still = np.flatnonzero((self.forecast.mean >= np.float32(STILL_LIKELY_PU)) & ~likely)
        if len(still):  # the findings of a node that has just failed are of that failure
            log = self.health.log()
            ended_ns = np.where(log.end_ns == 0, self.health.looked_ns, log.end_ns)
            fresh = log.node[ended_ns >= self.health.looked_ns - round(DAY_S * NS)]
            for i in np.setdiff1d(still, fresh).tolist():
                likely[i] = f"health/{self.site.name('node', i)}" in self.active
        return likely

    def _node(self, node: int, likely: bool) -> Finding | None:
        name, site = self.site.name("node", node), self.site
        reasons = [r] if (r := self._reason("node", node, "")) is not None else []
        first, last = int(site.gpu_start_of_node[node]), int(site.gpu_start_of_node[node + 1])
        spared = self.windows.mask("gpu")
        level = self._verdicts("gpu").level
        for gpu in range(first, last):
            if level[gpu] >= DEGRADED and not (spared is not None and spared[gpu]):
                found = self._reason("gpu", gpu, f"gpu{gpu - first}", node)
                reasons += [found] if found is not None else []
        # A GPU's own reason is more specific than trouble that recurs on its node
        reasons.sort(key=lambda r: (-r.level, not r.name and {e.rule for e in r.evidence} == {RECURS}))
        likely = likely and not (reasons and reasons[0].level >= FAILED)
        if not reasons and not likely:
            return None
        said = _sentences(reasons)
        what = _heading(reasons[0]) if reasons else "is likely to fail within a day"
        if likely:
            said.insert(min(len(said), MOST_EVIDENCE - 1), self._chance(node))
        if reasons and (many := len(self.followers().get(node, ()))):
            who, they = ("node", "it is") if many == 1 else ("nodes", "they are")
            follow = f"{many} more {who} of its scale-up domain failed with it; {they} not to blame"
            said.insert(min(len(said), 1), follow)
        todo = max((r.action for r in reasons), default=action("drain"))
        if likely and todo < action("drain"):  # what may be about to fail should not be at work when it does
            todo = action("drain")
        at_once = (
            likely
            or bool(reasons and reasons[0].level >= FAILED)
            or any(e.rule == RECURS for r in reasons for e in r.evidence)
        )
        sure = max((r.sure_pu for r in reasons if r.level == reasons[0].level), default=0.0)
        if likely and not reasons and self.forecast is not None:
            sure = float(self.forecast.mean[node])
        entities = (name, *(f"{name}/{r.name}" for r in reasons if r.name))
        return Finding(f"health/{name}", _severity(reasons, likely), _title(name, what, bool(reasons)),
                       entities[:MOST_ENTITIES], tuple(said[:MOST_EVIDENCE]), sure,
                       _todo(todo, at_once),
                       len(entities))  # fmt: skip

    def _reason(self, part: str, index: int, name: str, node: int = -1) -> _Reason | None:
        """Return the reasons against a part, unless they are reported elsewhere or not caused by it."""
        held = self._verdicts(part)
        level, todo = int(held.level[index]), int(held.action[index])
        if level < DEGRADED or todo == action("check_facility"):
            return None
        if int(held.lowered[index]) in (BY_FACILITY, BY_POWER) and todo in _NOTHING_TO_CURE:
            return None
        gravities = self._gravities(part, index, node)
        speaks = [
            e for e in self._speaks[part].get(index, []) if not is_over(SPECS[part].rule(e.rule), gravities)
        ]
        if not speaks and (part == "node" or not self._stands(part, index, node)):
            return None  # all is in its members, or the level is only kept a little longer than its reasons
        if speaks and gravities:
            alarmed = [is_alarmed(SPECS[part].rule(e.rule), e.level, gravities) for e in speaks]
            if all(alarmed):
                return None
            level = max(e.level for e, known in zip(speaks, alarmed, strict=True) if not known)
            order = sorted(range(len(speaks)), key=lambda k: (alarmed[k], -speaks[k].level))
            speaks = [speaks[k] for k in order]
        sure = float(held.sure_pu[index])
        return _Reason(part, name, level, todo, sure if np.isfinite(sure) else 0.0, tuple(speaks))

    def _stands(self, part: str, index: int, node: int) -> bool:
        """Return True if a finding on this part is active already."""
        if node >= 0:
            return f"health/{self.site.name('node', node)}" in self.active
        owner = self.site.name(PARTS[part], index // 2 if part in PAIRED else index)
        return f"health/{part}/{name_of_part(part, index, owner)}" in self.active

    def _gravities(self, part: str, index: int, node: int = -1) -> dict[str, int]:
        """Return the faults that the diagnosis reports of a part, and of the whole node of a GPU: kinds with
        their gravity.
        """
        own = self._gravity_of.get((PARTS[part], index // 2 if part in PAIRED else index), {})
        return own if node < 0 else self._gravity_of.get(("node", node), {}) | own

    def _chance(self, node: int) -> str:
        assert self.forecast is not None
        mean, low, high = (100 * float(x[node]) for x in (self.forecast.mean, self.forecast.lo,
                                                          self.forecast.hi))  # fmt: skip
        known = self.forecast.mean[np.isfinite(self.forecast.mean)].astype(np.float64)
        usual = 100 * float(known.mean()) if len(known) else 0.0
        times = f", {mean / usual:.0f} times the average here" if usual > 0 and mean / usual >= 2 else ""
        interval = f"(90 % interval {low:.0f} to {high:.0f} %)"
        return f"chance of failing within a day: {mean:.0f} % {interval}{times}"

    # -- what has a cause in common

    def followers(self) -> dict[int, I32]:
        """Return the nodes that failed with an NVLink of another node of their scale-up domain, by that
        node.

        Its link recovered again and again before, and an XID names it. None of two such nodes follows the
        other.
        """
        if self._followers is None:
            log, links = self.health.log(), self.health.nvlinks
            of_node: dict[int, int] = {}
            for gpu in np.flatnonzero(self.health.recurring.failing).tolist():
                if named_ns := links.named_ns(gpu):
                    node = int(self.site.node_of_gpu[gpu])
                    of_node[node] = min(named_ns, of_node.get(node, named_ns))
            of_link = np.array([name == "link" for name in log.classes], np.bool_)[log.kind]
            self._followers = {}
            for node, named_ns in of_node.items():
                with_it = log.start_ns >= named_ns - round(SAME_S * NS)
                down = np.unique(log.node[(log.end_ns == 0) & of_link & with_it])
                _, domain = scale_up_domain(self.site, node)
                below = np.setdiff1d(np.intersect1d(domain, down), list(of_node))
                self._followers[node] = below.astype(np.int32)
        return self._followers

    def _following(self) -> I32:
        return np.concatenate([np.zeros(0, np.int32), *self.followers().values()])

    def together(self) -> I32:
        """Nodes that are down by a cause in common with others, ascending; not those that a known link takes
        down, nor any with a link that recovers again and again: that link may be the cause; nor any that has
        reasons of its own and stays down when the cause is over.
        """
        if self._together is None:
            log = self.health.log()
            failing = self.site.node_of_gpu[self.health.recurring.failing]
            known = np.concatenate([failing, self._following(), self._left_over(log)])
            self._together = np.setdiff1d(log.node[_down_together(log)], known).astype(np.int32)
        return self._together

    def _left_over(self, log: FailureLog) -> I32:
        """Return the nodes with a verdict against them that are down, though their common cause is over.

        It is if most of those that failed with them are well again; if a node failed alone, an hour after
        the fault above it took it down, once that is not reported any more.
        """
        well_ns, _ = self.health.failures.well_again()
        rows = _down_together(log)
        started_ns = np.zeros(self.site.sizes["node"], np.int64)  # of nodes whose cause is not judged yet
        started_ns[log.node[rows]] = log.start_ns[rows]
        down, over = np.zeros((2, len(started_ns)), np.bool_)
        down[log.node[rows]] = well_ns[log.node[rows]] == 0
        present = {f.kind for f in self.faults}
        for s in reversed(self.health.failures.shocks() if down.any() else ()):  # the newest of a node
            nodes = np.array(s.nodes, np.int32)
            new = nodes[started_ns[nodes] >= s.start_ns]
            if not len(new):
                continue
            if s.count > 1:
                ended = bool(2 * np.count_nonzero(down[nodes]) < len(nodes))
            else:
                lasted_ns = self.health.looked_ns - s.start_ns
                ended = bool(s.fault) and s.fault not in present and lasted_ns > JOIN_S * NS
            over[new], started_ns[new] = ended, 0
        return np.flatnonzero(over & (self._worst() >= DEGRADED)).astype(np.int32)

    def shared(self) -> list[Finding]:
        """Return one finding for the nodes that failed together."""
        well_ns, _ = self.health.failures.well_again()
        nodes = self._unworked("node", self.together())
        # Of wet trays the leak speaks
        wet = [i for i in nodes.tolist() if "leak" in self._gravity_of.get(("node", i), {})]
        nodes = nodes[(well_ns[nodes] == 0) & ~np.isin(nodes, wet)]
        if len(nodes) == 0:
            return []
        log = self.health.log()
        down = _down_together(log) & np.isin(log.node, nodes)
        kinds = np.bincount(log.kind[down], minlength=len(log.classes))
        said = [f"{int(kinds[k])} x {log.classes[k].replace('_', ' ')}"
                for k in np.argsort(-kinds, kind="stable")[:3].tolist() if kinds[k]]  # fmt: skip
        names = tuple(self.site.name("node", int(i)) for i in nodes[:MOST_ENTITIES])
        since_ns = int(log.start_ns[down].min()) - round(JOIN_S * NS)
        mine = np.zeros(self.site.sizes["node"], np.bool_)
        mine[nodes] = True
        why = [
            s.why
            for s in self.health.failures.shocks()
            if s.start_ns >= since_ns and mine[list(s.nodes)].any()
        ]
        racks = len(np.unique(self.site.rack_of_node[nodes]))
        severity = "warning" if self.facility_alarmed else "critical"  # the cause has an alarm of its own
        many = f"{len(nodes)} {'node' if len(nodes) == 1 else 'nodes'}"
        where = f"{many} in {racks} {'rack' if racks == 1 else 'racks'}: "
        found = Finding("health/shared", severity, "Nodes became unusable together", names,
                        (where + ", ".join(said), *dict.fromkeys(why))[:MOST_EVIDENCE], 1.0,
                        "Check what they share: feed, coolant, network, job. No single node is to blame.",
                        len(nodes))  # fmt: skip
        if len(nodes) == 1:
            return [replace(found, title=f"{names[0]} became unusable by a cause outside it")]
        return [found]

    # -- lemons, wear, and parts outside nodes

    def lemons(self) -> list[Finding]:
        """Return findings for nodes that fail more often than others; a warning if they are unhealthy now."""
        found = []
        level = self._verdicts("node").level
        for i in self._unworked("node", np.flatnonzero(self.health.lemons.is_lemon())).tolist():
            name = self.site.name("node", i)
            found.append(
                Finding(f"health/lemon/{name}", "warning" if level[i] >= WATCH else "info",
                        f"{name} fails more often than others", (name,),
                        self.health.lemons.evidence(i)[:MOST_EVIDENCE], 1.0,
                        "Take it out of service and have it inspected: jobs on it fail more often.")
            )  # fmt: skip
        return found

    def wear(self) -> list[Finding]:
        """Return findings for parts that reach a limit within two weeks."""
        found = []
        for left in self.health.wear.remaining():
            soon = np.flatnonzero(left.mid_s < WEARS_OUT_S)  # NaN, no drift, is never less
            for i in self._unworked(left.table, soon).tolist():
                name = self.site.name(left.table, i)
                what = left.what.partition(".")[2].replace("_", " ") or left.what
                severity = "info" if (left.table, i) in self._gravity_of else "warning"
                title = f"{what} of {name} reaches its limit within two weeks"
                found.append(
                    Finding(f"health/wear/{left.what}/{name}", severity, title, (name,),
                            (f"in about {_days(left.mid_s, i)} days (90 % interval {_days(left.lo_s, i)} to "
                             f"{_days(left.hi_s, i)})",
                             *self.health.wear.evidence(left.table, i))[:MOST_EVIDENCE], 0.9,
                            "Plan the maintenance before that date.")
                )  # fmt: skip
        return found

    def single(self, part: str) -> list[Finding]:
        """Return findings for unhealthy parts of a kind that belong to no node's finding."""
        held = self._verdicts(part)
        ill = np.flatnonzero(held.level >= DEGRADED)
        if len(ill) == 0:
            return []
        table, paired = PARTS[part], part in PAIRED
        owner = ill // 2 if paired else ill
        if (spared := self.windows.mask(table)) is not None:
            ill = ill[~spared[owner]]
        ill = ill[np.argsort(-held.level[ill].astype(np.int64), kind="stable")]
        self.left_out += max(0, len(ill) - MOST)
        ill = ill[:MOST]
        self._listen(part, ill)
        found = []
        for i in ill.tolist():
            reason = self._reason(part, i, "")
            if reason is None:
                continue
            entity = self.site.name(table, i // 2 if paired else i)
            name, said = name_of_part(part, i, entity), _sentences([reason])
            if said and (lost := lost_with(self.site, part, i)):
                said.insert(min(1, MOST_EVIDENCE - 1), lost)
            what = _heading(reason) if said else f"the {part} is {LEVELS[reason.level]}"
            # A node runs on its other supply
            severity = "warning" if part == "psu" else _severity([reason], False)
            found.append(
                Finding(f"health/{part}/{name}", severity, _title(name, what, bool(said)), (entity,),
                        tuple(said[:MOST_EVIDENCE]), reason.sure_pu,
                        _sentence(todo_words(ACTIONS[reason.action], part)))
            )  # fmt: skip
        return found

    def _unworked(self, table: str, index: I32 | np.ndarray) -> np.ndarray:
        """Return those of these that are not under maintenance."""
        if len(index) and (spared := self.windows.mask(table)) is not None:
            return index[~spared[index]]
        return index


def is_alarmed(rule: Rule | None, level: int, gravities: Mapping[str, int]) -> bool:
    """Return True if the diagnosis reports a fault that accounts for a rule's evidence, as gravely as its
    level is; how grave a fault is that a rule only repeats, the diagnosis says.

    `gravities`: by kind of fault, 0 info, 1 warning, 2 critical.
    """
    if rule is None:
        return False
    if rule.source == DIAGNOSIS and rule.id in gravities:
        return True
    rank = 2 if level >= FAILED and rule.id not in _RUNS_ON else 1
    return any(gravity >= rank and rule.sign_of(kind) for kind, gravity in gravities.items())


def is_over(rule: Rule | None, gravities: Mapping[str, int]) -> bool:
    """Return True if a rule only repeats a fault of the diagnosis and adds nothing."""
    return rule is not None and rule.echo and not any(rule.sign_of(kind) for kind in gravities)


def _down_together(log: FailureLog) -> Bool:
    """Return the rows of lasting failures with a common cause [k]."""
    return np.asarray((log.end_ns == 0) & log.shared & is_failure(log), np.bool_)


def _severity(reasons: list[_Reason], likely: bool) -> str:
    """Return the severity of a device's fault; a fault of an application is only information."""
    of_device = [r.level for r in reasons if r.action != _OF_SOFTWARE]
    if of_device and max(of_device) >= FAILED:
        return "critical"
    return "warning" if of_device or likely else "info"


def _sentences(reasons: list[_Reason]) -> list[str]:
    """Return the gravest sentences of each part first, then the others; a shared sentence appears once."""
    said: dict[str, None] = {}
    for deep in range(MOST_EVIDENCE):
        for r in reasons:
            if deep < len(r.evidence):
                said[f"{r.name}: {r.evidence[deep].text}" if r.name else r.evidence[deep].text] = None
            elif deep == 0:
                said[f"{r.name or 'it'} is {LEVELS[r.level]}"] = None
    return list(said)[:MOST_EVIDENCE]


def _heading(reason: _Reason) -> str:
    """Return a heading for the gravest reason of a part that stays the same while its figures change."""
    if not reason.evidence:
        return f"{reason.name or 'it'} is {LEVELS[reason.level]}"
    return f"{reason.name}: {heading(reason.evidence[0])}" if reason.name else heading(reason.evidence[0])


def _todo(place: int, at_once: bool) -> str:
    """Return the recommended action and its time: a part that works and is not likely to fail soon costs no
    running job.
    """
    words = ACTION_WORDS[ACTIONS[place]]
    return _sentence(words if at_once or place <= action("check_facility") else f"between jobs, {words}")


def _title(name: str, what: str, colon: bool) -> str:
    text = f"{name}{': ' if colon else ' '}{what}"
    return text if len(text) <= MOST_TITLE else text[: MOST_TITLE - 1] + "…"


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:] + "."


def _days(values: F64, i: int) -> str:
    days = float(values[i]) / DAY_S
    return "?" if not np.isfinite(days) else f"{max(0.0, days):.0f}"


def _more(count: int, severity: str) -> Finding:
    return Finding("health/more", severity, "More health findings than are listed", (),
                   (f"{count} more: the most severe have alarms, racktwin device health lists all",),
                   1.0, "Look for a common cause before you look at a single one.", count)  # fmt: skip
