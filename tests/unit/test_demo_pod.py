"""The pod of the demo behaves as real devices where the diagnosis looks at them."""

from __future__ import annotations

import numpy as np

from twin.simulation.demo_pod import Pod


def test_power_at_a_cap_never_stands_still() -> None:
    pod = Pod()
    pod.cap_w[:] = 200.0
    rows = []
    for second in range(50):
        pod.move(second, blocked=False)
        rows.append(pod.power_w.copy())
    power_w = np.array(rows)
    assert (np.diff(power_w, axis=0) != 0.0).all()
    assert abs(power_w.mean() - 200.0) < 1.0
