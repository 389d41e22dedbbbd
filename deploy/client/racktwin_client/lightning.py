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
from contextlib import suppress
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
                _remove(path)  # of a run that went back: a folder cannot be replaced by another
                os.replace(path + ".part", path)
        if trainer.is_global_zero:
            for _step, old in saved(self.folder)[: -self.keep]:
                _remove(old)


def _remove(path: str) -> None:
    """Remove a checkpoint if there is one; one that cannot be removed stays and harms no job."""
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            os.remove(path)


def saved(folder: str) -> list[tuple[int, str]]:
    """(step, path) of the whole checkpoints of a folder, the newest last.

    By the time of their making: a run that went back to an earlier step makes newer ones of lower steps.
    """
    names = os.listdir(folder) if os.path.isdir(folder) else []
    found = list[tuple[int, int, str]]()
    for match in filter(None, map(_NAME.fullmatch, names)):
        path = os.path.join(folder, match[0])
        with suppress(FileNotFoundError):  # another process removed it
            found.append((os.stat(path).st_mtime_ns, int(match[1]), path))
    return [(step, path) for _, step, path in sorted(found)]


def latest(folder: str) -> str | None:
    """The newest whole checkpoint, None if there is none; for `Trainer.fit(ckpt_path=...)`."""
    found = saved(folder)
    return found[-1][1] if found else None
