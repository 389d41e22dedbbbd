"""The installation below a folder of its own, with a Python that pretends; examples; the servers' script."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from twin.config import load_config

ROOT = Path(__file__).parents[2]
INSTALL = ROOT / "deploy" / "install.sh"
SERVERS = ROOT / "deploy" / "setup" / "servers.sh"

# Answers what install.sh asks of an interpreter; `-m venv DIR` makes a DIR/bin/python that is this one again.
PYTHON = """#!/bin/bash
case "$*" in
    *sys.version_info*) exit 0 ;;
    *sys.base_prefix*) echo "${FAKE_BASE:-/usr}" ;;
    *sys.version*) echo "${FAKE_VERSION:-3.11}" ;;
    "-m venv "*) mkdir -p "$3/bin" "$3/lib"; cp "$0" "$3/bin/python"; echo venv "$3" >>"$FAKE_LOG" ;;
    *"pip "*)
        echo "${@: -1}" >>"$FAKE_LOG"
        if [[ -n ${FAKE_FAIL:-} ]]; then exit 1; fi
        cat >"${0%/*}/racktwin" <<'EOF'
#!/bin/bash
echo "$*" >>"$FAKE_LOG"
if [[ $1 == init ]]; then touch "$2/site.yaml" "$2/reference.yaml" "$2/racktwin.yaml"; fi
EOF
        chmod 755 "${0%/*}/racktwin" ;;
esac
"""


class Host:
    """A folder that stands for a host's root."""

    def __init__(self, folder: Path) -> None:
        self.root, self.log = folder / "root", folder / "log"
        self.python = folder / "python3"
        self.python.write_text(PYTHON)
        self.python.chmod(0o755)
        self.log.touch()

    def install(self, *arguments: str, code: int = 0, umask: int = -1, **variables: str) -> str:
        environment = {**os.environ, "FAKE_LOG": str(self.log), **variables}
        command = [str(INSTALL), "--destdir", str(self.root), "--python", str(self.python), *arguments]
        answer = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, umask=umask
        )
        assert answer.returncode == code, answer.stdout + answer.stderr
        return answer.stdout + answer.stderr

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def environments(self) -> list[str]:
        return sorted(p.name for p in self.path("/opt/racktwin/venvs").iterdir())


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_the_mask_of_whoever_installs_opens_nothing_and_closes_nothing(host: Host, umask: int) -> None:
    host.install(umask=umask)
    for path in (*host.path("/opt/racktwin").rglob("*"), host.path("/opt/racktwin")):
        made_by_pip = path.name == "racktwin" and path.is_file()  # by the one that pretends
        if not path.is_symlink() and not made_by_pip:
            mode = path.stat().st_mode
            assert not mode & 0o022, f"{path} can be changed by others"
            assert mode & 0o044, f"{path} cannot be read by the service's user"
    assert host.path("/etc/racktwin").stat().st_mode & 0o777 == 0o750
    assert host.path("/etc/racktwin/secrets").stat().st_mode & 0o777 == 0o700


def test_a_first_run_puts_all_in_place_and_a_second_changes_nothing(host: Host) -> None:
    said = host.install()
    assert "racktwin init --force /etc/racktwin" in said
    link = os.readlink(host.path("/opt/racktwin/venv"))
    assert link.startswith("/opt/racktwin/venvs/")
    assert host.path(link + "/bin/racktwin").exists()
    assert host.path("/etc/racktwin/racktwin.yaml").stat().st_mode & 0o777 == 0o640
    assert host.path("/etc/racktwin/secrets").stat().st_mode & 0o777 == 0o700
    unit = host.path("/usr/local/lib/systemd/system/racktwin.service").read_text()
    assert unit == (ROOT / "deploy" / "systemd" / "racktwin.service").read_text()
    log = host.log.read_text()
    assert "requirements.lock" in log
    assert f"init {host.path('/etc/racktwin')} --yes --for 0s" in log
    assert sorted(p.name for p in host.path("/etc/racktwin").iterdir()) == [
        "racktwin.yaml", "reference.yaml", "secrets", "site.yaml"]  # fmt: skip
    assert "nothing to change" in host.install()
    assert host.log.read_text() == log


