"""Each house rule refuses what it is there to refuse, and lets good code pass."""

from __future__ import annotations

import pytest

from tests.tidy import rules

DOC = '"""A pump: one per rack."""\n'
GOOD = DOC + (
    "import numpy as np\n"
    "from twin.catalogue import unit_of\n"
    "def in_order(xs: set[int]) -> list[int]:\n"
    '    """Sorted."""\n'
    "    return [x for x in sorted(set(xs))]\n"
)


def long_function(lines: int) -> str:
    return "def f() -> None:\n" + "    pass\n" * (lines - 1)


BAD = [
    ("twin/engine/a.py", DOC + "class A:\n" + "    x = 1\n" * 600, "more than 600 lines"),
    ("twin/engine/a.py", DOC + "def f(a, b, c, d, e, f, *, g): ...\n", "f has 7 parameters"),
    ("twin/engine/a.py", DOC + "class A(NamedTuple):\n" + "".join(f"    x{i}: int\n" for i in range(7)),
     "A has 7 positions"),
    ("twin/engine/a.py", '"""What a pump does."""\nx = 1\n', "begins with What"),
    ("policies/a.py", DOC + 'def f() -> None:\n    """Whether it leaks."""\n', "begins with Whether"),
    ("twin/telemetry/a.py", DOC + 'class A:\n    x: int\n    """Why it waits."""\n', "begins with Why"),
    ("tests/unit/test_a.py", DOC + 'def f() -> None:\n    """\n    When it ends.\n    """\n',
     "begins with When"),
    ("twin/engine/a.py", DOC + "class Told: ...\n", "no bare participle"),
    ("twin/health/past.py", DOC, "no bare participle"),
    ("policies/a.py", DOC + "from twin.telemetry.state import GOOD\n", "expected the face of its package"),
    ("twin/daemon/a.py", DOC + "from connectors.mqtt.link import Link\n", "expected the face of its package"),
    ("twin/engine/a.py", DOC + f"x = '{'y' * 110}'\n", "characters"),
    ("twin/engine/a.py", DOC + long_function(71), "f has 71 lines"),
    ("connectors/a.py", DOC + "async " + long_function(71), "f has 71 lines"),
    ("twin/daemon/a.py", DOC + "class A:\n    def g(self) -> None:\n" + "        pass\n" * 70,
     "g has 71 lines"),
    ("twin/engine/a.py", "x = 1\n", "docstring"),
    ("twin/engine/a.py", DOC + "class PumpManager: ...\n", "PumpManager"),
    ("policies/a.py", DOC + "def helper() -> None: ...\n", "helper"),
    ("models/util.py", DOC, "util"),
    ("connectors/mqtt_utils.py", DOC, "mqtt_utils"),
    ("twin/daemon/a.py", DOC + "class StoreImpl: ...\n", "StoreImpl"),
    ("twin/engine/a.py", DOC + "# TO" + "DO: later\n", "finish it"),
    ("deploy/a.py", DOC + "# FIX" + "ME\n", "finish it"),
    ("twin/engine/a.py", DOC + "import twin.cli\n", "may not import twin.cli"),
    ("twin/engine/a.py", DOC + "from twin import cli\n", "may not import twin.cli"),
    ("twin/engine/a.py", DOC + "def f() -> None:\n    from policies.a import B\n",
     "may not import policies.a"),
    ("twin/engine/a.py", DOC + "import models\n", "may not import models"),
    ("policies/a.py", DOC + "import connectors.mqtt.link\n", "may not import connectors.mqtt.link"),
    ("models/a.py", DOC + "import policies\n", "may not import policies"),
    ("connectors/a.py", DOC + "from twin.daemon.clock import Clock\n", "may not import twin.daemon.clock"),
    ("connectors/a.py", DOC + "from models import ewma\n", "may not import models.ewma"),
    ("twin/physics/a.py", DOC + "from twin.catalogue.units import unit_of\n", "may not import"),
    ("twin/engine/a.py", DOC + "import tests.tidy\n", "may not import tests"),
    ("twin/daemon/a.py", DOC + "from . import b\n", "absolute"),
    *[
        (f"{folder}/a.py", DOC + f"import {module}\n", f"may not import {module.split('.')[0]}")
        for folder in ("twin/engine", "twin/physics", "policies", "models")
        for module in (
            "asyncio", "time", "random", "os.path", "socket", "threading", "logging", "pathlib", "subprocess",
            "concurrent.futures", "importlib.resources",
        )
    ],
    ("twin/engine/a.py", DOC + "from time import monotonic\n", "may not import time"),
    ("twin/engine/a.py", DOC + "if 1:\n    import os\n", "may not import os"),
    ("twin/engine/a.py", DOC + "x = open('f')\n", "open()"),
    ("models/a.py", DOC + "print(1)\n", "print()"),
    ("policies/a.py", DOC + "x = hash('a')\n", "hash()"),
    ("twin/engine/a.py", DOC + "import datetime as d\nx = d.datetime.now()\n", "now()"),
    ("twin/engine/a.py", DOC + "def f(path): return path.read_text()\n", "read_text()"),
    ("models/a.py", DOC + "import numpy as np\nx = np.fromfile('f')\n", "fromfile()"),
    ("twin/engine/a.py", DOC + "import numpy as np\nx = np.random.default_rng(1)\n", "np.random"),
    ("twin/engine/a.py", DOC + "from numpy import random\n", "numpy.random"),
    ("models/a.py", DOC + "import numpy.random as r\n", "numpy.random"),
    ("twin/engine/a.py", DOC + "for x in {1, 2}: ...\n", "walks a set"),
    ("twin/engine/a.py", DOC + "x = [y for y in set(z)]\n", "walks a set"),
    ("twin/engine/a.py", DOC + "x = list(set(z) | q)\n", "walks a set"),
    ("policies/a.py", DOC + "x = ','.join({y for y in z})\n", "walks a set"),
    ("models/a.py", DOC + "x = (*frozenset(z),)\n", "walks a set"),
    ("twin/engine/a.py", DOC + "import time  # tidy: allow time\n", "because"),
    ("twin/engine/a.py", DOC + "import time  # tidy: allow os because of that\n", "may not import time"),
    ("twin/engine/a.py", DOC + "x = 1  # tidy: allow time because it was needed once\n", "lifts nothing"),
]  # fmt: skip


