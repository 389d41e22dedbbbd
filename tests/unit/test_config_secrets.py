"""Files of secrets that a configuration names: one that everybody can read is told, and works."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from twin.config import Config, Loaded


@pytest.mark.parametrize("mode, told", [(0o644, True), (0o602, True), (0o600, False), (0o440, False)])
def test_a_secret_that_everybody_can_read_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, told: bool
) -> None:
    secret = tmp_path / "password"
    secret.write_text("correct horse\n")
    secret.chmod(mode)
    loaded = Loaded(Config(site="site.yaml", broker="embedded"), tmp_path / "racktwin.yaml")
    with caplog.at_level(logging.WARNING):
        assert loaded.secret("password") == "correct horse"
    assert ("lets every user of this host reach the secret" in caplog.text) is told
    assert "horse" not in caplog.text
