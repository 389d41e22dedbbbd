"""Embedded broker: amqtt on loopback in a child process, so that nothing needs to be installed.

For trials and the simulated pod: it knows no identities, everybody on this host may publish, and it keeps no
messages for absent clients. The child ends with its parent, whose pipe it watches. `python -m
twin.wiring.embedded_broker PORT` is the child.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys

from twin.catalogue import ConnectorError

HOST = "127.0.0.1"
START_S, STOP_S = 15.0, 2.0
log = logging.getLogger(__name__)


class EmbeddedBroker:
    """A child process with a broker. `port` is set by the first `start` and stays; 0: the system chooses."""

    def __init__(self, port: int = 0) -> None:
        self.port = port
        self._child: asyncio.subprocess.Process | None = None

    @property
    def running(self) -> bool:
        """True while the child lives."""
        return self._child is not None and self._child.returncode is None

    @property
    def pid(self) -> int | None:
        """The child's process."""
        return self._child.pid if self._child is not None and self.running else None

    async def start(self) -> int:
        """Bring the broker up; returns its port once it listens. Raises ConnectorError if it does not."""
        await self.stop()
        self._child = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-W", "ignore", "-m", __spec__.name, str(self.port)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert self._child.stdout is not None
        try:
            async with asyncio.timeout(START_S):
                line = (await self._child.stdout.readline()).decode(errors="replace").strip()
        except TimeoutError:
            line = f"it was not ready within {START_S:g} s"
        except BaseException:
            await self.stop()
            raise
        word, _, rest = line.partition(" ")
        if word != "ready":
            await self.stop()
            raise ConnectorError(
                f"the embedded broker on {HOST}:{self.port or 'a free port'} did not start: "
                f"{rest if word == 'error' else line or 'it ended without a word'}"
            )
        self.port = int(rest)
        return self.port

    async def run(self) -> None:
        """Keep the broker up until cancelled. Raises ConnectorError when it dies; the port stays the same."""
        try:
            if not self.running:
                await self.start()
                log.info("the embedded broker listens on %s:%d", HOST, self.port)
            child = self._child
            assert child is not None
            code = await child.wait()
            raise ConnectorError(f"the embedded broker on {HOST}:{self.port} ended with {code}")
        finally:
            await self.stop()

    async def stop(self) -> None:
        """End the child, by force if it must be."""
        child, self._child = self._child, None
        if child is None:
            return
        if child.stdin is not None:
            child.stdin.close()
        if child.returncode is None:
            try:
                await asyncio.wait_for(child.wait(), STOP_S)
            except (TimeoutError, asyncio.CancelledError):
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
                await child.wait()


async def _serve(port: int) -> None:
    """The child: a broker until the parent's end of the pipe is closed."""
    from amqtt.broker import Broker  # type: ignore[import-untyped]

    broker = Broker(
        {
            "listeners": {"default": {"type": "tcp", "bind": f"{HOST}:{port}", "max_connections": 1000}},
            "plugins": {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}},
        }
    )
    try:
        await broker.start()
    except Exception as error:  # the parent gets it, whatever it is
        print(f"error {' '.join(str(error.__cause__ or error).split())}", flush=True)
        return
    listener = broker._servers["default"].instance
    assert isinstance(listener, asyncio.Server)
    print(f"ready {listener.sockets[0].getsockname()[1]}", flush=True)
    gone = asyncio.Event()

    def read_pipe() -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            gone.set()

    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), read_pipe)
    await gone.wait()
    asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
    with contextlib.suppress(Exception):
        await asyncio.wait_for(broker.shutdown(), 1.0)


def main() -> None:
    """Run as the child."""
    # Ctrl-C and a service manager's stop reach the whole group; the parent needs a broker to leave in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.disable(logging.CRITICAL)
    asyncio.run(_serve(int(sys.argv[1])))
    # Remains of connections in the library need not be waited for.
    os._exit(0)


if __name__ == "__main__":
    main()
