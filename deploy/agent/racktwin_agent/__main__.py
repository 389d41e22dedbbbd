"""`racktwin-agent --config FILE [--check]`: reads the configuration, opens the devices and runs until a
signal.

Exit status: 0 stopped or sound, 1 the devices or the state folder cannot be used, 2 the configuration is
wrong.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from pathlib import Path

from racktwin_agent import VERSION
from racktwin_agent.agent import Agent, open_devices
from racktwin_agent.config import ConfigError, load_config
from racktwin_agent.devices import DeviceError, settings


class OneLine(logging.Formatter):
    """Log formatter that keeps a record on one line, so that foreign text can neither forge a line nor
    control a terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the library's name
        """Return the record on one line; a traceback of the agent may follow it."""
        text = super().formatMessage(record)
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="racktwin-agent", description="The node agent of racktwin.")
    parser.add_argument("--config", type=Path, required=True, help="a TOML file, see agent.example.toml")
    parser.add_argument("--check", action="store_true", help="check the file and the devices, change nothing")
    parser.add_argument("--version", action="version", version=f"racktwin-agent {VERSION}")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    for out in logging.getLogger().handlers:
        out.setFormatter(OneLine("%(levelname)s %(message)s"))
    try:
        config = load_config(given.config)
        config.broker.password()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        devices = open_devices(config)
    except DeviceError as error:
        print(f"{given.config}: {error}", file=sys.stderr)
        return 1
    if given.check:
        found = f"{devices.gpus} GPUs, {len(settings(devices))} settings"
        print(f"{config.node}: {found}; the configuration is sound")
        devices.close()
        return 0
    try:
        agent = Agent(config, devices)
    except OSError as error:
        print(f"{config.state_dir}: {error.strerror}; expected a folder of this agent's own", file=sys.stderr)
        devices.close()
        return 1
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: agent.stop())
    try:
        agent.run()
    finally:
        devices.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
