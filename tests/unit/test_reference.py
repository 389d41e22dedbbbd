"""The reference of the files: every key has its words, and what it shows is what the schema does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from twin.catalogue import ConfigError
from twin.config import Config, load_config, reference_yaml
from twin.config.reference import keys_of
from twin.site import SiteFile


def sections(kind: type[msgspec.Struct], path: str = "") -> Iterator[tuple[str, type[msgspec.Struct]]]:
    """Every section below, with its path."""
    yield path, kind
    for key in keys_of(kind):
        if key.parts is not None:
            yield from sections(key.parts, f"{path}.{key.name}")


def shown() -> dict[type[msgspec.Struct], Any]:
    """Both files of the reference, uncommented."""
    parts = reference_yaml().split("## ")[1:]
    trees = [yaml.safe_load("\n".join(x.removeprefix("#") for x in p.splitlines()[1:])) for p in parts]
    return dict(zip((Config, SiteFile), trees, strict=True))


@pytest.mark.parametrize("file", [Config, SiteFile])
def test_every_key_says_what_it_means(file: type[msgspec.Struct]) -> None:
    silent = [f"{path}.{key.name}" for path, kind in sections(file) for key in keys_of(kind) if not key.words]
    assert silent == []


@pytest.mark.parametrize("file", [Config, SiteFile])
def test_uncommented_it_is_every_key_with_its_default(file: type[msgspec.Struct]) -> None:
    def check(tree: Any, kind: type[msgspec.Struct]) -> int:
        assert set(tree) == {key.name for key in keys_of(kind)}, kind
        if not any(f.required for f in msgspec.structs.fields(kind)):
            plain = {key.name: tree[key.name] for key in keys_of(kind) if key.parts is None}
            assert msgspec.convert(plain, kind) == kind(), kind
        count = len(tree)
        for key in keys_of(kind):
            if key.parts is not None:
                below = tree[key.name]
                below = below[0] if key.many == "list" else below["NAME"] if key.many == "mapping" else below
                count += check(below, key.parts)
        return count

    assert check(shown()[file], file) > 40


def test_a_check_says_what_a_missing_key_means(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("site: s.yaml\nbroker: {port: 1883}\n")
    with pytest.raises(ConfigError, match=r"\$\.broker\.host: missing; expected text \(name or address\)"):
        load_config(tmp_path / "c.yaml")
