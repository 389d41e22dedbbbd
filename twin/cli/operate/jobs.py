"""The commands `job list` and `job show`: what runs, how much of its time it trains, what holds it back."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rich.console import Console

from twin.catalogue import ConfigError, clean, counted, duration, utc
from twin.cli.arguments import live
from twin.report import grid, print_line, safe_text

if TYPE_CHECKING:
    from twin.api import Client

MOST_SHOWN = 1000


def _list(client: Client, args: argparse.Namespace) -> Any:
    return client.get("/jobs", name=args.name, limit=args.limit)


def _one(client: Client, args: argparse.Namespace) -> Any:
    """Ask for the job of this very name. Raises ConfigError if it does not run."""
    name = args.job.removeprefix("job:")
    found = [j for j in client.get("/jobs", name=name, limit=MOST_SHOWN)["jobs"] if j["name"] == name]
    if not found:
        raise ConfigError(f"no running job {clean(name, 80)}; `racktwin job list` lists the running jobs")
    return found[0]


def show_jobs(tree: dict[str, Any], out: Console) -> None:
    """A line for each running job."""
    rows = [
        [job["name"], job["kind"], str(job["nodes"]), str(job["gpus"]), _share(job["goodput_pu"]),
         _slower(job["held_back_by"]), job["held_back_by"]["entity"] if job["held_back_by"] else ""]
        for job in tree["jobs"]
    ]  # fmt: skip
    heads = ("job", "kind", "nodes", "GPUs", "goodput", "slower by", "held back by")
    grid(out, heads, rows, "no jobs", right=(2, 3, 4, 5))
    if tree["next_offset"] is not None:
        print_line(out, f"{len(rows)} of {tree['total']}: --limit shows more", "dim")


def show_job(job: dict[str, Any], out: Console) -> None:
    """One job: its time, its end, and the evidence on who holds it back."""
    print_line(
        out, f"{clean(job['name'])}: {clean(job['kind'])} on {job['nodes']} nodes, {job['gpus']} GPUs", "bold"
    )
    watched_s = job["trained_s"] + job["still_s"] + job["lost_s"]
    if watched_s:
        print_line(
            out,
            f"goodput {_share(job['goodput_pu'])}: of {duration(watched_s)} observed it stood still for "
            f"{duration(job['still_s'])} and lost {duration(job['lost_s'])} by "
            f"{counted('restart', job['restarts'])}",
        )
    else:
        print_line(out, "no activity recorded: the job is not synchronous, or has just begun")
    print_line(out, _end(job["expected_end_ns"], job["expected_end_by"]))
    if (held := job["held_back_by"]) is None:
        print_line(out, "no straggler")
        return
    name, since = clean(held["ends"] or held["entity"]), utc(held["since_ns"])
    print_line(out, f"{name} slows the job: {_slower(held)} since {since}", "yellow")
    print_line(out, f"stragglers have cost {job['straggler_gpu_h']:.1f} GPU-hours")
    for line in held["evidence"]:
        out.print(safe_text(f"  {line}"))


def _end(end_ns: int | None, by: str | None) -> str:
    if end_ns is None:
        return "its end is not known: it has no time limit, and does not report what training is left"
    if by == "progress":
        return f"ends {utc(end_ns)} by its own progress"
    return f"ends {utc(end_ns)} at the latest, by its time limit"


def _share(share_pu: float | None) -> str:
    return "unknown" if share_pu is None else f"{100.0 * share_pu:.1f} %"


def _slower(held: dict[str, Any] | None) -> str:
    return "" if held is None else f"{100.0 * (held['slowdown'] - 1.0):.0f} %"


VERBS = {
    "job list": live(
        _list,
        show_jobs,
        """
        --name TEXT=  only jobs whose name contains this text
        --limit COUNT=100  maximum number of jobs
        """,
        "",
        "--name llama",
        rows="jobs",
        watched=True,
    ),
    "job show": live(_one, show_job, "JOB  name of the job, with or without job:", "job:llama"),
}
