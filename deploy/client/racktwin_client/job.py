"""The job as its environment names it: its name at the twin, and its nodes."""

from __future__ import annotations

import os
import socket


def job_name() -> str:
    """RACKTWIN_JOB, else the twin's name of this job of Slurm. Raises ValueError without either."""
    own, number = os.environ.get("RACKTWIN_JOB"), os.environ.get("SLURM_JOB_ID")
    if own or not number:
        if not own:
            raise ValueError("no job of Slurm: name the job, Advisor('my-run', ...), or set RACKTWIN_JOB")
        return own
    return f"slurm:{os.environ.get('SLURM_CLUSTER_NAME') or 'cluster'}:{number}"


def job_nodes() -> str:
    """RACKTWIN_NODES, else the nodes that Slurm gave, else this host: names or lists such as gpu[001-004]."""
    given = os.environ.get("RACKTWIN_NODES") or os.environ.get("SLURM_JOB_NODELIST")
    return given or socket.gethostname().partition(".")[0]
