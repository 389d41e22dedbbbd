"""Journal records: one frozen struct per kind of line in a run's journal.

On disk a line is {seq, prev, kind, tick, now_ns, body}; the body is the record without its kind. Columns are
arrays here and lists, ranges or base64 on disk. JSON has no NaN and no infinity: both are null there. A kind
that this version does not know is read as `OtherRecord`.
"""

from __future__ import annotations

import base64
import re
from typing import Any, Literal, cast

import msgspec
import numpy as np

from twin.telemetry import Event, events as ev

INLINE = 64  # longer columns are base64
RUN = 3  # longer runs of consecutive numbers are written as the first and how many
SHORT_LIST = 64  # items of an event's list that the journal keeps; the trace has all of them
_MORE = re.compile(r"and \d+ more")


class Bound:
    """One side of an interval: a number for all, a column, or "lo" or "hi" for a wish at that side."""

    __slots__ = ("value",)

    def __init__(self, value: float | str | np.ndarray) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bound) and repr(self.value) == repr(other.value)

    __hash__ = None  # type: ignore[assignment]


class JournalRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", omit_defaults=True):
    """Base of all kinds. A field with a default is left out on disk where it has that value."""

    @property
    def kind(self) -> str:
        """Name of the kind."""
        return cast(str, self.__struct_config__.tag)


# -- commands and what became of them


class CommandRecord(JournalRecord, frozen=True, kw_only=True, tag="command"):
    """A batch of new commands of one policy on one control."""

    control: str
    policy: str = ""  # missing in the oldest journals
    first_name: str = msgspec.field(name="from")
    last_name: str = msgspec.field(name="to")
    index: np.ndarray
    names: tuple[str, ...] = ()
    value: np.ndarray
    reason: str
    epoch: int
    first_command: int
    expires_ns: int
    deadline_ns: int
    final: bool = False


class AdviceRecord(JournalRecord, frozen=True, kw_only=True, tag="advice"):
    """A batch of commands that a policy without authority would give."""

    control: str
    policy: str = ""  # missing in the oldest journals
    first_name: str = msgspec.field(name="from")
    last_name: str = msgspec.field(name="to")
    index: np.ndarray
    names: tuple[str, ...] = ()
    value: np.ndarray
    reason: str


class RenewalRecord(JournalRecord, frozen=True, kw_only=True, tag="renewal"):
    """Running leases of a control that were prolonged or sent again."""

    control: str
    count: int
    expires_ns: int
    reason: str


class LapsedRecord(JournalRecord, frozen=True, kw_only=True, tag="lapsed"):
    """Leases that ran out; `becomes` is the device's behaviour then."""

    control: str
    index: np.ndarray
    becomes: str
    names: tuple[str, ...] = ()


class FailedRecord(JournalRecord, frozen=True, kw_only=True, tag="failed"):
    """Commands that were given up."""

    control: str
    index: np.ndarray
    why: str
    names: tuple[str, ...] = ()


class DeferredRecord(JournalRecord, frozen=True, kw_only=True, tag="deferred"):
    """Number of changes that wait because of the blast radius; 0 once none does."""

    control: str
    count: int
    why: str


class NarrowedRecord(JournalRecord, frozen=True, kw_only=True, tag="narrowed"):
    """Number of entities on which a policy could not have its way; 0 once there are none."""

    control: str
    count: int
    why: str
    policy: str = ""


class ProtectedRecord(JournalRecord, frozen=True, kw_only=True, tag="protected"):
    """Number of nodes spared because nobody knows what runs on them; 0 once there are none."""

    control: str
    count: int
    why: str


class KeptBackRecord(JournalRecord, frozen=True, kw_only=True, tag="kept_back"):
    """Protective moves that were not sent into a maintenance window."""

    window: str
    control: str
    count: int
    why: str


class AcksRecord(JournalRecord, frozen=True, kw_only=True, tag="acks"):
    """Number of answers of one kind to commands on a control in one tick."""

    control: str
    state: str
    count: int
    refused: str = ""


class SettlingRecord(JournalRecord, frozen=True, kw_only=True, tag="settling"):
    """Controls that begin to settle after a takeover, and until when."""

    epoch: int
    until_ns: dict[str, int]
    why: str


class SettledRecord(JournalRecord, frozen=True, kw_only=True, tag="settled"):
    """Controls that have settled."""

    controls: tuple[str, ...]


# -- policies and models


class ProposalChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New or moved intervals of one control and reason, and the entities that were let go."""

    control: str
    reason: str
    index: np.ndarray | None = None
    lo: Bound | None = None
    hi: Bound | None = None
    want: Bound | None = None
    names: tuple[str, ...] = ()
    gone: np.ndarray | None = None


class ProposalsRecord(JournalRecord, frozen=True, kw_only=True, tag="proposals"):
    """Change of a policy's proposals."""

    policy: str
    proposals: tuple[ProposalChange, ...]


class AccountRecord(JournalRecord, frozen=True, kw_only=True, tag="account"):
    """Plain data by which a policy accounts for a decision."""

    policy: str
    account: dict[str, str | int | float | bool | None]


class FitRequestedRecord(JournalRecord, frozen=True, kw_only=True, tag="fit_requested"):
    """A model is due for a fit on these ticks."""

    id: str
    model: str
    first_tick: int
    last_tick: int


class FitExpiredRecord(JournalRecord, frozen=True, kw_only=True, tag="fit_expired"):
    """A fit that did not come in time."""

    id: str


# -- events and what they set


class EventRecord(JournalRecord, frozen=True, kw_only=True, tag="event"):
    """An event and, if so, why it was refused. `was` and `moved_from` are of a device that was exchanged.

    The event is as `brief_event` shortens it.
    """

    event: Event
    refused: str | None = None
    was: str | None = None
    moved_from: str | None = None


class FaultsRecord(JournalRecord, frozen=True, kw_only=True, tag="faults"):
    """Number of further faults of one code in a tick that held very many."""

    table: str
    code: int
    count: int


class ReportsRecord(JournalRecord, frozen=True, kw_only=True, tag="reports"):
    """Number of reports of jobs in one tick, by tier; or of those refused."""

    tier: str = ""
    refused: str = ""
    count: int


class DuplicatesRecord(JournalRecord, frozen=True, kw_only=True, tag="duplicates"):
    """Number of events in one tick that were delivered again."""

    count: int


class RequestExpiredRecord(JournalRecord, frozen=True, kw_only=True, tag="request_expired"):
    """A standing request that is over."""

    id: str


class ApprovalExpiredRecord(JournalRecord, frozen=True, kw_only=True, tag="approval_expired"):
    """An approval that is over."""

    id: str


class ApprovalDroppedRecord(JournalRecord, frozen=True, kw_only=True, tag="approval_dropped"):
    """An approval that a change of authority ended."""

    id: str


class GrantExpiredRecord(JournalRecord, frozen=True, kw_only=True, tag="grant_expired"):
    """A budget grant that is over."""

    feeder: str
    was_w: float | None
    becomes_w: float | None


class LoadTargetOverRecord(JournalRecord, frozen=True, kw_only=True, tag="load_target_over"):
    """A load target that is over."""

    target: str


class MaintenanceExpiredRecord(JournalRecord, frozen=True, kw_only=True, tag="maintenance_expired"):
    """A maintenance window that is over."""

    id: str


class MaintenanceDroppedRecord(JournalRecord, frozen=True, kw_only=True, tag="maintenance_dropped"):
    """A maintenance window of entities that a changed site no longer has."""

    id: str
    why: str


class SiteRecord(JournalRecord, frozen=True, kw_only=True, tag="site"):
    """The site changed."""

    site_hash: str
    was: str
    sizes: dict[str, int]


# -- findings and checks


class FindingRecord(JournalRecord, frozen=True, kw_only=True, tag="finding"):
    """A finding that began, got worse or concerns other entities."""

    id: str
    severity: str
    title: str
    entities: tuple[str, ...]
    evidence: tuple[str, ...]
    confidence_pu: float | None
    action: str
    count: int | None = None


class ClearedRecord(JournalRecord, frozen=True, kw_only=True, tag="cleared"):
    """A finding that is over, or that another one takes the place of; `title` as it was last."""

    id: str
    superseded_by: str = ""
    title: str = ""


class MarkRecord(JournalRecord, frozen=True, kw_only=True, tag="mark"):
    """A check of the state, by signal, so that a drifting replay can name the first that differs."""

    next_command: int
    state: dict[str, int]


# -- lines that the daemon writes between ticks; a replay passes over them


class ManifestRecord(JournalRecord, frozen=True, kw_only=True, tag="manifest"):
    """Versions and settings under which a run is made, and must be made again to be equal.

    All but the format may be missing in a journal of another version.
    """

    format: int
    racktwin: str | None = None
    site_hash: str | None = None
    authority: dict[str, str] | None = None
    policies: tuple[str, ...] | None = None
    models: dict[str, str] | None = None
    numpy: str | None = None
    machine: str | None = None
    simulated: bool = False
    resumed: dict[str, Any] | None = None


