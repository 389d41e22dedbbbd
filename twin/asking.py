"""Asking: policies are asked in the order of their ranks; what they say, remember and account for is kept.

One that breaks its contract is suspended; its intervals hold until their leases end. May import the core;
called by the engine only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from twin.arbiter import MAX_PROPOSALS, check_proposal
from twin.contracts import Policy, Proposal, read_only
from twin.errors import ContractError
from twin.frame import NS, Frame
from twin.promises import checked_accounts, checked_memory
from twin.records import proposals_record, same_proposals
from twin.signals import find_control
from twin.view import EngineView

if TYPE_CHECKING:
    from twin.engine import Engine


def ask_policies(engine: Engine, view: EngineView, frame: Frame, records: list[dict[str, Any]]) -> None:
    """Ask all policies that are due; what they say differs from before goes to `records`."""
    for policy in engine.policies:
        name = policy.name
        if engine.intake.authority[name] == "off":
            if engine.in_force[name]:
                records.append(proposals_record(name, [], engine.in_force[name], engine.site, engine.jobs))
            engine.in_force[name] = []
            continue
        if name in engine.suspended:
            _retire(engine, policy, frame.now_ns)
            continue
        if (frame.urgent and not policy.urgent) or not (
            frame.urgent or engine.due(name, policy.period_s, frame.now_ns)
        ):
            continue
        if not frame.urgent:
            engine.ran_ns[name] = frame.now_ns
        try:
            proposals, accounts = _ask(engine, policy, view)
        except Exception as error:
            records += engine.suspend(name, error, frame.now_ns)
            continue
        if not same_proposals(proposals, engine.in_force[name]):
            records.append(proposals_record(name, proposals, engine.in_force[name], engine.site, engine.jobs))
        records += accounts
        # A policy may reuse its buffers: what was said is kept as it was said.
        engine.in_force[name] = [
            Proposal(p.control, p.index.copy(), p.lo.copy(), p.hi.copy(), p.want.copy(), p.reason)
            for p in proposals
        ]


def _ask(engine: Engine, policy: Policy, view: EngineView) -> tuple[list[Proposal], list[dict[str, Any]]]:
    """What one policy proposes, and accounts for; its memory is kept. Raises what it does wrong."""
    before = {k: read_only(v) for k, v in engine.memory[policy.name].items()}
    proposals, memory = policy.propose(view, before)
    if len(proposals) > MAX_PROPOSALS:
        raise ContractError(f"{len(proposals)} proposals; expected at most {MAX_PROPOSALS}")
    for p in proposals:
        control = find_control(p.control)
        check_proposal(p, policy.controls, engine.site.sizes[control.table] if control else 0)
    after = checked_memory(policy, memory, engine.site)
    tell = getattr(policy, "accounts", None)
    told = [] if tell is None else tell(view, before, {k: read_only(v) for k, v in after.items()})
    accounts = [
        {"kind": "account", "policy": policy.name, "account": account} for account in checked_accounts(told)
    ]
    engine.memory[policy.name] = after
    return proposals, accounts


def _retire(engine: Engine, policy: Policy, now_ns: int) -> None:
    """A suspended policy's intervals hold until their leases end."""
    since = engine.suspended[policy.name]
    engine.in_force[policy.name] = [
        p
        for p in engine.in_force[policy.name]
        if now_ns - since < round(cast(Any, find_control(p.control)).lease_s * NS)
    ]
