"""Policy accounts: the running accounts that policies keep for their explanations, each in a small file.

Shows each account the site every few seconds, writes it every few minutes, and keeps the policies' sections
of the overview. Policies take turns, so that ticks and requests wait for one of them at the most.
"""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

from twin.api import Runtime
from twin.catalogue import TwinError, clean
from twin.contracts import Explainer, Explanation, Policy, PolicyAccount
from twin.engine import Inquiry, explain, request_of, topics_of
from twin.run import atomic_write

log = logging.getLogger(__name__)
LOOK_S, WRITE_S = 5.0, 300.0
PAGE_ROWS, PAGE_FIGURES = 8, 12  # of a section


class PolicyAccounts:
    """The accounts of a daemon's policies. `folder`: where they are kept; None: nowhere."""

    def __init__(self, live: Runtime, folder: Path | None = None) -> None:
        self.live, self.folder = live, folder
        self._policies: dict[str, Policy] = {}  # that the accounts were made for
        self._sections: dict[str, Explanation] = {}  # by policy
        self.adopt()

    def adopt(self) -> None:
        """Create the account of every policy that keeps one. The account of a recreated policy continues."""
        for policy in self.live.engine.policies:
            make = getattr(policy, "account", None)
            if make is None or self._policies.get(policy.name) is policy:
                continue
            previous = self.live.accounts.get(policy.name)
            account: PolicyAccount = make(previous)
            self.live.accounts[policy.name], self._policies[policy.name] = account, policy
            if previous is None and self.folder is not None:
                read_account(account, self.folder / f"{account.name}.json")

    async def run(self) -> None:
        """Look every few seconds, write every few minutes, until cancelled."""
        unwritten_s = 0.0
        try:
            while True:
                self.adopt()
                policies = tuple(self.live.engine.policies)
                for policy in policies:
                    await asyncio.sleep(LOOK_S / len(policies))
                    if policy in self.live.engine.policies:  # no other was loaded meanwhile
                        self._look(policy)
                await asyncio.sleep(0.0 if policies else LOOK_S)
                unwritten_s += LOOK_S
                if unwritten_s >= WRITE_S:
                    unwritten_s = 0.0
                    for account, path in self._kept():
                        await asyncio.to_thread(write_account, account, path, account.dump())
        finally:
            for account, path in self._kept():
                write_account(account, path, account.dump())

    def observe(self) -> None:
        """Update every account from the site, and renew all sections of the overview."""
        self.adopt()
        for policy in self.live.engine.policies:
            self._look(policy)

    def _look(self, policy: Policy) -> None:
        """Update the account of a policy from the site, and renew its section of the overview."""
        live, account = self.live, self.live.accounts.get(policy.name)
        if account is not None:
            try:
                request = request_of(live.engine, policy, Inquiry(role=live.role, account=account))
                account.observe(live.engine.view(), request)
            except Exception as error:
                account.problem = f"{policy.name} cannot keep its account: {type(error).__name__}"
                log.warning("%s: %s", account.problem, clean(str(error), 200))
        section = page_section(live, policy)
        named = {p.name for p in live.engine.policies}
        others = {name: found for name, found in self._sections.items() if name in named - {policy.name}}
        self._sections = others if section is None else others | {policy.name: section}
        live.sections = [self._sections[p.name] for p in live.engine.policies if p.name in self._sections]

    def _kept(self) -> list[tuple[PolicyAccount, Path]]:
        if self.folder is None:
            return []
        return [(a, self.folder / f"{a.name}.json") for a in self.live.accounts.values()]


def page_section(live: Runtime, policy: Policy) -> Explanation | None:
    """The section of a policy on the overview, bounded; None for one that does not explain itself."""
    if not isinstance(policy, Explainer):
        return None
    topic = "page" if any(t.name == "page" for t in topics_of(policy)) else ""
    try:
        found = explain(
            live.engine, policy, Inquiry(topic=topic, role=live.role, account=live.accounts.get(policy.name))
        )
    except TwinError as error:
        log.debug("page: %s", error)
        return None
    return found.shortened(PAGE_ROWS, PAGE_FIGURES) if isinstance(found, Explanation) else None


def read_account(account: PolicyAccount, path: Path) -> None:
    """Restore an account from its file; a file that cannot be read is put aside."""
    try:
        tree: Any = json.loads(path.read_text(encoding="utf-8"))
        account.restore(tree)
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        aside, why = path.with_name(f"{path.name}.unread"), clean(str(error), 120)
        account.problem = f"{path.name} could not be read ({why}): kept as {aside.name}, begun anew"
        log.warning("account: %s", account.problem)
        try:
            path.replace(aside)
        except OSError:
            log.warning("account: %s cannot be moved aside; it will be overwritten", path.name)


def write_account(account: PolicyAccount, path: Path, tree: dict[str, Any]) -> None:
    """Write an account's file whole."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps(tree), sync=False)
        account.problem = ""
    except OSError as error:
        account.problem = f"{path}: cannot be written: {error.strerror}"
        log.warning("account: %s", account.problem)
