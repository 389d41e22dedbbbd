"""Dumps of `ipmitool sdr`: lines, sensor names, archives good and bad, the real one, the site made of it."""

from __future__ import annotations

import io
import lzma
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from connectors.files import Dump, discover_ipmi, ipmi, read_sensor_table
from connectors.files.ipmi import DumpTally, SensorTable, decode_text, ranges
from twin.catalogue import ConfigError, StorageError
from twin.site import SiteFile, SiteSpec, build_site, convert, expand

SHIPPED = Path(__file__).parents[2] / "connectors/ipmi-sdr.yaml"
TIME = "Timestamp: 2025-05-30 13:34:05 UTC"
TIME_NS = 1_748_612_045 * 10**9
Values = list[tuple[str, float | None]]


def _decode(*lines: str | None, time: str = TIME) -> tuple[Values, DumpTally]:
    tally = DumpTally()
    found = list(decode_text([time, *lines], read_sensor_table(SHIPPED), tally))
    assert tally.total == tally.decoded + tally.ignored + tally.bad
    assert all(t == TIME_NS for t, _ in found)
    return [v for _, values in found for v in values], tally


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Sys Power                | 940 Watts         | ok", ("power_w", 940.0)),
        ("Pwr Consumption          | 420 Watts         | ok", ("power_w", 420.0)),
        ("Inlet Water Temp         | 22 degrees C      | ok", ("water_inlet_temp_c", 22.0)),
        ("Ambient Temp             | 34 degrees C      | cr", ("inlet_temp_c", 34.0)),
        ("CPU 1 Temp               | -5 degrees C      | nc", ("cpu_temp_c", -5.0)),
        ("CPU1 Temp                | 50 degrees F      | ok", None),  # not the unit that is declared: bad
        ("CPU Power                | 120 Watts         | ns", ("cpu_power_w", None)),
        ("CPU Power                | no reading        | ns", ("cpu_power_w", None)),
        ("Exhaust Temp             | disabled          | ns", ("outlet_temp_c", None)),
        ("Fan1A_Tach               | 6000 RPM          | ok", ("fan_hz", 100.0)),
        ("Fan 1 Front Tach         | 0 RPM             | ok", ("fan_hz", 0.0)),
        ("PSU 2 AC In Pwr          | 110 Watts         | ok", ("psu2_power_w", 110.0)),
        ("Chassis Drip1            | 0x00              | ok", ("leak_state", None)),
        ("Chassis Drip1            | 0x01              | ok", None),  # a byte that we do not know: bad
        ("Host Power               | 0x00              | ok", ("power_on_state", None)),
        ("Inlet Water Temp         | 1022.25 degrees   | ok", ("water_inlet_temp_c", 1022.25)),  # cut off
    ],
)
def test_lines(line: str, expected: tuple[str, float | None] | None) -> None:
    values, tally = _decode(line)
    assert values == ([] if expected is None else [expected])
    assert (tally.decoded, tally.bad) == ((0, 1) if expected is None else (1, 0))


@pytest.mark.parametrize(
    ("line", "kind", "why"),
    [
        ("Chassis Power | 10650 Watts | ok", "Watts", "of the chassis"),
        ("PSU1 FAN_B | no reading | ns", "no reading", "power-supply fan"),
        ("CPU 1 DTS | -44.80 unspecif | ok", "unspecified", "no signal"),
        ("CPU 2 DTS | -4.80 unspecifi | ok", "unspecified", "no signal"),
        ("TPM_TCM Lock | 0x00 | ok", "discrete", "no signal"),
        ("System Air Flow | 46 CFM | ok", "CFM", "no signal"),
        ("Drive | | ok", "nothing", "no signal"),
    ],
)
def test_ignored_lines_say_why(line: str, kind: str, why: str) -> None:
    _, tally = _decode(line)
    ((_, found_kind, found_why),) = tally.reasons
    assert (tally.ignored, found_kind) == (1, kind)
    assert why in found_why


