"""`python -m tests.support.storm SEED [COUNT] [--hours H] [--tick S] [--every S]`: blow storms."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.support.storm.storm import Shape, blow


def main() -> int:
    """Status 1 where an invariant was violated."""
    parser = argparse.ArgumentParser(prog="tests.support.storm")
    parser.add_argument("seed", type=int)
    parser.add_argument("count", type=int, nargs="?", default=1)
    parser.add_argument("--hours", type=float, default=0.1)
    parser.add_argument("--tick", type=float, default=5.0)
    parser.add_argument("--daemons", type=int, default=2)
    parser.add_argument("--every", type=float, default=12.0)
    parser.add_argument("--trouble", default="")
    parser.add_argument("--keep", action="store_true")
    args = parser.parse_args()
    trouble = tuple(args.trouble.split(",")) if args.trouble else ()
    shape = Shape(args.hours, args.tick, args.daemons, args.every, trouble)
    status = 0
    for seed in range(args.seed, args.seed + args.count):
        folder, began = Path(tempfile.mkdtemp(prefix="storm-", dir="/dev/shm")), time.process_time()
        report = blow(seed, folder, shape)
        took_s = time.process_time() - began
        print(f"seed {seed}: {report.hours:.2f} h in {took_s:.1f} s, {report.ticks} ticks, "
              f"{report.commands} commands, {report.lives} lives, {report.terms} terms, "
              f"{report.replayed} replayed, {report.digest[:16]}", flush=True)  # fmt: skip
        if report.faults or args.count == 1:
            print(report.text(), flush=True)
        status |= bool(report.faults)
        if args.keep:
            print(folder)
        else:
            shutil.rmtree(folder)
    return status


if __name__ == "__main__":
    sys.exit(main())
