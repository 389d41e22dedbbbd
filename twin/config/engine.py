"""Engine wiring: from files to a site, and from a site to an engine with its policies and models.

It reads YAML, finds profiles (the packaged ones and `profiles/` beside the site file) and loads plug-ins
through the registries.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import models
import policies
from twin.catalogue import ConfigError, ContractError, clean, did_you_mean
from twin.contracts import Explanation, Model, Policy, Value
from twin.engine import Engine, Inquiry, explain, topics_of
from twin.site import (
    ModelEntry,
    Profile,
    Site,
    SiteFile,
    SiteSpec,
    build_site,
    convert,
    lapse_faults,
    parse_profile,
    share_faults,
)

MAX_YAML_BYTES = 64 * 2**20  # of a site file
MAX_SCENARIO_BYTES = 8 * 2**20  # twice what 10,000 faults with long paths need
_CURLED = re.compile("^[^#\n]*[:\\-\\[{,] *[“”„‘’]", re.M)  # where a value begins
UTF_16 = (b"\xff\xfe", b"\xfe\xff")  # its byte order marks
# Usual mistakes behind an error of libyaml
YAML_HINTS = (
    ("mapping values are not allowed", "check the indentation, and for a `:` without a space behind it in "
     "the line before"),
    ("did not find expected ',' or", "a bracket is not closed, or a name with [ ] or { } is not in quotes"),
    ("did not find expected key", "check the indentation, and quotes within quotes"),
    ("did not find expected '-'", "check the indentation: all items of a list begin in the same column"),
    ("could not find expected ':'", "a key without `:`, or a line that is not indented"),
    ("unknown escape character", "put a path with \\ in single quotes, or write it with /"),
    ("unhashable key", "{{ }} is a template that was not filled in"),
    ("cannot start any token", "put a value that begins with @, % or ` in quotes"),
    ("found another document", "one document only, without `---` in the middle"),
)  # fmt: skip
MAX_YAML_DEPTH, MAX_YAML_ALIASES = 50, 1000


class _Loader(yaml.CSafeLoader):
    """YAML loader. Refuses a key that occurs twice in a mapping: YAML forbids it, the last would win."""

    def construct_document(self, node: Any) -> Any:
        _each_key_once(node)
        return super().construct_document(node)


# 4.0e6 is a number, as in YAML 1.2; PyYAML wants a sign in the exponent
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+\.[0-9]*[eE][0-9]+$"), list("-+0123456789")
)


def _each_key_once(root: yaml.Node) -> None:
    """Raises ConstructorError with the place of the second one."""
    waiting: list[yaml.Node] = [root]
    seen: set[int] = set()  # an anchor's node stands in many places
    while waiting:
        node = waiting.pop()
        if isinstance(node, yaml.ScalarNode) or id(node) in seen:
            continue
        seen.add(id(node))
        if not isinstance(node, yaml.MappingNode):
            waiting += node.value
            continue
        keys: dict[tuple[str, str], int] = {}
        for key, value in node.value:
            waiting += (key, value)
            if not isinstance(key, yaml.ScalarNode):
                continue
            name = (key.tag, key.value)
            if name in keys:
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    f"the key {clean(key.value, 60)!r} is already in line {keys[name]}; "
                    "expected each key once",
                    key.start_mark,
                )
            keys[name] = key.start_mark.line + 1


def read_yaml(path: Path, max_bytes: int = MAX_YAML_BYTES) -> Any:
    """A parsed YAML file. Raises ConfigError naming file, line and column."""
    try:
        if path.stat().st_size > max_bytes:
            raise ConfigError(f"{path}: {path.stat().st_size} bytes; expected at most {max_bytes}")
        text = path.read_text(encoding="utf-8")
        if curled := _CURLED.search(text):
            line = text.count("\n", 0, curled.start()) + 1
            raise ConfigError(f"{path}: line {line}: typographic quotes; expected \" or ' around a value")
        _check_shape(path, text)
        return yaml.load(text, Loader=_Loader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        what = "is UTF-16, as Windows writes it" if error.object[:2] in UTF_16 else (
            f"byte {error.start} is not UTF-8")  # fmt: skip
        raise ConfigError(f"{path}: {what}; expected a YAML text file in UTF-8: save it as UTF-8") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "unknown position"
        if mark is not None and _is_tab(text, mark.line):
            raise ConfigError(f"{path}: {where}: a tab; expected spaces, as YAML is indented") from error
        problem = error.problem or error.context or ""
        tail = "" if "; expected" in problem else "; expected YAML"
        hint = next((f": {hint}" for words, hint in YAML_HINTS if words in problem), "")
        raise ConfigError(f"{path}: {where}: {problem}{tail}{hint}") from error
    except yaml.reader.ReaderError as error:
        raise ConfigError(f"{path}: byte {error.position} is no text; expected YAML") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: not readable as YAML: {str(error)[:200]}") from error


def _is_tab(text: str, number: int) -> bool:
    """Return True if a line is indented by a tab."""
    line = (text.splitlines()[number : number + 1] or [""])[0]
    return "\t" in line[: len(line) - len(line.lstrip())]


def _check_shape(path: Path, text: str) -> None:
    """Refuse what would cost far more to read than to write: deep nesting, and aliases that multiply."""
    depth = aliases = 0
    for event in yaml.parse(text, Loader=yaml.CSafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        aliases += isinstance(event, yaml.AliasEvent)
        if depth > MAX_YAML_DEPTH or aliases > MAX_YAML_ALIASES:
            line = event.start_mark.line + 1 if event.start_mark else 0
            raise ConfigError(
                f"{path}: line {line}: nested deeper than {MAX_YAML_DEPTH}, or more than {MAX_YAML_ALIASES} "
                "aliases; expected plain YAML"
            )


def profile_path(name: str, beside: Path | None) -> Path | None:
    """Path of a profile: beside the site file first, then among the packaged ones."""
    if not name or "/" in name or name.startswith("."):
        return None
    own = beside / "profiles" / f"{name}.yaml" if beside else None
    if own is not None and os.path.isfile(own):  # not Path.is_file: it raises where the name is too long
        return own
    packaged = Path(str(resources.files("twin") / "profiles" / f"{name}.yaml"))
    return packaged if os.path.isfile(packaged) else None


def packaged_profiles() -> list[str]:
    """Names of the profiles that come with racktwin."""
    return sorted(
        p.name[:-5]
        for p in resources.files("twin").joinpath("profiles").iterdir()
        if p.name.endswith(".yaml")
    )


def spec_of(tree: Any, beside: Path | None, file_name: str) -> SiteSpec:
    """The site's tree with the profiles that it names."""
    wanted = []
    halls = tree.get("halls") if isinstance(tree, dict) else None
    for hall in halls if isinstance(halls, list) else []:
        racks = hall.get("racks") if isinstance(hall, dict) else None
        for group in racks if isinstance(racks, list) else []:
            name = group.get("profile") if isinstance(group, dict) else None
            if isinstance(name, str) and name not in wanted:
                wanted.append(name)
    found: dict[str, dict[str, Any]] = {}
    problems = []
    for name in wanted:
        path = profile_path(name, beside)
        if path is None:
            problems.append(
                f"{file_name}: no profile {name!r}; expected one of {', '.join(packaged_profiles())} "
                f"or a file profiles/NAME.yaml beside the site file{did_you_mean(name, packaged_profiles())}"
            )
            continue
        profile_tree = read_yaml(path)
        try:
            parse_profile(profile_tree, str(path))
            found[name] = profile_tree
        except ConfigError as error:
            problems += error.problems
    if not isinstance(tree, dict):
        found_kind = "an empty file" if tree is None else f"a {type(tree).__name__}"
        problems.append(f"{file_name}: expected a mapping with `site` and `halls`, got {found_kind}")
    if problems:
        try:
            if isinstance(tree, dict):
                build_site(SiteSpec(tree, found), file_name)
        except ConfigError as error:
            # The build repeats that the profile is missing; only what is new is of use.
            problems += [p for p in error.problems if "no profile named" not in p]
        raise ConfigError(list(dict.fromkeys(problems)))
    return SiteSpec(tree, found)


