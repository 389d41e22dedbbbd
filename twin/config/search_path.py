"""Search path of the configuration. It uses only the standard library, so that commands start fast."""

from __future__ import annotations

import os
from pathlib import Path

from twin.catalogue import ConfigError


def search_path() -> tuple[Path, ...]:
    """The files that are looked for where no configuration is named; the first that can be read wins."""
    home = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    return Path("racktwin.yaml"), home / "racktwin" / "racktwin.yaml", Path("/etc/racktwin/racktwin.yaml")


def find_config(named: Path | None = None) -> Path:
    """The configuration that the call or RACKTWIN_CONFIG names, or the first of `search_path`.

    Raises ConfigError where there is none.
    """
    if named is None and os.environ.get("RACKTWIN_CONFIG"):
        named = Path(os.environ["RACKTWIN_CONFIG"])
    readable = (path for path in search_path() if os.path.isfile(path) and os.access(path, os.R_OK))
    found = named or next(readable, None)
    if found is None:
        raise ConfigError(
            "no configuration: neither --config nor RACKTWIN_CONFIG names one, and no readable one is at "
            f"{', '.join(map(str, search_path()))}; `racktwin init` writes one"
        )
    return found
