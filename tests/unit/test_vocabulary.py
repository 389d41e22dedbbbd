"""Words for signals and controls: all have them, and a text keeps whatever is no key."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from twin.catalogue import TABLES, control_words, plain_text, signal_words

KEYS = [f"{t}.{name}" for t, spec in TABLES.items() for name in spec.by_name if "_" in name]
CONTROLS = [control.key for spec in TABLES.values() for control in spec.controls]


@pytest.mark.parametrize("key", CONTROLS)
def test_every_control_has_words_of_its_own(key: str) -> None:
    assert "_" not in control_words(key)
    assert control_words(key) != signal_words(key.partition(".")[2]) or key.endswith(
        ("cap_w", "interval_s", "level")
    )


@given(st.sampled_from(KEYS + CONTROLS), st.sampled_from(["", ",", ":", ".", ")"]))
def test_no_key_of_the_catalogue_stands_in_a_text_for_people(key: str, end: str) -> None:
    text = plain_text(f"see {key}{end} now")
    assert key not in text or "_" not in key
    assert text.startswith("see ")
    assert text.endswith(f"{end} now")


@given(st.sampled_from(KEYS))
def test_a_place_or_a_file_with_such_a_name_stays(key: str) -> None:
    name = key.partition(".")[2]
    for text in (f"rack lab/{name}", f"{name}/r1 leaks", f"file /x/{key}", f"a-{name}"):
        assert plain_text(text) == text


def test_a_reason_reads_as_a_sentence() -> None:
    assert plain_text("gpu.temp_c is beyond its guard") == "GPU temperature is beyond its guard"
    assert (
        plain_text("rack.flow_lpm of r1 at 3 l/min, 40 degC") == "rack coolant flow of r1 at 3 l/min, 40 °C"
    )
    assert plain_text("power_guard and thermal_guard agree") == "power_guard and thermal_guard agree"
