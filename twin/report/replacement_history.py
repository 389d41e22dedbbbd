"""History of withdrawn nodes: accounts, commands, tests and repairs in order, and the gate's score.

Made from lines of the journal alone, so it is the same while the daemon is down. Text from outside is made
safe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

from twin.catalogue import NS, clean, find_control, number, utc
from twin.contracts import (
    AccountRecord,
    AdviceRecord,
    CommandRecord,
    DeferredRecord,
    EventRecord,
    FailedRecord,
    FindingRecord,
    JournalRecord,
    KeptBackRecord,
    LapsedRecord,
    NarrowedRecord,
    ProtectedRecord,
)
from twin.report.replacement_journal import BURN_IN, CONTROLS, PLACEMENT, POLICY
from twin.run import RecordedLine
from twin.telemetry import events as ev

MAX_TEXT, MAX_DETAIL = 400, 4000
MAX_NODES = 64  # of one command that are listed by name
MAX_KEYS = 40  # of an account
LEAVING = ("suspect", "cordoned", "saving", "draining")  # phases into which a decision led
WAITING = ("watch", "wait", "none")  # courses on which nothing is done
OutcomeRecord = (
    FailedRecord | LapsedRecord | KeptBackRecord | DeferredRecord | NarrowedRecord | ProtectedRecord
)
NameOf = Callable[[int], str | None]  # node -> its path


def rows_of(
    entries: Sequence[RecordedLine], name_of: NameOf, node: str | None = None, findings: bool = False
) -> list[dict[str, Any]]:
    """A row for each line that concerns withdrawn nodes, or one of them, in the order of the journal.

    `findings`: those about the node as well, of which there may be many. A line that is not as we write it
    becomes no row.
    """
    out = []
    for entry in entries:
        try:
            row = _row(entry, name_of, node, findings)
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError):
            row = None
        if row is not None:
            out.append({"at_ns": entry.now_ns, "tick": entry.tick, "seq": entry.seq, **row})
    return out


def _row(entry: RecordedLine, name_of: NameOf, node: str | None, findings: bool) -> dict[str, Any] | None:
    match entry.record:
        case AccountRecord():
            return _account(entry.record, node)
        case EventRecord():
            return _event(entry.record, node)
        case FindingRecord():
            return _finding(entry.record, node) if findings else None
        case CommandRecord() | AdviceRecord():
            return _commanded(entry.record, name_of, node)
        case (
            FailedRecord()
            | LapsedRecord()
            | KeptBackRecord()
            | DeferredRecord()
            | NarrowedRecord()
            | ProtectedRecord()
        ):
            return _outcome(entry.record, name_of, node)
        case _:
            return None


# -- accounts


def _account(record: AccountRecord, node: str | None) -> dict[str, Any] | None:
    account = record.account
    if record.policy != POLICY or (node is not None and account.get("node") != node):
        return None
    data = {clean(k, 40): plain(v) for k, v in list(account.items())[:MAX_KEYS]}
    named = [str(data["node"])] if isinstance(data.get("node"), str) else []
    return {"kind": clean(str(data.get("what", "account")), 40), "nodes": named, "count": len(named),
            "text": account_words(data), "by": "", "data": data}  # fmt: skip


def account_words(data: dict[str, Any]) -> str:
    """An account as a sentence: the policy's own, or else one made from its kind."""
    own = next((data[k] for k in ("text", "sentence", "reason", "why") if isinstance(data.get(k), str)), "")
    what = data.get("what")
    if what == "gate":
        repair = f" ({_gpu_h(data['repair_gpu_h'])} of it repair)" if _known(data.get("repair_gpu_h")) else ""
        course = str(data.get("course", "?")).replace("_", " ")
        text = (
            f"{course}: by acting {_gpu_h(data.get('act_gpu_h'))}{repair} expected to be lost and "
            f"{_chance(data.get('act_pu'))} of an interruption, by waiting "
            f"{_gpu_h(data.get('wait_gpu_h'))} and {_chance(data.get('wait_pu'))}"
        )
        return clean(f"{text}; {own}" if own else text, MAX_TEXT)
    if what == "outcome":
        failed = data.get("failed")
        sentence = (
            "it failed"
            if failed is True
            else "it did not fail"
            if failed is False
            else "its outcome is unknown"
        )
        text = f"{sentence}; {_gpu_h(data.get('lost_gpu_h'))} lost"
        return clean(f"{text}; {own}" if own else text, MAX_TEXT)
    if what == "phase":
        weighed = ("cause", "course", "spare") if data.get("to") in LEAVING else ("spare",)
        more = [own, *(f"{name} {str(data[name]).replace('_', ' ')}" for name in weighed if data.get(name))]
        phases = f"{data.get('from')} -> {data.get('to')}".replace("_", " ")
        return clean(f"{phases}: {', '.join(filter(None, more))}", MAX_TEXT)
    if own:
        return clean(own, MAX_TEXT)
    rest = [f"{k} {v}" for k, v in data.items() if k not in ("what", "node") and v not in (None, "")]
    return clean(", ".join(rest), MAX_TEXT)


