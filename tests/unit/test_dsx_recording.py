"""The recorded BMS: every message accounted for, its metadata valid against bms.yaml, and mutations of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from connectors.dsx import BmsDecoder, discover
from connectors.dsx.points import ROWS
from connectors.files import read_capture
from twin.catalogue import BadMessage
from twin.site import SiteSpec, build_site
from twin.telemetry import Ignored, Message, Reading

METADATA, VALUE = "BMS/v1/PUB/Metadata/", "BMS/v1/PUB/Value/"


class DiscoveredNames:
    """The names of a discovered site, each table numbered in order."""

    def __init__(self, site: dict[str, Any]) -> None:
        (hall,) = site["halls"]
        self.tables = {"hall": [hall["name"]]}
        for table in ("rack", "cdu", "feeder"):
            self.tables[table] = [row["name"] for row in hall[table + "s"]]

    def entity(self, table: str, name: str) -> int | None:
        names = self.tables.get(table, [])
        return names.index(name) if name in names else None


Cell = tuple[str, str, str]


class Run:
    """Output of a decoder over messages: counts, reasons, and the last reading of each cell."""

    def __init__(self, messages: Iterable[Message], names: DiscoveredNames) -> None:
        self.decoder = BmsDecoder(names)
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[Ignored] = Counter()
        self.last: dict[Cell, Reading] = {}
        self.signals: set[str] = set()
        for message in messages:
            try:
                answer = self.decoder.decode(message)
            except BadMessage:
                self.counts["bad"] += 1
                continue
            if isinstance(answer, Ignored):
                self.counts["ignored"] += 1
                self.reasons[answer] += 1
                continue
            self.counts["decoded"] += 1
            for reading in answer:
                name = names.tables[reading.table][reading.entity]
                self.last[reading.table, name, reading.signal] = reading
                self.signals.add(f"{reading.table}.{reading.signal}")


@pytest.fixture
def messages(recording: Callable[[str], Path]) -> list[Message]:
    rows = list(read_capture(recording("dsx-bms-capture") / "dsx_exemplar.csv"))
    assert all(isinstance(row, Message) for row in rows)
    return [row for row in rows if isinstance(row, Message)]


@pytest.fixture
def names(messages: list[Message]) -> DiscoveredNames:
    return DiscoveredNames(discover(messages).site)


def changed(messages: Iterable[Message], part: str, **fields: Any) -> Iterator[Message]:
    """The messages, with `fields` set in the payload of those whose topic holds `part`."""
    for message in messages:
        if part in message.topic:
            body = json.loads(message.payload) | fields
            message = message._replace(payload=json.dumps(body).encode())
        yield message


def test_every_message_is_accounted_for(messages: list[Message], names: DiscoveredNames) -> None:
    run = Run(messages, names)
    assert len(messages) == 4711
    assert run.counts == {"decoded": 4668, "ignored": 43}
    assert run.reasons == {Ignored("Sound", "the catalogue has no signal for it"): 43}
    stats = run.decoder.stats
    assert (stats.metadata, stats.values, stats.ignored, stats.bad, stats.changed) == (166, 4502, 43, 0, 0)
    assert run.decoder.notes == {"process area 'Seccondary' read as 'Secondary'": 1}
    assert len(run.signals) == 52


@pytest.mark.parametrize(
    "cell, value",
    [
        (("rack", "Pod1C-E02", "power_w"), 35207.0),
        (("rack", "Pod1C-E01", "power_w"), 96.0),
        (("rack", "Pod1C-E02", "valve_pu"), 0.6498),
        (("rack", "Pod1C-E06", "supply_valve_state"), 1.0),
        (("rack", "Pod1C-E06", "leak_state"), 0.0),
        (
            ("cdu", "C-F00-CDU-05", "flow_lpm"),
            0.0,
        ),  # reads zero with a pump running: the recording's own oddity
        (("cdu", "C-F00-CDU-05", "facility_flow_lpm"), 4.92102),
        (("cdu", "C-F00-CDU-05", "pump1_speed_pu"), 0.44),
        (("cdu", "C-F00-CDU-05", "pump2_speed_pu"), 0.0),
        (("cdu", "C-F00-CDU-05", "fill_pump_state"), 0.0),
        (("cdu", "C-F00-CDU-05", "filter_diff_pressure_pa"), 5515.808),
        (("cdu", "C-F00-CDU-05", "diff_pressure_setpoint_pa"), 90000.0),
        (("cdu", "C-F00-CDU-05", "supply_temp_setpoint_final_c"), 32.0),
        (("feeder", "C-E-BUS-E1", "power_w"), 103005.0),
        (("feeder", "C-E05-TAP-E2", "current_a"), 28.813423),
        (("feeder", "C-E05-TAP-E2", "current_a_max"), 33.521),
        (("feeder", "C-E05-TAP-E2", "phase_b_current_a"), 33.521),
        (("feeder", "C-E06-TAP-E2", "shunt_trip_state"), 0.0),
        (("hall", "Pod1C", "cold_aisle_temp_c"), 26.40615),  # the warmer of two
        (("hall", "Pod1C", "leak_state"), 0.0),
    ],
)
def test_readings_of_the_recording(
    messages: list[Message], names: DiscoveredNames, cell: Cell, value: float
) -> None:
    reading = Run(messages, names).last[cell]
    assert reading.value == pytest.approx(value, rel=1e-9)
    assert reading.trusted


def test_the_order_of_metadata_does_not_matter(messages: list[Message], names: DiscoveredNames) -> None:
    metadata = [m for m in messages if m.topic.startswith(METADATA)]
    values = [m for m in messages if m.topic.startswith(VALUE)]
    assert Run(metadata[::-1] + values, names).last == Run(messages, names).last


def test_values_before_their_metadata_are_ignored(messages: list[Message], names: DiscoveredNames) -> None:
    late = [m for m in messages if m.topic.startswith(VALUE)] + [m for m in messages if METADATA in m.topic]
    run = Run(late + late, names)
    assert sum(n for why, n in run.reasons.items() if why.why == "no metadata yet") == 4545
    assert run.counts["decoded"] == 166 + 166 + 4502


@pytest.mark.parametrize(
    "fields, value, trusted", [({"value": None}, None, True), ({"quality": 0}, 35207.0, False)]
)
def test_null_and_bad_quality(
    messages: list[Message],
    names: DiscoveredNames,
    fields: dict[str, Any],
    value: float | None,
    trusted: bool,
) -> None:
    run = Run(changed(messages, VALUE, **fields), names)
    assert run.counts == {"decoded": 4668, "ignored": 43}
    assert {r.trusted for r in run.last.values()} == {trusted}
    assert run.last["rack", "Pod1C-E02", "power_w"].value == value


def test_swapped_state_texts_invert_the_state(messages: list[Message], names: DiscoveredNames) -> None:
    texts = [{"value": 0, "text": "Leak"}, {"value": 1, "text": "NoLeak"}]
    run = Run(changed(messages, "Metadata/Rack/RackLeakDetect/", stateText=texts), names)
    leaks = {key[1]: r.value for key, r in run.last.items() if key[0] == "rack" and key[2] == "leak_state"}
    assert leaks == {f"Pod1C-E0{i}": 1.0 for i in range(2, 7)}


@pytest.mark.parametrize(
    "part, unit, cell, expected",
    [
        ("Metadata/Rack/RackPower/", "W", ("rack", "Pod1C-E02", "power_w"), 35.207),
        ("Metadata/Rack/RackLiquidFlow/", "GPM", ("rack", "Pod1C-E02", "flow_lpm"), 50.768 * 3.785411784),
        ("Metadata/CDU/LiquidPressure/", "psi", ("cdu", "C-F00-CDU-05", "return_pressure_pa"),
         234.42184 * 6894.757293168),
    ],
)  # fmt: skip
def test_other_units_are_converted(
    messages: list[Message], names: DiscoveredNames, part: str, unit: str, cell: Cell, expected: float
) -> None:
    run = Run(changed(messages, part, engUnit=unit), names)
    assert run.last[cell].value == pytest.approx(expected, rel=1e-9)


def test_a_unit_that_does_not_fit_is_named(messages: list[Message], names: DiscoveredNames) -> None:
    run = Run(changed(messages, "Metadata/Rack/RackPower/", engUnit="LPM"), names)
    why = "unit 'LPM'; expected one that measures W"
    assert sum(n for said, n in run.reasons.items() if said[:2] == ("RackPower", why)) == 112


def test_misspelt_areas_are_read_and_noted(messages: list[Message], names: DiscoveredNames) -> None:
    slips = {"Secondary": "Secundary", "Primary": "Primry", "Supply": "Suppyl", "ColdAisle": "Cold-Asle"}
    worse = []
    for message in messages:
        payload = message.payload
        if message.topic.startswith(METADATA):
            for word, slip in slips.items():
                payload = payload.replace(f'"{word}"'.encode(), f'"{slip}"'.encode())
        worse.append(message._replace(payload=payload))
    run = Run(worse, names)
    assert run.last == Run(messages, names).last
    assert len(run.decoder.notes) == 5


def _schema(document: dict[str, Any], object_type: str, point_type: str) -> dict[str, Any]:
    """The schema that the document's channels give for the metadata of this kind of point."""
    refs = []
    for channel in document["channels"].values():
        if channel["address"].startswith(f"{METADATA}{object_type}/"):
            for message in channel["messages"].values():
                name = message["$ref"].rpartition("/")[2]
                payload = document["components"]["messages"][name]["payload"]
                if name in (f"{object_type}{point_type}Msg", f"{point_type}Msg"):
                    refs.append(payload)
    assert len(refs) == 1, (object_type, point_type)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "components": document["components"],
        **refs[0],
    }


