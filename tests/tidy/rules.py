"""The house rules that a machine can check, each a generator of problems over one file's source.

A rule that forbids a module or a call in pure code can be lifted for one statement, with its reason:

    import time  # tidy: allow time because the banner shows when the process began
"""

from __future__ import annotations

import ast
import gc
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from tests.tidy import tree

MAX_CLASS, MAX_FUNCTION, MAX_LINE = 600, 70, 110
MAX_PARAMETERS, MAX_POSITIONS = 6, 6  # of a function, of a NamedTuple

# Clocks, chance, threads, processes, files, sockets, logs: what the shell alone may touch.
IMPURE = frozenset((
    "asyncio", "concurrent", "ctypes", "fileinput", "glob", "http", "importlib", "logging", "multiprocessing",
    "os", "pathlib", "queue", "random", "sched", "secrets", "select", "selectors", "shutil", "signal",
    "socket", "socketserver", "sqlite3", "ssl",
    "subprocess", "sys", "tempfile", "threading", "time", "urllib", "uuid",
))  # fmt: skip
# `hash` and `id` differ from one process to the next.
IMPURE_CALLS = frozenset(("open", "print", "input", "hash", "id", "breakpoint", "exec", "eval", "__import__"))
FILE_CALLS = frozenset((
    "read_text", "read_bytes", "write_text", "write_bytes", "fromfile", "tofile", "memmap", "open_memmap",
    "loadtxt", "savetxt", "genfromtxt", "savez", "savez_compressed",
))  # fmt: skip
CLOCK_CALLS = frozenset(("now", "utcnow", "today"))
# Their result depends on the order of what they are given.
ORDERED_CALLS = frozenset(("list", "tuple", "enumerate", "iter", "next", "zip", "map", "filter", "sum"))
MAY_ROLL_DICE = ("twin/plant",)
# A package imports only packages of later lines; those of one line do not import each other. pyproject.toml
# has the same order for import-linter, and a test compares both.
LAYERS = (
    ("twin.cli",), ("twin.simulation",), ("twin.daemon",), ("twin.api",), ("twin.wiring",),
    ("twin.backtest",), ("twin.archive",), ("twin.report",), ("twin.tables",), ("twin.federation",),
    ("twin.anchor",), ("twin.run",), ("twin.sources",), ("twin.config",),
    ("policies", "models", "connectors"),
    ("twin.plant",), ("twin.engine",),
    ("twin.control", "twin.alerts", "twin.health", "twin.goodput", "twin.ledger"),
    ("twin.diagnosis",),
    ("twin.estimation",), ("twin.contracts",), ("twin.telemetry",), ("twin.site",), ("twin.catalogue",),
    ("twin.physics",), ("twin.kernels",),
)  # fmt: skip
PURE = frozenset((
    "physics", "catalogue", "site", "telemetry", "contracts", "estimation", "diagnosis", "health", "alerts",
    "goodput", "ledger", "control", "engine", "plant",
))  # fmt: skip

BANNED_PARTS = re.compile(r"manager|helper", re.IGNORECASE)
# A public name is a noun, or a verb that says what happens: no bare participle, pronoun or preposition.
BARE = frozenset((
    "asked", "barred", "course", "found", "ground", "heard", "held", "look", "narrowed", "now", "past",
    "places", "said", "seen", "spared", "spoiled", "told", "usual", "words",
))  # fmt: skip
# "What-if" is a noun.
_QUESTION = re.compile(r"(What|Whose|Whom|Who|How|Whether|Why|Where|When|Which)\b(?!-)")
BANNED_WORDS = frozenset(("util", "utils", "impl"))
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_ESCAPE = re.compile(r"#\s*tidy:\s*allow\s+(?P<name>[\w.]+)(?P<reason>\s+because\s+\S.*)?")

# Put together here, so that this file passes its own rule.
REGISTRY_HOSTS = tuple(
    ".".join(p) for p in (("pypi", "org"), ("pythonhosted", "org"), ("registry", "npmjs", "org"))
)
UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b")

