"""Growth of a site: adds racks beside an existing one, with the same feeds and cooling.

Of a group of CDUs or feeders that share racks in blocks one more rack would move all blocks. So a group that
gets new racks is written out, one entry for each, with what each serves.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from twin.site.build import build_site
from twin.site.design import Design
from twin.site.draft import shares
from twin.site.file import expand
from twin.site.site import Site, SiteSpec

PREFIX = "new"


def with_racks(
    tree: dict[str, Any], site: Site, beside: int, count: int, profile: str | None = None
) -> dict[str, Any]:
    """Return the tree of a site file with `count` more racks, of `profile` or of the type of the rack
    `beside`.

    They stand in its hall, and whatever feeds and cools it feeds and cools them. No other name changes.
    """
    out: dict[str, Any] = _written_out(tree)
    hall_at, group = _group_of(out, site.names["rack"][beside])
    hall = out["halls"][hall_at]
    name = f"{_free(site)}[1-{count}]"
    names = expand(name)
    same = profile in (None, group.get("profile"))
    kept = ("nodes", "gpus_per_node", "priority") if same else ("priority",)
    row = {key: group[key] for key in kept if group.get(key) is not None}
    chosen = profile or group.get("profile")
    hall["racks"].append({"name": name} | ({"profile": chosen} if chosen else {}) | row)
    if (cdu := int(site.cdu_of_rack[beside])) >= 0:
        _serve(hall, "cdus", site.names["cdu"][cdu].rpartition("/")[2], names)
    own = f"{site.file.site}/{expand(hall['name'])[0]}/"
    for feeder in site.feeders_of_rack.of_row(beside).tolist():
        path = site.names["feeder"][feeder]
        if path.startswith(own):
            _serve(hall, "feeders", path.rpartition("/")[2], names)
        else:
            _serve(out, "feeders", path.rpartition("/")[2], names)
    return out


def _written_out(value: Any) -> Any:
    """Return a copy without shared parts, which YAML anchors create."""
    if isinstance(value, dict):
        return {key: _written_out(part) for key, part in value.items()}
    return [_written_out(part) for part in value] if isinstance(value, list) else value


def grown_site(spec: SiteSpec, before: Site, name: str) -> Site:
    """Return the site with more racks; its CDUs and loops keep the design for the earlier ones."""
    site = build_site(spec, name)
    kept = {
        field.name: getattr(before.design, field.name)
        for field in fields(Design)
        if field.name.startswith(("cdu_", "loop_"))
    }
    site.design = replace(site.design, **kept)
    return site


def _group_of(tree: dict[str, Any], path: str) -> tuple[int, dict[str, Any]]:
    """The hall of the tree, and the group in it, that a rack is of. Raises ValueError where several halls
    are one entry.
    """
    _, hall_name, name = path.split("/")
    for at, hall in enumerate(tree["halls"]):
        if hall_name not in expand(hall["name"]):
            continue
        if len(expand(hall["name"])) > 1:
            raise ValueError(f"{hall['name']} describes several halls as one; expected {hall_name} by itself")
        for group in hall["racks"]:
            if name in expand(group["name"]):
                return at, group
    raise ValueError(f"{path}: no such rack in the file")


def _free(site: Site) -> str:
    """Return a prefix of names that no rack has."""
    taken = {name.rpartition("/")[2] for name in site.names["rack"]}
    prefix = PREFIX
    while any(name.startswith(prefix) for name in taken):
        prefix += "_"
    return prefix


def _serve(owner: dict[str, Any], key: str, name: str, racks: list[str]) -> None:
    """Let one of a list of CDUs or feeders also serve these racks."""
    rows: list[dict[str, Any]] = []
    for group in owner[key]:
        members = expand(group["name"])
        if name not in members:
            rows.append(group)
            continue
        served = [n for pattern in group.get("serves", []) for n in expand(pattern)]
        for member, share in zip(members, shares(served, len(members)), strict=True):
            rows.append(group | {"name": member, "serves": share + (racks if member == name else [])})
    owner[key] = rows