@pytest.mark.parametrize(
    "line", ["Sys Power", "Sys Power | 1 Watts", "a | b | c | d", " | 1 Watts | ok",
             "Sys Power | 1 Watts | fine",
             "Sys Power | x Watts | ok", "Sys Power | nan Watts | ok", "Sys Power | 1e9 Watts | ok",
             "Sys Power | 0x00 | ok", "Sys Power | 9999999999999999 Watts | ok",
             "Sys Power | 1_0 Watts | ok", None]
)  # fmt: skip
def test_bad_lines(line: str | None) -> None:
    values, tally = _decode(line)
    assert (values, tally.bad) == ([], 1)


def test_many_sensors_of_one_signal_are_reduced() -> None:
    values, tally = _decode(
        "CPU 1 Temp | 43 degrees C | ok", "CPU 2 Temp | 48 degrees C | ok", "CPU 3 Temp | no reading | ns",
        "Fan1 | 6000 RPM | ok", "Fan2 | 3000 RPM | ok", "Chassis Drip1 | 0x00 | ok",
        "Chassis Drip2 | 0x00 | ok",
    )  # fmt: skip
    assert values == [("cpu_temp_c", 48.0), ("fan_hz", 50.0), ("leak_state", None)]
    assert (tally.decoded, tally.no_reading) == (7, 3)


def test_times() -> None:
    power = "Sys Power | 1 Watts | ok"
    assert _decode(power, time="")[1].bad == 1
    for time in (
        "Timestamp: soon",
        "Timestamp: 1969-12-31 23:59:59 UTC",
        "Timestamp: 2300-01-01 00:00:00 UTC",
    ):
        tally = _decode(power, "", power, time=time)[1]
        assert (tally.bad, tally.bad_times, tally.total) == (2, 1, 2)
    tally = DumpTally()
    lines = [TIME, power, "Timestamp: x", power, TIME.replace(":05", ":06"), power]
    found = list(decode_text(lines, read_sensor_table(SHIPPED), tally))
    assert [t - TIME_NS for t, _ in found] == [0, 10**9]
    assert (tally.times, tally.bad_times, tally.bad) == (3, 1, 1)


def test_a_firmware_with_states_in_the_byte() -> None:
    rules = {
        "units": {},
        "sensors": [{"pattern": "Drip.*", "signal": "leak_state", "states": {"0x00": 0, "0x01": 1}}],
    }
    table = SensorTable(convert(ipmi.SensorMap, rules, "m"))
    lines = [TIME, "Drip1 | 0x00 | ok", "Drip2 | 0x01 | ok"]
    assert list(decode_text(lines, table, DumpTally())) == [(TIME_NS, [("leak_state", 1)])]


