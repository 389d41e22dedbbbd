"""A daemon reduced to its election, as a process. Arguments: NAME FOLDER LOG TERM_S URL...

Writes a line to LOG whenever it may act (`instant epoch name`, every few milliseconds), and one when its term
changes. All of them write to the same file, so that whoever reads it sees who acted when.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from twin.daemon.etcd import Etcd, EtcdElection
from twin.daemon.leader import EpochFile, Term, clock_s

STEP_S = 0.01


async def contend(name: str, folder: str, log: str, term_s: float, urls: list[str]) -> None:
    """Runs until it is killed."""
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    etcd = Etcd(urls, min(1.5, term_s / (2 + len(urls))))
    election = EtcdElection(etcd, "/racktwin/lab", name, term_s, EpochFile(Path(folder) / "epoch"))

    def changed(term: Term | None) -> None:
        what = f"won {term.epoch} after {term.predecessor_head or '-'}" if term else "lost"
        os.write(out, f"# {clock_s():.6f} {name} {what}\n".encode())

    contending = asyncio.create_task(election.run(changed))
    while not contending.done():
        now = clock_s()
        if election.may_act(now) and election.term is not None:
            os.write(out, f"{now:.6f} {election.term.epoch} {name}\n".encode())
            election.publish_head(f"{name}@{election.term.epoch}")
        await asyncio.sleep(STEP_S)
    contending.result()


if __name__ == "__main__":
    asyncio.run(contend(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]), sys.argv[5:]))