def load_site(path: Path) -> tuple[SiteSpec, Site]:
    """The site of a file. Raises ConfigError with every fault."""
    spec = spec_of(read_yaml(path), path.parent, str(path))
    return spec, build_site(spec, str(path))


def uncooled(site: Site) -> list[str]:
    """Racks made for liquid that no CDU serves, in words; the plant simulates them as cooled by air."""
    dry = np.flatnonzero(site.design.liquid & (site.cdu_of_rack < 0))
    names = [site.name("rack", int(i)) for i in dry[:5]]
    more = f" and {len(dry) - 5} more racks" if len(dry) > 5 else ""
    note = f"no CDU serves {', '.join(names)}{more}, made for liquid: simulated as cooled by air"
    return [note] if names else []


def underfed(site: Site) -> list[str]:
    """Feeders whose budget is far below what their GPUs draw at their lowest caps: mostly kW for W."""
    least_w = np.zeros(site.sizes["rack"])
    np.add.at(least_w, site.rack_of_gpu, np.nan_to_num(site.envelopes["gpu.power_cap_w"].low))
    out = []
    for feeder in np.flatnonzero(np.isfinite(site.budget_w)).tolist():
        budget_w, needed_w = float(site.budget_w[feeder]), float(least_w[site.racks_below(feeder)].sum())
        if budget_w < needed_w / 8:  # it may share them with others
            out.append(
                f"{site.name('feeder', feeder)}: budget_w is {budget_w:g} W, and the GPUs below it draw "
                f"{needed_w:,.0f} W at their lowest caps; expected W: 120 kW is 120000"
            )
    return out[:5]


