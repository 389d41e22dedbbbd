"""Files of secrets that a configuration names: one that everybody can read is told, and works."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from twin.catalogue import ConfigError
from twin.config import Broker, Config, Loaded, Tls
from twin.config.section import path_under
from twin.wiring import link_settings


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


def test_files_behind_links_are_those_that_the_links_name_now(tmp_path: Path) -> None:
    """Secrets of Kubernetes and certificates of certbot are links, which a renewal turns elsewhere.

    A link to the broker opens its files at each connection.
    """
    for version in ("1", "2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "ca.pem").write_text(version)
    (tmp_path / "now").symlink_to("1")
    (tmp_path / "ca.pem").symlink_to("now/ca.pem")
    tls = Tls(ca_file="ca.pem")
    broker = Broker(host="broker", tls=tls)
    settings = link_settings(Loaded(Config(site="site.yaml", broker=broker), tmp_path / "racktwin.yaml"))
    assert settings.ca_file is not None
    assert Path(settings.ca_file).read_text() == "1"
    (tmp_path / "now").unlink()
    (tmp_path / "now").symlink_to("2")
    shutil.rmtree(tmp_path / "1")
    assert Path(settings.ca_file).read_text() == "2"
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match="leads into a loop of symbolic links"):
        Loaded(Config(site="site.yaml", broker="embedded"), tmp_path / "racktwin.yaml").file("loop")


def test_a_path_that_leads_upwards_is_whole_and_leads_where_the_system_leads(tmp_path: Path) -> None:
    (tmp_path / "releases" / "1" / "etc").mkdir(parents=True)
    (tmp_path / "etc").symlink_to("releases/1/etc")
    upwards = path_under(tmp_path / "etc", "../../2/./site.yaml")
    assert upwards == tmp_path.resolve() / "releases" / "2" / "site.yaml"
    assert path_under(tmp_path / "etc", "site.yaml") == tmp_path / "etc" / "site.yaml"
    assert path_under(tmp_path / "etc", "/run/site.yaml") == Path("/run/site.yaml")


def test_profiles_stand_beside_the_site_file_and_not_beside_a_link_to_it(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "site.yaml").write_text("site: lab\n")
    (tmp_path / "site.yaml").symlink_to("shared/site.yaml")
    loaded = Loaded(Config(site="site.yaml", broker="embedded"), tmp_path / "racktwin.yaml")
    assert loaded.site_file == tmp_path / "shared" / "site.yaml"
