"""The client's adapters save, measure and go on in PyTorch Lightning and the Trainer of Hugging Face.

Against the real classes where they are installed (pip install lightning transformers accelerate), in another
process; else against stand-ins that call the same hooks in the same order.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import racktwin_client.advisor as client

from tests.support.extras import needs_torch

CLIENT = Path(client.__file__).parents[1]

LIGHTNING = """
import os, sys
import torch
import lightning.pytorch as pl
from racktwin_client.advisor import Advisor
from racktwin_client.lightning import AdvisedCheckpoint, latest, saved

folder, shared, last = sys.argv[1], sys.argv[2], int(sys.argv[3])

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        return self.layer(batch).pow(2).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

data = torch.utils.data.DataLoader(torch.randn(400, 4), batch_size=4)
advisor = Advisor("j", "file://" + shared, own_every_steps=10, poll_s=0.1)
trainer = pl.Trainer(
    max_steps=last, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, accumulate_grad_batches=2, callbacks=[AdvisedCheckpoint(advisor, folder)],
)
begun = latest(folder)
trainer.fit(Model(), data, ckpt_path=begun)
advisor.close()
print(begun and os.path.basename(begun), trainer.global_step, [s for s, _ in saved(folder)])
"""

HF = """
import os, sys
import torch
from transformers import Trainer, TrainingArguments
from racktwin_client.advisor import Advisor
from racktwin_client.transformers import AdvisedSaves

folder, shared, last = sys.argv[1], sys.argv[2], int(sys.argv[3])

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def forward(self, x, labels=None):
        return {"loss": self.layer(x).pow(2).mean()}

data = [{"x": torch.randn(4)} for _ in range(400)]
advisor = Advisor("j", "file://" + shared, own_every_steps=10, poll_s=0.1)
trainer = Trainer(
    model=Model(), train_dataset=data, callbacks=[AdvisedSaves(advisor)],
    args=TrainingArguments(
        output_dir=folder, max_steps=last, save_strategy="no", use_cpu=True, report_to=[], disable_tqdm=True,
        per_device_train_batch_size=4, remove_unused_columns=False, logging_steps=10,
    ),
)
def saved():
    return sorted(int(n.split("-")[1]) for n in os.listdir(folder) if n.startswith("checkpoint-"))
begun = max(saved(), default=None)
trainer.train(resume_from_checkpoint=begun is not None)
advisor.close()
print(begun, trainer.state.global_step, saved())
"""


def there(*names: str) -> bool:
    return all(importlib.util.find_spec(name) for name in names)


def reports(shared: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (shared / "j.reports.jsonl").read_text().splitlines()]


def fit(script: str, folder: Path, shared: Path, steps: int) -> str:
    answer = subprocess.run(
        [sys.executable, "-c", script, str(folder), str(shared), str(steps)], cwd=folder,
        env={**os.environ, "PYTHONPATH": str(CLIENT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.skipif(not there("lightning", "torch"), reason="not here: pip install lightning")
def test_lightning_itself(tmp_path: Path) -> None:
    folder, shared = tmp_path / "saves", tmp_path / "shared"
    folder.mkdir()
    shared.mkdir()
    assert fit(LIGHTNING, folder, shared, 35) == "None 35 [20, 30]"
    first = reports(shared)
    assert len([r for r in first if r["save_s"] > 0]) == 3
    assert not any(r["restart_s"] for r in first)
    assert fit(LIGHTNING, folder, shared, 45) == "racktwin-30.ckpt 45 [30, 40]"
    assert len([r for r in reports(shared) if r["restart_s"] > 0]) == 1


@pytest.mark.slow
@pytest.mark.skipif(
    not there("transformers", "accelerate", "torch"), reason="not here: pip install transformers"
)
def test_the_trainer_of_hugging_face_itself(tmp_path: Path) -> None:
    folder, shared = tmp_path / "saves", tmp_path / "shared"
    folder.mkdir()
    shared.mkdir()
    assert fit(HF, folder, shared, 25) == "None 25 [10, 20]"
    assert len([r for r in reports(shared) if r["save_s"] > 0]) == 2
    assert fit(HF, folder, shared, 45) == "20 45 [10, 20, 30, 40]"
    assert len([r for r in reports(shared) if r["restart_s"] > 0]) == 1


# Stand-ins


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules with the base classes and no more; the adapters are imported anew and forgotten."""
    pytorch = types.ModuleType("lightning.pytorch")
    pytorch.Callback = type("Callback", (), {})  # type: ignore[attr-defined]
    transformers = types.ModuleType("transformers")
    transformers.TrainerCallback = type("TrainerCallback", (), {})  # type: ignore[attr-defined]
    for name, module in (("lightning", types.ModuleType("lightning")), ("lightning.pytorch", pytorch),
                         ("transformers", transformers)):  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module)
    names = ("racktwin_client.lightning", "racktwin_client.transformers")
    before = {name: sys.modules.pop(name, None) for name in names}
    yield
    for name, module_before in before.items():
        sys.modules.pop(name, None)
        if module_before is not None:
            sys.modules[name] = module_before


