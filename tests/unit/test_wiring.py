"""From files to sites, policies and models: what is refused and how; and what importing costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import models
import policies
from twin.catalogue import ConfigError
from twin.config import load_site, make_engine, make_policies, read_yaml, uncooled
from twin.config.engine import make_model, packaged_profiles, profile_path
from twin.site import ModelEntry, SiteFile
from twin.site.file import PolicyEntry

ROOT = Path(__file__).parents[2]
# Libraries of statistics and learning: workers alone import them.
STATISTICS = ("sklearn", "statsmodels", "pandas", "scipy", "torch", "matplotlib")


class Third(policies.REGISTRY["operator"]):  # type: ignore[misc, name-defined]
    """A third party's policy, named in a site file as module:Class."""

    name = "third"

    def __init__(self, gain: float = 1.0) -> None:
        self.gain = gain


@pytest.mark.parametrize(
    "content, what",
    [
        (b"\xff", "is not UTF-8"),
        (b"a: [1", "line 2, column 1"),
        (b"a: b: c", "line 1, column 5"),
        (b"\0", "byte 0 is no text; expected YAML"),
        (b'a: 1\nb: {c: 1, d: 2,\n  "c": 3}', "line 3, column 3: the key 'c' is already in line 2"),
        (b"!!python/object:os.system {}", "could not determine a constructor"),
    ],
)
def test_what_is_no_yaml_is_told_with_its_place(tmp_path: Path, content: bytes, what: str) -> None:
    path = tmp_path / "site.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"site\.yaml") as told:
        read_yaml(path)
    assert what in str(told.value)