def _gpu_h(value: Any) -> str:
    return f"{number(value)} GPU-h" if _known(value) else "an unknown number of GPU-h"


def _chance(value: Any) -> str:
    from twin.report.health_texts import chance

    return f"a chance of {chance(float(value))}" if _known(value) else "an unknown chance"


def _known(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def plain(value: Any) -> Any:
    """Return a value of an account, bounded; None if it is no number."""
    if isinstance(value, str):
        return clean(value, MAX_TEXT)
    if value is None or isinstance(value, bool | int):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else None


# -- events


def _event(record: EventRecord, node: str | None) -> dict[str, Any] | None:
    event = record.event
    refused = clean(record.refused or "", 200)
    by = clean(getattr(event, "author", ""))
    data: dict[str, Any] = {"refused": refused} if refused else {}
    more = f"; refused: {refused}" if refused else ""
    match event:
        case ev.NodeTested() | ev.NodeRepaired():
            name = clean(event.name, 200)
            if node is not None and name != node:
                return None
            if isinstance(event, ev.NodeTested):
                kind = "test"
                data |= {
                    "detail": tail_of(event.detail),
                    "passed": event.passed,
                    "test": clean(event.test),
                    "began_ns": event.began_ns,
                    "ended_ns": event.ended_ns,
                }
                text = tested_words(data)
            else:
                kind, data["detail"] = "repair", tail_of(event.note)
                text = f"repaired, says {by}" + (f": {data['detail']}" if data["detail"] else "")
            return {"kind": kind, "nodes": [name], "count": 1,
                    "text": clean(text + more, MAX_TEXT), "by": by, "data": data}  # fmt: skip
        case ev.EntityReplaced(table="gpu" | "node"):
            name = clean(event.name, 200)
            owner = name.rpartition("/")[0] if event.table == "gpu" else name
            if node is not None and owner != node:
                return None
            data |= {"table": event.table, "name": name, "serial": clean(event.serial)}
            text = f"{name} was replaced: serial {data['serial'] or 'unknown'}{more}"
            return {"kind": "replaced", "nodes": [owner], "count": 1, "text": clean(text, MAX_TEXT),
                    "by": "", "data": data}  # fmt: skip
        case ev.AuthorityChanged(policy="replacement") | ev.Approved(policy="replacement"):
            return _decided(event, by, more, node)
        case _:
            return None


def _decided(
    event: ev.AuthorityChanged | ev.Approved, by: str, more: str, node: str | None
) -> dict[str, Any] | None:
    """Authority or approval that an operator gave the policy."""
    named: list[str] = []
    if isinstance(event, ev.AuthorityChanged):
        text = f"{by} sets what it may do: {clean(event.authority, 20)}"
    else:
        named = [clean(n, 200) for n in event.names[:MAX_NODES]]
        of = ", ".join(named[:4]) + (f" and {len(named) - 4} more" if len(named) > 4 else "")
        text = f"{by} approves {clean(event.control, 60)} {of or 'wherever it wants to'}"
        text += f" until {utc(event.expires_ns)} UTC"
    if node is not None and named and node not in named:
        return None
    what = "authority" if isinstance(event, ev.AuthorityChanged) else "approval"
    return {"kind": what, "nodes": named, "count": len(named), "text": clean(text + more, MAX_TEXT),
            "by": by, "data": {}}  # fmt: skip


def tail_of(text: Any) -> str:
    """The end of a test's output: whole lines as far as they fit, each made safe."""
    lines = [clean(line, MAX_TEXT) for line in str(text)[-2 * MAX_DETAIL :].splitlines()]
    out: list[str] = []
    room = MAX_DETAIL
    for line in reversed(lines):
        room -= len(line) + 1
        if room < 0:
            break
        out.append(line)
    return "\n".join(reversed(out)).strip("\n")


def tested_words(data: dict[str, Any]) -> str:
    """Write the result of a test, with its last line."""
    text = {True: "passed", False: "failed"}.get(data["passed"], "no result")
    took_s = (data["ended_ns"] - data["began_ns"]) / NS
    last = next((line for line in reversed(data["detail"].splitlines()) if line.strip()), "")
    test = f" {data['test']}" if data["test"] else ""
    return (
        f"test{test}: {text}"
        + (f" after {took_s:,.0f} s" if took_s >= 1 else "")
        + (f": {last}" if last else "")
    )


# -- commands, and what became of them


def _commanded(
    record: CommandRecord | AdviceRecord, name_of: NameOf, node: str | None
) -> dict[str, Any] | None:
    control = record.control
    if control not in CONTROLS or (record.policy or POLICY) != POLICY:
        return None
    index = record.index.astype("int64").tolist()
    names = _names(index, (record.first_name, record.last_name, *record.names), name_of)
    values = record.value.tolist()
    value = values[0] if values else None
    if node is not None:
        if node not in names:
            return None
        value = values[names.index(node)] if len(values) == len(names) else value
    verb = "" if isinstance(record, CommandRecord) else "would be: "
    text = f"{verb}{level_words(control, value)}: {record.reason}"
    data = {"control": control, "value": plain(value)}
    return _command_row(record, names, len(index), node, text, data)


def _outcome(record: OutcomeRecord, name_of: NameOf, node: str | None) -> dict[str, Any] | None:
    if record.control not in CONTROLS or (getattr(record, "policy", "") or POLICY) != POLICY:
        return None
    column = getattr(record, "index", None)
    index = [] if column is None else column.astype("int64").tolist()
    names = _names(index, getattr(record, "names", ()), name_of)
    if node is not None and node not in names:
        return None
    why = getattr(record, "why", "")
    text = f"{record.kind.replace('_', ' ')} {record.control}" + (f": {why}" if why else "")
    count = len(index) or int(getattr(record, "count", len(names)))
    return _command_row(record, names, count, node, text, {"control": record.control})


def _command_row(
    record: JournalRecord, names: list[str], count: int, node: str | None, text: str, data: dict[str, Any]
) -> dict[str, Any]:
    named = [node] if node is not None else names[:MAX_NODES]
    return {
        "kind": record.kind,
        "nodes": named,
        "count": 1 if node is not None else count,
        "text": clean(text, MAX_TEXT),
        "by": clean(getattr(record, "policy", "")),
        "data": data,
    }


def level_words(control: str, value: Any) -> str:
    """A commanded value as people say it."""
    spec = find_control(control)
    if not _known(value):
        return control
    if control == BURN_IN:
        return f"test it, after {utc(round(value) * NS)} UTC"
    if spec is not None and 0 <= value < len(spec.states):
        return f"placed {spec.states[int(value)]}" if control == PLACEMENT else spec.states[int(value)]
    return f"{control} {value:g}"


def _names(index: list[int], own: Sequence[str], name_of: NameOf) -> list[str]:
    """Names of a command's nodes; if the site has changed since, only those in the journal line itself."""
    parts = [clean(n, 200) for n in own if n]
    if not index:
        return list(dict.fromkeys(parts))
    named = [name_of(i) for i in index]
    ends_fit = not parts or (named[0] == parts[0] and named[-1] == parts[-1])
    if ends_fit and all(n is not None for n in named):
        return [n for n in named if n is not None]
    return list(dict.fromkeys(parts))


# -- findings


def _finding(record: FindingRecord, node: str | None) -> dict[str, Any] | None:
    about = [str(e).partition(":")[2] or str(e) for e in record.entities]
    if node is None or not any(
        e == node or e.startswith(node + "/") or e.startswith(node + "#") for e in about
    ):
        return None
    evidence = [clean(e, MAX_TEXT) for e in record.evidence[:8]]
    text = f"{record.severity}: {record.title}"
    return {"kind": "finding", "nodes": [node], "count": 1, "text": clean(text, MAX_TEXT), "by": "",
            "data": {"id": clean(record.id, 200), "evidence": evidence}}  # fmt: skip


# -- the kept score


def unmatched(rows: Sequence[dict[str, Any]], kinds: Sequence[str]) -> list[str]:
    """Write a note on requested kinds that no row has: a typo would look like quiet days."""
    there = sorted({str(row["kind"]) for row in rows})
    known = f"kinds of this time: {', '.join(there[:MAX_NODES])}" if there else "nothing at all is there"
    return [f"no line of kind {clean(kind, 40)}; {known}" for kind in kinds[:MAX_NODES] if kind not in there]


def score_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the score of the gate's predictions with a known outcome: Brier score and mean GPU-hours.

    A prediction is that of the course that was taken. `brier` is the mean square of (chance - what came),
    0 is perfect and 0.25 a coin.
    """
    gates: dict[str, dict[str, Any]] = {}
    asked = settled = unknown = 0
    squares: list[float] = []
    chances: list[float] = []
    came: list[float] = []
    pairs: list[tuple[float, float]] = []
    for row in rows:
        data = row["data"]
        node = str(data.get("node", ""))
        if row["kind"] == "gate":
            gates[node] = data
            asked += 1
        elif row["kind"] == "outcome":
            settled += 1
            before = gates.pop(node, {}) | {k: v for k, v in data.items() if v is not None}
            chance, gpu_h = predicted(before)
            if not isinstance(data.get("failed"), bool):
                unknown += 1
            elif chance is not None:
                chances.append(chance)
                came.append(float(data["failed"]))
                squares.append((chance - came[-1]) ** 2)
            lost = data.get("lost_gpu_h")
            if gpu_h is not None and _known(lost):
                pairs.append((gpu_h, float(lost)))
    n = len(pairs)
    return {"gates": asked, "settled": settled, "unknown": unknown, "scored": len(squares),
            "brier": sum(squares) / len(squares) if squares else None,
            "predicted_pu": sum(chances) / len(chances) if chances else None,
            "failed_pu": sum(came) / len(came) if came else None,
            "predicted_gpu_h": sum(p for p, _ in pairs) / n if n else None,
            "lost_gpu_h": sum(a for _, a in pairs) / n if n else None}  # fmt: skip


def predicted(gate: dict[str, Any]) -> tuple[float | None, float | None]:
    """(chance of an interruption, expected GPU-hours) of the course that was taken; None for unknown."""
    which = "wait" if str(gate.get("course", "")).lower() in WAITING else "act"
    chance, gpu_h = gate.get(f"{which}_pu"), gate.get(f"{which}_gpu_h")
    return (float(chance) if _known(chance) else None), (float(gpu_h) if _known(gpu_h) else None)
