"""Site change: what reported on the bus but is missing in a site's file, as a change of its text for a
person.

Only additions are proposed: racks, CDUs, feeders and loops that the file does not name, whom they serve, and
profiles that are missing. A report never removes or corrects what a person wrote.
"""

from __future__ import annotations

import difflib
import hashlib
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from connectors.dsx import Described, discover_points
from twin.catalogue import ConfigError, clean
from twin.config import packaged_profiles, read_yaml, spec_of
from twin.site import Profile, Site, build_site, expand, parse_profile
from twin.wiring.site_text import SiteText, items
from twin.wiring.survey import natural, tree_of_paths

MAX_NOTES = 100
NO_PROFILE = "none"
TOGETHER = "but the file describes it together with others: add that by hand to"
LOOK = "look at it, its limits follow from that"
UNGUARDED = "without a profile nothing guards it"


@dataclass(frozen=True)
class SelfDescription:
    """All that describes a site on the bus: points of the BMS, and paths of agents that the site has not."""

    points: list[Described] = field(default_factory=list)
    paths: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class SiteChange:
    """A change of a site file. `problems`: why it cannot be made; `notes`: what a person should check."""

    path: Path
    before: str
    after: str
    profile: str
    profiles: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """Identity of the text that it leads to, and of the one that it starts from."""
        return hashlib.sha256(f"{self.before}\0{self.after}".encode()).hexdigest()[:16]

    def diff(self) -> str:
        """As a unified diff; empty where nothing is to be added."""
        name = self.path.name
        rows = difflib.unified_diff(
            self.before.splitlines(), self.after.splitlines(), name, name, "as it stands",
            "with what reports", lineterm="",
        )  # fmt: skip
        return "".join(f"{row}\n" for row in rows)

    def added(self) -> list[str]:
        """The new lines."""
        return [row[1:] for row in self.diff().splitlines()[2:] if row[:1] == "+"]


def propose(path: Path, description: SelfDescription, profile: str | None = None) -> SiteChange:
    """The change of a site file by what reports. `profile`: of new racks; None: as all others have.

    Raises ConfigError where no such profile is known.
    """
    try:
        tree = read_yaml(path)
        before = path.read_bytes().decode("utf-8")
        site = build_site(spec_of(tree, path.parent, str(path)), str(path))
    except ConfigError as error:  # the daemon goes on with the file of before
        return SiteChange(path, "", "", NO_PROFILE, problems=list(error.problems))
    own = sorted({p for p in site.profile_of_rack if p is not None})
    choices = [*own, *(p for p in packaged_profiles() if p not in own), NO_PROFILE]
    if profile is not None and profile not in choices:
        raise ConfigError(f"profile {clean(profile, 60)!r}: expected one of {', '.join(choices)}")
    chosen = profile or (own[0] if len(own) == 1 else NO_PROFILE)
    addition = Addition(site, tree, SiteText(before), path, chosen)
    addition.take(description)
    after = addition.text.text() if addition.lines else before
    return SiteChange(
        path, before, after, chosen, choices, addition.notes[:MAX_NOTES], _problems(path, after, tree)
    )


def _problems(path: Path, after: str, expected: Any) -> list[str]:
    """Return the problems of the new text: it differs from the expected site, or describes no valid site."""
    with tempfile.TemporaryDirectory(prefix="racktwin-site-") as folder:
        (Path(folder) / path.name).write_text(after, encoding="utf-8")
        try:
            is_meant = read_yaml(Path(folder) / path.name) == expected
        except ConfigError:
            is_meant = False
    if not is_meant:
        return [
            f"{path.name}: its form (anchors, or keys that are there twice) does not let lines be added by a "
            "program; add them by hand"
        ]
    try:
        build_site(spec_of(expected, path.parent, path.name), path.name)
    except ConfigError as error:
        return list(error.problems)
    return []


