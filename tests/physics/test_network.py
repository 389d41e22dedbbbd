"""The split over racks against Kirchhoff's laws, root finders of scipy and closed forms.

May import `twin.physics`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.optimize import brentq, fsolve

from twin.physics import Flow, Network, network
from twin.physics.network import MAX_STEPS, Pumps, duty

RACK_LPM, RACK_PA, HEAD_PA = 100.0, 80_000.0, 155_000.0


def even(n_cdu: int, per_cdu: int) -> Network:
    n = n_cdu * per_cdu
    return Network(np.arange(0, n + 1, per_cdu), np.arange(n), n)


def case(n_cdu: int, per_cdu: int, seed: int = 0, spread: float = 0.1) -> dict[str, Any]:
    """A plausible hall: two pumps a CDU, a manifold that loses a few percent, everything spread."""
    rng = np.random.default_rng(seed)
    n = n_cdu * per_cdu

    def around(*shape: int) -> np.ndarray:
        return rng.uniform(1 - spread, 1 + spread, shape)

    total = RACK_LPM * per_cdu
    return {
        "pump_speed": 0.75 * around(n_cdu, 2),
        "head0": 1.3 * HEAD_PA / 0.75**2 * around(n_cdu, 2),
        "curve": 0.3 * HEAD_PA / (total / 2) ** 2 * around(n_cdu, 2),
        "inner": 75_000.0 / total**2 * around(n_cdu),
        "branch": RACK_PA / RACK_LPM**2 * around(n),
        "segment": 0.003 * RACK_PA / RACK_LPM**2 * around(n),
    }


def solved(network: Network, of: dict[str, Any], **more: Any) -> Flow:
    pumps = Pumps(of["pump_speed"], of["head0"], of["curve"])
    return network.solve(pumps, of["inner"], of["branch"], of["segment"], **more)


def imbalance(given_: dict[str, Any], found: Flow, per_cdu: int) -> float:
    """The worst relative violation of the laws of pipes, pumps and nodes, with check valves."""
    n_cdu = len(found.cdu_lpm)
    rack = found.rack_lpm.reshape(n_cdu, per_cdu)
    branch, segment = (given_[k].reshape(n_cdu, per_cdu) for k in ("branch", "segment"))
    along = np.cumsum(rack[:, ::-1], axis=1)[:, ::-1]
    node = found.drop_pa[:, None] - np.cumsum(segment * along * along, axis=1)
    open_ = np.isfinite(branch)
    lost = np.where(open_, np.where(open_, branch, 0.0) * rack * rack, node)
    scale = found.pump_head_pa
    no_flow = given_["pump_speed"] ** 2 * given_["head0"]
    pumps = found.pump_lpm
    given_head = no_flow - given_["curve"] * pumps * np.abs(pumps)
    shut = (pumps == 0.0) & (no_flow <= scale[:, None])
    worst = [
        np.abs(node - lost) / scale[:, None],
        np.abs(np.where(shut, 0.0, given_head - scale[:, None])) / scale[:, None],
        np.abs(scale - given_["inner"] * found.cdu_lpm**2 - found.drop_pa) / scale,
        np.abs(rack.sum(axis=1) - found.cdu_lpm) / found.cdu_lpm,
        np.abs(pumps.sum(axis=1) - found.cdu_lpm) / found.cdu_lpm,
        np.abs(node - found.rack_drop_pa.reshape(n_cdu, per_cdu)) / scale[:, None],
    ]
    return float(max(w.max() for w in worst))


@pytest.mark.parametrize("n_cdu, per_cdu", [(25, 3), (74, 8), (257, 1), (1, 40)])
def test_pipes_pumps_and_nodes_obey_their_laws(n_cdu: int, per_cdu: int) -> None:
    of = case(n_cdu, per_cdu)
    found = solved(even(n_cdu, per_cdu), of)
    assert found.converged.all()
    assert imbalance(of, found, per_cdu) < 1e-9


def kirchhoff(of: dict[str, Any], x: np.ndarray) -> np.ndarray:
    """All laws of one CDU, unknowns (pump 1, pump 2, every branch), in units of nominal flow and head."""
    q, rack = x[:2] * RACK_LPM, x[2:] * RACK_LPM
    head = of["pump_speed"][0] ** 2 * of["head0"][0] - of["curve"][0] * q * np.abs(q)
    total = rack.sum()
    along = np.cumsum(rack[::-1])[::-1]
    node = head[0] - of["inner"][0] * total * abs(total) - np.cumsum(of["segment"] * along * np.abs(along))
    return np.concatenate([
        [(head[0] - head[1]) / HEAD_PA, (q.sum() - total) / RACK_LPM],
        (node - of["branch"] * rack * np.abs(rack)) / HEAD_PA,
    ])  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_a_general_root_finder_agrees(seed: int) -> None:
    of = case(1, 6, seed)
    guess = np.concatenate([[3.0, 3.0], np.ones(6)])
    rival, _, ok, text = fsolve(lambda x: kirchhoff(of, x), guess, xtol=1e-13, full_output=True)
    assert ok == 1, text
    found = solved(even(1, 6), of)
    assert found.rack_lpm == pytest.approx(rival[2:] * RACK_LPM, rel=1e-9)
    assert found.pump_lpm[0] == pytest.approx(rival[:2] * RACK_LPM, rel=1e-9)


def bisected(of: dict[str, Any]) -> tuple[float, float]:
    """(flow, head) of one CDU with one rack by bisection on the head."""
    no_flow = of["pump_speed"][0] ** 2 * of["head0"][0]
    circuit = float(of["inner"][0] + of["segment"][0] + of["branch"][0])

    def spare_lpm(head: float) -> float:
        each = np.sign(no_flow - head) * np.sqrt(np.abs(no_flow - head) / of["curve"][0])
        return float(np.maximum(each, 0.0).sum() - np.sqrt(head / circuit))

    head = float(brentq(spare_lpm, 0.0, float(no_flow.max()), xtol=1e-9, rtol=1e-15))
    return float(np.sqrt(head / circuit)), head


@pytest.mark.parametrize(
    "speeds", [(0.75, 0.75), (0.75, 0.7), (0.4, 0.8), (0.0, 1.0), (1.0, 0.0), (0.9, 0.6)]
)
def test_bisection_agrees_forwards_and_shut(speeds: tuple[float, float]) -> None:
    of = case(1, 1, 3) | {"pump_speed": np.array([speeds])}
    flow, head = bisected(of)
    found = solved(even(1, 1), of)
    assert found.converged.all()
    assert found.cdu_lpm[0] == pytest.approx(flow, rel=1e-8)
    assert found.pump_head_pa[0] == pytest.approx(head, rel=1e-8)
    assert (found.pump_lpm >= 0.0).all()


def test_one_pump_and_one_rack_in_closed_form() -> None:
    of = case(1, 1) | {"pump_speed": np.array([[0.6, 0.0]])}
    resistance = (of["curve"][0, 0] + of["inner"] + of["segment"] + of["branch"])[0]
    expected = 0.6 * np.sqrt(of["head0"][0, 0] / resistance)
    assert solved(even(1, 1), of).cdu_lpm[0] == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("ease", [1.0, 1e-6, 1e-12])
def test_two_equal_pumps_in_closed_form_down_to_a_short_circuit(ease: float) -> None:
    of = case(1, 1, spread=0.0)
    of |= {k: of[k] * ease for k in ("branch", "segment", "inner")}
    circuit = (of["inner"] + of["segment"] + of["branch"])[0]
    no_flow, each = 0.75**2 * of["head0"][0, 0], of["curve"][0, 0]
    found = solved(even(1, 1), of)
    assert found.pump_head_pa[0] == pytest.approx(no_flow * circuit / (circuit + each / 4), rel=1e-12)
    assert found.cdu_lpm[0] == pytest.approx(np.sqrt(no_flow / (circuit + each / 4)), rel=1e-12)


def test_equal_racks_without_segments_share_alike_and_far_racks_get_less_with_them() -> None:
    of = case(2, 5, spread=0.0)
    none = solved(even(2, 5), of | {"segment": np.zeros(10)})
    assert none.rack_lpm == pytest.approx(none.cdu_lpm[0] / 5, rel=1e-14)
    ladder = solved(even(2, 5), of)
    assert (np.diff(ladder.rack_lpm.reshape(2, 5), axis=1) < 0.0).all()
    assert (np.diff(ladder.rack_drop_pa.reshape(2, 5), axis=1) < 0.0).all()


@pytest.mark.parametrize("blocked", [1e12, np.inf])
@pytest.mark.parametrize("place", [0, 2, 4])
def test_the_step_in_which_a_branch_blocks_is_exact(blocked: float, place: int) -> None:
    net, of = even(3, 5), case(3, 5)
    before = solved(net, of)
    rack = 5 + place
    branch = of["branch"].copy()
    branch[rack] *= blocked
    step = solved(net, of | {"branch": branch}, start=before)
    cold = solved(net, of | {"branch": branch})
    assert step.steps <= MAX_STEPS
    assert step.converged.all()
    assert imbalance(of | {"branch": branch}, step, 5) < 1e-8
    assert np.abs(step.rack_lpm - cold.rack_lpm).max() < 1e-8 * step.cdu_lpm.min()
    # Its flow is gone; its manifold has more pressure, and the others of its CDU
    # more flow. No other CDU moves.
    assert step.rack_lpm[rack] <= 2e-6 * before.rack_lpm[rack]
    others = [i for i in range(5, 10) if i != rack]
    assert (step.rack_lpm[others] > before.rack_lpm[others]).all()
    assert step.cdu_lpm[1] < before.cdu_lpm[1]
    assert step.rack_drop_pa[rack] > before.rack_drop_pa[rack]
    assert step.rack_lpm[:5] == pytest.approx(before.rack_lpm[:5], rel=1e-9)


def test_everything_blocked_means_no_flow_at_the_head_of_no_flow() -> None:
    net, of = even(2, 3), case(2, 3)
    branch = of["branch"].copy()
    branch[:3] = np.inf
    found = solved(net, of | {"branch": branch}, start=solved(net, of))
    assert found.converged.all()
    assert (found.rack_lpm[:3] == 0.0).all()
    assert found.cdu_lpm[0] == 0.0
    assert found.drop_pa[0] == (of["pump_speed"][0] ** 2 * of["head0"][0]).max()
    assert found.rack_drop_pa[:3] == pytest.approx(found.drop_pa[0])
    assert (found.rack_lpm[3:] > 50.0).all()


def test_pumps_that_stand_still_move_nothing() -> None:
    of = case(2, 3) | {"pump_speed": np.zeros((2, 2))}
    found = solved(even(2, 3), of)
    assert found.converged.all()
    assert not found.rack_lpm.any()
    assert not found.pump_lpm.any()
    assert not found.drop_pa.any()


def test_a_warm_start_takes_fewer_steps_and_gives_the_same() -> None:
    net, of = even(74, 8), case(74, 8)
    cold = solved(net, of)
    moved = of | {"pump_speed": of["pump_speed"] * np.linspace(0.999, 1.001, 74)[:, None]}
    warm, again = solved(net, moved, start=cold), solved(net, moved)
    assert warm.steps < again.steps
    assert np.abs(warm.rack_lpm - again.rack_lpm).max() < 1e-8 * again.cdu_lpm.min()


def test_the_split_does_not_depend_on_the_pumps() -> None:
    net, of = even(4, 3), case(4, 3)
    ladder = net.fold(of["branch"], of["segment"])
    assert np.add.reduceat(ladder.share_pu, [0, 3, 6, 9]) == pytest.approx(1.0, rel=1e-14)
    for speeds in ((0.9, 0.2), (0.5, 0.5)):
        found = solved(net, of | {"pump_speed": np.broadcast_to(speeds, (4, 2))})
        assert found.rack_lpm == pytest.approx(ladder.share_pu * np.repeat(found.cdu_lpm, 3), rel=1e-14)


def test_uneven_and_empty_cdus_and_racks_of_none() -> None:
    # CDU 0 has racks 4 and 1, nearest first; CDU 1 none; CDU 2 rack 0. Racks 2 and 3 hang nowhere.
    net = Network(np.array([0, 2, 2, 3], np.int32), np.array([4, 1, 0], np.int32), 5)
    of = case(3, 1) | {"branch": np.full(5, 8.0), "segment": np.full(5, 0.5)}
    found = solved(net, of)
    assert found.converged.all()
    assert found.rack_lpm[4] > found.rack_lpm[1] > 0.0
    assert found.rack_lpm[[2, 3]].tolist() == [0.0, 0.0]
    assert found.cdu_lpm[1] == 0.0
    assert found.rack_lpm[[1, 4]].sum() == pytest.approx(found.cdu_lpm[0], rel=1e-14)
    assert found.rack_lpm[0] == pytest.approx(found.cdu_lpm[2], rel=1e-14)


def test_no_cdu_at_all() -> None:
    pumps = Pumps(np.zeros((0, 2)), np.zeros((0, 2)), np.zeros((0, 2)))
    net = Network(np.zeros(1, np.int32), np.zeros(0, np.int32), 2)
    found = net.solve(pumps, np.zeros(0), np.ones(2), np.zeros(2))
    assert found.rack_lpm.tolist() == [0.0, 0.0]
    assert found.steps == 0


def test_a_rack_on_two_manifolds_is_refused() -> None:
    with pytest.raises(ValueError, match="at most once"):
        Network(np.array([0, 2]), np.array([1, 1]), 2)
    with pytest.raises(ValueError, match="start ends"):
        Network(np.array([0, 3]), np.array([1, 0]), 2)


@pytest.mark.parametrize(
    "name, at, value",
    [("branch", 4, np.nan), ("branch", 4, -1.0), ("branch", 4, 0.0), ("segment", 4, np.nan),
     ("inner", 1, np.nan), ("pump_speed", (1, 0), np.nan), ("pump_speed", (1, 1), np.nan),
     ("head0", (1, 1), np.nan), ("curve", (1, 0), 0.0), ("curve", (1, 1), np.nan)],
)  # fmt: skip
def test_an_impossible_input_makes_its_cdu_unknown_and_flags_it(name: str, at: Any, value: float) -> None:
    net, of = even(3, 3), case(3, 3)
    sound = solved(net, of)
    changed = of[name].copy()
    changed[at] = value
    found = solved(net, of | {name: changed}, start=sound)
    assert found.converged.tolist() == [True, False, True]
    assert np.isnan(found.cdu_lpm[1])
    assert np.isnan(found.rack_lpm[3:6]).all()
    assert found.rack_lpm[[0, 1, 2, 6, 7, 8]] == pytest.approx(sound.rack_lpm[[0, 1, 2, 6, 7, 8]], rel=1e-9)


def test_too_few_steps_are_flagged_per_cdu(monkeypatch: pytest.MonkeyPatch) -> None:
    net, of = even(3, 3), case(3, 3)
    of["pump_speed"][0] = (0.8, 0.0)  # shut: nothing to iterate
    monkeypatch.setattr(network, "MAX_STEPS", 1)
    found = solved(net, of)
    assert found.steps == 1
    assert found.converged.tolist() == [True, False, False]


wide = st.floats(-4.0, 4.0).map(lambda x: 10.0**x)


@settings(max_examples=300, deadline=None)
@given(
    speeds=st.tuples(st.floats(0.0, 1.2), st.floats(0.0, 1.2)),
    heads=st.tuples(wide, wide),
    curves=st.tuples(wide, wide),
    circuit=st.floats(-6.0, 12.0).map(lambda x: 10.0**x),
    warm=st.none() | st.tuples(st.floats(-10.0, 10.0), st.floats(-10.0, 10.0)),
)
def test_any_two_pumps_meet_any_circuit(
    speeds: Any, heads: Any, curves: Any, circuit: float, warm: Any
) -> None:
    speed, head0, curve = (np.array([x]) for x in (speeds, heads, curves))
    start = None if warm is None else np.array([warm])
    conductance = np.array([circuit**-0.5])
    found = duty(Pumps(speed, head0, curve), np.zeros(1), conductance, start)
    assert found.converged.all()
    assert found.steps <= MAX_STEPS
    head, q = found.head_pa[0], found.pump_lpm[0]
    no_flow = (speed**2 * head0)[0]
    no_flow[no_flow < network.LEAST_PA] = 0.0
    most = no_flow.max()
    assert 0.0 <= head <= most * (1 + 1e-12)
    expected = np.sign(no_flow - head) * np.sqrt(np.abs(no_flow - head) / curve[0])
    expected = np.maximum(expected, 0.0)
    # The circuit takes the flow that the pumps give, judged by the size of the flows that meet
    size = np.abs(q).max() + found.cdu_lpm[0]
    assert abs(found.cdu_lpm[0] - np.sqrt(head) * conductance[0]) <= 1e-8 * size
    slack = 1e-8 * size + np.sqrt(1e-15 * most / curve[0])
    assert (np.abs(q - expected) <= slack).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 3), st.floats(1.01, 100.0))
def test_more_resistance_takes_flow_from_there_to_elsewhere(seed: int, place: int, factor: float) -> None:
    net, of = even(1, 4), case(1, 4, seed, 0.4)
    before = solved(net, of)
    branch = of["branch"].copy()
    branch[place] *= factor
    after = solved(net, of | {"branch": branch}, start=before)
    assert after.rack_lpm[place] < before.rack_lpm[place]
    assert after.cdu_lpm[0] < before.cdu_lpm[0]
    assert (np.delete(after.rack_lpm, place) > np.delete(before.rack_lpm, place)).all()
    faster = solved(net, of | {"pump_speed": of["pump_speed"] * 1.05}, start=before)
    assert (faster.rack_lpm > before.rack_lpm).all()
