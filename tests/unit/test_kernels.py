"""Kernels are compiled or NumPy's: which, by what is there and what is asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from twin import kernels

NATIVE = kernels.native()


def test_one_of_another_source_is_not_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "native.c").write_text("/* newer than what was compiled */")
    monkeypatch.setattr(kernels, "__file__", str(tmp_path / "__init__.py"))
    assert kernels.native() is None


@pytest.mark.parametrize("asked", ["0", "1"])
def test_numpy_on_request(asked: str) -> None:
    words = [sys.executable, "-c", "from twin import kernels; print(kernels.COMPILED)"]
    environment = {**os.environ, "RACKTWIN_KERNELS": asked}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(asked == "1" and NATIVE is not None)


@pytest.mark.skipif(NATIVE is None, reason="no kernels were compiled (python hatch_build.py)")
def test_what_does_not_fit_is_refused() -> None:
    """A kernel that is called wrongly raises; it never writes beyond an array."""
    three, four = np.zeros(3), np.zeros(4)
    with pytest.raises(ValueError, match="argument 1: expected 3 values, got 4"):
        NATIVE.far_off(three, four, three, 2.0, np.zeros(3, np.int64))
    with pytest.raises(TypeError, match="argument 0: expected an array"):
        NATIVE.far_off(three.astype("f4"), three, three, 2.0, np.zeros(3, np.int64))
    with pytest.raises(ValueError, match="side by side"):
        NATIVE.far_off(np.zeros(6)[::2], three, three, 2.0, np.zeros(3, np.int64))
    with pytest.raises(TypeError, match="expected 5 arguments, got 6"):
        NATIVE.far_off(three, three, three, 2.0, np.zeros(3, np.int64), 1)
    read_only = np.zeros(3, np.int64)
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        NATIVE.far_off(three, three, three, 2.0, read_only)
    beyond = np.array([0, 9], np.int32)
    value, rows = np.zeros((2, 3), np.float32), np.zeros(1, np.int32)
    with pytest.raises(ValueError, match="do not fit"):
        NATIVE.stage_block(value, beyond, beyond, 0, np.zeros((2, 3), np.float32))
    with pytest.raises(ValueError, match="do not fit"):
        NATIVE.stage_block(value, rows, rows, 1, np.zeros((1, 3), np.float32))
    counts, limits = np.zeros((2, 3), np.int64), np.ones((2, 1))
    assert NATIVE.count_up(counts, counts.copy(), rows, 0, np.zeros((1, 3), np.int64), limits)
    with pytest.raises(ValueError, match="do not fit"):
        NATIVE.count_up(counts, counts.copy(), rows, 0, np.zeros((1, 3), np.int64), limits[:, :0])
    with pytest.raises(ValueError, match="expected 0 values, got 3"):
        NATIVE.far_off(np.zeros((0, 3)), three, three, 2.0, np.zeros(3, np.int64))
    with pytest.raises(ValueError, match="do not fit"):
        NATIVE.find_places(["a", "b"], {}, [], np.zeros(3, np.int32))
    with pytest.raises(TypeError, match="expected a list, a dict"):
        NATIVE.find_places(("a",), {}, [], np.zeros(1, np.int32))
    number, short = np.zeros(2, np.int64), np.zeros(1, np.int64)
    place, state = np.zeros(2, np.int32), np.zeros(2, np.uint8)
    texts = "gpu.power_cap_w", "1-", ("done",), {}, []
    with pytest.raises(ValueError, match="do not fit"):
        NATIVE.read_answers([1, 2], *texts, place, number, short, state)
    with pytest.raises(AttributeError, match="id"):
        NATIVE.read_answers([1, 2], *texts, place, number, number, state)
    with pytest.raises(TypeError, match="of kind b"):
        NATIVE.read_answers([1, 2], *texts, place, number, number, place)
    with pytest.raises(TypeError, match="expected a list, two texts"):
        NATIVE.read_answers((1, 2), *texts, place, number, number, state)
    numbers, table = np.zeros((3, 2), np.int64), np.zeros(2, np.uint8)
    with pytest.raises(ValueError, match="do not fit"):
        NATIVE.read_faults([1, 2], ("gpu",), table, numbers[:2], number, number)
    with pytest.raises(AttributeError, match="code"):
        NATIVE.read_faults([1, 2], ("gpu",), table, numbers, number, number)
    with pytest.raises(TypeError, match="expected a list, a tuple"):
        NATIVE.read_faults((1, 2), ("gpu",), table, numbers, number, number)
    ring, one, two = np.zeros((3, 2), np.int64), np.zeros(1, np.int64), np.zeros(2, np.int32)
    bools, held = np.zeros(1, np.bool_), np.zeros((3, 2), np.int32)
    with pytest.raises(ValueError, match="places do not fit"):
        NATIVE.keep_newest(one, two[:1] + np.int32(2), one, one, bools, ring, ring, held, bools, 1)
    with pytest.raises(ValueError, match="arrays do not fit"):
        NATIVE.keep_newest(one, two[:1], one, one, bools, ring, ring, held[:2], bools, 1)
    bucket, numbers = np.zeros((4, 2), np.uint16), np.zeros(2, np.int64)
    for pair, entity in ((2, 0), (0, 2), (-1, 0)):
        places = np.full(1, pair, np.int32), one, one, np.full(1, entity, np.int32)
        with pytest.raises(ValueError, match="places do not fit"):
            NATIVE.count_faults(*places, bools, bools, bucket, numbers, numbers, 1, 1)
    with pytest.raises(ValueError, match="arrays do not fit"):
        NATIVE.count_faults(two[:1], one, one, two[:1], bools, bools, bucket, one, numbers, 1, 1)