Function = ast.FunctionDef | ast.AsyncFunctionDef
# Modules inside packages that have a face; what stands beside their `__init__` (models/trees.py) has none.
_FILES = frozenset(tree.files())
MODULES = frozenset(
    p for p in _FILES if p.endswith(".py") and f"{PurePosixPath(p).parent}/__init__.pyi" in _FILES
)


@dataclass
class Source:
    """One Python file: its path from the root of the repository, its text, its tree and its escapes."""

    path: str
    text: str
    tree: ast.Module = field(init=False)
    nodes: list[ast.AST] = field(init=False)  # all of the tree
    escapes: dict[int, tuple[str, bool]] = field(init=False)  # line -> (name, gives a reason)
    used: set[int] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.tree = ast.parse(self.text, self.path)
        self.nodes = list(ast.walk(self.tree))
        self.escapes = {}
        if not _ESCAPE.search(self.text):
            return
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type == tokenize.COMMENT and (found := _ESCAPE.search(token.string)):
                self.escapes[token.start[0]] = (found["name"], found["reason"] is not None)

    def at(self, node: ast.AST, message: str) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 1)}: {message}"

    def allows(self, node: ast.AST, name: str) -> bool:
        """True if a line of the statement carries the escape for `name`."""
        first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
        lines = [i for i in range(first, last + 1) if self.escapes.get(i, ("", False))[0] == name]
        self.used.update(lines)
        return bool(lines)


def sources(paths: Iterable[str]) -> list[Source]:
    """These files, parsed. The garbage collector rests meanwhile: it would take most of the time."""
    gc.disable()
    try:
        return [Source(path, tree.text(path) or "") for path in paths]
    finally:
        gc.enable()


def is_pure(path: str) -> bool:
    """True for the core, policies and models: whatever must have no clock, chance, input or output."""
    top, *rest = PurePosixPath(path).parts
    return top in ("policies", "models") or (top == "twin" and len(rest) > 1 and rest[0] in PURE)


def layer(module: str) -> tuple[int, str] | None:
    """(line of LAYERS, package) of a dotted name; None for what is in no layer."""
    for height, packages in enumerate(LAYERS):
        for package in packages:
            if f"{module}.".startswith(f"{package}."):
                return height, package
    return None


def imports(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.stmt, str]]:
    """(statement, dotted name) of every absolute import, wherever it stands."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield node, f"{node.module}.{alias.name}"


def sizes(source: Source) -> Iterator[str]:
    """A function, a class and a line have a greatest length; docstrings of functions are not counted."""
    for number, line in enumerate(source.text.splitlines(), 1):
        if len(line) > MAX_LINE:
            yield f"{source.path}:{number}: {len(line)} characters, expected at most {MAX_LINE}"
    for node in source.nodes:
        if isinstance(node, ast.ClassDef) and _last(node) - node.lineno >= MAX_CLASS:
            yield source.at(node, f"{node.name} has more than {MAX_CLASS} lines")
        if isinstance(node, Function):
            length = _last(node) - node.lineno + 1
            if ast.get_docstring(node, clean=False) is not None:
                length -= _last(node.body[0]) - node.body[0].lineno + 1
            if length > MAX_FUNCTION:
                yield source.at(node, f"{node.name} has {length} lines, expected at most {MAX_FUNCTION}")


def parameters(source: Source) -> Iterator[str]:
    """A function has few parameters and a NamedTuple few positions; a frozen dataclass takes the rest.

    A kernel takes its columns one by one, as its twin in C does.
    """
    if source.path == "twin/kernels/plain.py":
        return
    for node in source.nodes:
        if isinstance(node, Function):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = sum(a.arg not in ("self", "cls") for a in given)
            if count > MAX_PARAMETERS:
                yield source.at(
                    node, f"{node.name} has {count} parameters, expected at most {MAX_PARAMETERS}"
                )
        elif isinstance(node, ast.ClassDef) and any(ast.unparse(b) == "NamedTuple" for b in node.bases):
            count = sum(isinstance(line, ast.AnnAssign) for line in node.body)
            if count > MAX_POSITIONS:
                yield source.at(node, f"{node.name} has {count} positions, expected at most {MAX_POSITIONS}")


def _last(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def docstring(source: Source) -> Iterator[str]:
    """Every module that says anything begins by defining its noun."""
    if source.tree.body and not ast.get_docstring(source.tree):
        yield f"{source.path}:1: expected a docstring that defines what this module holds"


def questions(source: Source) -> Iterator[str]:
    """No docstring, an attribute's included, begins with a question word: it says what a thing is or does."""
    for node in source.nodes:
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
            and (found := _QUESTION.match(node.value.value.lstrip()))
        ):
            yield source.at(node, f"a docstring begins with {found[0]}: expected subject, verb, object")