def test_all_faults_of_a_table_at_once(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text("""
units: {W: W}
ignore: {"(": x}
sensors:
  - {pattern: "a", signal: colour, unit: W}
  - {pattern: "b", signal: power_w, unit: C}
  - {pattern: "c", signal: power_w}
  - {pattern: "[", signal: power_w, unit: W}
""")
    with pytest.raises(ConfigError) as caught:
        read_sensor_table(path)
    assert len(caught.value.problems) == 5
    path.write_text("units: {}\nsensors: [{pattern: a, signal: power_w, unti: W}]\n")
    with pytest.raises(ConfigError, match="unknown key"):
        read_sensor_table(path)


class Known:
    """A site of these hosts, in this order."""

    def __init__(self, *hosts: str) -> None:
        self.hosts = hosts

    def entity(self, table: str, name: str) -> int | None:
        host = name.removesuffix("/node0")
        return self.hosts.index(host) if table == "node" and host in self.hosts else None


def _archive(path: Path, *members: tuple[str, bytes | tarfile.TarInfo], mode: Any = "w:gz") -> Path:
    with tarfile.open(path, mode) as tar:
        for name, content in members:
            if isinstance(content, tarfile.TarInfo):
                tar.addfile(content)
                continue
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def _text(power: int, second: int = 5) -> bytes:
    time = f"Timestamp: 2025-05-30 13:34:{second:02d} UTC"
    return f"{time}\nSys Power | {power} Watts | ok\nX | 0x00 | ok\n".encode()


@pytest.mark.parametrize("mode", ["w:gz", "w:xz", "w"])
def test_archive(tmp_path: Path, mode: str) -> None:
    link = tarfile.TarInfo("data/link-2025-05-29.txt")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    folder = tarfile.TarInfo("data")
    folder.type = tarfile.DIRTYPE
    path = _archive(
        tmp_path / "d.tar", ("data", folder),
        ("data/b1-2025-05-29.txt", _text(200, 7)), ("data/a1-2025-05-29.txt", _text(100, 5)),
        ("data/a2-2025-05-29.txt", _text(300, 7) + _text(301, 9)), ("data/c-2025-05-29.txt", TIME.encode()),
        ("data/ghost-2025-05-29.txt", _text(1)), ("../up-2025-05-29.txt", _text(1)), ("/abs.txt", _text(1)),
        ("data/read me.md", b"x"), ("link", link), mode=mode,
    )  # fmt: skip
    dump = Dump(path, read_sensor_table(SHIPPED), Known("a1", "a2", "b1", "c"))
    got = [((t - TIME_NS) // 10**9, [(r.entity, r.value) for r in readings]) for t, readings in dump]
    assert got == [(0, [(0, 100.0)]), (2, [(1, 300.0), (2, 200.0)]), (4, [(1, 301.0)])]
    y = dump.tally
    assert (y.total, y.decoded, y.ignored, y.bad) == (10, 4, 6, 0)
    assert (y.files, y.empty_files, y.refused_files, y.times) == (5, 1, 4, 5)
    assert y.reasons["ignored", "node", "no such host in the site"] == (2, "ghost")
    assert y.reasons["other", "file", "its path leaves the archive"][0] == 2
    assert y.reasons["other", "file", "not a plain file"][0] == 1
    assert ipmi.hosts_of(path) == ["a1", "a2", "b1", "c", "ghost"]


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _archive(tmp_path / "d.tar", *((f"h{i}-2025-05-29.txt", _text(i) * 9) for i in range(3)))
    known = Known("h0", "h1", "h2")
    table = read_sensor_table(SHIPPED)
    monkeypatch.setattr(ipmi, "MAX_MEMBER_BYTES", 10)
    assert Dump(path, table, known).tally.refused_files == 3
    monkeypatch.undo()
    for name, limit in (("MAX_MEMBERS", 2), ("MAX_SAMPLES", 2), ("MAX_CONTENT_BYTES", 1000)):
        monkeypatch.setattr(ipmi, name, limit)
        with pytest.raises(StorageError, match="more than"):
            Dump(path, table, known)
        monkeypatch.undo()


def test_a_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipmi, "MAX_CONTENT_BYTES", 1 << 20)
    path = tmp_path / "d.tar.xz"
    path.write_bytes(lzma.compress(bytes(50 << 20)))
    assert ipmi.hosts_of(path) == []  # two empty blocks end an archive
    path = _archive(tmp_path / "e.tar", ("h-2025-05-29.txt", bytes(30 << 20)))
    with pytest.raises(StorageError, match="more than"):
        ipmi.hosts_of(path)


def test_broken_archives_are_a_storage_error_or_nothing(tmp_path: Path) -> None:
    chance = random.Random(3)
    members = [(f"data/h{i}-2025-05-29.txt", _text(i) * 20) for i in range(20)]
    table, known = read_sensor_table(SHIPPED), Known(*(f"h{i}" for i in range(20)))
    for mode in ("w:gz", "w:xz", "w"):
        whole = _archive(tmp_path / "whole", *members, mode=mode).read_bytes()
        refused = 0
        for _ in range(150):
            body = bytearray(whole[: chance.randrange(len(whole))] if chance.random() < 0.4 else whole)
            for _ in range(chance.randrange(1, 9)):
                body[chance.randrange(len(body)) : 0] = b""
                body[chance.randrange(len(body))] = chance.randrange(256)
            (tmp_path / "broken").write_bytes(body)
            try:
                Dump(tmp_path / "broken", table, known)
            except StorageError:
                refused += 1
        assert refused > 20
    with pytest.raises(StorageError):
        ipmi.hosts_of(tmp_path / "absent")


def test_twenty_thousand_mutated_lines_never_raise() -> None:
    chance = random.Random(7)
    good = [TIME, "Sys Power | 940 Watts | ok", "CPU 1 Temp | 43 degrees C | ok", "Chassis Drip1 | 0x00 | ok",
            "Fan1A_Tach | 6000 RPM | ok", "Inlet Water Temp | no reading | ns"]  # fmt: skip
    alphabet = [
        "|",
        " | ",
        "\0",
        "\n",
        "\r",
        "-",
        ".",
        "9",
        "é",
        "\x85",
        "٣",
        "0x",
        "Watts",
        "ok",
        "1e999",
        "nan",
        "  ",
    ]
    lines: list[str | None] = []
    for i in range(20_000):
        text = list(chance.choice(good))
        if i % 7 == 0:
            lines.append(TIME)
        for _ in range(chance.randrange(1, 4)):
            at = chance.randrange(len(text) + 1)
            text[at : at + chance.randrange(3)] = [chance.choice(alphabet)]
        lines.append("".join(text) if chance.random() > 0.001 else None)
    tally = DumpTally()
    found = list(decode_text(lines, read_sensor_table(SHIPPED), tally))
    assert tally.total == tally.decoded + tally.ignored + tally.bad
    assert min(tally.decoded, tally.ignored, tally.bad, len(found)) > 100
    assert all(v is None or abs(v) < 1e16 for _, values in found for _, v in values)
    assert len(tally.reasons) <= 1001


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        (["n03", "n01", "n02", "n02"], ["n[01-03]"]),
        (["n1", "n2", "n10"], ["n[1-2]", "n10"]),
        (["n08", "n09", "n10"], ["n[08-10]"]),
        (["n99", "n100"], ["n99", "n100"]),
        (["gpu-a7", "login"], ["login", "gpu-a7"]),
        (["007", "008"], ["[007-008]"]),
        ([], []),
    ],
)
def test_ranges(names: list[str], folded: list[str]) -> None:
    assert ranges(names) == folded
    assert sorted(n for f in folded for n in expand(f)) == sorted(set(names))