def test_a_key_of_an_anchor_may_be_overridden(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\nc: *a\n")
    assert read_yaml(path) == {"a": {"x": 1, "y": 2}, "b": {"x": 3, "y": 2}, "c": {"x": 1, "y": 2}}
    with pytest.raises(ConfigError, match=r"bytes; expected at most 20"):
        read_yaml(path, 20)


def test_a_number_with_an_exponent_needs_no_sign(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text("[4.0e6, -1.5E3, 4.0e+6, 4.0e-6, 7e3, v4.0e6]\n")
    assert read_yaml(path) == [4e6, -1500.0, 4e6, 4e-6, "7e3", "v4.0e6"]


def test_racks_made_for_liquid_that_no_cdu_serves_are_told(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    rack = "{name: 'r[1-2]', profile: gb200-nvl72, nodes: 1}"
    for cdus, told in (("", ["lab/h/r1, lab/h/r2"]),
                       (", cdus: [{name: c, serves: [r1]}]", ["serves lab/h/r2,"]),
                       (", cdus: [{name: c, serves: ['r[1-2]']}]", [])):  # fmt: skip
        path.write_text(f"site: lab\nhalls: [{{name: h, racks: [{rack}]{cdus}}}]\n")
        found = uncooled(load_site(path)[1])
        assert len(found) == len(told)
        assert all(a in b for a, b in zip(told, found, strict=True))


def test_no_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_yaml(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_yaml(tmp_path)


def test_profiles_beside_the_site_file_come_first(tmp_path: Path) -> None:
    packaged = profile_path("gb200-nvl72", tmp_path)
    assert packaged is not None
    assert "gb200-nvl72" in packaged_profiles()
    (tmp_path / "profiles").mkdir()
    own = tmp_path / "profiles" / "gb200-nvl72.yaml"
    own.write_bytes(packaged.read_bytes())
    assert profile_path("gb200-nvl72", tmp_path) == own
    for name in ("", "../profiles/gb200-nvl72", ".hidden", "none"):
        assert profile_path(name, tmp_path) is None


def test_all_faults_of_a_site_are_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text("site: lab\nhalls: [{name: h, racks: [{name: r, profile: nope}]}]\nhistory_s: {a.b: 1}\n")
    with pytest.raises(ConfigError) as told:
        load_site(path)
    assert len(told.value.problems) == 2
    assert "'nope'" in told.value.problems[0]
    assert "a.b" in told.value.problems[1]


def test_all_registered_plug_ins_are_made_at_advise() -> None:
    chosen, authority = make_policies(SiteFile(site="lab"))
    assert [p.name for p in chosen] == list(policies.REGISTRY)
    assert set(authority.values()) == {"advise"}


def test_the_site_file_sets_authority_and_adds_policies() -> None:
    entries = {
        "operator": PolicyEntry(authority="off"),
        "third": PolicyEntry(kind=f"{__name__}:Third", settings={"gain": 2.0}),
    }
    chosen, authority = make_policies(SiteFile(site="lab", policies=entries))
    assert authority["operator"] == "off"
    assert {p.name for p in chosen} == {*policies.REGISTRY, "third"}


@pytest.mark.parametrize(
    "entry, what",
    [
        (PolicyEntry(), "is not registered; expected"),
        (PolicyEntry(kind="no.such:Thing"), "cannot load no.such:Thing"),
        (PolicyEntry(kind="os:nothing"), "expected module:Class"),
        (PolicyEntry(kind=":"), "cannot load"),
        (PolicyEntry(kind="operator", settings={"gain": 1.0}), r"there is no .gain.; expected none"),
    ],
)
def test_policies_that_cannot_be_made(entry: PolicyEntry, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        make_policies(SiteFile(site="lab", policies={"x": entry}))


def test_settings_of_a_model() -> None:
    entry = ModelEntry(signals=["gpu.power_w"], horizons_s=[30.0], settings={"fit_every_s": 60})
    model = make_model("persistence", entry)
    assert model.fit_every_s == 60.0
    assert models.REGISTRY["persistence"].fit_every_s != 60.0, "the class itself must not change"
    assert getattr(model, "signals", None) == ("gpu.power_w",)
    for bad in ({"fit_every_s": -1}, {"fit_every_s": "soon"}, {"nothing": 1.0}):
        with pytest.raises(ConfigError, match=r"\$.models.persistence.settings"):
            make_model("persistence", ModelEntry(settings=bad))  # type: ignore[arg-type]


def test_authority_given_by_hand_wins(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text("site: lab\npolicies: {operator: {authority: act}}\n")
    _, site = load_site(path)
    assert make_engine(site).intake.authority["operator"] == "act"
    assert make_engine(site, {"operator": "off"}).intake.authority["operator"] == "off"


@pytest.mark.long
@pytest.mark.parametrize(
    "module, unwanted",
    [
        ("twin.engine, policies, models", (*STATISTICS, "asyncio", "rich")),
        ("twin.cli.main", (*STATISTICS, "numpy", "yaml", "asyncio")),
        ("twin.run.replay", ("aiomqtt", "aiohttp", "rich")),
        ("twin.daemon.daemon", (*STATISTICS, "influxdb_client", "rich")),
    ],
)
def test_what_an_import_must_not_pull_in(module: str, unwanted: tuple[str, ...]) -> None:
    """Starting stays quick, and a tick can never reach a library of statistics or an event loop."""
    assert loaded_after(f"import {module}", unwanted) == []


def loaded_after(code: str, unwanted: tuple[str, ...]) -> list[str]:
    """Return those of these modules that a fresh process has loaded after it ran this code."""
    code = f"{code}\nimport sys; print('loaded', *sorted({set(unwanted)!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.splitlines()[-1].split()[1:]


@pytest.mark.long
def test_a_daemon_that_loads_its_site_imports_no_statistics() -> None:
    """With every model that is registered, and an engine as the daemon has it.

    Ruff's rule TID253 forbids such an import at the top of any other file.
    """
    code = """
import twin.cli.replay, twin.daemon.daemon, twin.run.fitting
from pathlib import Path
from twin.cli.main import main
from twin.config.engine import load_site, make_engine
assert main(["daemon", "check", "--config", "deploy/config/lab.yaml"]) == 0
make_engine(load_site(Path("deploy/sites/lab.yaml"))[1])
import models
from twin.config.engine import make_model
from twin.site.file import ModelEntry
for name in models.REGISTRY:
    signal = "node.failure_pu" if name == "failure" else "gpu.power_w"
    entry = ModelEntry() if name == "power_curve" else ModelEntry(signals=[signal], horizons_s=[3600.0])
    make_model(name, entry)
"""
    assert loaded_after(code, STATISTICS) == []
