"""The shadow that advising policies read, beside the site that everybody else reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.builders import Twin, Wish, explained, two_racks
from twin.catalogue import NS, digest
from twin.config import spec_of
from twin.contracts import Memory, Proposal, View
from twin.engine import first_commands
from twin.engine.preview import PreviewView
from twin.engine.preview_tables import Adviser, preview_tables
from twin.engine.shadow_power import METER_LAG_S, ShadowPower
from twin.physics import CLOCK_MIN_PU
from twin.telemetry import AuthorityChanged, EntityReplaced
from twin.telemetry.events import Approved, Held, JobStarted, SiteChanged

CAP, SERVICE, SAVE = "gpu.power_cap_w", "node.service_level", "job.checkpoint_since_s"
DRAWN_W, CAP_W, RACK_W, FULL_W = 1000.0, 800.0, 100e3, 1200.0
HEARD: dict[str, Any] = {
    "gpu.power_w": DRAWN_W, "gpu.power_limit_w": FULL_W, "gpu.temp_c": 60.0, "node.power_w": 5000.0,
    "node.service_level_state": 0.0, "node.service_owner_state": 0.0, "rack.power_w": RACK_W,
    "feeder.power_w": RACK_W,
}  # fmt: skip
FIRST = np.arange(4)  # GPUs of the first node


class Eye(Wish):
    """Keeps the view that it was last given."""

    view: Any = None

    def propose(self, view: View, memory: Memory) -> tuple[list[Proposal], Memory]:
        self.view = view
        return super().propose(view, memory)


def twin(**levels: str) -> tuple[Twin, dict[str, Eye]]:
    """Policies by name at these levels, on a site that has heard all for two seconds."""
    eyes = {name: Eye(name, rank) for rank, name in enumerate(levels, 5)}
    pod = Twin(two_racks(controls={SERVICE: {"blast_radius": 8}}), list(eyes.values()), authority=levels)
    pod.run(2, HEARD)
    return pod, eyes


def arm(name: str, authority: str = "act") -> AuthorityChanged:
    return AuthorityChanged(author="ann", policy=name, authority=authority)


def test_power_falls_along_the_tree_by_what_the_caps_would_save() -> None:
    pod, eyes = twin(asks="advise", looks="advise", acts="act")
    eyes["asks"].ask(CAP, FIRST, 200, CAP_W)
    pod.run(2, HEARD)
    view, real = eyes["looks"].view, eyes["acts"].view
    saved_w = 4 * (DRAWN_W - CAP_W) * (1.0 + pod.site.design.node_loss_pu[0])
    for key, index, expected in (
        ("gpu.power_w", slice(0, 4), CAP_W), ("gpu.power_limit_w", slice(0, 4), CAP_W),
        ("gpu.power_w", slice(4, None), DRAWN_W), ("gpu.power_limit_w", slice(4, None), FULL_W),
        ("node.power_w", 0, 5000.0 - saved_w), ("node.power_w", 1, 5000.0),
        ("rack.power_w", 0, RACK_W - saved_w), ("rack.power_w", 1, RACK_W),
        ("feeder.power_w", slice(None), RACK_W - saved_w / 2), ("gpu.temp_c", slice(None), 60.0),
    ):  # fmt: skip
        assert view.value(key)[index] == pytest.approx(expected), key
        assert view.worst(key)[index] == pytest.approx(expected), key
        table, _, signal = key.partition(".")
        assert real.value(key) == pytest.approx(HEARD[f"{table}.{signal}"]), key
    assert view.commanded(CAP)[:5] == pytest.approx([CAP_W] * 4 + [np.nan], nan_ok=True)
    assert np.isnan(real.commanded(CAP)).all()
    assert not isinstance(real, PreviewView)


def test_nothing_advised_costs_nothing() -> None:
    """The very same view, no shadow, no state."""
    pod, eyes = twin(looks="advise", acts="act")
    eyes["acts"].ask(CAP, FIRST, 200, CAP_W)
    pod.run(3, HEARD)
    assert eyes["looks"].view is eyes["acts"].view
    assert pod.engine.arbiter.shadow == {}
    assert pod.engine.preview.power.turn_ns == 0


def test_advice_and_commands_on_one_control_live_beside_each_other() -> None:
    """Whoever acts is not narrowed by advice; the shadow is where both lead."""
    pod, eyes = twin(asks="advise", acts="act")
    eyes["asks"].ask(CAP, [0, 1], 200, 600)
    eyes["acts"].ask(CAP, [1, 2], 200, 900)
    pod.run(3, HEARD)
    assert pod.lease(CAP)[:4] == pytest.approx([np.nan, 900, 900, np.nan], nan_ok=True)
    assert pod.engine.arbiter.shadow[CAP].apart[:4].tolist() == [True, True, False, False]
    assert eyes["asks"].view.commanded(CAP)[:4] == pytest.approx([600, 600, 900, np.nan], nan_ok=True)
    assert eyes["acts"].view.commanded(CAP)[:4] == pytest.approx([np.nan, 900, 900, np.nan], nan_ok=True)


def test_a_level_of_service_reads_as_it_is() -> None:
    pod, eyes = twin(asks="advise")
    eyes["asks"].ask(SERVICE, [0, 1], 3, 3, 3)
    pod.run(2, HEARD)
    view = eyes["asks"].view
    assert np.isnan(view.commanded(SERVICE)[:3]).all()
    assert view.readback(SERVICE)[:3].tolist() == [0.0, 0.0, 0.0]
    assert view.value("node.service_owner_state")[:3].tolist() == [0.0, 0.0, 0.0]


def test_a_device_that_never_read_back_does_not_begin_to() -> None:
    bare = Twin(two_racks(), [eye := Eye("asks")], authority={"asks": "advise"})
    eye.ask(CAP, FIRST, 200, CAP_W)
    bare.run(3, {"gpu.power_w": DRAWN_W})
    assert np.isnan(eye.view.readback(CAP)).all()
    assert (eye.view.value("gpu.power_w")[:4] == eye.view.commanded(CAP)[:4]).all()


def test_an_approval_makes_a_command_of_the_advice_and_reality_speaks_there_after_a_while() -> None:
    pod, eyes = twin(asks="approve")
    eyes["asks"].ask(CAP, [0, 1], 200, CAP_W)
    pod.run(2, HEARD)
    said = Approved(id="a", author="ann", policy="asks", control=CAP, names=("lab/h/r1/node0/gpu0",))
    pod.tick(HEARD, said)
    assert pod.lease(CAP)[:2] == pytest.approx([CAP_W, np.nan], nan_ok=True)
    pod.run(5, HEARD)
    assert eyes["asks"].view.readback(CAP)[:2].tolist() == [CAP_W, CAP_W], "its command is on its way"
    pod.run(10, HEARD)
    assert eyes["asks"].view.readback(CAP)[:2].tolist() == [FULL_W, CAP_W], "and nobody obeyed"


def test_who_was_armed_sees_reality_after_a_while() -> None:
    pod, eyes = twin(asks="advise")
    eyes["asks"].ask(CAP, FIRST, 200, CAP_W)
    pod.run(20, HEARD)
    pod.tick(HEARD, arm("asks"))
    assert pod.lease(CAP)[:4].tolist() == [CAP_W] * 4
    assert pod.decision.advice == ()
    pod.run(5, HEARD)
    assert eyes["asks"].view.value("gpu.power_w")[:4].tolist() == [CAP_W] * 4
    pod.run(8, HEARD)
    assert eyes["asks"].view.value("gpu.power_w")[:4].tolist() == [DRAWN_W] * 4
    pod.run(round(2 * METER_LAG_S), HEARD)
    assert pod.engine.arbiter.shadow == {}
    assert pod.engine.preview.power.turn_ns == 0


def test_who_was_armed_counts_on_its_own_commands_alone() -> None:
    """The preview never counts the advice of another policy as obeyed."""
    pod, eyes = twin(asks="advise", other="advise")
    eyes["asks"].ask(CAP, FIRST, 200, CAP_W)
    eyes["other"].ask(CAP, FIRST + 4, 200, 600)
    pod.run(3, HEARD)
    pod.tick(HEARD, arm("asks"))
    for _ in range(3):
        view = eyes["asks"].view
        assert view.value("gpu.power_w")[:9].tolist() == [CAP_W] * 4 + [DRAWN_W] * 5
        assert view.readback(CAP)[:9].tolist() == [CAP_W] * 4 + [FULL_W] * 5
        assert view.commanded(CAP)[:5] == pytest.approx([CAP_W] * 4 + [np.nan], nan_ok=True)
        assert eyes["other"].view.value("gpu.power_w")[:9].tolist() == [CAP_W] * 4 + [600.0] * 4 + [DRAWN_W]
        pod.tick(HEARD)


def test_what_is_no_longer_advised_is_given_back_as_it_would_be() -> None:
    pod, eyes = twin(asks="advise")
    eyes["asks"].ask(CAP, [0], 200, 1100)
    pod.run(2, HEARD)
    eyes["asks"].proposals = []
    steps = [[a.value.tolist() for a in pod.run(1, HEARD).advice] for _ in range(4)]
    assert steps == [[[1150.0]], [[1200.0]], [], []], "at the slew rate of the envelope"
    assert pod.engine.arbiter.shadow == {}


def test_a_replaced_device_and_a_snapshot_leave_the_rest_of_the_shadow() -> None:
    pod, eyes = twin(asks="advise")
    eyes["asks"].ask(CAP, [0, 1], 200, CAP_W)
    pod.run(3, HEARD)
    other = pod.restarted(two_racks(controls={SERVICE: {"blast_radius": 8}}), [Eye("asks")])
    assert digest(other.engine.dump()) == digest(pod.engine.dump())
    eyes["asks"].ask(CAP, [1], 200, CAP_W)
    pod.tick(HEARD, EntityReplaced(id="e", table="gpu", name="lab/h/r1/node0/gpu0", serial="S2"))
    assert pod.engine.arbiter.shadow[CAP].apart[:3].tolist() == [False, True, False]


def test_an_alarm_is_raised_although_the_advice_would_mend_it() -> None:
    """The findings are made of reality: a shadow hides nothing."""
    pod, eyes = twin(asks="advise")
    eyes["asks"].ask(CAP, FIRST, 200, CAP_W)
    hot = HEARD | {"gpu.temp_c": 120.0}
    found = pod.run(3, hot).findings
    assert any("gpu.temp_c" in f.id for f in found)
    assert (eyes["asks"].view.value("gpu.temp_c") == 120.0).all()


def test_people_see_it_beside_what_is() -> None:
    pod, eyes = twin(asks="advise")
    eyes["asks"].ask(CAP, FIRST, 200, CAP_W)
    pod.run(3, HEARD)
    found = explained(pod, "asks")
    assert found.preview
    (row,) = found.table("preview")
    assert row == {
        "control": CAP, "where": "lab/h/r1", "count": 4,
        "now": "1,200 W", "now_low": FULL_W, "now_high": FULL_W,
        "advised": "800 W", "advised_low": CAP_W, "advised_high": CAP_W, "unit": "W",
        "power": "from 4 kW to 3.2 kW", "power_w": 4 * DRAWN_W, "expected_w": 4 * CAP_W,
    }  # fmt: skip
    saved_w = 4 * (DRAWN_W - CAP_W) * (1.0 + pod.site.design.node_loss_pu[0])
    for feeder in found.table("preview_feeders"):
        assert feeder["power_w"] == RACK_W
        assert feeder["expected_w"] == pytest.approx(RACK_W - saved_w / 2)
    words = (
        f"armed now, it would first set {CAP} of 4 GPUs; "
        "the power of what it caps is expected to fall from 4 kW to 3.2 kW"
    )
    assert found.sentences[0].text == f"preview: nothing of this is commanded; {words}"
    assert found.tables[0].name == "preview"
    assert first_commands(pod.engine, eyes["asks"]) == words
    elsewhere = explained(pod, "asks", "lab/h/r2")
    assert not elsewhere.preview
    assert elsewhere.sentences[0].text == "preview: armed now, it would command nothing here"
    pod.tick(HEARD, arm("asks"))
    assert not explained(pod, "asks").preview
    assert first_commands(pod.engine, eyes["asks"]) == ""
    other = Adviser(0, "asks", ("job.power_cap_w",), ())
    assert preview_tables(pod.engine.view(), pod.engine.arbiter, None, other, None)[1] == []


def test_people_see_names_of_states_and_instants() -> None:
    pod, eyes = twin(asks="advise")
    pod.tick(HEARD, JobStarted(job="a", nodes=("lab/h/r1/node0",), kind="training"))
    eyes["asks"].ask(SERVICE, [0], 3, 4, 3)
    pod.run(1, HEARD)
    (row,) = explained(pod, "asks").table("preview")
    assert (row["where"], row["now"], row["advised"]) == ("lab/h/r1/node0", "in_service", "drained")
    eyes["asks"].controls = (SAVE,)
    eyes["asks"].ask(SAVE, [0], 1_700_000_000, 1e10, 1_700_000_000)
    pod.run(1, HEARD)
    (row,) = explained(pod, "asks").table("preview")
    assert (row["where"], row["now"]) == ("job:a", "not read")
    assert row["advised"] == "2023-11-14 22:13:20 UTC"


def test_people_are_told_why_less_is_advised_than_proposed() -> None:
    """More nodes than may leave at once; work of which nobody knows what it is; a hold."""
    pod = Twin(two_racks(controls={SERVICE: {"blast_radius": 2}}), [eye := Eye("asks")])
    pod.tick(HEARD, JobStarted(job="a", nodes=("lab/h/r1/node0",), kind="unknown"))
    eye.ask(SERVICE, np.arange(5), 3, 4, 3)
    pod.run(1, HEARD)
    notes = [s.text for s in explained(pod, "asks").sentences if s.kind == "note"]
    assert f"preview: {SERVICE}: 2 wait, as no more may be changed at once (blast radius)" in notes
    assert any(n.startswith(f"preview: {SERVICE}: 1 stay as they are, as nobody knows") for n in notes)
    eye.proposals = []
    pod.tick(HEARD, Held(author="ann"))
    notes = [s.text for s in explained(pod, "asks").sentences]
    assert notes[0] == "preview: the controls are on hold: only what protects would be commanded"
    assert not any("blast radius" in n for n in notes)


def test_meters_that_lag_are_lowered_by_what_was_saved_when_they_were_read() -> None:
    """A dip of the GPUs saves nothing, and the meter still tells of the load before it."""
    pod, eyes = twin(asks="advise")
    eyes["asks"].ask(CAP, np.arange(144), 200, CAP_W)
    pod.run(3, HEARD)
    full = eyes["asks"].view.value("rack.power_w")[0]
    pod.run(2, HEARD | {"gpu.power_w": 300.0})
    assert eyes["asks"].view.value("rack.power_w")[0] == pytest.approx(full)
    assert isinstance(pod.engine.preview.power, ShadowPower)
    pod.run(round(3 * METER_LAG_S), HEARD | {"gpu.power_w": 300.0, "rack.power_w": 40e3})
    assert eyes["asks"].view.value("rack.power_w")[0] == pytest.approx(40e3)


def test_the_shadow_moves_along_when_the_site_changes() -> None:
    pod, eyes = twin(asks="advise")
    eyes["asks"].ask(CAP, [0, 80], 200, CAP_W)
    pod.run(3, HEARD)
    eyes["asks"].ask(CAP, [72, 152], 200, CAP_W)  # the same GPUs behind a new rack
    later = spec_of(two_racks(racks="r[0-2]", controls={SERVICE: {"blast_radius": 8}}), None, "later")
    pod.inbox.events.append(SiteChanged(id="s", site_hash=later.digest(), spec=later.packed()))
    pod.engine.tick(pod.inbox.take(pod.number, pod.now_ns + NS, 1.0))
    shadow = pod.engine.arbiter.shadow[CAP]
    assert np.flatnonzero(shadow.apart).tolist() == [72, 152]
    assert shadow.value[[72, 152]].tolist() == [CAP_W, CAP_W]


def test_a_cap_below_the_lowest_clock_is_exceeded_along_the_learned_curve() -> None:
    pod, _ = twin(asks="advise")
    power, at = pod.engine.estimator.gpus.power, np.arange(2)
    none_w, drawn_w = np.full(2, np.nan), np.array([DRAWN_W, DRAWN_W])
    low, high = power.under(at, drawn_w, none_w, np.array([200.0, CAP_W]))
    static_w, exponent = power.set.in_use[[0, 4], 0]
    assert low == pytest.approx(static_w + (DRAWN_W - static_w) * CLOCK_MIN_PU**exponent)
    assert high == CAP_W
    (freed,) = power.under(at[:1], np.array([600.0]), np.array([600.0]), np.array([FULL_W]))
    assert freed == 600.0, "its activity is not known: it draws what it draws"