@pytest.mark.long
@pytest.mark.parametrize("base", ["/root/.pyenv/versions/3.11.9", "/home/ada/python", "/run/user/0/python"])
def test_a_python_in_a_home_is_refused_for_the_service_sees_none(host: Host, base: str) -> None:
    said = host.install(code=1, FAKE_BASE=base)
    assert f"the Python in {base} is in a home directory" in said
    assert "--python /usr/bin/python3" in said
    assert host.log.read_text() == ""
    host.install(FAKE_BASE="/opt/root/python")


@pytest.mark.long
def test_what_people_wrote_is_kept(host: Host) -> None:
    host.install()
    config = host.path("/etc/racktwin/racktwin.yaml")
    config.write_text("mine\n")
    state = host.path("/var/lib/racktwin/run/journal.jsonl")
    state.parent.mkdir(parents=True)
    state.write_text("records\n")
    host.install()
    said = host.install("--uninstall")
    assert "kept: /etc/racktwin, /var/lib/racktwin" in said
    assert (config.read_text(), state.read_text()) == ("mine\n", "records\n")
    assert not host.path("/opt/racktwin").exists()
    assert not host.path("/usr/local/lib/systemd/system/racktwin.service").exists()
    host.install("--uninstall")
    host.install()
    assert config.read_text() == "mine\n"


@pytest.mark.long
def test_an_upgrade_keeps_one_environment_to_go_back_to(host: Host) -> None:
    host.install(FAKE_VERSION="3.11.1")
    first = host.environments()
    assert "is now" in host.install(FAKE_VERSION="3.11.2")
    assert len(host.environments()) == 2
    host.install(FAKE_VERSION="3.11.3")
    assert len(host.environments()) == 2
    assert first[0] not in host.environments()


@pytest.mark.long
def test_an_upgrade_that_fails_leaves_what_there_was(host: Host) -> None:
    host.install()
    before, link = host.environments(), os.readlink(host.path("/opt/racktwin/venv"))
    host.install(FAKE_VERSION="3.12", FAKE_FAIL="yes", code=1)
    assert host.environments() == before
    assert os.readlink(host.path("/opt/racktwin/venv")) == link


@pytest.mark.long
def test_another_prefix_is_in_the_unit(host: Host) -> None:
    host.install("--prefix", "/srv/twin")
    unit = host.path("/usr/local/lib/systemd/system/racktwin.service").read_text()
    assert "ExecStart=/srv/twin/venv/bin/racktwin daemon run" in unit
    assert "/opt/racktwin" not in unit


def test_a_wheel_is_installed_instead_of_the_checkout(host: Host, tmp_path: Path) -> None:
    wheel = tmp_path / "racktwin-1.whl"
    wheel.write_bytes(b"a wheel")
    host.install("--wheel", str(wheel))
    assert str(wheel) in host.log.read_text().splitlines()
    first = host.environments()
    wheel.write_bytes(b"another")
    host.install("--wheel", str(wheel))
    assert host.environments() != first


def test_a_folder_of_others_is_neither_used_nor_removed(host: Host) -> None:
    precious = host.path("/opt/racktwin/precious")
    precious.parent.mkdir(parents=True)
    precious.write_text("x")
    assert "was not created by this script" in host.install(code=1)
    assert "it is kept" in host.install("--uninstall")
    assert precious.exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--prefix", "opt"], "expected an absolute path"),
        (["--prefix", "/opt/../etc"], "expected an absolute path"),
        (["--prefix", "/a b"], "expected an absolute path"),
        (["--prefix"], "expected a value"),
        (["--wheel", "/nowhere.whl"], "no such file"),
        (["--venv", "/nowhere"], "expected /nowhere/bin/racktwin"),
        (["--python", "/bin/false"], "apt-get install python3-venv"),
        (["--fast"], "unknown argument"),
    ],
)
def test_a_wrong_call_is_refused(host: Host, arguments: list[str], expected: str) -> None:
    assert expected in host.install(*arguments, code=1)


def test_the_script_says_how_it_is_used() -> None:
    answer = subprocess.run([str(INSTALL), "--help"], capture_output=True, text=True, check=True)
    assert "--uninstall" in answer.stdout
    assert "--venv DIR" in answer.stdout


