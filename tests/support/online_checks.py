"""One run of `racktwin daemon check --online` on a site of two racks, with sections of a test's choice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.builders import two_racks
from twin.cli.main import main


def check(folder: Path, capsys: pytest.CaptureFixture[str], **sections: Any) -> tuple[int, str]:
    """(exit code, what it prints), on a wide terminal."""
    (folder / "site.yaml").write_text(yaml.safe_dump(two_racks()))
    tree = {"site": "site.yaml", "broker": "embedded", "state": str(folder / "state"), **sections}
    (folder / "racktwin.yaml").write_text(yaml.safe_dump(tree))
    words = ["daemon", "check", "--config", str(folder / "racktwin.yaml"), "--online", "--listen", "1.5s"]
    code = main(words)
    said = capsys.readouterr()
    assert not (folder / "state").exists(), "it leaves nothing behind"
    return code, said.out + said.err
