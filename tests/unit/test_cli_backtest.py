"""`racktwin backtest load`: its output and what it refuses; and the evaluation `forecasts`."""

from __future__ import annotations

import io
import json
import lzma
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tests.evaluation.__main__ import main as evaluate
from tests.evaluation.forecasts import suite
from twin.backtest import print_load_scores
from twin.backtest.load_report import loss_words
from twin.catalogue import ConfigError
from twin.cli import horizons_of, write_json
from twin.cli.backtest import load as backtest
from twin.cli.backtest.load import losses, overall
from twin.cli.main import main

FAST = ["--experts", "last,ewma5,seasonal_day"]
SCORES = ["mae", "mae_naive", "mae_seasonal", "mae_ewma", "mase", "pinball", "coverage50", "coverage90",
          "coverage99", "peak_error", "ramp_hit_rate", "fit_s", "predict_ms"]  # fmt: skip


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a series of ten-minute rows, <b> in a name, an outage, and a column known ahead."""
    folder = tmp_path_factory.mktemp("lab")
    rng = np.random.default_rng(0)
    at = np.datetime64("2024-03-01T00:00", "m") + 10 * np.arange(500)
    wave = 50 + 20 * np.sin(np.arange(500) / 144 * 2 * np.pi)
    one, two = (wave + rng.normal(size=500).cumsum() for _ in range(2))
    lines = [f"{t},{a:.3f},{b:.3f},{w:.2f}" for t, a, b, w in zip(at, one, two, wave, strict=True)]
    (folder / "load.csv").write_text("\n".join(["when,<b>one</b>,two,plan", *lines]) + "\n")
    return folder


def ask(lab: Path, *more: str) -> list[str]:
    return ["backtest", "load", "--series", str(lab / "load.csv"), "--time-column", "when", *FAST, *more]


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*words, "--json"]) == 0
    text = capsys.readouterr().out
    assert text.count("\n") == 1
    found: dict[str, Any] = json.loads(text)
    return found


def test_json_is_one_object_with_all_scores(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = answer(
        capsys, *ask(lab, "--value-column", "two", "--horizons", "1,30min,10%", "--known-column", "plan")
    )
    assert [h["horizon_steps"] for h in told["horizons"]] == [1, 3, 50]
    assert [h["horizon_s"] for h in told["horizons"]] == [600.0, 1800.0, 30_000.0]
    for h in told["horizons"]:
        assert set(SCORES) <= set(h)
        assert set(h["series"]) == {"two"}
        assert h["series"]["two"]["mae"] == h["mae"]
    # A span of 10 % has too few outcomes behind it for a band that is told from the first row on
    assert [h["told_targets"] for h in told["horizons"][:2]] == [h["targets"] for h in told["horizons"][:2]]
    for h in told["horizons"][:2]:
        assert 0.8 <= h["coverage90"] - 0.05 <= h["coverage90_told"] <= 1.0
    assert told["rows"] == 500
    assert told["step_s"] == 600.0
    assert told["from"] == 0.5
    assert told["series"] == ["two"]
    assert told["lookahead_origins_checked"] > 0
    assert told["overall"]["coverage90"] > 0
    assert [h["mase_low"] is not None for h in told["horizons"]] == [True, True, False]
    assert told["horizons"][2]["independent_targets"] < 10 <= told["horizons"][1]["independent_targets"]
    assert told["overall"]["horizons_counted"] == 2, "five targets side by side say nothing of a tenth"
    for loss in told["losses"]:
        assert loss["value"] is None or loss["value"] > 1.0


def test_the_table_and_the_page(lab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ask(lab, "--value-column", "<b>one</b>", "two", "--horizons", "1,12", "--report", str(tmp_path))
    assert main([*words, "--gap", "2024-03-02 00:00", "2024-03-02 03:00"]) == 0
    seen = capsys.readouterr()
    assert "10 min" in seen.out
    assert "2 h" in seen.out
    assert "were forecast again without later rows" in seen.out
    assert "gap asked for" in seen.err
    html = (tmp_path / "backtest.html").read_text()
    assert "<b>one</b>" not in html
    assert "&lt;b&gt;one" in html
    for words_ in ("10 min ahead", "2 h ahead", "Inside the 90 % band", "Where it loses", "Series by series"):
        assert words_ in html
    assert "http" not in html.replace("http-equiv", "")


def test_one_forecaster_alone_and_a_total(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [w for w in ask(lab, "--value-column", "<b>one</b>", "two", "--total", "--horizons", "1")
             if w not in FAST]  # fmt: skip
    told = answer(capsys, *words, "--model", "last", "--from", "0.8")
    assert told["experts"] == ["last"]
    assert told["series"] == ["total"]
    assert told["horizons"][0]["targets"] == 99
    assert told["horizons"][0]["mae"] == pytest.approx(told["horizons"][0]["mae_naive"])


@pytest.mark.parametrize(
    "more, said",
    [
        (["--value-column", "three"], "three"),
        (["--value-column", "two", "--from", "0.99"], "--from 0.99: expected a part of the rows"),
        (["--value-column", "two", "--horizons", "0"], "--horizons 0: 0 rows of 600 s, expected 1 to 249"),
        (["--value-column", "two", "--horizons", "400"], "expected 1 to 249"),
        (["--value-column", "two", "--horizons", "15min"], "expected a multiple of the step of 600 s"),
        (["--value-column", "two", "--horizons", "soon"], "expected rows (5), a duration"),
        (["--value-column", "two", "--horizons", "2.5"], "expected 1 to"),
        (["--value-column", "two", "--where", "two"], "--where two: expected COLUMN=VALUE"),
        (["--value-column", "two", "--report", "{file}"], "is a file; expected a folder"),
        (["--value-column", "two", "--experts", "last,oracle"], "forecaster oracle: expected some of last,"),
        (["--value-column", "two", "--experts", ""], "forecaster (nothing): expected some of last,"),
        (["--value-column", "two", "--rival", "oracle"], "--rival oracle: expected one of last,"),
        (["--value-column", "two", "--horizons", ""], "--horizons (nothing): expected rows (5)"),
        (["--value-column", "two", "--horizons", "1,,2"], "--horizons (nothing): expected rows (5)"),
        (["--value-column", "two", "--from", "nan"], "--from nan: expected a part of the rows"),
        (["--value-column", "two", "--step", "6h"], "expected at least 20 for a score; give a longer"),
    ],
)
def test_what_is_refused_says_what_was_expected(
    lab: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    assert main(ask(lab, *(w.replace("{file}", str(lab / "load.csv")) for w in more))) == 1
    seen = capsys.readouterr()
    assert seen.out == ""
    assert said in seen.err


@pytest.mark.parametrize(
    "words",
    [
        ["backtest"],
        ["backtest", "load"],
        ["backtest", "load", "--series", "x.csv"],
        ["backtest", "load", "--series", "x.csv", "--time-column", "t", "--value-column", "v", "--jobs", "0"],
        ["backtest", "load", "--suite", "x"],
    ],
)  # fmt: skip
def test_a_wrong_call_ends_with_two(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "--help`" in capsys.readouterr().err


def test_the_help_of_the_evaluation_has_the_same_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        evaluate(["forecasts", "--help"])
    assert "or parts of the series (10%)" in " ".join(capsys.readouterr().out.split())


def test_a_call_that_contradicts_itself_ends_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["backtest", "load", "--series", "x.csv", "--time-column", "t"]
    assert main(base) == 2
    assert main([*base, "--value-column", "v", "--model", "last", "--experts", "last"]) == 2
    assert "expected one of the two; see `racktwin backtest load --help`" in capsys.readouterr().err


def test_horizons_by_themselves_go_to_a_tenth_of_the_rows() -> None:
    assert horizons_of(None, 44_640, 60.0, 0.5) == (1, 5, 15, 60, 360, 1440, 4464)
    assert horizons_of(None, 8760, 3600.0, 0.5) == (1, 5, 6, 15, 24, 60, 876)
    assert horizons_of(None, 58, 60.0, 0.5) == (1, 5)
    assert horizons_of(None, 20, 7.0, 0.9) == (1,)
    assert horizons_of("6h, 5,10%,1d", 2000, 3600.0, 0.5) == (5, 6, 24, 200)
    with pytest.raises(ConfigError, match="expected at least 20"):
        horizons_of(None, 19, 60.0, 0.5)


def unit(**given: Any) -> dict[str, Any]:
    base = dict.fromkeys([*SCORES, "mase_low", "mase_high", "pinball_persistence", "coverage90_low",
                          "coverage90_high", "coverage50_closed", "coverage90_closed", "coverage99_closed",
                          "ramp_false_rate", "unchanged_share"], 0.5)  # fmt: skip
    ints = {"ewma_half_life": 5, "targets": 10, "independent_targets": 10, "ramps": 1}
    return base | ints | given


def horizon(series: dict[str, Any], **given: Any) -> dict[str, Any]:
    few = {"after_moves": 0, "coverage90_after_moves": math.nan, "told_targets": 0}
    return {"horizon_steps": 1, "horizon_s": 60.0, "series": series} | few | unit(**given)


def test_losses_name_horizon_series_and_rival() -> None:
    told = [
        horizon({"a": unit(mase=1.2, mae_naive=0.4, mase_low=math.nan), "b": unit(pinball=0.6)}, mase=0.9),
        horizon(
            {"a": unit(mase=math.nan, mae=1.0, mae_naive=0.0), "b": unit()}, mase=1.0, pinball_persistence=0.0
        ),
    ]
    found = losses(told)
    assert [(loss["series"], loss["score"], loss["better"]) for loss in found] == [
        ("a", "mase", "naive"), ("b", "pinball", "persistence"), (None, "pinball", "persistence"),
        ("a", "mase", "naive"),
    ]  # fmt: skip
    assert loss_words(found[0]) == "loses 1 min ahead, a: MASE 1.200, to the last value"
    assert loss_words(found[2]).startswith("loses 1 min ahead: pinball loss")
    assert (
        losses([horizon({"a": unit(mase=1.5)}, mase=1.5)])[0]["series"] is None
    )  # the only one is told once
    assert len(losses([horizon({"a": unit(mase=1.5)}, mase=1.5)])) == 1
    write_json(found, Console(file=(text := io.StringIO())))
    assert json.loads(text.getvalue())[3]["value"] is None


def test_the_whole_is_told_over_all_horizons() -> None:
    told = overall([horizon({}, mase=0.5, coverage90=0.8), horizon({}, mase=2.0, coverage90=1.0)])
    assert told["mase"] == pytest.approx(1.0)
    assert told["mase_worst"] == 2.0
    assert told["coverage90"] == pytest.approx(0.9)
    weighed = overall([horizon({}, coverage90=0.8, independent_targets=30), horizon({}, coverage90=1.0)])
    assert weighed["coverage90_by_targets"] == pytest.approx(0.85)
    assert math.isnan(overall([horizon({}, mase=math.nan)])["mase"])


def test_a_narrow_terminal_gets_what_matters(capsys: pytest.CaptureFixture[str]) -> None:
    told = {"series": ["a"], "rows": 10, "step_s": 60.0, "from": 0.5, "horizons": [horizon({"a": unit()})],
            "losses": losses([horizon({"a": unit()}, mase=1.5)] * 30),
            "lookahead_origins_checked": 3}  # fmt: skip
    for width in (80, 140):
        out = io.StringIO()
        print_load_scores(told, Console(file=out, width=width))
        lines = out.getvalue().splitlines()
        assert all(len(line) <= width for line in lines)
        assert "…" not in lines[1]
        assert ("ramps hit" in lines[1]) == (width == 140)
        assert "10 more are in the JSON" in out.getvalue()


@pytest.mark.long
def test_the_suite_reads_each_recording_and_prints_a_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from models.load import SeriesPanel

    rng = np.random.default_rng(1)
    panel = SeriesPanel(0, 60.0, rng.normal(size=(120, 2)).cumsum(axis=0), ("a", suite.SUM))
    read = {"One": lambda root: suite.DataSet(panel, [0])}
    monkeypatch.setattr(suite, "DATA_SETS", read)
    assert evaluate(["forecasts", str(tmp_path), *FAST]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith("| One")]
    assert len(rows) == 2 * len(horizons_of(None, 120, 60.0, 0.5)) + 2  # and a line each over all horizons
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    lost = [line for line in lines if line.startswith("- One, ")]
    assert lost
    assert all(" ahead: MASE of " in line or " ahead: pinball loss of " in line for line in lost)
    assert "Goals:" in lines
    assert evaluate(["forecasts", str(tmp_path), *FAST, "--rival", "ewma60", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["data_sets"][0]["rival"]["name"] == "ewma60"
    assert len(told["goals"]) == 6
    assert evaluate(["forecasts", str(tmp_path / "none")]) == 1
    assert evaluate(["forecasts", str(tmp_path), "--only", "one, mars"]) == 1
    assert "--only 'mars': expected words in the names: One" in capsys.readouterr().err


def test_an_empty_folder_is_no_suite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for only in suite.DATA_SETS:
        assert evaluate(["forecasts", str(tmp_path), "--only", only]) == 1
        assert "expected the recordings (racktwin trace fetch)" in capsys.readouterr().err


NO_SERIES = {
    "empty.csv": (b"", "the file is empty: expected a first line"),
    "header.csv": (b"when,two\n", "no rows below the header"),
    "one.csv": (b"when,two\n1700000000,1\n", "no step to be found: give --step"),
    "two.csv": (b"when,two\n1700000000,1\n1700000060,2\n", "2 rows of 1 min: expected at least 20"),
    "binary.csv": (bytes(range(256)) * 9, "expected a table of text (CSV)"),
    "words.csv": (b"when,two\n1700000000,a\n1700000060,b\n", "expected numbers, found 0 in 2 rows"),
    "gaps.csv": (b"when,two\n1700000000,nan\n1700000060,\n", "expected numbers, found 0 in 2 rows"),
    "cut.csv.xz": (
        lzma.compress(b"when,two\n" + b"1700000000,1\n" * 999)[:-30],
        "expected a whole compressed",
    ),
}


@pytest.mark.parametrize("name", NO_SERIES)
def test_a_file_without_a_series_is_named_with_what_was_expected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    content, said = NO_SERIES[name]
    (tmp_path / name).write_bytes(content)
    words = ["backtest", "load", "--series", str(tmp_path / name), "--time-column", "when"]
    assert main([*words, "--value-column", "two", *FAST]) == 1
    seen = capsys.readouterr()
    assert seen.out == ""
    assert said in " ".join(seen.err.split())
    assert "Traceback" not in seen.err


def test_what_is_no_file_is_named(lab: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for path, said in ((tmp_path, "Is a directory"), (tmp_path / "none.csv", "No such file")):
        words = ["backtest", "load", "--series", str(path), "--time-column", "t", "--value-column", "v"]
        assert main(words) == 1
        told = " ".join(capsys.readouterr().err.split())
        assert f"{path}: cannot be read: {said}" in told
        assert "Errno" not in told


def test_a_constant_series_is_scored_without_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"{1_700_000_000 + 60 * i},5" for i in range(120)]
    (tmp_path / "still.csv").write_text("\n".join(["when,two", *rows]) + "\n")
    words = ["backtest", "load", "--series", str(tmp_path / "still.csv"), "--time-column", "when"]
    told = answer(capsys, *words, "--value-column", "two", "--experts", "last,ewma5")
    assert [h["mae"] for h in told["horizons"]] == [0.0] * len(told["horizons"])
    assert main([*words, "--value-column", "two", "--experts", "last,ewma5"]) == 0
    assert "Warning" not in capsys.readouterr().err


def test_values_too_far_apart_for_any_horizon_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"{1_700_000_000 + 60 * i},{'' if i % 10 else i}" for i in range(120)]
    (tmp_path / "rare.csv").write_text("\n".join(["when,two", *rows]) + "\n")
    words = ["backtest", "load", "--series", str(tmp_path / "rare.csv"), "--time-column", "when",
             "--value-column", "two", *FAST, "--horizons", "1,3"]  # fmt: skip
    assert main(words) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert "two: nothing to score: after 56 of 111 rows of 1 min" in told
    assert "give a longer --step" in told


def test_notes_go_to_stderr_beside_json(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ask(lab, "--value-column", "two", "--horizons", "1", "--gap", "2024-03-02", "2024-03-02 03:00")
    assert main([*words, "--json"]) == 0
    seen = capsys.readouterr()
    json.loads(seen.out)
    assert seen.out.count("\n") == 1
    assert "gap asked for" in seen.err


@pytest.mark.long
def test_a_rival_beside_a_series(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ask(lab, "--value-column", "two", "--horizons", "1,50", "--rival", "ewma60")
    told = answer(capsys, *words)
    assert told["rival"]["horizons"][0]["better"] == "ours"
    assert told["rival"]["overall"]["ratio"] < 1.0
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "beside ewma60, 10 min ahead" in shown
    assert "processor time of all fits" in shown


def test_the_command_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "backtest" in capsys.readouterr().out
    assert backtest.LEAST_ROWS == 20