def test_metadata_and_requests_are_valid_against_the_published_schema(
    recording: Callable[[str], Path], messages: list[Message], names: DiscoveredNames
) -> None:
    text = (recording("dsx-bms-capture") / "bms.yaml").read_text()
    document = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    validators: dict[tuple[str, str], Any] = {}
    odd: Counter[tuple[str, str]] = Counter()
    metadata = [m for m in messages if m.topic.startswith(METADATA)]
    for message in metadata:
        kind, point = message.topic[len(METADATA) :].split("/")[:2]
        if (kind, point) not in validators:
            schema = _schema(document, kind, point)
            validators[kind, point] = jsonschema.Draft202012Validator(schema)
        if list(validators[kind, point].iter_errors(json.loads(message.payload))):
            odd[kind, point] += 1
    assert len(metadata) == 166
    assert odd == {}  # the misspelt process area is free text there
    wrong = json.loads(metadata[0].payload)
    for broken in (
        wrong | {"servesId": "a"},
        wrong | {"extra": 1},
        {k: wrong[k] for k in wrong if k != "objectId"},
    ):
        assert not validators["PowerMeter", "ActivePower"].is_valid(broken)
    envelope = jsonschema.Draft202012Validator(document["components"]["messages"]["ValueMessage"]["payload"])
    for message in messages:
        if message.topic.startswith(VALUE):
            envelope.validate(json.loads(message.payload))
    ours = BmsDecoder(names, ours=("MEPAI", "NICO"))
    sent = 0
    for message in metadata:
        assert ours.decode(message) == []
        if b'"integration"' in message.payload:
            topic, payload = ours.encode_request(
                message.topic, 1.0 if "/Rack/" in message.topic else 30.0, 10**18
            )
            envelope.validate(json.loads(payload))
            owner = json.loads(message.payload)["integration"]
            assert topic == message.topic.replace("PUB", owner, 1).replace("Metadata", "Value", 1)
            sent += 1
    assert sent == 16


def test_the_discovered_site_can_be_built_and_decoded_against(messages: list[Message]) -> None:
    found = discover(messages)
    site = build_site(SiteSpec(file=found.site, profiles={}))
    decoder = BmsDecoder(site)
    assert sum(not isinstance(decoder.decode(m), Ignored) for m in messages) == 4668


def test_the_rows_cover_every_kind_of_point_recorded_but_sound(messages: list[Message]) -> None:
    recorded = {tuple(m.topic.split("/")[4:6]) for m in messages}
    assert recorded - {(r.object_type, r.point_type) for r in ROWS} == {("Sensor", "Sound")}
