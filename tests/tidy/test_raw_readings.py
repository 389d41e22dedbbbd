"""Policies act on believed readings: a raw one needs a reason, given here."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

from twin.catalogue import find_signal
from twin.diagnosis import RECONCILED

ROOT = Path(__file__).resolve().parents[2]
# Of arguments that are no constant: (file, argument) -> the reason
REASONS = {
    (
        "checkpointing/storage_traffic.py",
        "key",
    ): "rates and states of file systems, which nothing contradicts",
    ("cooling_setpoint/obstacles.py", "f'{table}.leak_state'"): "one wet detector is enough to keep still",
    ("cooling_setpoint/obstacles.py", "key"): "a hot reading is a reason to keep still, believed or not",
    ("leak_guard/detectors.py", "key"): "leak detectors, which it confirms by others",
    ("leak_guard/policy.py", "key"): "evidence is shown as it was read",
    ("node_replacement/headroom.py", "key"): "states and limits, which nothing contradicts",
    ("power_capping/budgets.py", "key"): "states of feeders, with their power beside them",
    ("power_capping/demand.py", "key"): "asks whether a reading has drifted, not how large it is",
    ("power_capping/loads.py", "key"): "supplies of nodes, of which nearly all of a rack have to agree",
    ("power_capping/unreported.py", "key"): "asks whether anything was ever read",
    ("thermal_guard/caps.py", "key"): "asks whether what was read is contradicted, to end a cap",
    ("thermal_guard/policy.py", "key"): "evidence is shown as it was read",
}


def raw_readings() -> Iterator[tuple[str, int, ast.expr]]:
    """(file, line, argument) of all readings of a view as they came."""
    for path in sorted((ROOT / "policies").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=of, attr="value"), args=[argument]):
                    if "view" in ast.unparse(of):
                        yield str(path.relative_to(ROOT / "policies")), node.lineno, argument


def key_of(file: str, argument: ast.expr) -> str:
    """The signal that an argument names; "" where only running it would tell."""
    if isinstance(argument, ast.Constant):
        return str(argument.value)
    module = importlib.import_module("policies." + file.removesuffix(".py").replace("/", "."))
    return str(getattr(module, ast.unparse(argument), ""))


def test_no_policy_acts_on_a_raw_reading_that_others_can_contradict() -> None:
    wrong, used = [], set()
    for file, line, argument in raw_readings():
        key, text = key_of(file, argument), ast.unparse(argument)
        if key in RECONCILED or (not key and (file, text) not in REASONS):
            wrong.append(f"policies/{file}:{line}: view.value({text}); expected view.believed, or a reason")
        if not key:
            used.add((file, text))
    assert not wrong, "\n".join(wrong)
    assert used == set(REASONS), f"no longer needed: {set(REASONS) - used}"


def test_all_that_is_reconciled_is_a_signal() -> None:
    assert RECONCILED
    assert all(find_signal(key) is not None for key in RECONCILED)
