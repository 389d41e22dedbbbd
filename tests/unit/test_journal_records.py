"""Every record is read as it was written, and every kind is in the schema."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest

from twin.cli.main import main
from twin.contracts import (
    JOURNAL_KINDS,
    AcksRecord,
    Bound,
    CommandRecord,
    EventRecord,
    JournalRecord,
    LeaderRecord,
    OtherRecord,
    ProposalChange,
    ProposalsRecord,
    brief_event,
    encode_body,
    fields_of,
    journal_schema,
    read_record,
)
from twin.run.journal import Chain
from twin.telemetry import events as ev

COMMAND = CommandRecord(
    control="gpu.power_cap_w",
    policy="p",
    first_name="a",
    last_name="b",
    index=np.arange(100, dtype=np.int32),
    value=np.linspace(0.0, 1.0, 100),
    reason="r",
    epoch=1,
    first_command=2,
    expires_ns=3,
    deadline_ns=4,
)
WIDE = ProposalChange(
    control="gpu.power_cap_w",
    reason="r",
    index=np.array([1, 5]),
    lo=Bound(float("-inf")),
    hi=Bound(np.array([1.0, np.inf])),
    want=Bound("hi"),
)
LONG = ev.OutlookTold(
    author="x", quantity="site.power_w", name="", start_ns=1, step_s=60.0, values=tuple(range(100))
)
RECORDS: tuple[JournalRecord, ...] = (
    COMMAND,
    ProposalsRecord(policy="p", proposals=(WIDE,)),
    EventRecord(event=brief_event(LONG), refused="no"),
    EventRecord(event=brief_event(ev.ModelFitted(fit="f", model="m", params=b"abcd", params_hash="h"))),
    EventRecord(
        event=ev.OperatorRequest(
            id="q", author="ann", control="gpu.power_cap_w", names=("g",), lo=float("-inf"), hi=9.0
        )
    ),
    AcksRecord(control="gpu.power_cap_w", state="done", count=3),
    LeaderRecord(lost=3),
)


def body(record: JournalRecord) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(encode_body(record))
    return found


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.kind)
def test_a_record_is_read_as_it_was_written(record: JournalRecord) -> None:
    back = read_record(record.kind, body(record))
    assert type(back) is type(record)
    assert "kind" not in body(record)
    assert list(body(record)) == list(fields_of(record)), "in the order of the fields, without defaults"


def test_columns_and_bounds_come_back() -> None:
    back = read_record("command", body(COMMAND))
    assert isinstance(back, CommandRecord)
    assert back.index.tolist() == list(range(100))
    assert back.value.tolist() == COMMAND.value.tolist()
    back = read_record("proposals", body(RECORDS[1]))
    assert isinstance(back, ProposalsRecord)
    (change,) = back.proposals
    assert (change.lo, change.want) == (WIDE.lo, WIDE.want)
    assert isinstance(change.hi, Bound)
    assert np.array_equal(change.hi.value, WIDE.hi.value if WIDE.hi else 0)


def test_long_content_of_an_event_is_a_count() -> None:
    assert body(RECORDS[2])["event"]["values"][-2:] == [63, "and 36 more"]
    assert body(RECORDS[3])["event"]["params"] == "8 characters, in the trace"


def test_what_is_not_known_passes_through_by_name() -> None:
    for kind, strange in (
        ("future", {"x": 1}),
        ("command", {"control": 7}),
        ("finding", {"side": "a", "bytes": 9}),
    ):
        record = read_record(kind, strange)
        assert (record, record.kind) == (OtherRecord(kind, strange), kind)
        assert json.loads(encode_body(record)) == strange


def test_every_kind_is_in_the_schema_and_every_line_fits_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["journal", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema == json.loads(json.dumps(journal_schema()))
    jsonschema.Draft202012Validator.check_schema(schema)
    assert {line["properties"]["kind"]["const"] for line in schema["oneOf"]} == set(JOURNAL_KINDS)
    check, chain = jsonschema.Draft202012Validator(schema), Chain()
    for record in RECORDS:
        check.validate(json.loads(chain.line(record, 1, 2)))
    strange = json.loads(chain.line(OtherRecord("command", {"control": "x"}), 1, 2))
    assert not check.is_valid(strange)