def problems(path: str, text: str) -> list[str]:
    """Everything that the rules find, the bounded ones too."""
    source = rules.Source(path, text)
    return rules.problems(source) + [found for rule in rules.BOUNDED for found in rule(source)]


@pytest.mark.parametrize(("path", "text", "expected"), BAD)
def test_bad_code_is_refused(path: str, text: str, expected: str) -> None:
    found = problems(path, text)
    assert any(expected in f and f.startswith(path) for f in found), found


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("twin/engine/a.py", GOOD),
        ("twin/__init__.py", ""),
        ("tests/unit/test_a.py", '"""What-if: two courses from one moment."""\n'),
        ("twin/engine/a.py", DOC + long_function(70)),
        ("twin/engine/a.py", DOC + 'def f() -> None:\n    """Long.\n' + "\n" * 90 + '    """\n'),
        ("twin/engine/a.py", DOC + "import time  # tidy: allow time because the clock is the subject\n"),
        ("twin/engine/a.py", DOC + "x = list(\n    set(y)  # tidy: allow set because y has one member\n)\n"),
        ("twin/daemon/a.py", DOC + "import asyncio, time\nimport policies.cap\nfor x in {1}: print(x)\n"),
        ("connectors/a.py", DOC + "import socket\nfrom twin.telemetry import Reading\n"),
        ("twin/plant/a.py", DOC + "import numpy as np\nrng = np.random.default_rng(1)\n"),
        ("twin/plant/b.py", DOC + "from numpy.random import Generator\n"),
        ("twin/physics/a.py", DOC + "import numpy as np\nfrom twin.physics.liquid import x\n"),
        ("twin/health/a.py", DOC + "from twin.telemetry import GOOD\nfrom twin.health.rates import x\n"),
        ("twin/engine/a.py", DOC + "def f(self, a, b, c, d, e, *, f): ...\n"),
        (
            "policies/a.py",
            DOC + "from twin.contracts import Policy\nfrom policies.shed import order\n",
        ),
        ("twin/application.py", DOC + "from twin.clinic import x\n"),
        ("twin/engine/a.py", DOC + "def utilisation() -> float: ...\ndef simple() -> int: ...\n"),
        ("twin/engine/a.py", DOC + "x = sorted({1, 2})\ny = len({1} | {2})\n"),
    ],
)
def test_good_code_passes(path: str, text: str) -> None:
    assert problems(path, text) == []


def test_every_rule_is_seen_to_refuse_something() -> None:
    """The table above leaves no rule out: each finds a problem in at least one of its rows."""
    every = (*rules.RULES, *rules.BOUNDED)
    sources = [rules.Source(path, text) for path, text, _ in BAD]
    assert [rule.__name__ for rule in every if not any(list(rule(source)) for source in sources)] == []


@pytest.mark.parametrize("host", rules.REGISTRY_HOSTS)
def test_a_registry_is_refused(host: str) -> None:
    assert list(rules.registry_hosts("README.md", f"see https://{host}/simple"))


@pytest.mark.parametrize(
    "line", ["--index-url https://mirror", "--extra-index-url=x", "--find-links /x", "-f /x"]
)
def test_a_lock_says_nothing_of_where_packages_come_from(line: str) -> None:
    assert list(rules.registry_hosts("requirements.lock", line))
