"""racktwin client for jobs: registers a job, receives the interval between checkpoints and reports the cost
of saves.

The standard library only, Python >= 3.9. `Advisor` is the whole of it; adapters for Lightning, Hugging Face
and several ranks are modules of their own.
"""

from __future__ import annotations

from racktwin_client.advisor import Advisor, Save
from racktwin_client.job import job_name, job_nodes

__all__ = ["Advisor", "Save", "job_name", "job_nodes"]
