"""`racktwin journal show`: what it leaves out is counted, with the way to see it."""

from __future__ import annotations

from pathlib import Path

import pytest

from twin.cli.main import main

SITE = "site: lab\nhalls: [{name: h, racks: [{name: r1, profile: gb200-nvl72, nodes: 1}]}]\n"


def test_what_is_left_out_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "site.yaml").write_text(SITE)
    run = str(tmp_path / "run")
    assert main(["simulate", "--site", str(tmp_path / "site.yaml"), "--hours", "0.05", "--out", run]) == 0

    def shown(*more: str) -> tuple[str, str]:
        capsys.readouterr()
        assert main(["journal", "show", run, *more]) == 0
        said = capsys.readouterr()
        return said.out, said.err

    whole, _ = shown("--limit", "100000")
    assert "left out" not in whole
    entries = len(whole.splitlines()) - 1
    count = len(shown("--json", "--limit", "100000")[0].splitlines())
    assert 2 < count <= entries
    assert f"{count - 2} later entr" in shown("--limit", "2")[0]
    assert f"`--limit {count}` shows all, `--last` the last ones" in shown("--limit", "2")[0]
    assert f"{count - 2} earlier entr" in shown("--limit", "2", "--last")[0]
    out, err = shown("--limit", "2", "--json")
    assert len(out.splitlines()) == 2
    assert "left out" in err
