"""`racktwin policy explain` on a terminal: the list, an explanation, one entity, wrong options."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from tests.support.in_process_daemon import serving_aside
from twin.cli.operate import show_explanation
from twin.contracts import DataCurve, DataTable, Explanation, FigureMetric, KeyFigure, Sentence, TableColumn


def test_policies_topics_and_explanations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving_aside(tmp_path, monkeypatch) as desk:
        desk.do(lambda: desk.pod.tick({"gpu.temp_c": 88.0}))

        def said(*words: str) -> str:
            assert desk.run("policy", "explain", *words, role="viewer") == 0
            return capsys.readouterr().out

        assert "thermal_guard" in said()
        text = said("thermal_guard")
        assert "authority approve" in text
        assert "GPU temperature is beyond its guard" in text
        assert "gpu.power_cap_w" in text
        assert " 72 " in said("thermal_guard", "r1")
        tree: Any = msgspec.json.decode(said("thermal_guard", "--json"))
        assert {"strains", "proposals"} <= {t["name"] for t in tree["tables"]}
        assert desk.run("policy", "explain", "thermal_guard", "nowhere", role="viewer") == 1
        assert "no entity or job nowhere" in capsys.readouterr().err
        assert desk.run("policy", "explain", "thermal_guard", "--set", "x", role="viewer") == 1
        assert "expected NAME=VALUE" in capsys.readouterr().err


def test_units_totals_and_markup_are_shown_as_they_are() -> None:
    out = Console(file=io.StringIO(), width=100)
    columns = tuple(TableColumn(*c) for c in (("place",), ("left_w", "W"), ("use_pu", "1"), ("none",)))
    rows = (("r1", 12_300.0, 0.9, None), ("r2", None, 0.5, None))
    figures = (
        KeyFigure("room", 1.5e6, "W", "room"), KeyFigure("since", 1_700_000_000_000_000_000, "ns", "since"),
        KeyFigure("wait", 90.0, "s", "wait"), KeyFigure("share", 0.25, "1", "share"),
        KeyFigure("empty", None, "", "empty"),
        KeyFigure("series", 1.0, text="series", metric=FigureMetric("x", labels={"a": "b"})),
    )  # fmt: skip
    said = (Sentence("[red]all[/red] is well"), Sentence("assumed", "note"), Sentence("beware", "warning"))
    show_explanation(
        Explanation(
            policy="p",
            now_ns=0,
            topic="t",
            authority="act",
            suspended=True,
            sentences=said,
            figures=figures,
            tables=(DataTable("places", columns, rows, total=7),),
            curves=(DataCurve("saved", (0.0, 1.0), (None, 2500.0), "1", "W"),),
        ),
        out,
    )
    text = out.file.getvalue()  # type: ignore[attr-defined]
    shown = ("[red]all[/red] is well", "assumed", "beware", "1,500 kW", "11-14 22:13", "1 min 30 s", "25 %")
    for expected in (*shown, "authority suspended", "left kW", "12.3", "the first 2 of 7", "2.5 kW"):
        assert expected in text, (expected, text)
    for absent in ("empty", "series", "none"):
        assert absent not in text
