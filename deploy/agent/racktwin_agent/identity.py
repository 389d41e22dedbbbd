"""Identity of the devices in a node: reported at the start, after a replacement, and now and then.

A serial that cannot be read says nothing: a GPU off the bus is still the same GPU. One that several GPUs of
the node show at once is no name of one, and neither is what firmware writes where nobody wrote a serial; the
daemon refuses that too. Imports the agent's clock and messages.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

from racktwin_agent.clock import NS, Instant
from racktwin_agent.publish import Out, identity_of

READ_EVERY_S = 60.0
AGAIN_S = 3600.0  # what was lost on the way, or refused while two agents spoke under one name, heals by it
MIN_LENGTH, MAX_LENGTH = 4, 160
BOARD_SERIAL = Path("/sys/class/dmi/id/board_serial")  # root reads it


def board_serial(path: Path = BOARD_SERIAL) -> str | None:
    """The serial of the node's main board by DMI, or None where it has none or we may not read it."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_LENGTH + 2)
    except OSError:
        return None
    return plain_serial(raw.decode("ascii", "replace"))


def plain_serial(text: str) -> str | None:
    """The serial without blanks around it; None for what is none."""
    serial = text.strip().strip("\0").strip()
    if not MIN_LENGTH <= len(serial) <= MAX_LENGTH or not (serial.isascii() and serial.isprintable()):
        return None
    return serial if len(set(serial)) > 1 else None


class Identity:
    """Last report on each device of the node at `path`, with its instant."""

    def __init__(self, path: str, boot: str) -> None:
        self.path, self.boot = path, boot
        self._sent: dict[str, tuple[str, int]] = {}  # name within the node -> (serial, count since boot)
        # A fleet that starts at once does not report it all again at once.
        self._phase_ns = zlib.crc32(path.encode()) % round(AGAIN_S) * NS

    def reports(self, gpus: Sequence[str | None], board: str | None, at: Instant) -> list[Out]:
        """Return the reports that are due on the node ("") and its GPUs, in order.

        An id is made of the boot, the slot, the serial and the second: a board that is put back within one
        boot is news again, and a second delivery of one message is not.
        """
        slots = [("node", "", board), *(("gpu", f"gpu{i}", serial) for i, serial in enumerate(gpus))]
        shown = [serial for table, _, serial in slots if table == "gpu"]
        out: list[Out] = []
        for table, name, serial in slots:
            if serial is None or (table == "gpu" and shown.count(serial) > 1):
                continue
            was = self._sent.get(name)
            if was is not None and was[0] == serial and at.boot_ns < self._again_ns(was[1]):
                continue
            self._sent[name] = serial, at.boot_ns
            event_id = f"{self.boot}-{name or 'node'}-{at.boot_ns // NS}-{serial}"
            out.append(identity_of(self.path, event_id, table, name, serial))
        return out

    def _again_ns(self, sent_ns: int) -> int:
        """Return when to repeat a report of `sent_ns`: at this node's own minute of the hour."""
        every_ns = round(AGAIN_S * NS)
        return sent_ns + every_ns - (sent_ns - self._phase_ns) % every_ns
