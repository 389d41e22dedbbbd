"""DCMI: power limit of a node by `ipmitool dcmi power`, and its power switch by `chassis power`.

The password goes by the environment, never on the command line. Before a limit is activated its exception
action is made harmless: a BMC as found may be set to switch the node off where a limit cannot be met.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from connectors.bmc.limits import NODE_CAP, BmcReading, Cap, Key
from connectors.bmc.power import OFF, ON, STOP
from connectors.program import run_program
from twin.catalogue import ActuationError, ConfigError, ConnectorError

ExceptionAction = Literal["none", "log"]
MAX_OUTPUT = 64 * 2**10
MAX_NODE_W = 20_000  # of no node; ipmitool shows what happens to be in memory where an answer is too short
MAX_LIMIT_W = 0xFFFF  # source: DCMI 1.5, 6.6.3 Set Power Limit: two bytes
MAX_SECRET = 20  # characters. source: IPMI 2.0, 13.28 RAKP: 160 bits
# Names of the actions in commands of ipmitool, and in its output (lib/ipmi_dcmi.c)
ACTIONS: dict[str, tuple[str, str]] = {
    "none": ("no_action", "No Action"),
    "log": ("sel_logging", "Log Event"),
}
CHASSIS = {ON: "on", STOP: "soft", OFF: "off"}  # source: ipmitool(1), chassis power
# Words of refusals that another try does not mend; source: completion codes of DCMI 1.5 and IPMI 2.0
FOR_GOOD = ("out of range", "Invalid command", "Command not", "Insufficient privilege", "not supported")
# A BMC may answer a wrong user or password by silence.
NO_SESSION = "check address, port, user and password, and that IPMI over LAN is enabled"
# Advice on errors of ipmitool, by the first words that fit (src/plugins/lanplus/lanplus.c)
HINTS = (
    ("HMAC is invalid", "the BMC refused the password; expected the password of the user in password_file"),
    ("unauthorized name", "the BMC refused the user; expected a user of the BMC with LAN access"),
    ("Unable to establish", NO_SESSION),
    ("Address lookup", "no such host; check the name and the DNS of this host"),
)
_LINE = re.compile(r"^\s*(?P<label>[A-Za-z ]{4,60}?)\s*:\s*(?P<value>.*?)\s*$", re.MULTILINE)
_WATTS = re.compile(r"([0-9]{1,6})\s*Watts?\b", re.IGNORECASE)
_MS = re.compile(r"([0-9]{1,10})\s*milliseconds", re.IGNORECASE)
_S = re.compile(r"([0-9]{1,10})\s*sec", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class DcmiAccess:
    """Access to one BMC: its address, user and password, and the `program` with its `options`."""

    host: str
    port: int
    user: str
    secret: Callable[[], str]
    timeout_s: float = 10.0
    program: str = "ipmitool"
    options: Sequence[str] = ()


@dataclass(frozen=True)
class DcmiCommand:
    """Settings of a limit: the time to correct an excess, and the action if that fails."""

    correction_ms: int = 1000
    action: ExceptionAction = "log"


class DcmiLimit(NamedTuple):
    """Answer of `get_limit`. `action` in ipmitool's words."""

    active: bool
    limit_w: float
    action: str
    correction_ms: int
    sample_s: int


def parse_limit(text: str) -> DcmiLimit:
    """Parse what `get_limit` printed. Raises ConnectorError where one of the parts is not there."""
    values = {m["label"].strip().lower(): m["value"] for m in _LINE.finditer(text[:MAX_OUTPUT])}
    state, action = values.get("current limit state", ""), values.get("exception actions", "")
    watts, ms = _WATTS.search(values.get("power limit", "")), _MS.search(values.get("correction time", ""))
    seconds = _S.search(values.get("sampling period", ""))
    if state.lower() not in ("power limit active", "no active power limit") or not (watts and ms and seconds):
        raise ConnectorError(f"expected a power limit, got {_short(text)!r}")
    return DcmiLimit(
        state.lower() == "power limit active", float(watts[1]), action, int(ms[1]), int(seconds[1])
    )


def parse_power(text: str) -> float | None:
    """Return the present power that `reading` printed, W; None if the BMC does not measure it.

    Raises ConnectorError for what is no reading.
    """
    values = {m["label"].strip().lower(): m["value"] for m in _LINE.finditer(text[:MAX_OUTPUT])}
    watts = _WATTS.search(values.get("instantaneous power reading", ""))
    if watts is None:
        raise ConnectorError(f"expected a power reading, got {_short(text)!r}")
    if values.get("power reading state is", "").lower() != "activated":
        return None
    if float(watts[1]) > MAX_NODE_W:
        raise ConnectorError(f"says that it draws {watts[1]} W, which no node can draw")
    return float(watts[1])


