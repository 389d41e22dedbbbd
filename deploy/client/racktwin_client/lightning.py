"""Advice on checkpoints in PyTorch Lightning: a callback that saves when the advisor says so.

    advisor = Advisor(job_name(), "file:///shared/racktwin", own_interval_s=1800)
    trainer = Trainer(callbacks=[AdvisedCheckpoint(advisor, "checkpoints")])
    trainer.fit(model, ckpt_path=latest("checkpoints"))

It stands beside a ModelCheckpoint that keeps the best models; let that one save seldom. May import Lightning.
"""

from __future__ import annotations

import os
import re
import shutil
from typing import Any

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

from racktwin_client.advisor import Advisor

_NAME = re.compile(r"racktwin-(\d+)\.ckpt")


class AdvisedCheckpoint(Callback):  # type: ignore[misc]
    """Saves to `folder`/racktwin-STEP.ckpt, a folder of this job alone, and keeps the last `keep` of them."""

    def __init__(self, advisor: Advisor, folder: str, keep: int = 2) -> None:
        self.advisor, self.folder, self.keep = advisor, folder, max(1, keep)
        self._step = -1

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """A run that goes on from a checkpoint says how long that took."""
        os.makedirs(self.folder, exist_ok=True)
        self._step = trainer.global_step
        if trainer.ckpt_path is not None:
            self.advisor.restored()

    def on_train_batch_end(self, trainer: Any, *batch: Any, **more: Any) -> None:
        """Save on all ranks after a step of the optimizer if rank 0 decided so, which Lightning
        broadcasts."""
        step = trainer.global_step
        if step == self._step:
            return
        self._step = step
        if not self.advisor.due(step, broadcast=trainer.strategy.broadcast):
            return
        path = os.path.join(self.folder, f"racktwin-{step}.ckpt")
        with self.advisor.saving():
            trainer.save_checkpoint(path + ".part")  # a name of its own until it is whole
            if trainer.is_global_zero:
                os.replace(path + ".part", path)
        if trainer.is_global_zero:
            for _step, old in saved(self.folder)[: -self.keep]:
                shutil.rmtree(old, ignore_errors=True) if os.path.isdir(old) else os.remove(old)


def saved(folder: str) -> list[tuple[int, str]]:
    """(step, path) of the whole checkpoints of a folder, the newest last."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted((int(m[1]), os.path.join(folder, m[0])) for m in map(_NAME.fullmatch, names) if m)


def latest(folder: str) -> str | None:
    """The newest whole checkpoint, None if there is none; for `Trainer.fit(ckpt_path=...)`."""
    found = saved(folder)
    return found[-1][1] if found else None
