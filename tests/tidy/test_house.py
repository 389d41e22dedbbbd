"""The house as a whole: names that exist once, packages of a size that a person keeps in mind, no circles."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

import pytest

from tests.tidy import rules, tree

MAX_MODULES = 25
# Bounds that only fall: class names that exist twice, modules that one neighbour alone uses.
MAX_DOUBLES, MAX_FRAGMENTS = 0, 24
PRODUCT = ("twin", "policies", "models", "connectors")


@pytest.fixture(scope="module")
def code() -> list[rules.Source]:
    """All that ships; parsed once, and freed at the end of this module."""
    return rules.sources(tree.code())


@pytest.fixture(scope="module")
def product(code: list[rules.Source]) -> dict[str, rules.Source]:
    """The packages, without what `deploy` holds."""
    return {source.path: source for source in code if source.path.split("/", maxsplit=1)[0] in PRODUCT}


def dotted(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@pytest.fixture(scope="module")
def graph(product: dict[str, rules.Source]) -> dict[str, set[str]]:
    """Module -> modules of the product that it imports, wherever the import stands; faces are no modules."""
    modules = {dotted(p) for p in product if not p.endswith("/__init__.py")}
    edges: dict[str, set[str]] = {m: set() for m in modules}
    for path, source in product.items():
        if dotted(path) in modules:
            for node in source.nodes:
                if isinstance(node, ast.ImportFrom) and node.module:
                    named = {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
                    edges[dotted(path)] |= named & modules - {dotted(path)}
    return edges


@pytest.mark.long
@pytest.mark.parametrize("rule", rules.BOUNDED, ids=lambda rule: rule.__name__)
def test_what_breaks_a_bounded_rule_gets_fewer(
    rule: Callable[[rules.Source], Iterator[str]], code: list[rules.Source]
) -> None:
    found = [problem for source in code for problem in rule(source)]
    assert len(found) <= rules.BOUNDED[rule], "\n".join(found)


def test_a_public_class_name_exists_once(product: dict[str, rules.Source]) -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path, source in product.items():
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(path)
    doubles = {name: found for name, found in homes.items() if len(found) > 1}
    assert len(doubles) <= MAX_DOUBLES, doubles


def test_a_package_has_few_modules_and_a_face(product: dict[str, rules.Source]) -> None:
    sizes: dict[str, int] = defaultdict(int)
    for path in product:
        sizes[str(PurePosixPath(path).parent)] += not path.endswith("__init__.py")
    assert {p: n for p, n in sizes.items() if n > MAX_MODULES} == {}
    doc = {p: ast.get_docstring(product[f"{p}/__init__.py"].tree) for p in sizes}
    assert [p for p, text in doc.items() if not text or text == p.replace("/", ".")] == []


def test_imports_make_no_circle(graph: dict[str, set[str]]) -> None:
    edges = graph
    while leaves := {m for m, named in edges.items() if not named & edges.keys()}:
        edges = {m: named for m, named in edges.items() if m not in leaves}
    # The remaining modules lie on a circle or above one: peel from the top too.
    while tops := edges.keys() - {n for named in edges.values() for n in named}:
        edges = {m: named for m, named in edges.items() if m not in tops}
    assert sorted(edges) == []


@pytest.mark.long
def test_a_module_that_one_neighbour_uses_is_part_of_it(graph: dict[str, set[str]]) -> None:
    """Unless other packages or tests use it by itself."""
    users: dict[str, set[str]] = defaultdict(set)
    for module, named in graph.items():
        for other in named:
            users[other].add(module)
    faces = rules.sources(p for p in tree.files() if p.endswith("/__init__.pyi"))
    faced = {
        f"{dotted(face.path.removesuffix('i'))}.{node.module}"
        for face in faces
        for node in face.tree.body
        if isinstance(node, ast.ImportFrom)
    }
    tested = {name for source in rules.sources(tree.suite()) for _, name in rules.imports(source.nodes)}
    used = {name.rpartition(".")[0] for name in tested} | tested | faced
    fragments = [
        m
        for m, found in users.items()
        if len(found) == 1 and m not in used and m.rpartition(".")[0] == next(iter(found)).rpartition(".")[0]
    ]
    assert len(fragments) <= MAX_FRAGMENTS, sorted(fragments)
