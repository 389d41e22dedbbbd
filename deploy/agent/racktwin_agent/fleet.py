"""Many simulated nodes in one process over one connection: for demonstrations, storms and tests.

Each node is the same `Node` that a real agent runs, so leases and contingencies behave alike; the caller
brings the devices. One thread. A broker keeps one last will per connection, so only the first node's state
turns `offline` when the process is killed. Imports the agent's node, link and stores.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from racktwin_agent.clock import NS, boot_id, current_instant
from racktwin_agent.config import Broker
from racktwin_agent.devices import Devices
from racktwin_agent.inbox import Inbox
from racktwin_agent.link import Link
from racktwin_agent.node import Node
from racktwin_agent.power import Powered
from racktwin_agent.publish import Out
from racktwin_agent.store import FileStore, MemoryStore
from racktwin_agent.triggers import Watch
from racktwin_agent.wire import Refused, read_plan, read_request


def _nothing(seconds: float) -> list[Out]:  # noqa: ARG001
    return []


def _silent(text: str) -> None:
    """Drop the sentence: the default without a log."""


class Fleet:
    """Runs a node per entry of `devices` (path -> devices).

    `before_step(seconds)` is called on the fleet's thread before each round of samples, to move a simulated
    plant on; the messages that it returns are published too. With `state_dir` leases outlive the process.
    """

    def __init__(
        self,
        devices: Mapping[str, Devices],
        broker: Broker,
        *,
        integration: str = "racktwin",
        interval_s: float = 1.0,
        state_dir: Path | None = None,
        broker_gone_s: float = 60.0,
        before_step: Callable[[float], list[Out]] = _nothing,
        say: Callable[[str], None] = _silent,
    ) -> None:
        self.interval_s, self.before_step, self.say, self.integration = (
            interval_s,
            before_step,
            say,
            integration,
        )
        self.refused = 0
        self.inbox = Inbox(20_000, 64 * 2**20)
        self._connected = False
        self._stores: list[FileStore] = []
        boot, at = boot_id(), current_instant()
        self.nodes: dict[str, Node] = {}
        self._of_rack: dict[str, list[Node]] = {}
        for path, of_node in devices.items():
            store: FileStore | MemoryStore = MemoryStore()
            if state_dir is not None:
                store = FileStore(state_dir / path.replace("/", "+"))
                self._stores.append(store)
            watch = Watch(broker_gone_s)
            watch.connected(False, at)
            power = of_node.power if isinstance(of_node, Powered) else None
            node = Node(path, of_node, store, watch, boot, integration, say, power=power)
            node.resume(at)
            self.nodes[path] = node
            self._of_rack.setdefault(node.rack, []).append(node)
        first = next(iter(self.nodes.values()))
        topics = sorted({t for node in self.nodes.values() for t in node.topics()})
        self.link = Link(broker, topics, first.status("offline", at), self._received, self._changed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleet", daemon=True)
        self._error: BaseException | None = None

    def start(self) -> None:
        """Connect, and run on a thread."""
        self.link.start()
        self._thread.start()

    def stop(self) -> None:
        """Publish a last state for every node and stop. Raises the error that ended the thread, if any."""
        self._stop.set()
        self._thread.join(timeout=10.0)
        at = current_instant()
        self.link.stop([node.status("offline", at) for node in self.nodes.values()])
        for store in self._stores:
            store.close()
        if self._error is not None:
            raise self._error

    def __enter__(self) -> Fleet:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _received(self, topic: str, payload: bytes) -> None:
        self.inbox.put("message", (topic, payload), len(payload))

    def _changed(self, connected: bool, why: str) -> None:
        self.inbox.put("link", why)

    @property
    def lost(self) -> int:
        """Return the number of messages that arrived faster than they could be processed."""
        return self.inbox.lost

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:  # the caller's devices may fail; `stop` reports it
            self._error = error
            self.say(f"the fleet ended: {error!r}")

    def _loop(self) -> None:
        interval_ns = round(self.interval_s * NS)
        due_ns = current_instant().boot_ns
        while not self._stop.is_set():
            at = current_instant()
            if at.boot_ns >= due_ns:
                steps = 1 + (at.boot_ns - due_ns) // interval_ns
                self._step(self.interval_s * steps)
                due_ns += interval_ns * steps
            got = self.inbox.get(min((due_ns - current_instant().boot_ns) / NS, 0.2))
            self._end_leases()
            if got is None:
                continue
            what, item = got
            if what == "message":
                self._take(*item)
            else:
                self.say(f"broker: {item}")
                self._note_link()

    def _step(self, seconds: float) -> None:
        self._note_link()
        for out in self.before_step(seconds):
            self.link.send(out)
        for node in self.nodes.values():
            at = current_instant()
            for out in node.step(at):
                self.link.send(out)
            self.link.send(node.report(node.devices.sample(at.wall_ns), at))
            self._run_power(node)

    def _end_leases(self) -> None:
        at = current_instant()
        for node in self.nodes.values():
            ends_ns = node.next_ns()
            if ends_ns is not None and ends_ns <= at.boot_ns:
                for out in node.step(at):
                    self.link.send(out)

    def _take(self, topic: str, payload: bytes) -> None:
        """Read a message once, for all nodes of its rack."""
        at = current_instant()
        parts = topic.split("/", 4)
        try:
            if len(parts) != 5:
                raise Refused("no topic of ours")
            kind, rest = parts[3], parts[4]
            if kind == "Contingency":
                plan = read_plan(rest, payload) if payload else None
                self._each(rest, lambda node: node.arm(plan, at))
            elif kind == "Request":
                control, _, rack = rest.partition("/")
                request = read_request(control, rack, payload)
                self._each(rack, lambda node: node.obey(request, at))
        except Refused as error:
            self.refused += 1
            self.say(f"{topic[:200]}: refused: {error}")

    def _each(self, rack: str, act: Callable[[Node], list[Out]]) -> None:
        for node in self._of_rack.get(rack, ()):
            for out in act(node):
                self.link.send(out)
            self._run_power(node)

    def _run_power(self, node: Node) -> None:
        if node.power.is_due:
            self.say(node.power.run())

    def _note_link(self) -> None:
        was, self._connected = self._connected, self.link.connected
        at = current_instant()
        for node in self.nodes.values():
            node.watch.connected(self._connected, at)
            if self._connected and not was:
                self.link.send(node.status("online", at))
