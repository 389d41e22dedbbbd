"""Journal texts: a record of the journal as one sentence with its numbers and reason.

The interface and `racktwin journal show` use the same sentences. A record may hold columns for a hundred
thousand devices; here they become a count, a range and the first names. Text from outside is made safe.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
import numpy as np

from twin.catalogue import (
    INSTANTS,
    clean,
    control_value,
    control_words,
    counted,
    find_control,
    plain_text,
    quantity,
    table_noun,
    utc,
)
from twin.contracts import (
    AccessRecord,
    AccountRecord,
    AcksRecord,
    AdviceRecord,
    AlarmRecord,
    ApprovalDroppedRecord,
    ApprovalExpiredRecord,
    AuthorityRecord,
    Bound,
    ClearedRecord,
    CommandRecord,
    ContingencyNote,
    DaemonRecord,
    DeferredRecord,
    DuplicatesRecord,
    EndRecord,
    EventRecord,
    FailedRecord,
    FaultsRecord,
    FindingRecord,
    FitExpiredRecord,
    FitRequestedRecord,
    GrantExpiredRecord,
    HallHeadsRecord,
    JournalRecord,
    KeptBackRecord,
    LapsedRecord,
    LeaderRecord,
    LoadTargetOverRecord,
    MaintenanceDroppedRecord,
    MaintenanceExpiredRecord,
    ManifestRecord,
    MarkRecord,
    NarrowedRecord,
    OtherRecord,
    ProposalChange,
    ProposalsRecord,
    ProtectedRecord,
    QuarantineRecord,
    ReloadRecord,
    RenewalRecord,
    ReportsRecord,
    RequestExpiredRecord,
    ResumedRecord,
    SettledRecord,
    SettlingRecord,
    SiteFileRecord,
    SiteRecord,
    StoryRecord,
    UpkeepRecord,
    fields_of,
)
from twin.report.event_texts import SHOWN_NAMES, event_words, few, interval
from twin.report.replacement_history import account_words
from twin.site import Site

MAX_TEXT = 400
LAPSED = {"safe": "the safe value applies", "keep": "the set value stays", "restore": "as it was found"}
MAX_ITEMS = 20  # of a mapping within a record, and of its proposals
MAX_LISTED = 65  # of a list; the journal shortens names to 64 and "and 9 more"
MAX_DEPTH = 4
_UNDER_EPOCH = re.compile(r", under epoch \d+$")  # of a reason; the line of the leader reports it


def sentence(record: JournalRecord | OtherRecord, site: Site | None = None) -> str:
    """A record as a sentence; one without a sentence of its own, field by field.

    With a site, entities that a record gives by index alone are named. Keys of controls and signals, which
    reasons hold, stand as words.
    """
    return plain_text(_sentence(record, site))


def _sentence(record: JournalRecord | OtherRecord, site: Site | None) -> str:
    match record:
        case CommandRecord() | AdviceRecord():
            return _command(record, site)
        case FaultsRecord():
            return f"{record.count} more faults {record.code} of a {table_noun(record.table)} in this tick"
        case ReportsRecord() if record.refused:
            return f"{record.count} more reports of jobs refused in this tick"
        case ReportsRecord():
            return f"jobs reported on {record.count} checkpoints, {record.tier}"
        case RenewalRecord():
            return f"{_control(record)} of {counted(record.control, record.count)} renewed: {record.reason}"
        case LapsedRecord():
            then = LAPSED.get(record.becomes, f"becomes {record.becomes}")
            return f"{_control(record)} of {_entities(record, site)} lapsed; {then}"
        case FailedRecord():
            return f"failed {_control(record)} of {_entities(record, site)}: {record.why}"
        case DeferredRecord() | NarrowedRecord() | ProtectedRecord():
            policy = getattr(record, "policy", "")
            by = f"{policy}: " if policy else ""
            if record.count == 0:
                return f"{by}{_control(record)} is no longer {record.kind}"
            count = counted(record.control, record.count)
            return f"{by}{record.kind} {_control(record)} of {count}: {record.why}"
        case FindingRecord():
            # The count of one place is that of what it concerns, not of more such places
            many = (record.count or 0) if len(record.entities) > 1 else 1
            entities = few(record.entities, many) if record.entities else ""
            parts = (f"{record.severity}: {record.title}", *record.evidence, entities, record.action)
            return "; ".join(part for part in parts if part)
        case ClearedRecord():
            what = record.title or record.id
            if record.superseded_by:
                return f"superseded: {what}, by {record.superseded_by.rpartition('/')[2]}"
            return f"over: {what}"
        case KeptBackRecord():
            count = counted(record.control, record.count)
            return f"kept back {_control(record)} of {count} under {record.window}: {record.why}"
        case EventRecord():
            return event_words(record.event) + (f"; refused: {record.refused}" if record.refused else "")
        case ProposalsRecord():
            changes = (_proposal(p, site) for p in record.proposals[:MAX_ITEMS])
            return f"{record.policy} proposes: " + ("; ".join(changes) or "nothing")
        case AccountRecord():
            account = record.account
            named = " ".join(str(account[k]) for k in ("what", "node") if k in account)
            return f"{record.policy}: {named}: {account_words(account)}"
        case _:
            return (
                _of_the_run(record)
                or _of_the_daemon(record)
                or _of_standing(record)
                or ", ".join(_field(k, v) for k, v in brief(record, site).items())
            )


def _of_the_run(record: JournalRecord | OtherRecord) -> str:
    """The sentence of a record on the run itself; empty for any other."""
    match record:
        case StoryRecord():
            return f"story, {record.chapter} of {record.of}, {record.title}: {record.text}"
        case DaemonRecord(started=str(), resumed_at=int() as last):
            begun = "a new run" if last < 0 else f"continues after tick {last}"
            faults = f"; repaired: {'; '.join(record.faults)}" if record.faults else ""
            return f"the daemon started (racktwin {record.started}): {begun}{faults}"
        case LeaderRecord(lost=int()):
            return f"no longer leads (it led with epoch {record.lost})"
        case LeaderRecord(epoch=int()):
            after = f", after {record.predecessor}" if record.predecessor else ""
            adopts = "; adopts the commands in force" if record.adopt else ""
            return f"leads with epoch {record.epoch}{after}{adopts}"
        case HallHeadsRecord():
            heads = [f"{hall} at line {h.lines:,}" for hall, h in sorted(record.heads.items())]
            return f"journals of halls: {few(tuple(heads), len(heads))}"
        case SettlingRecord():
            return record.why
        case SettledRecord():
            return f"commands of {', '.join(record.controls) or 'no control'} are settled"
        case MarkRecord():
            return f"check of {len(record.state)} signals"
        case QuarantineRecord():
            parts = "the tick itself" if record.whole else few(record.parts, len(record.parts))
            return (
                f"left out of tick {record.poisoned}: {parts}; the engine failed on it: {record.error}; "
                f"kept in {record.file}"
            )
        case UpkeepRecord(pruned=tuple() as pruned) if pruned:
            return f"pruned {len(pruned)} journal segments up to {pruned[-1].file}"
        case _:
            return ""


def _control(record: Any) -> str:
    """The control of a record, as people call it."""
    return control_words(record.control)


def _command(record: CommandRecord | AdviceRecord, site: Site | None) -> str:
    """Return a command or advice in words; for a control with an instant as value, as a request."""
    where = _entities(record, site)
    if record.control in INSTANTS:
        verbs, target = ("asks for", "would ask for"), f"a {_control(record)} of {where}"
    else:
        value = control_value(_range(record.value), record.control)
        verbs, target = ("commands", "would command"), f"{_control(record)} {value} for {where}"
    reason = _UNDER_EPOCH.sub("", record.reason)
    if where.startswith("job:"):  # a reason of one job begins with its name
        reason = reason.removeprefix(f"job {where.removeprefix('job:')}: ")
    if isinstance(record, AdviceRecord):
        return f"{record.policy} {verbs[1]} {target}: {reason}"
    end = utc(record.expires_ns, "%H:%M:%S")
    return f"{record.policy} {verbs[0]} {target} until {end} UTC: {reason}"


def _of_the_daemon(record: JournalRecord | OtherRecord) -> str:
    """Return the sentence for a line about the daemon or people; "" for any other."""
    match record:
        case DaemonRecord(contingency=ContingencyNote() as note):
            return _contingency(note)
        case AuthorityRecord():
            what = f"{record.author} sets the authority of {record.policy} to {record.authority}"
            return what + (f" ({record.reason})" if record.reason else "")
        case ReloadRecord():
            refused = f"; refused: {'; '.join(record.refused)}" if record.refused else ""
            return f"{record.author} reloads configuration, site and tokens{refused}"
        case SiteFileRecord():
            lines = f"{len(record.lines)} line" + ("s" if len(record.lines) != 1 else "")
            refused = f"; refused: {'; '.join(record.refused)}" if record.refused else ""
            where = " from the terminal" if record.writer == "terminal" else ""
            return (
                f"{record.author} approves {lines} more in the site's file{where} ({record.reason}){refused}"
            )
        case ResumedRecord():
            return f"{record.author} resumes the sending of commands" + (
                f" ({record.reason})" if record.reason else ""
            )
        case AlarmRecord():
            until = f" until {utc(record.until_ns)} UTC" if record.until_ns else ""
            more = "; ".join(filter(None, (record.note, record.reason)))
            return f"{record.author}: {record.what or 'changed'} {record.id}{until}" + (
                f" ({more})" if more else ""
            )
        case AccessRecord():
            who = f"{record.name} ({record.role}) at " if record.name and record.role else ""
            path = f" to {record.path}" if record.path else ""
            return f"refused {record.count} of {who}{record.remote}{path}: {record.why}"
        case SiteRecord():
            sizes = ", ".join(f"{n:,} {t}" for t, n in record.sizes.items())
            return f"the site changed: now {sizes}"
        case EndRecord():
            return "the daemon stopped"
        case ManifestRecord():
            levels = ", ".join(f"{policy} {level}" for policy, level in (record.authority or {}).items())
            return f"recorded by racktwin {record.racktwin or '?'}; authority: {levels or 'no policy'}"
        case DuplicatesRecord():
            return f"{record.count} duplicate events were left out"
        case FitRequestedRecord():
            return f"requests a new fit of the model {record.model}"
        case FitExpiredRecord():
            return f"the fit {record.id} gave no result"
        case _:
            return ""


def _contingency(note: ContingencyNote) -> str:
    """A contingency plan that is published or withdrawn."""
    if note.withdrawn is not None:
        return f"withdrew the caps for a lost side from {note.withdrawn} agents"
    count = counted("gpu", note.gpus if note.gpus is not None else note.delivered or 0)
    ends = dict.fromkeys(quantity(v, "W") for v in (note.low_w, note.high_w) if v is not None)
    caps = f": {' to '.join(ends)}" if ends else ""
    return f"gave agents the caps for a lost side, for {count}{caps}"


def _of_standing(record: JournalRecord | OtherRecord) -> str:
    """The sentence of a standing order of people that ended, or of replies; empty for any other."""
    match record:
        case AcksRecord():
            refused = f", {record.refused}" if record.refused else ""
            state = record.state.replace("_", " ")
            return f"{_control(record)} of {counted(record.control, record.count)}: {state}{refused}"
        case RequestExpiredRecord():
            return f"the request {record.id} ended"
        case ApprovalExpiredRecord():
            return f"the approval {record.id} ended"
        case ApprovalDroppedRecord():
            return f"the approval {record.id} was dropped"
        case GrantExpiredRecord():
            becomes = quantity(record.becomes_w, "W")
            return (
                f"the budget granted for {record.feeder} ended: {quantity(record.was_w, 'W')}, now {becomes}"
            )
        case LoadTargetOverRecord():
            return f"the load target {record.target} is over"
        case MaintenanceExpiredRecord():
            return f"the maintenance window {record.id} ended"
        case MaintenanceDroppedRecord():
            return f"the maintenance window {record.id} was dropped: {record.why}"
        case _:
            return ""


def brief(record: msgspec.Struct, site: Site | None = None) -> dict[str, Any]:
    """A record without its long columns: how many, the first names, from what to what."""
    spec = find_control(getattr(record, "control", ""))
    out: dict[str, Any] = {}
    for name, value in fields_of(record).items():
        if isinstance(value, Bound):
            value = value.value
        if isinstance(value, np.ndarray):
            if name in ("index", "gone") and spec is not None:
                out["count" if name == "index" else "gone_count"] = len(value)
                out["names" if name == "index" else "gone_names"] = _first_names(value, spec.table, site)
            elif value.dtype.kind in "fiu" and value.size:
                out[name] = _range(value)
            else:
                out[name] = int(value.size)
        elif name == "proposals" and isinstance(record, ProposalsRecord):
            out[name] = [brief(p, site) for p in value[:MAX_ITEMS]]
        else:
            out[name] = _bounded(value)
    return out


def _first_names(index: np.ndarray, table: str, site: Site | None) -> list[str]:
    if site is None:
        return []
    first = [int(i) for i in index[:SHOWN_NAMES]]
    return [site.name(table, i) for i in first if i < site.sizes[table]]


def _range(values: np.ndarray) -> Any:
    """A number, {min, max} of several, or None."""
    finite = values[np.isfinite(values)] if values.dtype.kind == "f" else values
    if not len(finite):
        return None
    low, high = float(finite.min()), float(finite.max())
    return low if low == high else {"min": low, "max": high}


def _bounded(value: Any, depth: int = 0) -> Any:
    """Plain data of bounded size; text from outside on one line."""
    if isinstance(value, str):
        return clean(value, MAX_TEXT)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if depth >= MAX_DEPTH:
        return "..."
    if isinstance(value, msgspec.Struct):
        value = msgspec.to_builtins(value)
    if isinstance(value, dict):
        return {clean(k): _bounded(v, depth + 1) for k, v in list(value.items())[:MAX_ITEMS]}
    if isinstance(value, list | tuple):
        return [_bounded(v, depth + 1) for v in value[:MAX_LISTED]]
    if isinstance(value, np.ndarray):
        return [_bounded(v, depth + 1) for v in value[:MAX_ITEMS].tolist()]
    return clean(str(value), MAX_TEXT)


def _field(name: str, value: Any) -> str:
    """One field of a record that has no sentence of its own."""
    if isinstance(value, list):
        return f"{name} {few(value, len(value)) if value else 'none'}"
    if name.endswith("_ns") and isinstance(value, int):
        return f"{name[:-3]} {utc(value) + ' UTC' if value > 0 else 'never'}"
    return f"{name} {'none' if value in ('', None, {}) else value}"


def _proposal(p: ProposalChange, site: Site | None) -> str:
    if p.index is None or not len(p.index) or p.lo is None or p.hi is None:
        return f"{_control(p)} of {counted(p.control, 0 if p.gone is None else len(p.gone))} let go"
    bounds = interval(_side(p.lo), _side(p.hi), p.control)
    return f"{_control(p)} {bounds} for {_entities(p, site)}: {p.reason}"


def _side(bound: Bound) -> Any:
    return _range(bound.value) if isinstance(bound.value, np.ndarray) else bound.value


def _entities(record: Any, site: Site | None) -> str:
    """The first entities of a column, by the record's own names where it has them."""
    count = len(record.index)
    names = list(record.names) or _first_names(record.index, record.control.partition(".")[0], site)
    if not names and count and (first := getattr(record, "first_name", "")):
        return first if count == 1 else f"{count} from {first} to {record.last_name}"
    return few(names, count) if names else str(count)