def unguarded(site: Site) -> list[str]:
    """Feeders without a budget, in words, with the line that each lacks."""
    bare = np.flatnonzero(~np.isfinite(site.budget_w) & ~site.external_budget)
    names = ", ".join(site.names["feeder"][i].rpartition("/")[2] for i in bare[:5].tolist())
    more = f" and {len(bare) - 5} more" if len(bare) > 5 else ""
    note = f"power_cap cannot guard feeders without a budget ({names}{more}): add what each may carry to its"
    return [f"{note} line of the site file, as in `budget_w: 160000` for 160 kW"] if len(bare) else []


def _plug_in(registry: dict[str, Any], name: str, kind: str | None, path: str) -> Any:
    """The class of a registered name or of `module:Class`."""
    wanted = kind or name
    if ":" in wanted:
        module, _, cls = wanted.partition(":")
        try:
            found = getattr(importlib.import_module(module), cls)
        except (Exception, SystemExit) as error:  # an import runs whatever the module does
            raise ConfigError(f"{path}: cannot load {wanted}: {error}; expected module:Class") from error
        if not isinstance(found, type) or not (hasattr(found, "propose") or hasattr(found, "predict")):
            raise ConfigError(
                f"{path}: {wanted} is neither a policy nor a model; see twin/contracts/contracts.py"
            )
        return found
    if wanted not in registry:
        raise ConfigError(
            f"{path}: {wanted!r} is not registered; expected {', '.join(sorted(registry))} or module:Class"
        )
    return registry[wanted]


def outside_plug_ins(file: SiteFile) -> list[str]:
    """The plug-ins of a site that are loaded by module name: code from outside racktwin."""
    kinds = [e.kind for e in file.policies.values()] + [e.kind for e in file.models.values()]
    return sorted({k for k in kinds if k is not None and ":" in k})


def _known(cls: type[Any], settings: dict[str, Any]) -> dict[str, Any]:
    """The same settings. Raises ContractError for a name that the plug-in's own code does not have."""
    of = inspect.signature(cls).parameters
    if any(p.kind is p.VAR_KEYWORD for p in of.values()):
        return settings
    strange = [name for name in settings if name not in of]
    if strange:
        known = ", ".join(sorted(name for name, p in of.items() if p.kind is not p.VAR_POSITIONAL))
        near = did_you_mean(strange[0], of)
        raise ContractError(f"there is no {strange[0]!r}; expected {known or 'none at all'}{near}")
    return settings


def make_policies(file: SiteFile) -> tuple[list[Policy], dict[str, str]]:
    """(policies, their authority): all registered ones at `advise`, as the site file changes that."""
    problems: list[str] = []
    chosen: list[Policy] = []
    authority: dict[str, str] = {}
    known = {**policies.REGISTRY, **policies.BY_NAME}
    for name in dict.fromkeys([*policies.REGISTRY, *file.policies]):
        entry = file.policies.get(name)
        try:
            cls = _plug_in(known, name, entry.kind if entry else None, f"$.policies.{name}")
            policy = cls(**_known(cls, entry.settings)) if entry and entry.settings else cls()
        except (Exception, SystemExit) as error:
            where = f"the site file: $.policies.{name}.settings"
            problems.append(str(error) if isinstance(error, ConfigError) else f"{where}: {error}")
            continue
        if policy.name in authority:
            problems.append(f"$.policies.{name}: there is a {policy.name!r} already; expected one entry each")
            continue
        chosen.append(policy)
        authority[policy.name] = entry.authority if entry else "advise"
    if problems:
        raise ConfigError(problems)
    return chosen, authority


