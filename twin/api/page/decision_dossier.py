"""Decision dossier: a past decision as the journal holds it, with the authority then, who approved it, what
confirmed it, and the entities of its whole case.

Only lines of the journal speak here. Where it has none, the dossier says that nothing is recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from twin.api.answers import Refused
from twin.api.page.decision_search import DecisionScope, lines_in_memory, walked
from twin.api.runtime import WHOLE_TEXT, JournalLine, Runtime
from twin.catalogue import NS, control_words, utc
from twin.contracts import (
    AccountRecord,
    AcksRecord,
    ApprovalDroppedRecord,
    ApprovalExpiredRecord,
    AuthorityRecord,
    CommandRecord,
    EventRecord,
    FailedRecord,
    FindingRecord,
    LapsedRecord,
    ManifestRecord,
)
from twin.report import sentence
from twin.run import FOREVER_NS, JournalQuery, JournalWalk
from twin.telemetry import AuthorityChanged, JobEnded, JobStarted, events as ev

FAR_BYTES = 4096 * 2**20  # searched for rare lines, whose blocks alone are parsed. source: estimate
MOST_S, MOST_AUTHORITY_S = 1.0, 4.0  # of a search; who gave an authority may lie months back
BEFORE_NS, AFTER_NS = 3600 * NS, 3600 * NS  # of a decision without phases, and before the first phase
CASE_NS = 14 * 86_400 * NS  # of a node's way out and back on either side. source: estimate
MARGIN_NS = 60 * NS  # after a deadline: the line on it comes with a later tick
NOTE_NS = 600 * NS  # a person's reason follows the change with the next tick
MOST_ENTITIES = 12  # of a case
MISMATCHES = ("readback", "unanswered", "unread")  # kinds of findings on commands of a control
# States of a command, the weightiest first
OUTCOMES = ("failed", "mismatch", "lapsed", "next phase", "answered", "superseded")
UNKNOWN = "not recorded"
BY_MANIFEST = "as the manifest of the run says; its author is not recorded"
TOO_FAR = "as the manifest of the run says; its author lies before the searched part of the journal"
AT_HOME = "in_service"  # the phase of a node that works


@dataclass(slots=True)
class DossierReader:
    """Reads the journal around a line: the run's files, or memory without files."""

    live: Runtime
    kept: list[JournalLine] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def lines(self, query: JournalQuery, most_s: float = MOST_S) -> Iterator[JournalLine]:
        """Return lines, newest first. A search that ends at its budget leaves a note."""
        if not self.live.run_dir:
            for line in self.kept:
                if line.kind in query.kinds and query.since_ns <= line.now_ns <= query.until_ns and (
                    query.before is None or 0 <= line.seq < query.before
                ):  # fmt: skip
                    yield line
            return
        site = self.live.engine.site
        walk = JournalWalk(Path(self.live.run_dir), query, site.spec_hash, FAR_BYTES, most_s)
        yield from walked(walk, site)
        if not walk.ended:
            kinds = ", ".join(sorted(query.kinds))
            self.notes.append(f"lines of {kinds} were searched back to {utc(walk.reached_ns)} UTC only")

    def read(self, place: tuple[int, int], about: DecisionScope | None) -> dict[str, Any]:
        """Return the dossier of the line at a place. Raises Refused if there is no such line."""
        line, site = self.line(place), self.live.engine.site
        entity = about.about if about is not None else self.entity(line)
        verdict = self.authority(line)
        if verdict is not None and verdict["authority"] == "approve":
            verdict["approval"] = self.approval(line, entity)
        confirmation = None
        if isinstance(line.record, CommandRecord):
            confirmation = self.confirmation(line, line.record, entity)
        return {
            "decision": line.answer(site, WHOLE_TEXT), "verdict": verdict, "confirmation": confirmation,
            "case": None if entity is None else self.case(line, entity), "notes": self.notes,
        }  # fmt: skip

    def line(self, place: tuple[int, int]) -> JournalLine:
        """Return the line at a place. Raises Refused."""
        now_ns, seq = place
        if self.live.run_dir:
            walk = JournalWalk(
                Path(self.live.run_dir), JournalQuery(before=seq + 1), self.live.engine.site.spec_hash
            )
            found = next(walked(walk, self.live.engine.site), None)
            begin_ns = walk.begin_ns
        else:
            found = next((one for one in self.kept if one.seq == seq), None)
            begin_ns = self.kept[-1].now_ns if self.kept else 0
        if found is not None and (found.seq, found.now_ns) == (seq, now_ns):
            return found
        if now_ns < begin_ns:
            raise Refused(404, f"this decision is no longer in the journal (kept since {utc(begin_ns)} UTC)")
        raise Refused(
            404,
            f"no line {seq} of {utc(now_ns)} UTC is in this journal (kept since {utc(begin_ns)} UTC); the "
            "link may be of another daemon or run",
        )

    def entity(self, line: JournalLine) -> tuple[str, int, str] | None:
        """Return the first entity of a line as (table, index, path); None if it is not on the site."""
        site, record = self.live.engine.site, line.record
        names = sorted(line.names(), key=lambda name: not name.startswith("job:"))
        table = getattr(record, "control", "").partition(".")[0]
        index: Any = getattr(record, "index", ())
        shift = line.shift(site) if table != "job" else None
        if len(index) and shift is not None and 0 <= int(index[0]) + shift < site.sizes.get(table, 0):
            names.insert(0, site.name(table, int(index[0]) + shift))
        for name in names:
            if name.startswith("job:"):
                return "job", self.live.engine.jobs.slot_of.get(name[4:], -1), name
            for table in ("node", "gpu", "link", *site.names):
                if (row := site.entity(table, name)) is not None:
                    return table, row, site.name(table, row)
        return None

    # -- verdict

    def authority(self, line: JournalLine) -> dict[str, Any] | None:
        """Return the authority of the line's policy at that time, with its author and instant; None
        without a policy."""
        policy = line.policy
        if not policy or line.kind in ("event", "authority"):
            return None
        out: dict[str, Any] = {"policy": policy, "authority": UNKNOWN, "by": "", "at_ns": None,
                               "reason": "", "basis": "", "approval": None}  # fmt: skip
        anchor: JournalLine | None = None
        query = JournalQuery(
            before=line.seq, until_ns=line.now_ns, kinds=frozenset({"authority", "manifest"})
        )
        notes = len(self.notes)
        for found in self.lines(query, MOST_AUTHORITY_S):
            record = found.record
            if isinstance(record, AuthorityRecord) and record.policy == policy:
                if out["authority"] in (UNKNOWN, record.authority):
                    out |= {"authority": record.authority, "by": record.author, "reason": record.reason,
                            "at_ns": found.now_ns, "basis": "given by a person"}  # fmt: skip
                anchor = anchor or found
                break
            level = (record.authority or {}).get(policy) if isinstance(record, ManifestRecord) else None
            if level is None:
                continue
            if out["authority"] not in (UNKNOWN, level):
                break  # it was changed in the configuration in between
            out |= {"authority": level, "at_ns": found.now_ns or None, "basis": BY_MANIFEST}
            anchor = anchor or found
        if len(self.notes) > notes and not out["by"]:
            out["basis"] = TOO_FAR
        self._changed(line, policy, anchor, out)
        return out

    def _changed(
        self, line: JournalLine, policy: str, anchor: JournalLine | None, out: dict[str, Any]
    ) -> None:
        """Return True for a change between the anchor and the line whose reason follows it."""
        query = JournalQuery(
            anchor.now_ns if anchor else 0,
            line.now_ns,
            line.seq,
            frozenset({"event"}),
            needle=b'"AuthorityChanged"',
        )
        for found in self.lines(query):
            if anchor is not None and found.seq <= anchor.seq:
                break
            record = found.record
            if (
                not isinstance(record, EventRecord)
                or record.refused
                or not isinstance(record.event, AuthorityChanged)
            ):
                continue
            event = record.event
            if event.policy != policy:
                continue
            reasons = JournalQuery(found.now_ns, found.now_ns + NOTE_NS, kinds=frozenset({"authority"}))
            notes = [n.record for n in self.lines(reasons) if isinstance(n.record, AuthorityRecord)]
            reason = next((n.reason for n in notes if n.event == event.id), "")
            out |= {"authority": event.authority, "by": event.author, "at_ns": found.now_ns, "reason": reason,
                    "basis": "given by a person"}  # fmt: skip
            break

    def approval(self, line: JournalLine, entity: tuple[str, int, str] | None) -> dict[str, Any] | None:
        """Return the approval under which a policy in `approve` acted; None if none is recorded."""
        kinds = frozenset({"event", "approval_dropped", "approval_expired"})
        over: set[str] = set()
        for found in self.lines(JournalQuery(0, line.now_ns, line.seq, kinds, needle=b"pprov")):
            record = found.record
            if isinstance(record, ApprovalDroppedRecord | ApprovalExpiredRecord):
                over.add(record.id)
            if not isinstance(record, EventRecord) or record.refused:
                continue
            event = record.event
            if isinstance(event, ev.ApprovalWithdrawn):
                over.add(event.approval)
            if isinstance(event, ev.Approved) and event.id not in over and _covers(event, line, entity):
                return {"by": event.author, "at_ns": found.now_ns, "reason": event.reason, "id": event.id,
                        "expires_ns": event.expires_ns or None}  # fmt: skip
        return None

    # -- confirmation

    def confirmation(
        self, line: JournalLine, command: CommandRecord, entity: tuple[str, int, str] | None
    ) -> dict[str, Any]:
        """Return the outcome of this command on an entity, by the gravest line of the journal about it."""
        kinds = frozenset({"failed", "lapsed", "command", "acks", "finding"})
        until_ns = max(command.deadline_ns, line.now_ns) + MARGIN_NS
        around = [*self.lines(JournalQuery(line.now_ns - MARGIN_NS, until_ns, kinds=kinds))][::-1]
        outcomes: dict[str, tuple[JournalLine, str]] = {}
        for found in around:
            if found.seq > line.seq and (state := self._outcome(found, command.control, entity)):
                outcomes.setdefault(state, (found, sentence(found.record, self.live.engine.site)))
        if (phase := self._next_phase(line, entity)) is not None:
            outcomes["next phase"] = phase, sentence(phase.record, self.live.engine.site)
        if (answered := _answered(line, command, around)) is not None:
            many = f"{len(command.index):,}"
            outcomes["answered"] = answered, f"{many} of {many} answered done; the read-back is not recorded"
        for state in OUTCOMES:
            if state in outcomes:
                found, text = outcomes[state]
                return {"state": state, "at_ns": found.now_ns, "text": text, "at": found.at}
        deadline = f"{utc(command.deadline_ns, '%H:%M:%S')} UTC"
        over = command.deadline_ns <= self.live.engine.state.now_ns
        end = f"none of this one did by its deadline {deadline}" if over else f"its deadline is {deadline}"
        text = (
            f"the journal counts answers to commands of {control_words(command.control)} and names those "
            f"that fail; {end}"
        )
        return {"state": "not recorded", "at_ns": None, "text": text, "at": None}

    def _outcome(self, line: JournalLine, control: str, entity: tuple[str, int, str] | None) -> str:
        """Return the state of a command on an entity in a line; "" if the line has none."""
        record = line.record
        if entity is None:
            return ""
        if isinstance(record, FindingRecord):
            kind, _, key = record.id.partition("/")
            if kind not in MISMATCHES or key != control:
                return ""
            many = (record.count or 0) > len(record.entities)
            return "mismatch" if many or entity[2] in line.names() else ""
        if control not in line.controls() or not line.concerns(self.live.engine.site, entity):
            return ""
        words = {FailedRecord: "failed", LapsedRecord: "lapsed", CommandRecord: "superseded"}
        return next((word for kind, word in words.items() if isinstance(record, kind)), "")

    def _next_phase(self, line: JournalLine, entity: tuple[str, int, str] | None) -> JournalLine | None:
        """Return the first account of a node's phase after a line."""
        if entity is None or entity[0] != "node":
            return None
        query = JournalQuery(line.now_ns + 1, line.now_ns + CASE_NS, kinds=frozenset({"account"}),
                             needle=msgspec.json.encode(entity[2]))  # fmt: skip
        found = [
            one
            for one in self.lines(query)
            if isinstance(one.record, AccountRecord)
            and one.record.account.get("node") == entity[2]
            and one.record.account.get("to")
        ]
        return found[-1] if found else None

    # -- case

    def case(self, line: JournalLine, entity: tuple[str, int, str]) -> dict[str, Any]:
        """Return the entities and the time range of the whole case of a decision."""
        table, row, path = entity
        site, jobs = self.live.engine.site, self.live.engine.jobs
        if table in ("gpu", "link") and "/" in path:
            path = path.rpartition("/")[0]
            table, row = "node", -1 if (at := site.entity("node", path)) is None else at
        since_ns, until_ns = line.now_ns - BEFORE_NS, line.now_ns + AFTER_NS
        entities = [path if table == "job" else f"{table}:{path}"]
        if table == "job":
            since_ns, until_ns = self._job_time(path.removeprefix("job:"), line.now_ns)
        elif table == "node":
            since_ns, until_ns, others = self._way_out(line, path)
            entities += others
            if (
                row >= 0
                and (slot := int(jobs.job_of_node[row])) >= 0
                and int(jobs.started_ns[slot]) <= until_ns
            ):
                entities.append(jobs.shown(slot))
        entities = list(dict.fromkeys(filter(None, entities)))[:MOST_ENTITIES]
        return {"entities": entities, "since_ns": max(0, since_ns),
                "until_ns": min(until_ns, self.live.engine.state.now_ns)}  # fmt: skip

    def _way_out(self, line: JournalLine, path: str) -> tuple[int, int, list[str]]:
        """Return (begin, end, spares and jobs) of a node's withdrawal and return, around a line."""
        since_ns, until_ns = line.now_ns - CASE_NS, line.now_ns + CASE_NS
        kinds, needle = frozenset({"account", "event"}), msgspec.json.encode(path)
        found = [*self.lines(JournalQuery(since_ns, until_ns, kinds=kinds, needle=needle))][::-1]
        phases = [
            (one, record.account)
            for one in found
            if isinstance(record := one.record, AccountRecord)
            and record.account.get("node") == path
            and "to" in record.account
        ]
        # The case that the line is in begins where the node left service last, unless it came back since.
        back = max(
            (i for i, (one, a) in enumerate(phases) if one.seq < line.seq and a["to"] == AT_HOME), default=-1
        )
        mine = phases[back + 1 :]
        end = next((i for i, (_, a) in enumerate(mine) if a["to"] == AT_HOME), len(mine) - 1)
        mine = mine[: end + 1]
        begun_ns = min(mine[0][0].now_ns, line.now_ns) if mine else line.now_ns
        ended = bool(mine) and mine[-1][1]["to"] == AT_HOME
        over_ns = max(mine[-1][0].now_ns, line.now_ns) if ended else line.now_ns
        spares = [f"node:{a['spare']}" for _, a in mine if isinstance(a.get("spare"), str) and a["spare"]]
        jobs = [
            (one.now_ns, record.event.job)
            for one in found
            if isinstance(record := one.record, EventRecord)
            and not record.refused
            and isinstance(record.event, JobStarted)
            and path in one.names()
            and one.now_ns <= over_ns
        ]
        last = max((i for i, (at_ns, _) in enumerate(jobs) if at_ns <= begun_ns), default=-1)
        if last >= 0 and self._ended(jobs[last][1], jobs[last][0], begun_ns):
            last += 1
        others = [*spares, *(f"job:{job}" for _, job in jobs[max(0, last) :])]
        if not mine:
            return line.now_ns - BEFORE_NS, line.now_ns + AFTER_NS, others
        return begun_ns - BEFORE_NS, over_ns + MARGIN_NS if ended else FOREVER_NS, others

    def _job_events(self, job: str, since_ns: int, until_ns: int) -> list[tuple[int, bool]]:
        """Return (instant, True for an end) of a job's starts and ends, oldest first."""
        needle = b'"job":' + msgspec.json.encode(job)
        query = JournalQuery(since_ns, until_ns, kinds=frozenset({"event"}), needle=needle)
        return [
            (one.now_ns, isinstance(event, JobEnded))
            for one in self.lines(query)
            if isinstance(one.record, EventRecord)
            and not one.record.refused
            and isinstance(event := one.record.event, JobStarted | JobEnded)
            and event.job == job
        ][::-1]

    def _ended(self, job: str, since_ns: int, until_ns: int) -> bool:
        """Return True if a job left its nodes in that time."""
        return any(end for _, end in self._job_events(job, since_ns, until_ns))

    def _job_time(self, job: str, now_ns: int) -> tuple[int, int]:
        """Return the time range of a job that ran at an instant, with a margin, as far as searched."""
        found = self._job_events(job, now_ns - CASE_NS, now_ns + CASE_NS)
        begun = [at_ns for at_ns, end in found if not end and at_ns <= now_ns]
        over = [at_ns for at_ns, end in found if end and at_ns >= now_ns]
        since_ns = begun[-1] if begun else now_ns - BEFORE_NS
        return since_ns - MARGIN_NS, over[0] + MARGIN_NS if over else FOREVER_NS


def _covers(event: ev.Approved, line: JournalLine, entity: tuple[str, int, str] | None) -> bool:
    """Return True if an approval was in force for this policy, control and entity; a line names at most 64
    entities."""
    if event.policy != line.policy or event.control not in line.controls():
        return False
    if 0 < event.expires_ns < line.now_ns:
        return False
    cut = bool(event.names) and event.names[-1].startswith("and ")
    return cut or not event.names or entity is None or entity[2] in event.names


def _answered(line: JournalLine, command: CommandRecord, around: list[JournalLine]) -> JournalLine | None:
    """Return the line that answers a whole batch; None if it also counts other commands."""
    mine = [one for one in around if command.control in one.controls()]
    if any(one.kind == "command" and one.seq != line.seq for one in mine):
        return None
    done = 0
    for one in mine:
        if isinstance(one.record, AcksRecord) and one.seq > line.seq and one.record.state == "done":
            done += 0 if one.record.refused else one.record.count
            if done >= len(command.index):
                return one
    return None


def dossier_reader(live: Runtime) -> DossierReader:
    """Return a reader of the daemon's present journal."""
    return DossierReader(live, [] if live.run_dir else lines_in_memory(live)[0])