def names(source: Source) -> Iterator[str]:
    """Public names say what a thing does."""
    module = PurePosixPath(source.path).stem
    found: list[tuple[ast.AST, str]] = [(source.tree, module)]
    found += [(n, n.name) for n in source.nodes if isinstance(n, Function | ast.ClassDef)]
    for node, name in found:
        words = {w.lower() for w in _WORD.findall(name)}
        if not name.startswith("_") and (BANNED_PARTS.search(name) or words & BANNED_WORDS):
            yield source.at(
                node, f"{name}: expected a name that says what it does, without manager, helper, util"
            )


def bare_names(source: Source) -> Iterator[str]:
    """A public name is a noun or a verb, no bare participle, pronoun or preposition."""
    found: list[tuple[ast.AST, str]] = [(source.tree, PurePosixPath(source.path).stem)]
    found += [(n, n.name) for n in source.nodes if isinstance(n, Function | ast.ClassDef)]
    for node, name in found:
        if name.lower() in BARE:
            yield source.at(node, f"{name}: expected a noun or a verb, no bare participle or preposition")


def unfinished(source: Source) -> Iterator[str]:
    """Nothing is left to be done later in a comment."""
    yield from unfinished_text(source.path, source.text)


def unfinished_text(path: str, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        if found := UNFINISHED.search(line):
            yield f"{path}:{number}: {found[0]}: finish it, or file an issue"


def registry_hosts(path: str, text: str) -> Iterator[str]:
    """Packages are named by name; where they come from is each machine's own setting."""
    for number, line in enumerate(text.splitlines(), 1):
        for host in REGISTRY_HOSTS:
            if host in line.lower():
                yield f"{path}:{number}: names the registry {host}"
        if path.endswith(".lock") and re.match(r"\s*(--(extra-)?index-url|--find-links|-[if]\s)", line):
            yield f"{path}:{number}: a lock file says where packages come from"


def direction(source: Source) -> Iterator[str]:
    """A package imports only packages below it, and nothing that does not ship."""
    own = layer(source.path.removesuffix(".py").replace("/", "."))
    if own is None:
        return
    for node, name in imports(source.nodes):
        other = layer(name)
        upward = other is not None and other[1] != own[1] and other[0] <= own[0]
        if upward or name.split(".", maxsplit=1)[0] in ("tests", "deploy"):
            yield source.at(node, f"{source.path} may not import {name}")


def faces(source: Source) -> Iterator[str]:
    """Another package is imported by its face, `from twin.health import X`, not by a module inside it."""
    own = PurePosixPath(source.path).parent
    if layer(source.path.removesuffix(".py").replace("/", ".")) is None:
        return
    for node in source.nodes:
        if not isinstance(node, ast.ImportFrom) or layer(node.module or "") is None:
            continue
        module = PurePosixPath((node.module or "").replace(".", "/"))
        inside = own == module.parent or own.is_relative_to(module.parent)
        if not inside and f"{module}.py" in MODULES:
            yield source.at(node, f"imports {node.module}: expected the face of its package, {module.parent}")


def relative_imports(source: Source) -> Iterator[str]:
    """Imports are absolute, so that every rule about them can be read off the line."""
    for node in source.nodes:
        if isinstance(node, ast.ImportFrom) and node.level:
            yield source.at(node, "expected an absolute import")


def purity(source: Source) -> Iterator[str]:
    """Pure code imports no clock, chance, thread, file, socket or log, and calls none of them."""
    if not is_pure(source.path):
        return
    for statement, name in imports(source.nodes):
        root = name.split(".", maxsplit=1)[0]
        if root in IMPURE and not source.allows(statement, root):
            yield source.at(statement, f"pure code may not import {root}")
    for node in source.nodes:
        called = node.func if isinstance(node, ast.Call) else None
        name = ""
        if isinstance(called, ast.Name) and called.id in IMPURE_CALLS:
            name = called.id
        elif isinstance(called, ast.Attribute) and called.attr in CLOCK_CALLS | FILE_CALLS:
            name = called.attr
        if name and not source.allows(node, name):
            yield source.at(node, f"pure code may not call {name}()")


def dice(source: Source) -> Iterator[str]:
    """Only the simulated plant and its faults use np.random, from a generator that they are given."""
    if not is_pure(source.path) or source.path.removesuffix(".py").startswith(MAY_ROLL_DICE):
        return
    for statement, name in imports(source.nodes):
        if f"{name}.".startswith("numpy.random.") and not source.allows(statement, "np.random"):
            yield source.at(statement, "pure code may not import numpy.random")
    for node in source.nodes:
        if (
            not isinstance(node, ast.Attribute)
            or node.attr != "random"
            or not isinstance(node.value, ast.Name)
        ):
            continue
        if node.value.id in ("np", "numpy") and not source.allows(node, "np.random"):
            yield source.at(node, "pure code may not use np.random")


def set_order(source: Source) -> Iterator[str]:
    """The order of a set differs from one process to the next: sort it before walking it."""
    if not is_pure(source.path):
        return
    for node in source.nodes:
        for walked in _walked(node):
            if _is_set(walked) and not source.allows(walked, "set"):
                yield source.at(walked, "walks a set, whose order is not fixed: expected sorted(...)")


def _walked(node: ast.AST) -> list[ast.expr]:
    """The expressions that `node` goes through one by one, in their order."""
    if isinstance(node, ast.For | ast.comprehension):
        return [node.iter]
    if isinstance(node, ast.Starred):
        return [node.value]
    called = node.func if isinstance(node, ast.Call) else None
    ordered = isinstance(called, ast.Name) and called.id in ORDERED_CALLS
    joined = isinstance(called, ast.Attribute) and called.attr in ("join", "extend", "fromiter")
    return node.args if isinstance(node, ast.Call) and (ordered or joined) else []


def _is_set(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr | ast.BitAnd | ast.Sub | ast.BitXor):
        return _is_set(node.left) or _is_set(node.right)
    called = node.func if isinstance(node, ast.Call) else None
    named = isinstance(called, ast.Name) and called.id in ("set", "frozenset")
    return named or isinstance(node, ast.Set | ast.SetComp)


def escapes(source: Source) -> Iterator[str]:
    """An escape gives its reason and lifts something. Runs last."""
    for line, (name, has_reason) in source.escapes.items():
        if not has_reason:
            yield f"{source.path}:{line}: expected `tidy: allow {name} because <reason>`"
        if line not in source.used:
            yield f"{source.path}:{line}: this escape for {name} lifts nothing"


RULES = (
    sizes, docstring, questions, names, unfinished, direction, relative_imports, purity, dice, set_order,
    escapes,
)  # fmt: skip
# Rules that the whole of the code does not keep yet, and how many places break each: a bound that only falls.
BOUNDED = {parameters: 6, bare_names: 1, faces: 0}


def problems(source: Source) -> list[str]:
    """Everything that the rules find in one Python file; the bounded ones are apart."""
    return [found for rule in RULES for found in rule(source)]
