"""Reloading: a new configuration taken over while the daemon runs, whole or not at all.

A faulty one is refused and the old one stays. What cannot change in a running process is refused too, by
name. Part of the shell.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast

from twin.app.config import load_config
from twin.app.opening import load_checked
from twin.errors import ConfigError, TwinError
from twin.events import AuthorityChanged, Event, SiteChanged
from twin.site import SiteSpec
from twin.sitefile import SiteFile

if TYPE_CHECKING:
    from twin.app.daemon import Daemon

log = logging.getLogger(__name__)
# What a process begins with and keeps.
FIXED = ("state", "tick_s", "leader", "simulated", "embedded_port")
LINKS = ("broker", "scrapes", "jobs", "kubernetes", "burn_in", "redfish", "dcmi", "power")


class Reloading:
    """SIGHUP, and the interface's `reload`."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self._busy = False

    async def reload(self, author: str) -> list[str]:
        """Take over the file as it is now; the problems, none if it holds. `author` is in the journal."""
        if self._busy or self.daemon.live.stopping:
            return ["the daemon stops" if self.daemon.live.stopping else "a reload is under way"]
        self._busy = True
        daemon = self.daemon
        daemon.notify.reloading()
        try:
            problems = await self._take_over(author)
        except (ConfigError, TwinError) as error:
            problems = list(error.problems) if isinstance(error, ConfigError) else [str(error)]
        finally:
            self._busy = False
            daemon.notify.ready("reloaded")
        if problems:
            log.error("the new configuration is refused, the old one stays: %s", "; ".join(problems[:5]))
            daemon.alarms.condition("reload", "warning", "A new configuration was refused",
                                    tuple(problems[:8]), "Mend the file and reload.")  # fmt: skip
        else:
            log.info("configuration reloaded")
            daemon.alarms.clear("reload")
        daemon.live.note("reload", {"author": author, "refused": problems[:20]})
        return problems

    async def _take_over(self, author: str) -> list[str]:
        daemon, old = self.daemon, self.daemon.loaded.config
        loaded = load_config(daemon.loaded.path)
        spec, site, configured = load_checked(loaded)
        new = loaded.config
        problems = [
            f"{loaded.path}: $.{name}: cannot change while the daemon runs; restart it"
            for name in FIXED
            if getattr(new, name) != getattr(old, name)
        ]
        if (new.broker == "embedded") != (old.broker == "embedded"):
            problems.append(f"{loaded.path}: $.broker: embedded or not cannot change; restart the daemon")
        problems += _plug_ins_differ(daemon.engine.site.file, site.file, str(loaded.file(new.site)))
        if problems:
            return problems
        # Whatever can be refused is refused here, before anything is touched.
        prepared = daemon.services.prepare(loaded, site)
        before = dict(daemon.authority.levels)
        daemon.authority.reconfigure(configured)
        changed = site.spec_hash != daemon.inflow.site.spec_hash
        links = changed or any(getattr(new, name) != getattr(old, name) for name in LINKS)
        async with daemon.between:  # not while a tick is in flight: its commands speak of the old site
            if daemon.live.stopping:
                return ["the daemon stops"]
            if links:
                await daemon.services.stop_links()
            daemon.loaded = daemon.live.loaded = loaded
            self._follow(spec, changed, before, author)
            if links:
                daemon.services.start_links(prepared)
        await daemon.services.reconfigure(old, new, prepared)
        return []

    def _follow(self, spec: SiteSpec, changed: bool, before: dict[str, str], author: str) -> None:
        daemon = self.daemon
        events: list[Event] = []
        if changed:
            events.append(SiteChanged(site_hash=spec.digest(), spec=spec.packed()))
            daemon.opened.spec = spec
        if daemon.leading.term is not None:
            for policy, level in daemon.authority.levels.items():
                if before.get(policy) != level:
                    events.append(AuthorityChanged(author=author, policy=policy, authority=cast(Any, level)))
        daemon.put(events)
        daemon.services.history.change_site(daemon.inflow.site)


def _plug_ins_differ(old: SiteFile, new: SiteFile, path: str) -> list[str]:
    """Policies and models are made when the process starts."""
    out = []
    for kind in ("policies", "models"):
        a = {n: (e.kind, e.settings) for n, e in getattr(old, kind).items()}
        b = {n: (e.kind, e.settings) for n, e in getattr(new, kind).items()}
        out += [
            f"{path}: $.{kind}.{name}: kind and settings cannot change while the daemon runs; restart it"
            for name in sorted(a.keys() | b.keys())
            if a.get(name, (None, {})) != b.get(name, (None, {}))
        ]
    return out
