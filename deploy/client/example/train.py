"""A training loop that saves on advice: a small regression in plain Python, checkpoints that are never torn.

    python train.py JOB SOURCE FOLDER [NODES]

With NODES, such as gpu[001-004], the job registers itself there. May import racktwin_client and the standard
library.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time

from racktwin_client import Advisor

STEPS, STEP_S = 2000, 0.01  # a step of real work takes far longer


def restore(path: str) -> dict[str, float]:
    """Return the last durable state, or the initial state."""
    try:
        with open(path, encoding="utf-8") as file:
            return dict(json.load(file))
    except FileNotFoundError:
        return {"step": 0, "weight": 0.0}


def save(path: str, state: dict[str, float]) -> None:
    """Write a temporary file, force it to disk, then rename it: a kill leaves the previous checkpoint."""
    with open(path + ".part", "w", encoding="utf-8") as file:
        json.dump(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".part", path)


def main(job: str, source: str, folder: str, nodes: str = "") -> None:
    """Fit y = 3 x by gradient steps."""
    path = os.path.join(folder, f"{job}.state.json")
    advisor = Advisor(job, source, own_interval_s=5.0, least_interval_s=1.0, poll_s=2.0, nodes=nodes)
    print(advisor.first_answer() or f"the twin knows {job}", flush=True)
    state = restore(path)
    if state["step"]:
        advisor.restored()
    while state["step"] < STEPS:
        x = random.gauss(0.0, 1.0)
        state["weight"] -= 0.1 * (state["weight"] - 3.0) * x * x
        state["step"] += 1
        time.sleep(STEP_S)
        if advisor.due(state["step"]):
            with advisor.saving():
                save(path, state)
    save(path, state)
    print(f"done: {state}, {advisor.interval_s:g} s between saves")
    advisor.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
