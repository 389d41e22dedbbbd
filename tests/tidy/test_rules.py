"""Each house rule refuses what it is there to refuse, and lets good code pass."""

from __future__ import annotations

import pytest

from tests.tidy import rules

DOC = '"""What this is for."""\n'
GOOD = DOC + (
    "import numpy as np\n"
    "from twin.units import unit_of\n"
    "def in_order(xs: set[int]) -> list[int]:\n"
    '    """Sorted."""\n'
    "    return [x for x in sorted(set(xs))]\n"
)


def long_function(lines: int) -> str:
    return "def f() -> None:\n" + "    pass\n" * (lines - 1)


BAD = [
    ("twin/a.py", DOC + "x = 1\n" * 400, "401 lines"),
    ("twin/a.py", DOC + f"x = '{'y' * 110}'\n", "characters"),
    ("twin/a.py", DOC + long_function(71), "f has 71 lines"),
    ("connectors/a.py", DOC + "async " + long_function(71), "f has 71 lines"),
    ("twin/app/a.py", DOC + "class A:\n    def g(self) -> None:\n" + "        pass\n" * 70, "g has 71 lines"),
    ("twin/a.py", "x = 1\n", "docstring"),
    ("twin/a.py", DOC + "class PumpManager: ...\n", "PumpManager"),
    ("twin/a.py", DOC + "class A:\n    def event_handler(self) -> None: ...\n", "event_handler"),
    ("policies/a.py", DOC + "def helper() -> None: ...\n", "helper"),
    ("models/util.py", DOC, "util"),
    ("connectors/mqtt_utils.py", DOC, "mqtt_utils"),
    ("twin/app/a.py", DOC + "class StoreImpl: ...\n", "StoreImpl"),
    ("twin/a.py", DOC + "# TO" + "DO: later\n", "finish it"),
    ("deploy/a.py", DOC + "# FIX" + "ME\n", "finish it"),
    ("twin/a.py", DOC + "import twin.app\n", "may not import twin.app"),
    ("twin/a.py", DOC + "from twin import app\n", "may not import twin.app"),
    ("twin/a.py", DOC + "def f() -> None:\n    from policies.a import B\n", "may not import policies.a"),
    ("twin/a.py", DOC + "import models\n", "may not import models"),
    ("policies/a.py", DOC + "import connectors.mqtt\n", "may not import connectors.mqtt"),
    ("models/a.py", DOC + "import policies\n", "may not import policies"),
    ("connectors/a.py", DOC + "from twin.app.clock import Clock\n", "may not import twin.app.clock"),
    ("connectors/a.py", DOC + "from models import ewma\n", "may not import models.ewma"),
    ("twin/physics/a.py", DOC + "from twin.units import unit_of\n", "may not import twin.units"),
    ("twin/a.py", DOC + "import tests.tidy\n", "may not import tests"),
    ("twin/app/a.py", DOC + "from . import b\n", "absolute"),
    *[
        (f"{folder}/a.py", DOC + f"import {module}\n", f"may not import {module.split('.')[0]}")
        for folder in ("twin", "twin/physics", "policies", "models")
        for module in (
            "asyncio", "time", "random", "os.path", "socket", "threading", "logging", "pathlib", "subprocess",
            "concurrent.futures", "importlib.resources",
        )
    ],
    ("twin/a.py", DOC + "from time import monotonic\n", "may not import time"),
    ("twin/a.py", DOC + "if 1:\n    import os\n", "may not import os"),
    ("twin/a.py", DOC + "x = open('f')\n", "open()"),
    ("models/a.py", DOC + "print(1)\n", "print()"),
    ("policies/a.py", DOC + "x = hash('a')\n", "hash()"),
    ("twin/a.py", DOC + "import datetime as d\nx = d.datetime.now()\n", "now()"),
    ("twin/a.py", DOC + "def f(path): return path.read_text()\n", "read_text()"),
    ("models/a.py", DOC + "import numpy as np\nx = np.fromfile('f')\n", "fromfile()"),
    ("twin/a.py", DOC + "import numpy as np\nx = np.random.default_rng(1)\n", "np.random"),
    ("twin/a.py", DOC + "from numpy import random\n", "numpy.random"),
    ("models/a.py", DOC + "import numpy.random as r\n", "numpy.random"),
    ("twin/a.py", DOC + "for x in {1, 2}: ...\n", "walks a set"),
    ("twin/a.py", DOC + "x = [y for y in set(z)]\n", "walks a set"),
    ("twin/a.py", DOC + "x = list(set(z) | q)\n", "walks a set"),
    ("policies/a.py", DOC + "x = ','.join({y for y in z})\n", "walks a set"),
    ("models/a.py", DOC + "x = (*frozenset(z),)\n", "walks a set"),
    ("twin/a.py", DOC + "import time  # tidy: allow time\n", "because"),
    ("twin/a.py", DOC + "import time  # tidy: allow os because of that\n", "may not import time"),
    ("twin/a.py", DOC + "x = 1  # tidy: allow time because it was needed once\n", "lifts nothing"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "text", "expected"), BAD)
def test_bad_code_is_refused(path: str, text: str, expected: str) -> None:
    found = rules.problems(path, text)
    assert any(expected in f and f.startswith(path) for f in found), found


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("twin/a.py", GOOD),
        ("twin/__init__.py", ""),
        ("twin/a.py", DOC + long_function(70)),
        ("twin/a.py", DOC + 'def f() -> None:\n    """Long.\n' + "\n" * 90 + '    """\n'),
        ("twin/a.py", DOC + "import time  # tidy: allow time because the clock is the subject\n"),
        ("twin/a.py", DOC + "x = list(\n    set(y)  # tidy: allow set because y has one member\n)\n"),
        ("twin/app/a.py", DOC + "import asyncio, time\nimport policies.cap\nfor x in {1}: print(x)\n"),
        ("connectors/a.py", DOC + "import socket\nfrom twin.reading import Reading\n"),
        ("twin/plant.py", DOC + "import numpy as np\nrng = np.random.default_rng(1)\n"),
        ("twin/faults.py", DOC + "from numpy.random import Generator\n"),
        ("twin/physics/a.py", DOC + "import numpy as np\nfrom twin.physics.thermal import x\n"),
        ("policies/a.py", DOC + "from twin.contracts import Policy\nfrom policies.shed import order\n"),
        ("twin/application.py", DOC + "from twin.apparatus import x\n"),
        ("twin/a.py", DOC + "def utilisation() -> float: ...\ndef simple() -> int: ...\n"),
        ("twin/a.py", DOC + "x = sorted({1, 2})\ny = len({1} | {2})\n"),
    ],
)
def test_good_code_passes(path: str, text: str) -> None:
    assert rules.problems(path, text) == []


@pytest.mark.parametrize("rule", rules.RULES)
def test_every_rule_is_seen_to_refuse_something(rule: object) -> None:
    """The table above leaves no rule out: each finds a problem in at least one of its rows."""
    refused = 0
    for path, text, _ in BAD:
        source = rules.Source(path, text)
        for each in rules.RULES:
            found = list(each(source))
            refused += bool(found) and each is rule
    assert refused


@pytest.mark.parametrize("host", rules.REGISTRY_HOSTS)
def test_a_registry_is_refused(host: str) -> None:
    assert list(rules.registry_hosts("README.md", f"see https://{host}/simple"))


@pytest.mark.parametrize(
    "line", ["--index-url https://mirror", "--extra-index-url=x", "--find-links /x", "-f /x"]
)
def test_a_lock_says_nothing_of_where_packages_come_from(line: str) -> None:
    assert list(rules.registry_hosts("requirements.lock", line))
