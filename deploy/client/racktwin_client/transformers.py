"""Advice on checkpoints for the Trainer of Hugging Face Transformers: a callback that asks it to save.

    advisor = Advisor(job_name(), "file:///shared/racktwin", own_interval_s=1800)
    trainer = Trainer(args=TrainingArguments(save_strategy="no", ...), callbacks=[AdvisedSaves(advisor)], ...)

Saves that the Trainer makes by itself are measured, too; with the save strategy "best" it overrules advice at
its evaluations. May import Transformers.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from racktwin_client import torch_ranks
from racktwin_client.advisor import Advisor, Save


class AdvisedSaves(TrainerCallback):  # type: ignore[misc]
    """Asks the Trainer to save when the advisor decides so, on all ranks, and measures its saves."""

    def __init__(self, advisor: Advisor) -> None:
        self.advisor = advisor
        self._save: Save | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A run that goes on from a checkpoint says how long that took."""
        if state.global_step > 0:
            self.advisor.restored()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """After each step of the optimizer."""
        if self._save is not None:  # it was asked for and not made
            self.advisor.saved(self._save, ok=False)
            self._save = None
        if self.advisor.due(state.global_step, broadcast=torch_ranks.broadcast) or control.should_save:
            control.should_save = True
            self._save = Save()
        return control

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restart the measurement of a save: logging between the step and the save is not part of it."""
        if self._save is not None:
            self._save = Save()

    on_evaluate = on_log

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The save is done."""
        if self._save is not None:
            self.advisor.saved(self._save)
            self._save = None
