"""Job registration: a job states its nodes and its kind, for the length of a lease.

Where no scheduler reports a job, its client does. It says which nodes it has and its kind, nothing that
gives it rights over others. The registration is a lease: it lapses when its client has not asked for so long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from connectors.slurm import expand_hosts, find_node
from twin.catalogue import BadMessage, clean
from twin.telemetry import JobStarted, NamedSite

LEASE_S, LEAST_LEASE_S, MOST_LEASE_S = 600.0, 60.0, 86_400.0
MAX_REGISTERED_NODES = 10_000  # of one job
MAX_OF_TENANT = 64  # jobs that one token has registered at once, or within START_S. source: estimate
START_S = 600.0  # for which a slot rests after its job


class JobRegistration(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A job registers itself. `nodes`: names of hosts, or lists of them as Slurm has them: gpu[001-004]."""

    nodes: Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_REGISTERED_NODES)]
    kind: Literal["training", "inference", "batch"] = "training"
    lease_s: Annotated[float, msgspec.Meta(ge=LEAST_LEASE_S, le=MOST_LEASE_S)] = LEASE_S
    storage: Annotated[str, msgspec.Meta(max_length=200)] = ""  # file system of the site that it saves to


def nodes_of(site: NamedSite, registration: JobRegistration) -> tuple[int, ...]:
    """Return the nodes that a job names, ascending. Raises BadMessage with the first few outside the site."""
    try:
        hosts = [host for text in registration.nodes for host in expand_hosts(text)]
    except ValueError as error:
        raise BadMessage(f"nodes: {error}") from None
    if not 0 < len(hosts) <= MAX_REGISTERED_NODES:
        raise BadMessage(f"nodes: {len(hosts)} hosts; expected 1 to {MAX_REGISTERED_NODES}")
    found = {host: find_node(site, host) for host in hosts}
    strangers = [host for host, node in found.items() if node is None]
    if strangers:
        named = ", ".join(clean(host, 60) for host in strangers[:3]) + (" ..." if len(strangers) > 3 else "")
        raise BadMessage(
            f"nodes: this site has no node {named}; expected names of its site file, such as "
            f"{site.name('node', 0)}: ask the operator for the names of your hosts"
        )
    return tuple(sorted({node for node in found.values() if node is not None}))


def start_of(
    identity: str, job: str, tenant: str, nodes: tuple[str, ...], registration: JobRegistration
) -> JobStarted:
    """Return the start of a self-registered job."""
    return JobStarted(
        id=f"registered/{identity}",
        job=job,
        nodes=nodes,
        kind=registration.kind,
        tenant=tenant,
        lease_s=registration.lease_s,
        storage=registration.storage,
    )


class JobLeases:
    """Instants at which jobs renewed their own registration, and tokens started some, in seconds of a
    clock that the caller reads.
    """

    def __init__(self) -> None:
        self._renewed_s: dict[str, float] = {}
        self._started_s: dict[str, deque[float]] = {}  # by token: no more than there are in its file

    def may_start(self, token: str, now_s: float) -> bool:
        """Return True, and count it, if a token may register a job: `MAX_OF_TENANT` times in `START_S`."""
        started_s = self._started_s.setdefault(token, deque(maxlen=MAX_OF_TENANT))
        if len(started_s) == MAX_OF_TENANT and now_s - started_s[0] < START_S:
            return False
        started_s.append(now_s)
        return True

    def renew(self, job: str, now_s: float) -> None:
        """Renew the lease of a job whose client reported."""
        self._renewed_s[job] = now_s

    def lapsed(self, leased: Mapping[str, float], now_s: float) -> list[str]:
        """Return the jobs of `leased` (name -> lease, s) whose client has been silent for longer than its
        lease.

        One that is new here, as after a restart of the daemon, has its whole lease from now on.
        """
        self._renewed_s = {job: self._renewed_s.get(job, now_s) for job in leased}
        return [job for job, lease_s in leased.items() if now_s - self._renewed_s[job] > lease_s]
