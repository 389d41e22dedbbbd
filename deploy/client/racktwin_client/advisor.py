"""Advises a training job when to save a checkpoint, by the advice of racktwin but never dependent on it.

    advisor = Advisor("4711", "https://twin.example:8077", own_interval_s=1800)
    if advisor.due(step):  # at every step
        with advisor.saving(): save(step)

Without valid advice the job's own interval holds. One daemon thread does all input and output.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import random
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit

from racktwin_client.wires import MAX_ADVICE, FolderWire, HttpWire, Refusal

NS = 1_000_000_000
# Reports that wait, saves not yet durable, lines of log, characters of a problem
MAX_REPORTS, MAX_OPEN, MAX_SAID, MAX_TEXT = 64, 8, 50, 400
# Limits of the twin on reports; time for which advice is obeyed without a new one. source: estimate
MAX_INTERVAL_S, MAX_COST_S, MAX_PROGRESS_PER_S, MAX_LEASE_S = 1e7, 1e6, 1e6, 3600.0
TICK_S, MAX_BACKOFF_S, REPORT_S = 0.5, 300.0, 300.0  # the last: between reports, at most
FOR_GOOD = (400, 409, 413, 422)  # HTTP status of a report that will not be taken later either
_IMPORTED = time.monotonic()
_LOG = logging.getLogger("racktwin.client")


class StandingAdvice(NamedTuple):
    """Advice in force until `until`, in steady seconds. The advice of greater `order` replaces the other."""

    interval_s: float | None = None
    want: tuple[int, int] | None = None  # the name of a wish for a save begun at `since` or later
    since: float = math.inf
    until: float = math.inf
    order: tuple[int, int] = (-1, -1)  # (epoch, issued_ns)
    local_s: float | None = None  # between saves to memory


NOTHING = StandingAdvice()


def advice_of(payload: bytes, job: str, before: StandingAdvice, now: float, wall_ns: int) -> StandingAdvice:
    """Return the advice in force after a message. Raises ValueError for no advice, and for expired advice.

    Its instants count by their distance from `issued_ns`, from now on, so that clocks that differ do no harm.
    What has expired by this host's clock is refused all the same, for it may have lain somewhere.
    """
    advice = None
    with suppress(ValueError, RecursionError):
        advice = json.loads(payload) if len(payload) <= MAX_ADVICE else None
    if not isinstance(advice, dict) or advice.get("v") != 1 or advice.get("job") != job:
        raise ValueError(f"expected advice of version 1 for this job, at most {MAX_ADVICE} bytes of JSON")
    interval_s, local_s = advice.get("interval_s"), advice.get("local_interval_s")
    since_ns, said = advice.get("save_since_ns"), [x for x in (interval_s, local_s) if x is not None]
    if not all(type(x) in (int, float) and 0 < x <= MAX_INTERVAL_S for x in said):
        raise ValueError("interval_s, local_interval_s: expected seconds above 0, or null")
    instants: list[Any] = [advice.get(key) for key in ("issued_ns", "expires_ns", "epoch")]
    if not all(type(x) is int and 0 <= x < 2**62 for x in [*instants, 0 if since_ns is None else since_ns]):
        raise ValueError("instants and epoch: expected whole numbers below 2**62")
    issued_ns, expires_ns, epoch = instants
    if (epoch, issued_ns) <= before.order:
        return before
    lease_s = min((expires_ns - max(issued_ns, wall_ns)) / NS, MAX_LEASE_S)
    if expires_ns <= issued_ns:  # so it is said that there is none
        return StandingAdvice(order=(epoch, issued_ns))
    if lease_s <= 0:
        raise ValueError("this advice has expired by the clock of this host: set its clock (NTP)")
    want, since = None, math.inf
    if since_ns is not None:
        want, since = (epoch, since_ns), now - (issued_ns - since_ns) / NS
        if before.want == want:
            since = min(since, before.since)  # received earlier, so with less delay
    return StandingAdvice(interval_s, want, since, now + lease_s, (epoch, issued_ns), local_s)


class Pace:
    """Timing of the saves of one tier: a function of the steady seconds that are handed in.

    own_s, own_steps: when the job saves by itself. most_s: it never waits longer, nor for 4 times own_steps.
    Saves that advice brings forward begin `least_s` or more after the last and stay within `share` of the
    time: each pays what it took from a balance that earns `share` a second and holds what one save took.
    """

    def __init__(self, now: float, own_s: float, own_steps: int, most_s: float, least_s: float, share: float):
        self.own_s, self.own_steps, self.most_s = own_s, own_steps, most_s
        self.least_s, self.share, self.flush_s = least_s, share, 0.0  # the storage takes them no faster
        self.began = self._ended = self._counted = self._not_before = now
        self.first: int | None = None  # the step from which they are counted; None: the next one
        self.step, self._balance, self._cap, self._extra, self._asked = -1, 0.0, 0.0, False, math.nan
        self._want = self._answered = NOTHING.want

    def in_force(self, held: StandingAdvice) -> float:
        """Return the interval in force, s; 0 if it is counted in steps."""
        own_s, advised_s = self.own_s if self.own_s < math.inf else 0.0, held.interval_s
        return own_s if advised_s is None else min(max(advised_s, min(self.least_s, self.own_s)), self.most_s)

    def due(self, now: float, step: int | None = None, held: StandingAdvice = NOTHING) -> bool:
        """Return True when a save is due."""
        if self._asked <= now:  # nobody measured that save: it took until now at most
            self.ended(now, self._asked)
        earned = min(self._cap, self._balance + self.share * max(0.0, now - self._counted))
        self._balance, self._counted = max(self._balance, earned), max(now, self._counted)
        self.step = self.step + 1 if step is None else step  # else the calls are counted
        if self.first is None or self.step < self.first:  # one was made; or the count went back
            self.first = self.step - 1
        elapsed, steps = now - self._ended, self.step - self.first
        own = steps >= self.own_steps if self.own_steps else elapsed >= self.own_s
        late = elapsed >= self.most_s or steps >= 4 * self.own_steps > 0
        free = elapsed >= max(self.least_s, self.flush_s) and self._balance >= 0.0
        wanted = held.want not in (None, self._answered) and self.began < held.since <= now
        early = held.interval_s is not None and elapsed >= held.interval_s
        kept = own and (held.interval_s is None or early)
        if now < self._not_before or not (kept or late or ((early or wanted) and free)):
            return False
        self._extra, self._want, self._asked = not (own or late), held.want if wanted else None, now
        return True

    def ended(self, now: float, began: float, ok: bool = True) -> None:
        """Note that a save ended, due or not. A failed save is tried again after a pause."""
        took_s = max(0.0, now - began)
        self._balance -= took_s if self._extra else 0.0
        self._cap, self._asked, self._extra = took_s, math.nan, False
        self._answered, self._want = (ok and self._want) or self._answered, None
        if ok:
            self.began, self._ended, self.first, self._not_before = began, now, self.step, now
        else:
            self._not_before = now + min(max(self.least_s, took_s / self.share), self.own_s)


class Save:
    """A save in progress; its begin by the wall clock, ns, is its name."""

    def __init__(self, tier: str = "durable", asynchronous: bool = False) -> None:
        self.tier, self.asynchronous, self.block_s = tier, asynchronous, 0.0
        self.began_ns, self.began = time.time_ns(), time.monotonic()


class Advisor:
    """Says when a job should save. Only the constructor raises: ValueError, for terms of the job's own.

    job: its name at the twin (`job_name`). source: file:///folder, http(s)://host:port, mqtt(s)://host
    or "". own_interval_s or own_every_steps: when the job saves by itself. most_interval_s: the longest wait,
    else 4 times its own. own_local_interval_s: the same of saves to memory, if it makes any by itself.
    least_interval_s, most_share: see Pace. token_file, or RACKTWIN_TOKEN: who we are. rank: rank 0 alone
    asks and decides; RANK, else SLURM_PROCID, else 0. nodes: where no scheduler reports this job to the twin,
    it registers itself over http(s) as of `kind` (training, inference, batch) on these, say `job_nodes()`,
    until it ends or has not asked for ten minutes. Set progress_per_s to report a speed once (saves apart),
    and remaining_s to report how long it still trains at this speed.
    """

    def __init__(
        self, job: str, source: str = "", own_interval_s: float = math.inf, *, own_every_steps: int = 0,
        most_interval_s: float = 0.0, least_interval_s: float = 10.0, most_share: float = 0.2,
        poll_s: float = 15.0, token_file: str = "", ca_file: str | None = None, rank: int | None = None,
        own_local_interval_s: float = math.inf, nodes: str | Sequence[str] = (), kind: str = "training",
    ) -> None:  # fmt: skip
        most_s, local_s, now = most_interval_s or 4 * own_interval_s, own_local_interval_s, time.monotonic()
        times = (own_interval_s, most_s, least_interval_s, poll_s, local_s)
        own = own_interval_s < math.inf or own_every_steps >= 1  # when the job saves by itself
        if not (own and job and all(x > 0 for x in times) and poll_s < math.inf and 0 < most_share <= 1):
            raise ValueError("expected a job, own_interval_s or _every_steps, times above 0, most_share 0..1")
        if nodes and urlsplit(source).scheme not in ("http", "https"):
            raise ValueError(
                "nodes: a job registers itself over http(s); expected source='https://twin:8077'"
            )
        number = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
        self._rank = rank if rank is not None else int(number) if number.isdecimal() else 0
        self._pace = Pace(now, own_interval_s, int(own_every_steps), most_s, least_interval_s, most_share)
        self._local = Pace(now, local_s, 0, 4 * local_s, least_interval_s, most_share)
        self.job, self.problem, self._source, self._poll_s = str(job), "", source, poll_s
        self._token_file, self._ca_file, self._pid = token_file, ca_file, os.getpid()
        self._held, self._flushing, self._durable_ns = NOTHING, dict[int, Save](), 0
        self.progress_per_s = self.remaining_s = 0.0
        self._waiting: deque[dict[str, Any]] = deque(maxlen=MAX_REPORTS)  # a signal or a fork cannot lock it
        self._said, self._sent_s, self._sent_at, self._closing = 0, [-1.0], 0.0, False
        self._nodes, self._kind = [nodes] if isinstance(nodes, str) and nodes else list(nodes), kind
        self._registered, self._ends, self._asked = False, False, False
        self._wire: Any = None
        self._thread: threading.Thread | None = None
        if self._rank == 0 and source:
            thread = threading.Thread(target=self._run, name="racktwin-client", daemon=True)
            with suppress(RuntimeError):  # no more threads, or the interpreter ends: without advice
                thread.start()
                self._thread = thread
                atexit.register(self.close)

    def due(self, step: Any = None, broadcast: Any = None, tier: str = "durable") -> bool:
        """Return True when a save is due; never blocks or raises. To be asked at the same steps on all ranks.

        broadcast gives all ranks the decision of rank 0 (torch_ranks.broadcast); what it raises goes through,
        without it other ranks receive False. tier: "durable" (to be asked first: it counts as both),
        "memory".
        """
        count = None
        with suppress(Exception):
            count = int(step)
        pace, held = self._of(tier)
        found = self._rank == 0 and pace.due(time.monotonic(), count, held)
        return found if broadcast is None else bool(broadcast(found))

    def _of(self, tier: str = "durable") -> tuple[Pace, StandingAdvice]:
        held = self._held  # the other thread may change it at any time; a forked process has no such thread
        held = held if time.monotonic() < held.until and os.getpid() == self._pid else NOTHING
        local_s = held.local_s if self._local.step >= 0 else None  # else it does not listen
        return (self._pace, held) if tier == "durable" else (self._local, StandingAdvice(local_s))

    @property
    def interval_s(self) -> float:
        """The interval in force, s: advice within limits, or the job's own; 0 if counted in steps."""
        return Pace.in_force(*self._of())

    def first_answer(self, wait_s: float = 10.0) -> str:
        """Wait for the first answer of the twin, at most this long; returns its problem, "" if it
        answered."""
        until = time.monotonic() + wait_s
        while self._thread is not None and not self._asked and time.monotonic() < until:
            time.sleep(0.01)
        return self.problem or ("" if self._asked else "nobody was asked yet")

    @contextmanager
    def saving(self, tier: str = "durable", asynchronous: bool = False) -> Iterator[Save]:
        """Measures a save; what its body raises goes through. An asynchronous one is done by `durable`."""
        save, ok = Save(tier, asynchronous), False
        try:
            yield save
            ok = True
        finally:
            self.saved(save, ok)

    def saved(self, save: Save, ok: bool = True) -> None:
        """End a save, as `saving` does at its end, for a `Save` that is no block of code."""
        now = time.monotonic()
        save.block_s = now - save.began
        self._of(save.tier)[0].ended(now, save.began, ok)
        if ok and save.tier == "durable":  # after which none in memory is needed
            self._local.ended(now, now)
        if ok and save.asynchronous:
            self._flushing[save.began_ns] = save
            for old in sorted(self._flushing)[:-MAX_OPEN]:
                self._flushing.pop(old, None)
        elif ok:
            self._report(save, save.block_s)

    def durable(self, began_ns: int) -> None:
        """Note that the asynchronous save of this begin can be recovered from."""
        if (save := self._flushing.pop(began_ns, None)) is not None:
            took_s = time.monotonic() - save.began
            self._pace.flush_s = took_s if save.tier == "durable" else self._pace.flush_s
            self._report(save, took_s)

    def restored(self, restart_s: float = 0.0, tier: str = "durable") -> None:
        """Note that the job trains again after a failure. Without `restart_s` the restart counts from this
        file's import."""
        now = time.monotonic()
        self._pace.ended(now, now)
        self._local.ended(now, now)
        self._pace.first = None
        self._report(None, 0.0, restart_s if 0 < restart_s < MAX_COST_S else now - _IMPORTED, tier)

    def __getstate__(self) -> dict[str, Any]:
        """Return a copy that contacts nobody, for another process."""
        return {**self.__dict__, "_thread": None, "_wire": None, "_pid": -1}

    def _report(
        self, save: Save | None, took_s: float, restart_s: float = 0.0, tier: str = "durable"
    ) -> None:
        """Leave a report for the other thread; without a save it concerns the tier's last save."""
        tier, began_ns, block_s = (save.tier, save.began_ns, save.block_s) if save else (tier, 0, 0.0)
        if save and tier == "durable":  # nowhere else: the other thread would undo what is noted meanwhile
            self._durable_ns = max(began_ns, self._durable_ns)
        t_ns, began_ns = time.time_ns(), self._durable_ns if tier == "durable" else began_ns  # in this order
        costs = dict(save_s=took_s, block_s=block_s, flush_s=took_s, restart_s=restart_s)
        report: dict[str, Any] = {k: min(max(0.0, v), MAX_COST_S) for k, v in costs.items()}
        report.update(v=1, id=os.urandom(12).hex(), t_ns=max(t_ns, began_ns), tier=tier)
        report.update(began_ns=began_ns, interval_s=min(Pace.in_force(*self._of(tier)), MAX_INTERVAL_S))
        for name, most in (("progress_per_s", MAX_PROGRESS_PER_S), ("remaining_s", MAX_INTERVAL_S)):
            with suppress(Exception):  # whatever the job set
                report[name] = x if 0 < (x := float(getattr(self, name))) <= most else 0.0
        self.progress_per_s = self.remaining_s = 0.0
        self._waiting.append(report)

    def close(self, wait_s: float = 2.0) -> None:
        """Send what waits, for at most so long, and stop asking. Then the job's own interval holds."""
        thread, self._thread, self._closing = self._thread, None, True
        if thread is not None and os.getpid() == self._pid:
            thread.join(wait_s)
            atexit.unregister(self.close)
        self._held = NOTHING

    def _run(self) -> None:
        failures, again_at, last = 0, 0.0, False
        while not last:
            last = self._closing
            if last or time.monotonic() >= again_at or (self._waiting and not self.problem):
                failures = 0 if self._exchange() else min(failures + 1, 10)
                wait_s = max(self._poll_s, min(self._poll_s * 2**failures, MAX_BACKOFF_S))
                again_at = time.monotonic() + wait_s * random.uniform(0.8, 1.2)
            time.sleep(0.0 if last else min(TICK_S, self._poll_s))
        if self._registered and self._ends:
            with suppress(Exception):  # then the registration lapses
                self._wire.unregister()
        getattr(self._wire, "close", bool)()

    def _exchange(self) -> bool:
        """Receive and report once. Returns False if nothing arrived, so that the next query comes later."""
        problems = {}
        for act in (self._receive, self._send):
            try:
                act()
            except Exception as error:
                kind = "" if isinstance(error, Refusal) else f"{type(error).__name__}: "
                problems[act] = f"{kind}{error}"[:MAX_TEXT]
                if not kind:  # it would be refused the reports as well
                    break
        text = "".join(c if c.isprintable() else "?" for c in "; ".join(dict.fromkeys(problems.values())))
        if text and text != self.problem and self._said < MAX_SAID:
            self._said += 1
            _LOG.warning("%s; the job keeps its own interval", text)
        self.problem, self._asked = text, True
        return self._receive not in problems

    def _register(self) -> None:
        """Say on which nodes the job runs, once; again where the twin has forgotten it."""
        if self._registered or not self._nodes:
            return
        answer = self._wire.register(json.dumps({"nodes": self._nodes, "kind": self._kind}).encode())
        self._registered, self._ends = True, answer.get("registered") is True
        for line in answer.get("warnings") or ():
            _LOG.warning("%s", "".join(c if c.isprintable() else "?" for c in str(line)[:400]))

    def _receive(self) -> None:
        self._wire = self._wire or self._open()
        self._register()
        try:
            body, before = self._wire.fetch(), self._held
        except Refusal as refusal:
            if refusal.status == 404:  # the job does not run there, so nothing holds; perhaps not yet
                self._registered, self._held = False, StandingAdvice(order=self._held.order)
            if refusal.status != 404 or not self._nodes:
                raise
            self._register()
            body, before = self._wire.fetch(), self._held
        clocks = (time.monotonic(), time.time_ns())
        self._held = (
            StandingAdvice(order=before.order) if body is None else advice_of(body, self.job, before, *clocks)
        )

    def _send(self) -> None:
        kept = [Pace.in_force(*self._of(tier)) for tier in ("durable", "memory")]
        if kept != self._sent_s or time.monotonic() >= self._sent_at + REPORT_S:
            self._sent_s, self._sent_at = kept, time.monotonic()
            for tier in ("durable", "memory") if kept[1] else ("durable",):
                self._report(None, 0.0, tier=tier)
        refused: Refusal | None = None
        while self._wire is not None and self._waiting:
            report = self._waiting[0]
            try:
                self._wire.send(json.dumps(report).encode())
            except Refusal as refusal:
                if refusal.status not in FOR_GOOD:
                    raise
                refused = refusal
            if self._waiting[0] is report:  # else it was the oldest of too many
                self._waiting.popleft()
        if refused is not None:
            raise refused

    def _open(self) -> Any:
        parts, level = urlsplit(self._source), quote(self.job, "").replace(".", "%2E", self.job[0] == ".")
        if parts.scheme == "file" and parts.netloc in ("", "localhost"):
            return FolderWire(unquote(parts.path), level)
        if parts.scheme in ("http", "https"):
            return HttpWire(self._source, level, self._token, self._ca_file)
        if parts.scheme in ("mqtt", "mqtts"):
            from racktwin_client.mqtt import Broker

            return Broker(self._source, level, self._token, self._ca_file)
        raise ValueError("source: expected file:///folder, http(s)://host:port or mqtt(s)://host:port")

    def _token(self) -> str:
        text = os.environ.get("RACKTWIN_TOKEN", "")
        if self._token_file:
            with open(self._token_file, encoding="ascii") as file:
                text = file.read(400)
        if not text.strip().isprintable():  # which http.client would quote
            raise ValueError("the token is no single line")
        return text.strip()