def explain_topic(engine: Engine, topic: str, options: Mapping[str, Value] | None = None) -> Explanation:
    """Explain a topic by the first policy that has it: a running one, or else a registered one."""
    running: list[Policy] = [p for p in engine.policies if any(t.name == topic for t in topics_of(p))]
    if not running:
        running = [c() for c in policies.REGISTRY.values() if any(t.name == topic for t in topics_of(c))]
    if not running:
        raise ContractError(f"no policy explains {topic!r}")
    found = explain(engine, running[0], Inquiry(topic=topic, options=options or {}))
    return found if isinstance(found, Explanation) else found()


def make_model(name: str, entry: ModelEntry | None) -> Model:
    """A model with the signals, horizons and settings of its entry. Raises ConfigError."""
    path = f"$.models.{name}"
    cls = _plug_in(models.REGISTRY, name, entry.kind if entry else None, path)
    settings: dict[str, Any] = dict(entry.settings) if entry else {}
    fit_every_s = settings.pop("fit_every_s", None)
    if entry is not None and entry.signals:
        settings["signals"] = tuple(entry.signals)
    if entry is not None and entry.horizons_s:
        settings["horizons_s"] = tuple(entry.horizons_s)
    try:
        model: Model = cls(**_known(cls, settings))
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{path}.settings: {error}") from error
    if fit_every_s is not None:
        if not isinstance(fit_every_s, int | float) or fit_every_s < 0:
            raise ConfigError(f"{path}.settings.fit_every_s: expected seconds >= 0, got {fit_every_s!r}")
        model.fit_every_s = float(fit_every_s)  # type: ignore[misc]
    return model


def make_models(file: SiteFile) -> list[Model]:
    """The models that every site has, and those that this one names."""
    made: list[Model] = []
    problems: list[str] = []
    for name in dict.fromkeys([*models.DEFAULT, *file.models]):
        try:
            made.append(make_model(name, file.models.get(name)))
        except ConfigError as error:
            problems += error.problems
    names = [m.name for m in made]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        problems.append(f"$.models: two models are called {twice[0]!r}; expected one entry for each")
    if problems:
        raise ConfigError(problems)
    return made


def make_engine(site: Site, authority: dict[str, str] | None = None) -> Engine:
    """An engine for a site, with its own plug-ins. `authority` overrides the file's."""
    chosen, from_file = make_policies(site.file)
    return Engine(site, chosen, make_models(site.file), {**from_file, **(authority or {})})


def arming_faults(spec: SiteSpec, site: Site) -> list[str]:
    """Return the faults that forbid this site to run: guaranteed shares of halls that exceed a feeder, and,
    if a policy may act on power, the load that is left when all leases lapse."""
    armed = [name for name, entry in site.file.policies.items() if entry.authority in ("act", "approve")]
    if faults := share_faults(site):  # they apply whatever this daemon may do
        return faults
    if not armed or site.sizes["gpu"] == 0:
        return []
    profiles: dict[str, Profile] = {n: parse_profile(t, n) for n, t in spec.profiles.items()}
    return [f"armed ({', '.join(armed)}), but {fault}" for fault in lapse_faults(site, profiles)]


def site_faults(path: Path) -> tuple[Site | None, list[str]]:
    """(the site, if it can be built; every fault of its file, plug-ins and arming included)."""
    spec: SiteSpec | None = None
    site: Site | None = None
    faults: list[str] = []
    try:
        spec, site = load_site(path)
        file = site.file
    except ConfigError as error:
        faults = list(error.problems)
        try:
            file = convert(SiteFile, read_yaml(path), str(path))
        except ConfigError:
            return None, faults
    for check in (make_policies, make_models):
        try:
            check(file)
        except ConfigError as error:
            faults += [f"{path}: {fault}" for fault in error.problems]
    if spec is not None and site is not None:
        faults += [f"{path}: {fault}" for fault in arming_faults(spec, site)]
    return site, faults
