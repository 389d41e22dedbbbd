"""A real training loop that saves on advice, is killed at drawn times and goes on from its last durable save.

The job runs in a process of its own and gets SIGKILL. What it keeps of its time is held against what the
theory says of exactly these lives, and that against the closed form over all lives.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import racktwin_client.advisor as client

from policies.checkpointing import ettr
from tests.support.extras import needs_torch

INTERVAL_S, SAVE_S, RESTART_S, MTTF_S = 0.2, 0.03, 0.1, 1.5
LIVES = 8

# A launcher that has imported what takes long, so that a restart is short against the time between failures.
# On each line it starts a job in a fork, tells its process, and waits until that has ended.
TRAIN = """
import json, os, sys, time
folder, shared, kind, save_s, restart_s = *sys.argv[1:4], float(sys.argv[4]), float(sys.argv[5])
from racktwin_client.advisor import Advisor
if kind == "torch":
    import io, torch
    torch.set_num_threads(1)
    class Model:
        def __init__(self):
            torch.manual_seed(1)
            self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
            self.how = torch.optim.Adam(self.net.parameters(), 1e-3)
        def step(self, k):
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(k))
            self.how.zero_grad()
            (self.net(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
            self.how.step()
        def dump(self):
            out = io.BytesIO()
            torch.save([self.net.state_dict(), self.how.state_dict()], out)
            return out.getvalue()
        def load(self, raw):
            net, how = torch.load(io.BytesIO(raw), weights_only=True)
            self.net.load_state_dict(net)
            self.how.load_state_dict(how)
        def warm(self):  # all but the engine of gradients, whose threads do not survive a fork
            self.net(torch.zeros(1, 8))
            for p in self.net.parameters():
                p.grad = torch.zeros_like(p)
            self.how.step()
            self.load(self.dump())
        def weights(self):
            return torch.cat([p.detach().flatten() for p in self.net.parameters()]).tolist()
else:
    import numpy as np
    class Model:
        def __init__(self):
            self.w = np.zeros(8)
        def step(self, k):
            x = np.random.default_rng(k).normal(size=(16, 8))
            self.w -= 0.01 * x.T @ (x @ self.w - x.sum(1)) / 16
        def dump(self):
            return self.w.tobytes()
        def load(self, raw):
            self.w = np.frombuffer(raw).copy()
        def warm(self):
            self.step(0)
        def weights(self):
            return self.w.tolist()

path = os.path.join(folder, "state")
log = os.open(os.path.join(folder, "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def note(what, step, trained_s):
    os.write(log, json.dumps([what, time.monotonic(), step, trained_s]).encode() + b"\\n")

def save(model, step, trained_s):
    with open(path + ".part", "wb") as file:
        file.write(json.dumps([step, trained_s]).encode() + b"\\n" + model.dump())
        file.flush()
        os.fsync(file.fileno())
    time.sleep(save_s)  # a storage that is slow, however fast this one is
    os.replace(path + ".part", path)

def restore(model):
    try:
        with open(path, "rb") as file:
            step, trained_s = json.loads(file.readline())
            model.load(file.read())
            return step, trained_s
    except FileNotFoundError:
        return 0, 0.0

def train():
    born = time.monotonic()
    model = Model()
    step, trained_s = restore(model)
    time.sleep(restart_s)
    advisor = Advisor("j", "file://" + shared, own_interval_s=60.0, least_interval_s=0.01, poll_s=0.01)
    while advisor.interval_s == 60.0:  # so that each life goes by the advice from its first step on
        time.sleep(0.001)
    advisor.restored(time.monotonic() - born)
    note("begins", step, trained_s)
    while True:
        began = time.monotonic()
        model.step(step)
        time.sleep(0.002)
        step += 1
        trained_s += time.monotonic() - began
        if advisor.due(step):
            note("saves", step, trained_s)
            with advisor.saving():
                save(model, step, trained_s)
            note("saved", step, trained_s)

if save_s < 0:  # what an undisturbed run of as many steps comes to
    model = Model()
    for k in range(int(restart_s)):
        model.step(k)
    print(json.dumps(model.weights()))
    model = Model()
    restore(model)
    print(json.dumps(model.weights()))
    sys.exit(0)
Model().warm()
print("ready", flush=True)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        train()
    print(child, flush=True)
    os.waitpid(child, 0)
    print("gone", flush=True)
"""


@dataclass
class Run:
    """A job over its lives: lengths of the lives, s, its log, and its reports."""

    lives_s: list[float] = field(default_factory=list)
    born_s: list[float] = field(default_factory=list)
    log: list[tuple[str, float, int, float]] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)
    kept_s: float = 0.0
    steps: int = 0


def command(folder: Path, shared: Path, kind: str, *terms: float) -> tuple[list[str], dict[str, str]]:
    place = str(Path(client.__file__).parents[1])
    variables = {"PYTHONPATH": place, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "SLURM_PROCID")} | variables
    return [sys.executable, "-c", TRAIN, str(folder), str(shared), kind, *map(str, terms)], environment


def live_and_die(tmp_path: Path, kind: str, lives_s: list[float]) -> Run:
    """Run a job that is killed so long after each of its starts."""
    folder, shared = tmp_path / "job", tmp_path / "shared"
    folder.mkdir()
    shared.mkdir()
    now_ns = time.time_ns()
    advice = {"v": 1, "job": "j", "interval_s": INTERVAL_S, "save_since_ns": None, "issued_ns": now_ns,
              "expires_ns": now_ns + 3600 * client.NS, "epoch": 1, "reason": "a test"}  # fmt: skip
    (shared / "j.json").write_text(json.dumps(advice))
    run = Run()
    arguments, environment = command(folder, shared, kind, SAVE_S, RESTART_S)
    pipe = subprocess.PIPE
    with subprocess.Popen(arguments, stdin=pipe, stdout=pipe, text=True, env=environment) as launcher:
        assert launcher.stdin is not None
        assert launcher.stdout is not None
        try:
            assert launcher.stdout.readline() == "ready\n"
            for life_s in lives_s:
                run.born_s.append(time.monotonic())
                launcher.stdin.write("go\n")
                launcher.stdin.flush()
                job = int(launcher.stdout.readline())
                time.sleep(max(0.0, run.born_s[-1] + life_s - time.monotonic()))
                os.kill(job, signal.SIGKILL)
                run.lives_s.append(time.monotonic() - run.born_s[-1])
                assert launcher.stdout.readline() == "gone\n"
        except BaseException:
            with contextlib.suppress(ProcessLookupError, UnboundLocalError):
                os.kill(job, signal.SIGKILL)
            launcher.kill()
            raise
        launcher.stdin.close()
    run.log = [tuple(json.loads(line)) for line in (folder / "log").read_text().splitlines()]  # type: ignore[misc]
    run.reports = [json.loads(line) for line in (shared / "j.reports.jsonl").read_text().splitlines()]
    with open(folder / "state", "rb") as file:
        run.steps, run.kept_s = json.loads(file.readline())
    return run


def drawn(n: int, seed: int) -> list[float]:
    """Lives of a constant rate of failures, s: one from each n-th of the distribution, in any order.

    None ends close to the end of a cycle, where a delay of milliseconds would decide about a whole interval:
    its place within the cycle is moved towards the middle, which leaves the number of cycles as it was.
    """
    rng = np.random.default_rng(seed)
    lives = -MTTF_S * np.log1p(-(np.arange(n) + rng.uniform(0.0, 1.0, n)) / n)
    restart_s, cycle_s = 1.2 * RESTART_S, INTERVAL_S + 1.2 * SAVE_S  # with what a process and a disk add
    whole, place = np.divmod(lives - restart_s, cycle_s)
    lives = np.maximum(0.01, restart_s + (whole + 0.35 + 0.3 * place) * cycle_s)
    return [float(life) for life in rng.permutation(lives)]


def kept(lives_s: Any, restart_s: Any, interval_s: float, cycle_s: float) -> float:
    """The share of these lives that is kept: an interval of training for each whole cycle of both."""
    lives = np.asarray(lives_s, np.float64)
    cycles = np.floor(np.maximum(0.0, lives - restart_s) / cycle_s)
    return float(interval_s * cycles.sum() / lives.sum())


def check(folder: Path, kind: str, seed: int) -> None:
    """Hold the share of time that a job keeps against the theory. A busy machine spoils a try; a fault of the
    advice spoils all of them.
    """
    tries = []
    for number in range(3):
        (folder / str(number)).mkdir()
        tries.append(keeps_what_it_should(folder / str(number), kind, seed + number))
        if tries[-1]:
            return
    raise AssertionError(f"what {kind} keeps is not what the theory says in {len(tries)} tries")


def keeps_what_it_should(tmp_path: Path, kind: str, seed: int) -> bool:
    """True if the share of time that is kept is that of the theory; all else is asserted."""
    run = live_and_die(tmp_path, kind, drawn(LIVES, seed))

    # It goes on from the last save that was whole, and from nothing else.
    durable = {0}
    for what, _, step, _ in run.log:
        if what == "begins":
            assert step in durable
        durable = {step} if what == "saved" else durable | {step} if what == "saves" else durable
    assert run.steps in durable
    arguments, environment = command(tmp_path / "job", tmp_path / "shared", kind, -1.0, run.steps)
    answer = subprocess.run(
        arguments, env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    alone, restored = map(json.loads, answer.stdout.splitlines())
    np.testing.assert_allclose(restored, alone, rtol=1e-6, atol=1e-9)

    # It saves when told: its own interval is a minute.
    trained = [b[3] - a[3] for a, b in zip(run.log, run.log[1:], strict=False) if b[0] == "saves"]
    interval_s = statistics.fmean(trained)
    assert len(trained) > LIVES
    assert statistics.median(trained) >= 0.95 * INTERVAL_S
    told = [r for r in run.reports if r["save_s"] > 0]
    assert {r["interval_s"] for r in told} == {INTERVAL_S}
    assert min(r["block_s"] for r in told) >= SAVE_S
    assert all(r["restart_s"] >= RESTART_S for r in run.reports if r["restart_s"])

    # Its share of useful time is that of the theory for exactly these lives.
    save_s = statistics.fmean(r["block_s"] for r in told)
    cycles = [b[1] - a[1] for a, b in zip(run.log, run.log[2:], strict=False) if b[0] == "saved"]
    cycle_s = statistics.fmean(cycles)
    whole_s = interval_s + save_s
    is_undisturbed = statistics.median(cycles) == pytest.approx(whole_s, rel=0.1)  # nothing else takes time
    begun = [at for what, at, _, _ in run.log if what == "begins"]
    restart_s = [next((b - at for b in begun if at <= b < at + life), life)
                 for at, life in zip(run.born_s, run.lives_s, strict=True)]  # fmt: skip
    measured = run.kept_s / sum(run.lives_s)
    predicted = kept(run.lives_s, restart_s, interval_s, cycle_s)
    print(f"{kind}: kept {measured:.4f} of the time, predicted {predicted:.4f}; interval {interval_s:.3f} s, "
          f"save {save_s:.4f} s, restart {statistics.fmean(restart_s):.3f} s, {len(told)} saves")  # fmt: skip
    return is_undisturbed and measured == pytest.approx(predicted, abs=0.02)


def test_over_all_lives_the_share_of_whole_cycles_is_the_closed_form() -> None:
    lives = np.random.default_rng(7).exponential(MTTF_S, 400_000)
    for interval_s in (0.1, INTERVAL_S, 0.5, 2.0):
        found = kept(lives, RESTART_S, interval_s, interval_s + SAVE_S)
        assert found == pytest.approx(float(ettr(interval_s, SAVE_S, RESTART_S, MTTF_S)), abs=0.003)


@pytest.mark.long
def test_a_loop_in_numpy_that_is_killed_keeps_what_the_theory_says(tmp_path: Path) -> None:
    check(tmp_path, "numpy", 3)


@pytest.mark.long
@pytest.mark.slow
def test_a_model_in_torch_that_is_killed_keeps_what_the_theory_says(tmp_path: Path) -> None:
    needs_torch()
    check(tmp_path, "torch", 4)