@pytest.mark.parametrize("path", sorted((ROOT / "deploy" / "config").glob("*.yaml")), ids=lambda p: p.name)
def test_the_examples_are_good(path: Path) -> None:
    loaded = load_config(path)
    assert loaded.config.site


def test_the_examples_site_loads() -> None:
    from twin.daemon import load_checked

    load_checked(load_config(ROOT / "deploy" / "config" / "lab.yaml"))


# A Debian whose packages are files in $HERE; apt-get fails where $APT_FAILS says so.
DEBIAN = {
    "dpkg-query": '[[ -e $HERE/installed/${@: -1} ]] && printf "install ok installed"',
    "apt-get": """echo "$*" >>"$HERE/log"; ls "$HERE/policy" >>"$HERE/log" 2>&1
[[ $1 != "${APT_FAILS:-}" ]] || { echo "E: broken"; exit 100; }
[[ $1 == install ]] || exit 0
for p in "$@"; do [[ $p == -* || $p == install ]] || touch "$HERE/installed/$p"; done""",
    "apt-cache": '[[ $2 == "${APT_LACKS:-}" ]] && c="(none)" || c=1.0; echo "  Candidate: $c"',
    "dpkg": 'echo "/lib/systemd/system/$2.service"',
    "systemctl": 'echo "systemctl $*" >>"$HERE/log"',
    "id": 'echo "${USER_ID:-0}"',
}


class Debian:
    """A copy of the script and of the commands that it calls."""

    def __init__(self, folder: Path) -> None:
        self.folder, programs = folder, folder / "programs"
        (folder / "installed").mkdir()
        (folder / "checkout" / "deploy" / "setup").mkdir(parents=True)
        self.script = Path(shutil.copy(SERVERS, folder / "checkout" / "deploy" / "setup"))
        programs.mkdir()
        for name, text in DEBIAN.items():
            (programs / name).write_text(f"#!/bin/bash\n{text}\n")
            (programs / name).chmod(0o755)

    def run(self, code: int = 0, **variables: str) -> str:
        environment = {
            "PATH": f"{self.folder}/programs:/usr/bin:/bin", "HERE": str(self.folder),
            "RACKTWIN_POLICY_FILE": str(self.folder / "policy"), **variables,
        }  # fmt: skip
        answer = subprocess.run(
            [str(self.script)], env=environment, capture_output=True, text=True, check=False
        )
        assert answer.returncode == code, answer.stderr
        return answer.stderr

    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def debian(tmp_path: Path) -> Debian:
    return Debian(tmp_path)


def test_servers_are_installed_but_neither_started_nor_enabled(debian: Debian) -> None:
    assert "installing mosquitto" in debian.run(CI="true")
    log = debian.log()
    assert f"{debian.folder}/policy" in log  # while apt-get ran, starting was forbidden
    assert not (debian.folder / "policy").exists()
    assert "systemctl disable -q mosquitto.service" in log
    assert debian.run(CI="true") == ""
    assert debian.log() == log


def test_without_root_it_only_says_what_is_missing(debian: Debian) -> None:
    assert "Remedy: sudo apt-get install mosquitto" in debian.run(USER_ID="1000", CI="true")
    assert debian.log() == ""


@pytest.mark.parametrize("step", ["update", "install"])
def test_an_installation_that_fails_is_an_error_in_ci_alone(debian: Debian, step: str) -> None:
    assert "E: broken" in debian.run(code=1, CI="true", APT_FAILS=step)
    assert "E: broken" in debian.run(APT_FAILS=step)
    assert not (debian.folder / "policy").exists()


def test_a_policy_that_was_there_stays(debian: Debian) -> None:
    (debian.folder / "policy").write_text("mine")
    debian.run()
    assert (debian.folder / "policy").read_text() == "mine"


def test_a_package_that_this_release_lacks_is_not_looked_for_each_time(debian: Debian) -> None:
    assert "not in this release: victoria-metrics" in debian.run(CI="true", APT_LACKS="victoria-metrics")
    log = debian.log()
    assert debian.run(CI="true", APT_LACKS="victoria-metrics") == ""
    assert debian.log() == log
