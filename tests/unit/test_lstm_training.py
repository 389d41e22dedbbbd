"""The LSTM learns what can be learned, by a search that sees no later row; NumPy says what PyTorch says."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from models.backtest.audit import spoil
from tests.evaluation.forecasts import lstm as lstm_module, lstm_training
from tests.evaluation.forecasts.lstm import Lstm, candidates, network_says
from tests.evaluation.forecasts.lstm_training import Sample, Settings, Trained
from tests.support.extras import needs_torch
from tests.support.lstm_panels import HOURLY, drawn, panel_of, ratio, swinging
from twin.catalogue import ContractError


@pytest.mark.evaluation
@pytest.mark.parametrize("layers", [1, 2])
def test_numpy_says_what_torch_says(layers: int) -> None:
    torch = needs_torch()
    torch.manual_seed(3)
    network = lstm_training.build(torch, Settings((1,) * 30, 17, layers, 1e-3, 0.3), 3, 11, 4).eval()
    with torch.no_grad():
        for weights in network.parameters():
            weights *= 3.0  # so that gates are full and empty too
    rng = np.random.default_rng(0)
    sequence, beside = rng.normal(size=(50, 30, 3)) * 3, rng.normal(size=(50, 11))
    with torch.no_grad():
        expected = lstm_training.forward(
            torch, network, torch.from_numpy(sequence).float(), torch.from_numpy(beside).float()
        ).numpy()
    arrays = {name: tensor.numpy() for name, tensor in network.state_dict().items()}
    np.testing.assert_allclose(network_says(arrays, sequence, beside), expected, atol=1e-5)


@pytest.mark.evaluation
def test_it_learns_a_season_and_an_error_that_fades() -> None:
    needs_torch()
    panel = panel_of(swinging(2500), 1e6 * swinging(2500, 2))
    lstm = Lstm(HOURLY, budget_fits=1)
    lstm.load(lstm.fit(panel.upto(1499), 0))
    found = ratio(lstm, panel, 1500)
    # An oracle that knows the swing and the 0.9 reaches 0.40 and 0.16.
    assert found[0] < 0.45
    assert found[1] < 0.22


@pytest.mark.evaluation
def test_fits_are_the_same_and_leave_torch_as_it_was() -> None:
    torch = needs_torch()
    panel = panel_of(swinging(400))
    threads = torch.get_num_threads()
    before = torch.random.get_rng_state()
    first = Lstm(HOURLY, 1).fit(panel, 5)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    torch.manual_seed(99)
    again = Lstm(HOURLY, 1).fit(panel, 5)
    other = Lstm(HOURLY, 1).fit(panel, 6)
    assert first.keys() == again.keys()
    for name, array in first.items():
        np.testing.assert_array_equal(array, again[name])
    assert not np.array_equal(first["mix.weight"], other["mix.weight"])


def test_without_torch_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ContractError, match=r"install racktwin\[torch\]"):
        Lstm(HOURLY).fit(panel_of(swinging(600)), 0)


def test_candidates_are_judged_on_a_later_block_and_searched_again_when_the_past_doubles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[Sample, Sample]] = []
    chosen = candidates(HOURLY)[0]

    def fit_nothing(setting: Settings, sample: Sample, *_: Any) -> Trained:
        arrays = drawn(HOURLY, setting=chosen)
        return Trained({k: v for k, v in arrays.items() if "." in k}, 1, np.ones(2), np.ones(2))

    def looked(found: tuple[Settings, ...], split: Any, seed: int) -> tuple[Settings, Trained]:
        assert len(found) == 3
        seen.append(split(found[0]))
        return chosen, fit_nothing(chosen, seen[-1][0])

    monkeypatch.setattr(lstm_module, "search", looked)
    monkeypatch.setattr(lstm_module, "train", fit_nothing)
    panel = panel_of(swinging(2000))
    lstm = Lstm(HOURLY, 3)
    lstm.load(lstm.fit(panel.upto(799), 0))
    assert len(seen) == 1
    for rows, searches in ((1200, 1), (1599, 1), (1600, 2), (2000, 2)):
        lstm.load(lstm.fit(panel.upto(rows - 1), 0))
        assert len(seen) == searches
    Lstm(HOURLY, 3).fit(spoil(panel, 599, "wild values").upto(799), 0)
    (earlier, later), (again, spoiled_later) = seen[0], seen[-1]
    np.testing.assert_array_equal(earlier.sequence, again.sequence)
    np.testing.assert_array_equal(earlier.beside, again.beside)
    np.testing.assert_array_equal(earlier.target, again.target)
    assert not np.array_equal(later.target, spoiled_later.target)
