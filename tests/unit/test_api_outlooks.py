"""Outlooks over the interface and by `racktwin forecast`: who may tell one, what is refused and shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.load import SeriesPanel
from tests.support.builders import START_NS
from tests.support.in_process_daemon import Pod, serve
from tests.unit.test_cli_live import Desk, desk
from twin.catalogue import NS, ConfigError
from twin.cli.main import main
from twin.engine import MAX_VALUES
from twin.tables import outlook, outlook_of
from twin.tables.panel_file import SeriesRead

__all__ = ["desk"]
AT = "/api/v1/outlooks"
HOUR_NS = 3600 * NS
BODY = {"quantity": "site.outdoor_temp_c", "start_ns": START_NS, "step_s": 3600, "values": [20, None, 30.5]}


def test_an_outlook_is_told_in_the_name_of_the_token(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        status, done = await pod.ask("POST", AT, "operator", BODY)
        assert (status, done["values"], done["end_ns"]) == (200, 3, START_NS + 3 * HOUR_NS)
        view = pod.twin.engine.view(1.0)
        assert view.outlook("site.outdoor_temp_c", START_NS + 2 * HOUR_NS).tolist() == [30.5]
        status, _ = await pod.ask("POST", AT, "admin", BODY | {"quantity": "rack.power_w", "name": "r2"})
        assert status == 200
        _, tree = await pod.ask("GET", AT)
        assert [(o["quantity"], o["name"], o["author"]) for o in tree["outlooks"]] == [
            ("rack.power_w", "lab/h/r2", "admin-1"), ("site.outdoor_temp_c", "", "operator-1")]  # fmt: skip
        (held,) = [o for o in tree["outlooks"] if o["id"] == done["id"]]
        assert (held["now"], held["low"], held["high"], held["values"], held["unknown"], held["unit"]) == (
            20.0, 20.0, 30.5, 3, 1, "degC")  # fmt: skip
        assert (tree["total"], tree["next_offset"]) == (2, None)
        _, tree = await pod.ask("GET", f"{AT}?quantity=rack.power_w&limit=1")
        assert [o["name"] for o in tree["outlooks"]] == ["lab/h/r2"]
        assert (await pod.ask("GET", f"{AT}?quantitty=x"))[0] == 400
        _, tree = await pod.ask("GET", f"{AT}?limit=1")
        assert (tree["total"], tree["next_offset"]) == (2, 1)
        # Unknown values only take it back.
        await pod.ask("POST", AT, "operator", BODY | {"values": [None]})
        _, tree = await pod.ask("GET", AT)
        assert tree["total"] == 1

    serve(tmp_path, check)


BAD: list[tuple[Any, int, str]] = [
    (BODY | {"quantity": "rack.colour"}, 404, "rack.colour is not a quantity"),
    (BODY | {"quantity": "gpu.energy_mj"}, 404, "is not a quantity"),
    (BODY | {"quantity": "rack.power_w", "name": "r9"}, 409, "no rack r9"),
    (BODY | {"quantity": "rack.power_w"}, 409, "names no rack"),
    (BODY | {"name": "x" * 600}, 400, "name: expected at most"),
    (BODY | {"values": []}, 400, "values: expected 1 to"),
    (BODY | {"values": [1.0] * (MAX_VALUES + 1)}, 400, "values: expected 1 to"),
    (BODY | {"values": [61]}, 409, "from -60 to 60 degC, got 61"),
    (BODY | {"values": ["20"]}, 400, "the body is not valid"),
    (BODY | {"values": [True]}, 400, "the body is not valid"),
    (BODY | {"step_s": 0}, 400, "step_s: expected seconds from 1"),
    (BODY | {"step_s": 1e9}, 400, "step_s: expected"),
    (BODY | {"start_ns": START_NS // NS}, 400, "the last value was over"),
    (BODY | {"start_ns": -(10**30)}, 400, "start_ns"),
    (BODY | {"start_ns": 10**30}, 400, "begins in more than a year"),
    (BODY | {"start_ns": 2 * START_NS}, 400, "begins in more than a year"),
    (BODY | {"author": "eve"}, 400, "unknown field"),
    ({k: v for k, v in BODY.items() if k != "step_s"}, 400, "missing required field `step_s`"),
    (b'{"quantity": "rack.power_w", "step_s": 60, "values": [NaN], "start_ns": 1}', 400, "not JSON"),
    (b'{"start_ns": ' + b"9" * 5000 + b"}", 400, "the body is"),
]  # fmt: skip


def test_a_wrong_one_is_told_what_is_expected(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        for body, status, why in BAD:
            got, tree = await pod.ask("POST", AT, "operator", body)
            assert (got, why in tree["error"]) == (status, True), (str(body)[:200], tree)
        assert pod.twin.engine.intake.outlooks.dump() == []

    serve(tmp_path, check)


def a_file(folder: Path, hours: int = 4, first: str = "2023-11-14T22:00:00Z") -> Path:
    """Hourly temperatures; the pod begins at 22:13:20 of that day."""
    path, start = folder / "weather.csv", np.datetime64(first.rstrip("Z"))
    rows = [f"{start + np.timedelta64(i, 'h')}Z,{20 + i}" for i in range(hours)]
    path.write_text("when,temp\n" + "\n".join(rows) + "\n")
    return path


COLUMNS = ("--time-column", "when", "--value-column", "temp")


def test_a_file_is_told_to_the_daemon(desk: Desk, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(a_file(tmp_path, first="2023-11-14T20:00:00Z"))
    assert desk.run("forecast", "send", file, "--quantity", "site.outdoor_temp_c", *COLUMNS) == 0
    said = capsys.readouterr().out
    assert "done" in said
    assert "values 2" in said  # the two hours before are over
    (held,) = desk.pod.twin.engine.intake.outlooks.entries()
    assert held.values.tolist() == [22.0, 23.0]
    assert held.start_ns == START_NS // HOUR_NS * HOUR_NS
    assert held.author == "operator-1"
    assert desk.run("forecast", "outlooks") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "site.outdoor_temp_c - now 22, 22 to 23 degC from 11-14 22:00:00 to 11-15 00:00:00" in said
    assert "by operator-1" in said
    assert desk.run("forecast", "outlooks", "--quantity", "rack.power_w") == 0
    assert "no outlooks" in capsys.readouterr().out
    assert (
        desk.run("forecast", "send", file, "--quantity", "rack.power_w", "--name", "r1", *COLUMNS, "--json")
        == 0
    )
    assert json.loads(capsys.readouterr().out)["quantity"] == "rack.power_w"


@pytest.mark.parametrize(
    "words,why",
    [
        (("--quantity", "rack.colour", *COLUMNS), "rack.colour is not a quantity"),
        (("--quantity", "rack.power_w", "--name", "r9", *COLUMNS), "no rack r9"),
        (("--quantity", "site.outdoor_temp_c"), "time"),
        (("--quantity", "site.outdoor_temp_c", *COLUMNS, "--zone", "Mars/Base"), "expected UTC or an"),
    ],
)  # fmt: skip
def test_a_file_that_is_refused(
    desk: Desk, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], why: str
) -> None:
    assert desk.run("forecast", "send", str(a_file(tmp_path)), *words) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert why in said
    assert "Traceback" not in said
    assert desk.pod.twin.engine.intake.outlooks.dump() == []


def test_a_file_of_the_past_is_not_told(
    desk: Desk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(a_file(tmp_path, first="2023-10-14T20:00:00Z"))
    assert desk.run("forecast", "send", file, "--quantity", "site.outdoor_temp_c", *COLUMNS) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "weather.csv: the last value was over at 2023-10-15 00:00:00+00:00" in said


def test_a_quantity_is_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["forecast", "send", str(a_file(tmp_path)), "--url", "http://127.0.0.1:1"])
    assert "required: --quantity; see `racktwin forecast send --help`" in capsys.readouterr().err


def read(values: list[float], step_s: float = 60.0) -> SeriesRead:
    panel = SeriesPanel(START_NS, step_s, np.array(values, np.float64)[:, None])
    return SeriesRead(panel, ("a note",), False, len(values))


def test_the_value_in_force_is_the_first_that_is_told() -> None:
    values = [1.0, np.nan, 3.0, 4.0]
    for at_s, first in ((-100, 0), (0, 0), (59.9, 0), (60, 1), (239, 3)):
        body, warnings = outlook_of(read(values), START_NS + round(at_s * NS), "f")
        assert body["start_ns"] == START_NS + first * 60 * NS
        assert body["values"] == [1.0, None, 3.0, 4.0][first:]
        assert (body["step_s"], warnings) == (60.0, ["a note"])
    with pytest.raises(ConfigError, match="was over at 2023-11-14 22:17:20"):
        outlook_of(read(values), START_NS + 240 * NS, "f")
    with pytest.raises(ConfigError, match="no value to come is known"):
        outlook_of(read([1.0, np.nan]), START_NS + 60 * NS, "f")


def test_what_is_beyond_the_limit_is_said() -> None:
    assert outlook.MAX_VALUES == MAX_VALUES
    body, warnings = outlook_of(read([1.0] * 5000), START_NS, "f")
    assert len(body["values"]) == MAX_VALUES
    assert warnings[-1] == "5000 values are to come; sent are the first 2000"