class EndRecord(JournalRecord, frozen=True, kw_only=True, tag="end"):
    """The end of a run."""

    state_checksum: str


class AccessRecord(JournalRecord, frozen=True, kw_only=True, tag="access"):
    """A request that was refused, or how many more of its kind."""

    remote: str
    why: str
    count: int
    path: str | None = None
    name: str | None = None
    role: str | None = None
    needs: str | None = None


class AlarmRecord(JournalRecord, frozen=True, kw_only=True, tag="alarm"):
    """An alarm that an operator acknowledged, shelved or unshelved."""

    what: str = ""
    id: str
    severity: str = ""
    author: str
    note: str | None = None
    reason: str | None = None
    until_ns: int | None = None


class AuthorityRecord(JournalRecord, frozen=True, kw_only=True, tag="authority"):
    """A change of a policy's authority."""

    author: str
    policy: str
    authority: str
    reason: str
    event: str


class ResumedRecord(JournalRecord, frozen=True, kw_only=True, tag="resumed"):
    """The reason why an operator ended a hold."""

    author: str
    reason: str


class StoryRecord(JournalRecord, frozen=True, kw_only=True, tag="story"):
    """A chapter of a simulated story, as its narrator reports it: what happens, and what answered it."""

    author: str
    chapter: int
    of: int
    title: str
    text: str


class LeaderRecord(JournalRecord, frozen=True, kw_only=True, tag="leader"):
    """Leadership gained with an epoch, or lost."""

    lost: int | None = None
    epoch: int | None = None
    predecessor: str | None = None
    head: str | None = None
    adopt: bool | None = None


class HallHead(msgspec.Struct, frozen=True):
    """The journal head of a hall, as its summary reported it last."""

    run: str
    lines: int
    head: str
    epoch: int
    sequence: int


class HallHeadsRecord(JournalRecord, frozen=True, kw_only=True, tag="hall_heads"):
    """The journal heads of all halls of a fleet: a hall whose journal is cut later is shown by them."""

    heads: dict[str, HallHead]


class ReloadRecord(JournalRecord, frozen=True, kw_only=True, tag="reload"):
    """A reload of the configuration, and why it was refused if it was."""

    author: str
    refused: tuple[str, ...]


class SiteFileRecord(JournalRecord, frozen=True, kw_only=True, tag="site_file"):
    """A change of the site's file that a person approved: its new lines, and who writes them.

    `refused`: why the daemon kept the file as it was.
    """

    author: str
    reason: str
    digest: str
    lines: tuple[str, ...]
    writer: Literal["daemon", "terminal"] = "daemon"
    refused: tuple[str, ...] = ()


class PrunedSegment(msgspec.Struct, frozen=True):
    """A segment of the journal that is about to be deleted."""

    file: str
    first_seq: int
    last_seq: int
    last_hash: str
    bytes: int


class UpkeepRecord(JournalRecord, frozen=True, kw_only=True, tag="upkeep"):
    """Files that were deleted, or segments of the journal that are about to be."""

    snapshots: tuple[str, ...] | None = None
    set_aside: tuple[str, ...] | None = None
    trace: tuple[str, ...] | None = None
    ticks: tuple[tuple[int, int], ...] | None = None
    pruned: tuple[PrunedSegment, ...] | None = None


class QuarantineRecord(JournalRecord, frozen=True, kw_only=True, tag="quarantine"):
    """Input of a tick that was left out, since the engine failed on it; `whole`: the tick itself was."""

    poisoned: int
    parts: tuple[str, ...] = ()
    whole: bool = False
    error: str
    file: str