class Addition:
    """Everything that is added, to the tree of the file and to its text alike."""

    def __init__(self, site: Site, tree: dict[str, Any], text: SiteText, path: Path, profile: str) -> None:
        self.site, self.tree, self.text, self.path = site, tree, text, path
        self.layout = _layout(profile, path)
        whole = self.layout is not None and self.layout.layout.racks.value == 1  # fills racks one by one
        self.profile = profile if whole else None
        self.notes: list[str] = []
        self.lines = 0
        self.known = {
            t: {n.rpartition("/")[2] for n in (*site.names[t], *site.elsewhere)}
            for t in ("rack", "cdu", "feeder", "loop")
        }
        self.new: dict[str, set[str]] = {t: set() for t in self.known}
        self.halls: dict[str, int] = {}
        for i, hall in enumerate(tree.get("halls") or []):
            self.halls |= dict.fromkeys(expand(hall["name"]), i)
        self._appends: dict[tuple[int | None, str], list[Any]] = {}  # hall of the file, list -> rows
        self._serves: dict[tuple[int | None, str, int], list[str]] = {}  # ..., its entry -> names
        self._new_halls: dict[str, dict[str, Any]] = {}

    def take(self, description: SelfDescription) -> None:
        """Add all that reports and is not named, and profiles that are missing."""
        agents = tree_of_paths(
            {p: n for p, n in description.paths.items() if p.split("/")[0] == self.site.file.site}
        )
        if strange := {p.split("/")[0] for p in description.paths} - {self.site.file.site}:
            self.notes.append(f"agents speak for other sites too: {', '.join(sorted(strange)[:5])}")
        drafts = [agents.site] if agents is not None else []
        if description.points:
            drafts.append(discover_points(description.points, self.site.file.site).site)
        for kind, key in (("loop", "loops"), ("rack", "racks"), ("cdu", "cdus"), ("feeder", "feeders")):
            for draft in drafts:
                self.new[kind] |= {row["name"] for _, row in _rows(draft, key)} - self.known[kind]
        for draft in drafts:
            for hall, row in _rows(draft, "racks"):
                # An agent says in which hall its rack stands, a BMS may not
                full = f"{self.site.file.site}/{hall}/{row['name']}"
                if agents is not None and draft is agents.site:
                    rack = self.site.entity("rack", full)
                    self._add_rack(rack, row) if rack is not None else self._new_rack(hall, row)
                elif row["name"] not in self.known["rack"]:
                    self._new_rack(hall, row)
            for hall, row in _rows(draft, "loops"):
                if row["name"] not in self.known["loop"]:
                    self._append(hall, "loops", row)
            for kind, key in (("cdu", "cdus"), ("feeder", "feeders")):
                for hall, row in _rows(draft, key):
                    self._server(kind, key, hall, row)
        self._write()
        self._profiles()

    def _add_rack(self, rack: int, row: dict[str, Any]) -> None:
        starts = self.site.node_start_of_rack
        nodes = int(starts[rack + 1] - starts[rack])
        if row.get("nodes", 0) > nodes:
            last = f"an agent speaks for node{row['nodes'] - 1}"
            self.notes.append(f"rack {row['name']} has {nodes} nodes in the file; {last}")

    def _new_rack(self, hall: str | None, row: dict[str, Any]) -> None:
        name, nodes, gpus = row["name"], row.get("nodes"), row.get("gpus_per_node")
        self.known["rack"].add(name)
        made = {"name": name}
        if self.profile is not None and (not gpus or gpus == getattr(self.layout, "gpus_per_node", gpus)):
            made["profile"] = self.profile
            self.notes.append(f"rack {name} is taken for {self.profile}: {LOOK}")
        elif nodes:
            made |= {"nodes": nodes, "gpus_per_node": gpus or 0}
            agents = f"agents of {nodes} nodes with {gpus or 0} GPUs each report"
            self.notes.append(f"rack {name}: {agents}; {UNGUARDED}")
        else:
            self.notes.append(f"rack {name}: nothing says what stands in it; {UNGUARDED}")
        self._append(hall, "racks", made | {k: row[k] for k in ("reports",) if k in row})

    def _server(self, kind: str, key: str, hall: str | None, row: dict[str, Any]) -> None:
        """A CDU or feeder: added, or given the new ones that it serves."""
        below = ("rack",) if kind == "cdu" else ("rack", "feeder")
        fresh = [n for n in row.get("serves", ()) if any(n in self.new[t] for t in below)]
        if row["name"] in self.new[kind]:
            if row["name"] in self.known[kind]:
                return
            self.known[kind].add(row["name"])
            free = [n for n in row.get("serves", ()) if n in fresh or self._is_free(kind, n)]
            loops = self.new["loop"].union(n.rpartition("/")[2] for n in self.site.names["loop"])
            made = {k: v for k, v in row.items() if k != "loop" or v in loops}
            self._append(hall, key, made | {"serves": free})
        elif fresh:
            self._serve(kind, key, row["name"], fresh)

    def _is_free(self, kind: str, name: str) -> bool:
        """True if the file lets one more serve it: a rack has one CDU, a feeder one above it."""
        site = self.site
        rack, feeder = site.entity("rack", name), site.entity("feeder", name)
        if kind == "cdu":
            return rack is not None and site.cdu_of_rack[rack] < 0
        return rack is not None or (feeder is not None and site.parent_of_feeder[feeder] < 0)

    def _serve(self, kind: str, key: str, name: str, fresh: list[str]) -> None:
        """Let a CDU or feeder of the file serve what is new."""
        places: list[tuple[int | None, list[Any]]] = [(None, self.tree.get(key) or [])]
        places += [(i, hall.get(key) or []) for i, hall in enumerate(self.tree.get("halls") or [])]
        for hall, groups in places:
            for i, group in enumerate(groups):
                if name not in expand(group["name"]):
                    continue
                if expand(group["name"]) == [name]:
                    known = self._serves.setdefault((hall, key, i), [])
                    known += [n for n in fresh if n not in known]
                else:
                    served = ", ".join(fresh[:5])
                    self.notes.append(f"{kind} {name} serves {served} too, {TOGETHER} {group['name']}")
                return

    def _append(self, hall: str | None, key: str, row: dict[str, Any]) -> None:
        """A row of a list, of this hall of the draft or of the whole site."""
        if hall is None:
            self._appends.setdefault((None, key), []).append(row)
            return
        at = self.halls.get(hall)
        if at is None and hall == "hall1" and self.tree.get("halls"):
            at = 0  # it is discovery's name where nothing names one
        if at is None:
            new = self._new_halls.setdefault(hall, {"name": hall})
            new.setdefault(key, []).append(row)
        elif len(expand(self.tree["halls"][at]["name"])) > 1:
            group = self.tree["halls"][at]["name"]
            self.notes.append(f"{row['name']} stands in {hall}, {TOGETHER} {group}")
        else:
            self._appends.setdefault((at, key), []).append(row)

    def _owner(self, hall: int | None) -> tuple[dict[str, Any], yaml.MappingNode]:
        """A hall of the file, or the whole, in the tree and in the text."""
        if hall is None:
            return self.tree, self.text.root
        return self.tree["halls"][hall], items(self.text.root, "halls")[hall]

    def _write(self) -> None:
        """Put the rows into the tree and into the text."""
        if self._new_halls:
            self._appends[None, "halls"] = list(self._new_halls.values())
        for (hall, key), rows in self._appends.items():
            rows.sort(key=lambda row: natural(row["name"]))
            tree, node = self._owner(hall)
            self.text.append(node, key, rows)
            tree[key] = [*(tree.get(key) or []), *rows]
            self.lines += len(rows)
        for (hall, key, i), names in self._serves.items():
            tree, node = self._owner(hall)
            names.sort(key=natural)
            self.text.append(items(node, key)[i], "serves", names)
            group = tree[key][i]
            group["serves"] = [*(group.get("serves") or []), *names]
            self.lines += 1

    def _profiles(self) -> None:
        """Profiles for groups of the file that have GPUs and none: of the one type that has this layout."""
        for at, hall in enumerate(self.tree.get("halls") or []):
            if at >= len(items(self.text.root, "halls")):
                break  # what follows is new
            old = items(items(self.text.root, "halls")[at], "racks")
            for node, group in zip(old, hall.get("racks") or [], strict=False):
                if group.get("profile") or not (group.get("nodes") and group.get("gpus_per_node")):
                    continue
                fitting = self._fitting(group["nodes"], group["gpus_per_node"])
                layout = f"its {group['nodes']} nodes of {group['gpus_per_node']} GPUs"
                if len(fitting) == 1:
                    self.text.fill(node, "profile", fitting[0])
                    group["profile"] = fitting[0]
                    self.lines += 1
                    self.notes.append(f"{group['name']} gets {fitting[0]}, which has {layout}: {LOOK}")
                else:
                    known = f"{', '.join(fitting)} have" if fitting else "no profile has"
                    self.notes.append(f"{group['name']}: {UNGUARDED}; {known} {layout}")

    def _fitting(self, nodes: int, gpus: int) -> list[str]:
        """The profiles of one rack that have this layout; the chosen one alone if it is among them."""
        own = {p for p in self.site.profile_of_rack if p is not None}
        found = []
        for name in sorted({*own, *packaged_profiles()}):
            layout = _layout(name, self.path)
            if layout and (layout.nodes, layout.gpus_per_node, layout.layout.racks.value) == (nodes, gpus, 1):
                found.append(name)
        return [self.profile] if self.profile in found else found


def _layout(name: str, path: Path) -> Profile | None:
    """A profile by its name; None for none."""
    if name == NO_PROFILE:
        return None
    tree = {"site": "s", "halls": [{"name": "h", "racks": [{"name": "r", "profile": name}]}]}
    return parse_profile(spec_of(tree, path.parent, str(path)).profiles[name], name)


def _rows(draft: dict[str, Any], key: str) -> list[tuple[str | None, dict[str, Any]]]:
    """(hall, row) of a list of a draft; of the whole site first, in the hall None."""
    rows: list[tuple[str | None, dict[str, Any]]] = [(None, row) for row in draft.get(key) or []]
    for hall in draft["halls"]:
        rows += [(hall["name"], row) for row in hall.get(key) or []]
    return rows