class Ipmitool:
    """The program `ipmitool` for one BMC."""

    def __init__(self, name: str, access: DcmiAccess) -> None:
        self._name, self._secret, self._timeout_s = name, access.secret, access.timeout_s
        address = ("-H", access.host, "-p", str(access.port), "-U", access.user)
        self._words = (
            *(access.program, "-I", "lanplus", *address, "-E", "-N", "2", "-R", "2"),
            *access.options,
        )

    async def run(self, *words: str) -> str:
        """Return the output of ipmitool. Raises ConnectorError, or ActuationError if the BMC refuses
        permanently."""
        try:
            secret = await asyncio.to_thread(self._secret)
        except ConfigError as error:
            raise ConnectorError(f"{self._name}: {str(error)[:200]}") from None
        env = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "IPMI_PASSWORD": secret}
        what = f"{self._name}: {' '.join(words[:3])}"
        try:
            answer = await run_program((*self._words, *words), env, self._timeout_s, MAX_OUTPUT)
        except TimeoutError:
            raise ConnectorError(f"{what}: no answer within {self._timeout_s:g} s; {NO_SESSION}") from None
        except OSError as error:
            why = f"{error.strerror}; install ipmitool, or set its path in `program`"
            raise ConnectorError(f"{self._name}: {self._words[0]}: {why}") from None
        except ValueError:
            raise ConnectorError(
                f"{self._name}: {self._words[0]}: an argument that ipmitool cannot take"
            ) from None
        if answer.is_cut:
            raise ConnectorError(f"{what}: more than {MAX_OUTPUT} bytes; expected a power limit or reading")
        if answer.code != 0:
            said = (answer.errors or answer.out).replace(secret, "***")
            why = _short(said) or f"exit {answer.code}"
            kind = ActuationError if any(w in why for w in FOR_GOOD) else ConnectorError
            raise kind(f"{what}: {why}{next((f'; {hint}' for text, hint in HINTS if text in said), '')}")
        return answer.out


class DcmiSwitch:
    """Switch of one node, by the chassis commands of IPMI."""

    def __init__(self, name: str, tool: Ipmitool) -> None:
        self.name, self._tool = name, tool

    async def level(self) -> int:
        """Return the present level: IPMI reports on and off. Raises ConnectorError, ActuationError."""
        text = await self._tool.run("chassis", "power", "status")
        found = re.search(r"Chassis Power is (on|off)\b", text, re.IGNORECASE)
        if found is None:
            raise ConnectorError(f"{self.name}: expected the power of its chassis, got {_short(text)!r}")
        return ON if found[1].lower() == "on" else OFF

    async def put(self, level: int) -> None:
        """Switch the node. Raises ConnectorError, or ActuationError if the BMC refuses."""
        await self._tool.run("chassis", "power", CHASSIS[level])


class DcmiBmc:
    """One node's BMC. `most_w` is the site's highest cap of the node: where no limit is active, that is read.

    With `command` a command turns the limit on, with our `correction_ms` and exception `action`; one that
    gives back the highest cap turns it off.
    """

    def __init__(
        self, name: str, node: int, access: DcmiAccess, most_w: float, command: DcmiCommand | None = None
    ) -> None:
        self.name, self.node, self._tool = name, node, Ipmitool(name, access)
        self.switch = DcmiSwitch(name, self._tool)
        self.keys: tuple[Key, ...] = () if command is None else (Key(NODE_CAP, node),)
        self._most_w = most_w
        command = command or DcmiCommand()
        self._correction_ms, self._action = command.correction_ms, ACTIONS[command.action]
        self._limit: DcmiLimit | None = None

    async def read(self) -> BmcReading:
        """Return the limit and the power of the node. Raises ConnectorError."""
        cap = await self.cap(Key(NODE_CAP, self.node))
        faults: tuple[str, ...] = ()
        try:
            watts = parse_power(await self._run("reading"))
        except (ConnectorError, ActuationError) as error:
            watts, faults = None, (str(error),)
        try:
            level = await self.switch.level()
        except (ConnectorError, ActuationError) as error:
            level, faults = None, (*faults, str(error))
        return BmcReading((cap,), () if watts is None else (("node", self.node, watts),), faults, level)

    async def cap(self, key: Key) -> Cap:
        """Read the limit again. Raises ConnectorError, ActuationError."""
        text = await self._run("get_limit")
        try:
            limit = self._limit = parse_limit(text)
        except ConnectorError as error:
            raise ConnectorError(f"{self.name}: {error}") from None
        if limit.active and limit.limit_w > MAX_NODE_W:
            raise ConnectorError(f"{self.name}: says it enforces {limit.limit_w:g} W, which no node can draw")
        most_w = min(self._most_w, MAX_LIMIT_W)
        return Cap(key, limit.limit_w if limit.active else most_w, 0.0, most_w, not limit.active)

    async def put(self, cap: Cap, value_w: float, final: bool) -> None:
        """Set the limit, in whole watts and never above the requested value; see `Bmc.put`."""
        if final and value_w >= cap.high_w:
            await self._run("deactivate")
            return
        if not cap.free and not self._harmless(self._limit):  # before a lower limit may be missed
            await self._set(cap.limit_w)
        await self._set(value_w, check=cap.free)
        if cap.free:
            await self._run("activate")

    def _harmless(self, limit: DcmiLimit | None) -> bool:
        return limit is not None and limit.action.startswith(self._action[1])

    async def _set(self, value_w: float, check: bool = True) -> None:
        """Set limit and exception action. With `check`, raises ActuationError where it is not taken."""
        sample_s = self._limit.sample_s if self._limit is not None else 1
        await self._run(
            "set_limit",
            "action",
            self._action[0],
            "limit",
            str(math.floor(value_w + 1e-6)),
            "correction",
            str(self._correction_ms),
            "sample",
            str(sample_s),
        )
        if not check:
            return
        limit = parse_limit(await self._run("get_limit"))
        if not self._harmless(limit):
            raise ActuationError(
                f"{self.name}: its exception action is {limit.action[:40]!r} and cannot change; the limit "
                "is not set, since the BMC might switch the node off"
            )

    async def close(self) -> None:
        """Close nothing: no connection stays open."""

    async def _run(self, *words: str) -> str:
        return await self._tool.run("dcmi", "power", *words)


def _short(text: str) -> str:
    return " ".join(text.split())[:160]