class ContingencyNote(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Contingency plans that are about to be published, or withdrawn."""

    delivered: int | None = None
    gpus: int | None = None
    epoch: int | None = None
    low_w: float | None = None
    high_w: float | None = None
    withdrawn: int | None = None


class DaemonRecord(JournalRecord, frozen=True, kw_only=True, tag="daemon"):
    """The daemon's start, its contingency plans, or its last word on a full disk."""

    what: str | None = None
    started: str | None = None
    resumed_at: int | None = None
    wall_ns: int | None = None
    faults: tuple[str, ...] | None = None
    contingency: ContingencyNote | None = None
    journal: str | None = None
    reserve_released_bytes: int | None = None
    held: str | None = None


class OtherRecord(msgspec.Struct, frozen=True):
    """A line of a kind, or of a form, that this version does not know; passed through as it is."""

    kind: str
    body: dict[str, Any]


DECISIONS: tuple[type[JournalRecord], ...] = (
    CommandRecord, AdviceRecord, EventRecord, FindingRecord, ClearedRecord, LapsedRecord, FailedRecord,
    DeferredRecord, NarrowedRecord, KeptBackRecord, ProtectedRecord, ProposalsRecord, RenewalRecord,
    AcksRecord, FaultsRecord, ReportsRecord, DuplicatesRecord, SettlingRecord, SettledRecord,
    SiteRecord, MarkRecord, AccountRecord, FitRequestedRecord, FitExpiredRecord, GrantExpiredRecord,
    LoadTargetOverRecord, RequestExpiredRecord, ApprovalExpiredRecord, ApprovalDroppedRecord,
    MaintenanceExpiredRecord, MaintenanceDroppedRecord,
)  # fmt: skip
NOTES: tuple[type[JournalRecord], ...] = (
    ManifestRecord, EndRecord, AccessRecord, AlarmRecord, AuthorityRecord, ResumedRecord, StoryRecord,
    LeaderRecord, HallHeadsRecord, ReloadRecord, SiteFileRecord, UpkeepRecord, QuarantineRecord, DaemonRecord,
)  # fmt: skip
_CLASSES = {cast(str, cls.__struct_config__.tag): cls for cls in (*DECISIONS, *NOTES)}
# Lines that no tick made: how the run was kept and who touched it. A replay passes over them.
SHELL_KINDS = tuple(cast(str, cls.__struct_config__.tag) for cls in NOTES)
JOURNAL_KINDS = tuple(_CLASSES)


def brief_event(event: Event) -> Event:
    """An event for the journal: long content becomes a count, as the trace has it whole."""
    short: dict[str, Any] = {}
    for name in ("spec", "params"):
        content = getattr(event, name, None)
        if content is not None:
            size = 4 * -(-len(content) // 3) if isinstance(content, bytes) else len(content)
            short[name] = f"{size} characters, in the trace"
    for name in ("names", "nodes", "values"):
        items = getattr(event, name, None)
        if items is not None and len(items) > SHORT_LIST:
            short[name] = (*items[:SHORT_LIST], f"and {len(items) - SHORT_LIST} more")
    return msgspec.structs.replace(event, **short) if short else event


# -- bytes


def _encode_column(value: np.ndarray) -> Any:
    """A list, a range or base64 little-endian; an infinity always as base64, since JSON has none."""
    if value.dtype.kind == "i" and value.size > RUN and (np.diff(value) == 1).all():
        return {"first": int(value[0]), "n": int(value.size)}
    if value.size <= INLINE and not (value.dtype.kind == "f" and np.isinf(value).any()):
        return value.tolist()
    data = np.ascontiguousarray(value.astype(value.dtype.newbyteorder("<"), copy=False))
    return {
        "dtype": data.dtype.str[1:],
        "n": int(data.size),
        "base64": base64.b64encode(data.tobytes()).decode(),
    }


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _encode_column(value)
    if isinstance(value, Bound):
        return value.value
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be journaled")


def column(value: Any) -> np.ndarray:
    """The array that a column on disk stands for."""
    if isinstance(value, dict) and "first" in value:
        return np.arange(value["first"], value["first"] + value["n"])
    if isinstance(value, dict):
        return np.frombuffer(base64.b64decode(value["base64"]), "<" + value["dtype"])
    return np.array([np.nan if v is None else v for v in value])


def _decode(kind: Any, value: Any) -> Any:
    if kind is np.ndarray:
        return column(value)
    if kind is Bound:
        return Bound(column(value) if isinstance(value, dict | list) else value)
    raise TypeError(f"{kind} is no part of a journal record")


_ENCODER = msgspec.json.Encoder(enc_hook=_encode)


def encode_body(record: JournalRecord | OtherRecord) -> bytes:
    """The body of a record's line: its fields without the kind."""
    if isinstance(record, OtherRecord):
        return _ENCODER.encode(record.body)
    packed = _ENCODER.encode(record)  # {"kind":"...","field":...}
    rest = packed.find(b",")
    return b"{" + packed[rest + 1 :] if rest > 0 else b"{}"


def read_record(kind: str, body: dict[str, Any]) -> JournalRecord | OtherRecord:
    """The record that a line stands for; `OtherRecord` if it is of no kind or form that is known here."""
    cls = _CLASSES.get(kind)
    if cls is None:
        return OtherRecord(kind, body)
    if cls is EventRecord and isinstance(body.get("event"), dict):
        body = {**body, "event": _whole_event(body["event"])}
    try:
        return msgspec.convert({"kind": kind, **_bounded(body)}, cls, dec_hook=_decode)
    except (msgspec.ValidationError, ValueError, TypeError, KeyError):
        return OtherRecord(kind, body)


def _bounded(body: dict[str, Any]) -> dict[str, Any]:
    """Bounds of proposals that are null on disk are infinite, a null wish is none."""
    proposals = body.get("proposals")
    if not isinstance(proposals, list):
        return body
    absent = {"lo": -np.inf, "hi": np.inf, "want": np.nan}
    filled = [
        {k: absent[k] if v is None and k in absent else v for k, v in p.items()} if isinstance(p, dict) else p
        for p in proposals
    ]
    return {**body, "proposals": filled}


def _whole_event(event: dict[str, Any]) -> dict[str, Any]:
    """An event of a line in the form of `Event`: without the text that stands for what was left out."""
    out = dict(event)
    if "params" in out:
        out["params"] = ""
    values = out.get("values")
    if isinstance(values, list) and values and isinstance(values[-1], str) and _MORE.fullmatch(values[-1]):
        out["values"] = values[:-1]
    if out.get("lo", 0.0) is None:
        out["lo"] = -np.inf
    if out.get("hi", 0.0) is None:
        out["hi"] = np.inf
    return out


def fields_of(record: msgspec.Struct) -> dict[str, Any]:
    """The fields of a record as on disk: by their names there, without those that have their default."""
    if isinstance(record, OtherRecord):
        return record.body
    values = ((f, getattr(record, f.name)) for f in msgspec.structs.fields(record))
    return {f.encode_name: v for f, v in values if v is not f.default}


# -- schema

_COLUMN_SCHEMA = {
    "description": "A column: its values, a run of consecutive numbers, or base64 little-endian",
    "anyOf": [
        {"type": "array", "items": {"type": ["number", "boolean", "null"]}},
        {
            "type": "object",
            "properties": {"first": {"type": "integer"}, "n": {"type": "integer"}},
            "required": ["first", "n"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {
                "dtype": {"type": "string"},
                "n": {"type": "integer"},
                "base64": {"type": "string", "contentEncoding": "base64"},
            },
            "required": ["dtype", "n", "base64"],
            "additionalProperties": False,
        },
    ],
}


def _custom_schema(kind: Any) -> dict[str, Any]:
    if kind is np.ndarray:
        return _COLUMN_SCHEMA
    if kind is Bound:
        return {"anyOf": [{"type": ["number", "null"]}, {"enum": ["lo", "hi"]}, _COLUMN_SCHEMA]}
    raise NotImplementedError(f"{kind} is no part of a journal record")


def journal_schema() -> dict[str, Any]:
    """JSON Schema of a line of the journal."""
    classes = (*DECISIONS, *NOTES)
    _, components = msgspec.json.schema_components(
        classes, schema_hook=_custom_schema, ref_template="#/$defs/{name}"
    )
    lines = []
    for kind, cls in _CLASSES.items():
        body = components[cls.__name__]
        del body["properties"]["kind"]
        body["required"] = [name for name in body["required"] if name != "kind"]
        # A body that is too large for a line is a file of its own, named by its hash.
        beside = {"anyOf": [{"$ref": f"#/$defs/{cls.__name__}"}, {"$ref": "#/$defs/SideBody"}]}
        lines.append({"properties": {"kind": {"const": kind}, "body": beside}})
    components["SideBody"] = {
        "type": "object",
        "properties": {"side": {"type": "string"}, "bytes": {"type": "integer"}},
        "required": ["side", "bytes"],
    }
    for name, kind in (("seq", "integer"), ("tick", "integer"), ("now_ns", "integer")):
        for line in lines:
            line["properties"][name] = {"type": kind}
    for line in lines:
        line["properties"]["prev"] = {"type": "string", "pattern": "^[0-9a-f]{32}$"}
    shortened = {"type": "string", "pattern": _MORE.pattern}
    outlook = components[ev.OutlookTold.__name__]["properties"]["values"]
    outlook["items"] = {"anyOf": [outlook["items"], shortened]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A line of a racktwin journal",
        "type": "object",
        "required": ["seq", "prev", "kind", "tick", "now_ns", "body"],
        "oneOf": lines,
        "$defs": _nullable(components),
    }


def _nullable(schema: Any) -> Any:
    """Numbers may be null, as JSON has neither NaN nor infinity."""
    if isinstance(schema, list):
        return [_nullable(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    out = {key: _nullable(part) for key, part in schema.items()}
    if out.get("type") == "number":
        out["type"] = ["number", "null"]
    return out
