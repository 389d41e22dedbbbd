"""Expected values in the history: kept beside the measured ones, asked for by name, and packed as well."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tests.support.builders import START_NS, Twin, two_racks
from tests.support.in_process_daemon import Pod, serve
from twin.catalogue import NS
from twin.contracts import Z90, Residual
from twin.engine import Engine
from twin.run import (
    FILE_NAME,
    HistoryError,
    HistoryReader,
    HistoryStore,
    Layout,
    expected_rows,
    recorded_signal,
    take_sample,
)

NAN = np.nan


def residual(name: str, expected: list[float], sigma: list[float]) -> Residual:
    known = np.array(expected)
    return Residual(name, known, known + 1.0, np.array(sigma))


def engine_with(pod: Twin, *residuals: Residual) -> Engine:
    estimator = SimpleNamespace(residuals={r.name: r for r in residuals})
    return cast(Engine, SimpleNamespace(state=pod.engine.state, estimator=estimator))


def test_of_several_comparisons_the_first_learned_is_kept() -> None:
    pod = Twin(two_racks())
    engine = engine_with(
        pod,
        residual("rack.flow_lpm", [80.0, 90.0], [NAN, 2.0]),
        residual("rack.flow_lpm/heat", [70.0, 60.0], [3.0, 9.0]),
        residual("feeder.balance", [1.0, 2.0], [1.0, 1.0]),  # sums, no entities
        residual("rack.power_w", [50_000.4, NAN], [100.0, NAN]),
        residual("rack.inlet_temp_c", [NAN, NAN], [NAN, NAN]),
    )
    found = expected_rows(engine, "rack")
    assert found is not None
    rows = dict(zip(found[0], found[1].tolist(), strict=True))
    assert set(rows) == {"flow_lpm", "power_w", "flow_lpm/band", "power_w/band"}
    assert rows["flow_lpm"] == pytest.approx([70.0, 90.0])
    assert rows["flow_lpm/band"] == pytest.approx([3.0 * Z90, 2.0 * Z90], abs=0.06)
    assert rows["power_w"][0] == pytest.approx(50_000.4, abs=1.0)
    assert np.isnan(rows["power_w"][1])
    assert expected_rows(engine, "feeder") is None


@pytest.mark.long
@pytest.mark.parametrize("compacted", [False, True])
def test_what_was_expected_is_read_back_beside_what_was_measured(tmp_path: Path, compacted: bool) -> None:
    pod = Twin(two_racks())
    store = HistoryStore(tmp_path / FILE_NAME, 1.0, 30.0, 10**9)
    layout, samples = Layout(pod.site), 400
    for i in range(samples):
        pod.tick({"rack.power_w": 50_000.0 + i})
        engine = engine_with(pod, residual("rack.power_w", [40_000.0 + i, 41_000.0], [100.0, 200.0]))
        sample = take_sample(engine, layout, pod.now_ns, ["rack", "cdu"])
        assert {t.table for t in sample.tables}.isdisjoint({"rack/expected"}), "not for outside databases"
        store.add(sample)
    while compacted and store.upkeep():
        pass
    if compacted:
        assert store.db.execute("SELECT COUNT(*) FROM chunk").fetchone()[0] > 0
    store.close()
    reader = HistoryReader(tmp_path / FILE_NAME, 1.0)

    def ask(key: str) -> list[Any]:
        found = reader.query(key, ["r1"], START_NS, START_NS + 1000 * NS, None, 5000)
        values: list[Any] = found["values"]["r1"]
        return values

    assert ask("rack.power_w/expected") == [40_000.0 + i for i in range(samples)]
    assert set(ask("rack.power_w/band")) == {round(2 * 100 * Z90) / 2}, "in its quanta of 0.5 W"
    assert ask("rack.power_w")[:2] == [50_000.0, 50_001.0]
    for wrong in ("rack.power_w/guess", "rack.nothing/expected", "gpu.energy_mj/expected"):
        with pytest.raises(HistoryError, match="is no signal"):
            ask(wrong)
    signal = recorded_signal("rack/expected.power_w/band")
    assert signal is not None
    assert signal.key == "rack.power_w"


def test_the_interface_answers_measured_expected_residual_and_band_at_each_time(tmp_path: Path) -> None:
    other = Twin(two_racks())
    store = HistoryStore(tmp_path / FILE_NAME, 1.0, 30.0, 10**9)
    for i in range(60):
        other.tick({"rack.power_w": 50_000.0 + i, "gpu.power_w": 700.0})
        engine = engine_with(
            other, residual("rack.power_w", [40_000.0 if i != 7 else NAN] * 2, [100.0, 200.0])
        )
        store.add(take_sample(engine, Layout(other.site), other.now_ns, ["rack"]))
    store.close()
    reader = HistoryReader(tmp_path / FILE_NAME, 1.0)

    class History:
        async def query(self, *asked: Any) -> dict[str, Any]:
            return reader.query(*asked)

    async def check(pod: Pod) -> None:
        pod.live.history = History()  # type: ignore[assignment]
        span = f"since={START_NS}&until={START_NS + 100 * NS}&name=r1"
        for step in ("", "&step=5"):
            status, tree = await pod.ask(
                "GET", f"/api/v1/history?signal=rack.power_w&beside=expected&{span}{step}"
            )
            assert status == 200
            columns = [tree[what]["lab/h/r1"] for what in ("values", "expected", "band", "residual")]
            assert {len(column) for column in columns} == {len(tree["t_ns"])}
            known = 0
            for measured, expected, band, off in zip(*columns, strict=True):
                if expected is None:
                    assert off is None
                    continue
                known += 1
                assert off == pytest.approx(measured - expected, abs=0.1)
                assert (expected, band) == (40_000.0, pytest.approx(100 * Z90, abs=0.5))
            assert known >= (50 if not step else 11)
        keep, gpu = "add gpu to history.expected", f"{span}/node0/gpu1"
        for query, why in (
            (f"signal=gpu.power_w&{gpu}&beside=expected", keep),
            (f"signal=gpu.power_w/expected&{gpu}", keep),
            (f"signal=rack.power_w&{span}&beside=hope", "expected `expected`"),
            (f"signal=site.power_w&{span}&beside=expected", "no expected values"),
        ):
            status, tree = await pod.ask("GET", f"/api/v1/history?{query}")
            assert status in (400, 404)
            assert why in tree["error"]

    serve(tmp_path, check)