def test_the_recording(recording: Callable[[str], Path]) -> None:
    path = recording("node-ipmi-sdr-harvard") / "2025-05-29.tar.gz"
    tree = discover_ipmi(path, "harvard")
    listed = convert(SiteFile, tree, "site")
    assert [h.name for h in listed.halls][:3] == ["holy2c", "holy7c", "holy8a"]
    site = build_site(SiteSpec(tree, {}))
    assert (site.sizes["node"], site.sizes["rack"], site.sizes["gpu"]) == (1724, 1724, 0)
    dump = Dump(path, read_sensor_table(SHIPPED), site)
    y = dump.tally
    assert (y.total, y.decoded, y.ignored, y.bad) == (291_336, 13_183, 278_153, 0)
    assert (y.files, y.empty_files, y.refused_files, y.times, y.bad_times) == (1724, 33, 0, 1724, 0)
    assert sum(n for (outcome, _, _), (n, _) in y.reasons.items() if outcome == "ignored") == y.ignored
    heard = [r for _, readings in dump for r in readings]
    count = {s: sum(r.signal == s for r in heard) for s in {r.signal for r in heard}}
    assert (count["power_w"], count["water_inlet_temp_c"], count["leak_state"]) == (1691, 518, 865)
    # a discrete sensor's byte is no state: every host "is" 0x00 while it draws power; so no leak is ruled out
    assert all(r.value is None for r in heard if r.signal in ("leak_state", "power_on_state"))
    power = [r.value for r in heard if r.signal == "power_w" and r.value is not None]
    assert sum(p > 100 for p in power) > 1600
    node = site.entity("node", "holy8a24101/node0")
    assert [r.value for r in heard if r.entity == node and r.signal == "water_inlet_temp_c"] != []