class Lightning:
    """As its Trainer calls: two batches to a step; what it saves is a file."""

    def __init__(self, ckpt_path: str | None = None, fails_at: int = -1) -> None:
        self.global_step, self.ckpt_path, self.is_global_zero = 0, ckpt_path, True
        self.strategy = types.SimpleNamespace(broadcast=lambda decision: decision)
        self._fails_at = fails_at

    def save_checkpoint(self, path: str) -> None:
        Path(path).write_text("half")
        if self.global_step == self._fails_at:
            raise OSError("the disk is full")
        Path(path).write_text("whole")

    def fit(self, callback: Any, steps: int) -> None:
        callback.on_train_start(self, None)
        for batch in range(2 * steps):
            self.global_step += batch % 2
            callback.on_train_batch_end(self, None, None, None, batch)


def test_lightning_hooks(stand_in: None, tmp_path: Path) -> None:
    from racktwin_client.lightning import AdvisedCheckpoint, latest

    assert latest(str(tmp_path / "saves")) is None
    advisor = client.Advisor("j", "", own_every_steps=4, rank=0)
    callback = AdvisedCheckpoint(advisor, str(tmp_path / "saves"))
    Lightning().fit(callback, 18)
    assert sorted(p.name for p in (tmp_path / "saves").iterdir()) == ["racktwin-12.ckpt", "racktwin-16.ckpt"]
    with pytest.raises(OSError, match="full"):
        Lightning(fails_at=4).fit(AdvisedCheckpoint(advisor, str(tmp_path / "saves")), 9)
    newest = latest(str(tmp_path / "saves"))
    assert newest is not None
    assert Path(newest).name == "racktwin-16.ckpt"  # what is half written has another name
    assert Path(newest).read_text() == "whole"
    assert not [r for r in advisor._waiting if r["restart_s"]]
    Lightning(ckpt_path="x").fit(callback, 1)
    assert [r for r in advisor._waiting if r["restart_s"]]


class Sharded(Lightning):
    """As with FSDP: what it saves is a folder."""

    def save_checkpoint(self, path: str) -> None:
        Path(path).mkdir(exist_ok=True)
        (Path(path) / "shard").write_text(str(self.global_step))


@pytest.mark.parametrize("trainer", [Lightning, Sharded])
def test_a_run_that_goes_back_keeps_its_own_saves(stand_in: None, tmp_path: Path, trainer: Any) -> None:
    from racktwin_client.lightning import AdvisedCheckpoint, saved

    advisor = client.Advisor("j", "", own_every_steps=4, rank=0)
    trainer().fit(AdvisedCheckpoint(advisor, str(tmp_path)), 18)
    assert [step for step, _ in saved(str(tmp_path))] == [12, 16]
    for made_s, (_, path) in enumerate(saved(str(tmp_path)), 1000):
        os.utime(path, (made_s, made_s))
    trainer().fit(AdvisedCheckpoint(advisor, str(tmp_path)), 9)
    assert [step for step, _ in saved(str(tmp_path))] == [4, 8]
    again = trainer()
    again.global_step = 4
    again.fit(AdvisedCheckpoint(advisor, str(tmp_path)), 5)
    assert [step for step, _ in saved(str(tmp_path))] == [4, 8]


@pytest.mark.parametrize("decision", [False, True])
def test_without_pytorch_a_process_agrees_with_itself(
    monkeypatch: pytest.MonkeyPatch, decision: bool
) -> None:
    from racktwin_client import torch_ranks

    monkeypatch.setitem(sys.modules, "torch", None)  # an import of it fails
    assert torch_ranks.broadcast(decision) is decision


def test_hugging_face_hooks(stand_in: None) -> None:
    from racktwin_client.transformers import AdvisedSaves

    advisor = client.Advisor("j", "", own_every_steps=4, rank=0)
    callback = AdvisedSaves(advisor)
    state = types.SimpleNamespace(global_step=0)
    callback.on_train_begin(None, state, None)
    found = []
    for _ in range(18):
        state.global_step += 1
        control = types.SimpleNamespace(should_save=state.global_step == 7)
        callback.on_step_end(None, state, control)
        callback.on_log(None, state, control)
        callback.on_evaluate(None, state, control)
        if control.should_save and state.global_step != 11:  # where its own metric overrules
            found.append(state.global_step)
            callback.on_save(None, state, control)
    assert found == [4, 7]
    assert len([r for r in advisor._waiting if r["began_ns"]]) == len(found)
    callback.on_train_begin(None, state, None)
    assert [r for r in advisor._waiting if r["restart_s"]]


RANKS = """
import json, os, sys
import torch.distributed as dist
from racktwin_client import torch_ranks
from racktwin_client.advisor import Advisor

assert torch_ranks.broadcast(True) and not torch_ranks.broadcast(False)  # before there are any ranks
second = os.fork()
rank = 1 if second else 0
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
# Each would decide otherwise by itself.
advisor = Advisor("j", "", own_every_steps=3 if rank == 0 else 2, rank=rank)
found = [advisor.due(step, broadcast=torch_ranks.broadcast) for step in range(1, 10)]
dist.barrier()
dist.destroy_process_group()
status = os.waitstatus_to_exitcode(os.waitpid(second, 0)[1]) if second else 0  # one prints after the other
print(json.dumps(found), flush=True)
sys.exit(status)
"""


@pytest.mark.slow
def test_two_ranks_agree(tmp_path: Path) -> None:
    needs_torch()
    environment = {**os.environ, "PYTHONPATH": str(CLIENT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", RANKS, str(tmp_path / "meet")],
        capture_output=True, text=True, env=environment, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [[False, False, True] * 3] * 2
