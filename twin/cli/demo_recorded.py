"""The demo: a real recording if one is here, then a simulated pod under control, recorded and replayed.

Without a recording it says so and shows only what it generated itself.
"""

from __future__ import annotations

import os
import time
from argparse import Namespace
from pathlib import Path

from rich.console import Console

from connectors.dsx import discover, to_yaml
from connectors.files import read_capture
from twin.cli.demo import claimed
from twin.cli.replay import conclude, run_replay
from twin.cli.traces import trace_root
from twin.config import load_site, make_engine
from twin.report import Collector
from twin.run import TraceReader, replay_arrivals, replay_frames, summary
from twin.simulation import SITE, PodSource

CAPTURE = Path("dsx-bms-capture") / "dsx_exemplar.csv"


def run_demo(folder: Path, out: Console, err: Console) -> int:
    """Both parts, with a report each."""
    folder.mkdir(parents=True, exist_ok=True)
    capture = trace_root(os.environ) / CAPTURE
    if capture.is_file():
        out.rule("A real recording: an NVL72 pod, 99 seconds")
        site = folder / "titan.yaml"
        site.write_text(to_yaml(discover(read_capture(capture), "titan")), encoding="utf-8")
        out.print(
            f"{site}: the site, discovered from the recording's own metadata", markup=False, soft_wrap=True
        )
        run_replay(
            Namespace(
                site=site,
                trace=[capture],
                map=None,
                speed="max",
                tick=None,
                out=None,
                report=folder / "real",
                authority=[],
                no_compare=False,
                trust_plugins=False,
                json=False,
            ),
            out,
            err,
        )
    else:
        out.print(
            f"No recording at {capture}.\n`.venv/bin/racktwin traces fetch dsx-bms-capture` brings a real "
            "one, or set RACKTWIN_TRACES; without it the demo shows only what racktwin generates itself.",
            markup=False,
            soft_wrap=True,
        )
    out.rule("Simulated by racktwin: a rack loses its coolant")
    _simulated(folder / "simulated", out)
    out.print(
        "\nNext: open the reports; `.venv/bin/racktwin --help`; `.venv/bin/racktwin discover CAPTURE -o "
        "site.yaml` for your own site.",
        markup=False,
        soft_wrap=True,
    )
    return 0


def _simulated(folder: Path, out: Console) -> None:
    with claimed(folder, ("run", "demo-pod.yaml", "simulated-pod.jsonl", "report.html")):
        _play(folder, out)


def _play(folder: Path, out: Console) -> None:
    run = folder / "run"
    path = folder / "demo-pod.yaml"
    path.write_text(SITE, encoding="utf-8")
    spec, site = load_site(path)
    engine, collector = make_engine(site), Collector()
    source = PodSource(site, keep=folder / "simulated-pod.jsonl")
    begun = time.monotonic()
    outcome = replay_arrivals(engine, spec, source, 1.0, run, (collector, source))
    result = summary(engine, outcome, source.messages.summary(), time.monotonic() - begun)
    result |= {"source": [str(source.keep)], "simulated": True}
    conclude(collector, result, folder, False, out)
    again = make_engine(site)
    compared = replay_frames(again, TraceReader(run), run / "journal.jsonl").compared_lines
    out.print(
        f"replayed from {run}: {compared} journal lines and the final state are byte-identical",
        markup=False,
        soft_wrap=True,
    )
