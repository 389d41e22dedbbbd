"""A real ClickHouse of the tests' own, on loopback, if `clickhouse` is on the PATH; else see `chdb_server`.

The administrator of the tests makes the users that `racktwin fleet history --schema` speaks of.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from tests.support.chdb_server import PASSWORD, USER, ChdbServer
from tests.support.victoriametrics import free_port

OLDEST = (
    24,
    3,
)  # older ones take `v.t` of a rollup for the alias `t`, and check a writer's rights on it
_CONFIG = """<clickhouse>
  <logger><level>warning</level><console>1</console></logger>
  <listen_host>127.0.0.1</listen_host>
  <http_port>{http}</http_port><tcp_port>{tcp}</tcp_port>
  <path>{folder}/data/</path><tmp_path>{folder}/tmp/</tmp_path>
  <user_files_path>{folder}/files/</user_files_path>
  <format_schema_path>{folder}/formats/</format_schema_path>
  <mark_cache_size>67108864</mark_cache_size>
  <user_directories><users_xml><path>{folder}/config.xml</path></users_xml></user_directories>
  <users><{user}>
    <password>{password}</password><networks><ip>127.0.0.1</ip></networks>
    <profile>default</profile><quota>default</quota><access_management>1</access_management>
  </{user}></users>
  <profiles><default/></profiles><quotas><default/></quotas>
</clickhouse>
"""


def clickhouse_program() -> Path | None:
    """The program, if one that is young enough is on the PATH."""
    found = shutil.which("clickhouse")
    if found is None:
        return None
    text = subprocess.run([found, "server", "--version"], capture_output=True, text=True, check=False).stdout
    version = re.search(r"version (\d+)\.(\d+)", text)
    return Path(found) if version and (int(version[1]), int(version[2])) >= OLDEST else None


class RealServer(ChdbServer):
    """A server process; its failures cannot be chosen."""

    name = "clickhouse"

    def __init__(self, folder: Path, program: Path) -> None:
        super().__init__(folder)
        self._program = program
        text = _CONFIG.format(http=self.port, tcp=free_port(), folder=folder, user=USER, password=PASSWORD)
        (folder / "config.xml").write_text(text)

    def command(self) -> list[str]:
        """The program with its arguments."""
        return [str(self._program), "server", f"--config-file={self.folder / 'config.xml'}"]
