"""Training of the LSTM: PyTorch on arrays, with a search over its settings on a later block of the past.

Only the functions that train import PyTorch, inside themselves. What comes out is arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from twin.catalogue import F32, F64, ContractError

BATCH = 128  # windows per step of Adam. source: estimate
MAX_EPOCHS = 16  # times through the sample at most. source: estimate
PATIENCE = 4  # epochs without a better median error before training stops. source: estimate
LAST_RATE = 0.05  # share of the first learning rate that the last epoch would use. source: estimate
CLIP = 1.0  # greatest norm of a gradient. source: estimate
JUDGE_BLOCK = 1024  # windows judged at once
SHARES = np.linspace(0.0, 1.0, 11)  # of the change that the network says, which the forecast follows


@dataclass(frozen=True)
class Settings:
    """Settings that a search chooses. `widths`: rows in each step of the sequence, the oldest step first."""

    widths: tuple[int, ...]
    hidden: int
    layers: int
    rate: float
    dropout: float


@dataclass(frozen=True)
class Sample:
    """Windows to learn from: sequence [m, steps, channels], beside [m, k], target and weight [m, n_horizon].

    A weight of 0 marks a target that is a gap; the target is 0 there.
    """

    sequence: F32
    beside: F32
    target: F32
    weight: F32

    @property
    def m(self) -> int:
        return len(self.target)


@dataclass(frozen=True)
class Trained:
    """A network's arrays, the epochs they took, and how it did on the later block (NaN without one).

    `share` and `error` [n_horizon]: error is relative to that of saying no change.
    """

    arrays: dict[str, np.ndarray]
    epochs: int
    share: F64
    error: F64

    @property
    def mean_error(self) -> float:
        return float(self.error.mean())


def pytorch() -> Any:
    """The module torch. Raises ContractError where it is not installed."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ContractError("lstm: fitting needs PyTorch: install racktwin[torch]") from error
    return torch


def search(
    settings: Sequence[Settings], split: Callable[[Settings], tuple[Sample, Sample]], seed: int
) -> tuple[Settings, Trained]:
    """The settings whose network errs least on the later block, averaged over horizons; the first on a tie.

    `split` gives the earlier windows to learn from and the later ones to judge by. Each of the settings is
    one fit of at most MAX_EPOCHS. Raises ContractError as `pytorch`.
    """
    best: tuple[Settings, Trained] | None = None
    for candidate in settings:
        earlier, later = split(candidate)
        trained = train(candidate, earlier, later, MAX_EPOCHS, seed)
        if best is None or trained.mean_error < best[1].mean_error:
            best = candidate, trained
    if best is None:
        raise ContractError("lstm: expected at least one candidate to search through")
    return best


def train(settings: Settings, sample: Sample, later: Sample | None, epochs: int, seed: int) -> Trained:
    """A network trained by Adam on the weighted absolute error, with the rate falling in a straight line.

    With a later block, training stops PATIENCE epochs after the best, and the best is kept; without one it
    runs `epochs` of the MAX_EPOCHS that the rate falls over. On one thread, and the same for the same seed.
    Raises ContractError as `pytorch`.
    """
    torch = pytorch()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in one order, whatever the machine
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return _train(torch, settings, sample, later, epochs)
    finally:
        torch.set_num_threads(threads)


def _train(torch: Any, settings: Settings, sample: Sample, later: Sample | None, epochs: int) -> Trained:
    n_channel, n_beside, n_out = sample.sequence.shape[2], sample.beside.shape[1], sample.target.shape[1]
    network = build(torch, settings, n_channel, n_beside, n_out)
    adam = torch.optim.Adam(network.parameters(), lr=settings.rate)
    tensors = [torch.from_numpy(a) for a in (sample.sequence, sample.beside, sample.target, sample.weight)]
    best = Trained(_arrays(network), 0, np.ones(n_out), np.full(n_out, np.nan))
    for epoch in range(1, epochs + 1):
        for group in adam.param_groups:
            group["lr"] = settings.rate * (1.0 - (1.0 - LAST_RATE) * (epoch - 1) / max(1, MAX_EPOCHS - 1))
        network.train()
        for batch in torch.randperm(sample.m).split(BATCH):
            sequence, beside, target, weight = (tensor[batch] for tensor in tensors)
            loss = (weight * (forward(torch, network, sequence, beside) - target).abs()).mean()
            adam.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), CLIP)
            adam.step()
        if later is None:
            continue
        share, error = judge(said(torch, network, later), later)
        if best.epochs == 0 or np.mean(error) < best.mean_error:
            best = Trained(_arrays(network), epoch, share, error)
        elif epoch >= best.epochs + PATIENCE:
            break
    if later is None:
        return Trained(_arrays(network), epochs, best.share, best.error)
    return best


def build(torch: Any, settings: Settings, n_channel: int, n_beside: int, n_out: int) -> Any:
    """LSTM over the sequence; its last state and what stands beside it go through one hidden layer."""
    nn = torch.nn
    between = settings.dropout if settings.layers > 1 else 0.0
    return nn.ModuleDict(
        {
            "lstm": nn.LSTM(n_channel, settings.hidden, settings.layers, batch_first=True, dropout=between),
            "drop": nn.Dropout(settings.dropout),
            "mix": nn.Linear(settings.hidden + n_beside, settings.hidden),
            "out": nn.Linear(settings.hidden, n_out),
        }
    )


def forward(torch: Any, network: Any, sequence: Any, beside: Any) -> Any:
    """Scaled changes [m, n_horizon] of tensors of windows."""
    states, _ = network["lstm"](sequence)
    mixed = torch.cat([network["drop"](states[:, -1]), beside], dim=1)
    return network["out"](torch.tanh(network["mix"](mixed)))


def said(torch: Any, network: Any, sample: Sample) -> F64:
    """Return the network's output for a sample, without dropout. [m, n_horizon]"""
    network.eval()
    with torch.no_grad():
        parts = [
            forward(torch, network, torch.from_numpy(sequence), torch.from_numpy(beside)).numpy()
            for sequence, beside in zip(
                np.array_split(sample.sequence, -(-sample.m // JUDGE_BLOCK)),
                np.array_split(sample.beside, -(-sample.m // JUDGE_BLOCK)),
                strict=True,
            )
        ]
    return np.concatenate(parts).astype(np.float64)


def judge(change: F64, sample: Sample) -> tuple[F64, F64]:
    """The share of the change [m, n_horizon] that errs least, and its error relative to no change.

    Both [n_horizon]. A network that has learned nothing gets a share of 0, so that it says the last value. A
    horizon at which nothing ever changes counts as 1.
    """
    weight = sample.weight.astype(np.float64)
    still = (weight * np.abs(sample.target)).sum(axis=0)
    error = np.stack([(weight * np.abs(share * change - sample.target)).sum(axis=0) for share in SHARES])
    best = np.argmin(error, axis=0)
    return SHARES[best], np.divide(error.min(axis=0), still, out=np.ones_like(still), where=still > 0)


def _arrays(network: Any) -> dict[str, np.ndarray]:
    return {name: tensor.detach().numpy().copy() for name, tensor in network.state_dict().items()}
