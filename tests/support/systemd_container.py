"""A real systemd for tests: booted by systemd-nspawn on a throw-away copy of this machine's file system.

Nothing of it reaches the machine: the copy is an overlay in memory, in a mount namespace that ends with the
test; it has no network. The code under test is mounted read only. Where the kernel or the rights for that are
missing, `NotHere` says which.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import site
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
VENV = "/opt/venv-under-test"
BOOT_S = 60.0

# The mounts are private to this script's namespace: when it ends, they are gone.
SCRIPT = """
set -eu
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
cp -a "$2/." "$1/root/"
mkdir -p /run/systemd
mount -t tmpfs tmpfs /run/systemd
machine=$3
root=$1/root
shift 3
echo mounted
exec systemd-nspawn --quiet --register=no --keep-unit --machine="$machine" --private-network \\
    --link-journal=no --console=pipe -D "$root" "$@"
"""


class NotHere(Exception):
    """This machine lets nobody boot a container; says why."""


class Container:
    """`with Container(tmp_path) as c: c.run("systemctl", "start", "x")`.

    What is put into `files` is laid over the root before the start; the checkout is at /opt/racktwin-source,
    and VENV runs it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, folder / "files"
        self.console = folder / "console.log"
        self._binds: list[str] = []
        self._nspawn: subprocess.Popen[bytes] | None = None
        self._pid = 0
        (self.files / VENV[1:] / "bin").mkdir(parents=True)
        self._lay_out_python()

    def _lay_out_python(self) -> None:
        """An environment outside of anybody's home, made of this interpreter and its packages."""
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        base, venv = Path(sys.base_prefix), self.files / VENV[1:]
        inside = Path("/usr") if base == Path("/usr") else Path("/opt/python-under-test")
        if inside != base:
            self.bind(base, str(inside))
        packages = venv / "lib" / version / "site-packages"
        packages.mkdir(parents=True)
        paths = ["/opt/racktwin-source"]
        for i, found in enumerate(site.getsitepackages()):
            if Path(found).is_dir():
                self.bind(Path(found), f"/opt/packages-under-test{i}")
                paths.append(f"/opt/packages-under-test{i}")
        (packages / "under_test.pth").write_text("".join(f"{p}\n" for p in paths))
        (venv / "pyvenv.cfg").write_text(f"home = {inside}/bin\ninclude-system-site-packages = false\n")
        (venv / "bin" / "python").symlink_to(f"{inside}/bin/{version}")
        self.bind(ROOT, "/opt/racktwin-source")
        self.library_path = f"{inside}/lib"

    def bind(self, outside: Path, inside: str) -> None:
        """Mount a folder of this machine, read only."""
        (self.files / inside[1:]).mkdir(parents=True, exist_ok=True)
        self._binds.append(f"--bind-ro={outside}:{inside}")

    def script(self, path: str, text: str) -> None:
        """An executable, run by VENV's Python."""
        file = self.files / path[1:]
        file.parent.mkdir(parents=True, exist_ok=True)
        python = f"env LD_LIBRARY_PATH={self.library_path} {VENV}/bin/python"
        start = f"#!/bin/sh\n''''exec {python} \"$0\" \"$@\" #'''\n"
        file.write_text(start + text)
        file.chmod(0o755)

    def __enter__(self) -> Container:
        if os.geteuid() != 0:
            raise NotHere("needs root")
        self._probe()
        try:
            self._start(["--boot"], ["systemd.unit=basic.target"])
            self._wait_booted()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _probe(self) -> None:
        """Raise NotHere unless mounts, overlays and namespaces are allowed: a container runs only `true`."""
        self._start([], ["/bin/true"])
        assert self._nspawn is not None
        code = self._nspawn.wait(30)
        if code:
            raise NotHere(f"the kernel or its settings allow no container: {self._tail()}")

    def _start(self, options: list[str], command: list[str]) -> None:
        mountpoint = self.folder / "mnt"
        mountpoint.mkdir(exist_ok=True)
        machine = f"racktwin-{os.getpid()}-{self.folder.name}".replace("_", "-")[:60].rstrip("-")
        with self.console.open("ab") as console:
            self._nspawn = subprocess.Popen(
                ["unshare", "--mount", "bash", "-c", SCRIPT, "container", str(mountpoint), str(self.files),
                 machine, *options, *self._binds, "--", *command],
                stdin=subprocess.DEVNULL, stdout=console, stderr=console,
            )  # fmt: skip

    def _wait_booted(self) -> None:
        assert self._nspawn is not None
        end = time.monotonic() + BOOT_S
        while time.monotonic() < end:
            if self._nspawn.poll() is not None:
                raise NotHere(f"systemd does not boot in a container here: {self._tail()}")
            self._pid = self._init()
            if self._pid:
                state = self.run("systemctl", "is-system-running", check=False).stdout.strip()
                if state in ("running", "degraded"):
                    return
            time.sleep(0.1)
        raise NotHere(f"systemd did not come up in a container within {BOOT_S:g} s: {self._tail()}")

    def _init(self) -> int:
        """The container's first process, as this machine numbers it."""
        assert self._nspawn is not None
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self._nspawn.pid).children(recursive=True):
                status = Path(f"/proc/{child.pid}/status").read_text()
                spaces = next(line.split()[1:] for line in status.splitlines() if line.startswith("NSpid"))
                if len(spaces) > 1 and spaces[-1] == "1":
                    return child.pid
        return 0

    def _tail(self) -> str:
        return " / ".join(self.console.read_text(errors="replace").split("\n")[-6:])[-600:]

    def run(
        self, *command: str, check: bool = True, timeout_s: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """A command inside, as root. Raises AssertionError with its output if it fails."""
        enter = ["nsenter", "--target", str(self._pid), "--mount", "--uts", "--ipc", "--net", "--pid",
                 "--root", "--wd=/"]  # fmt: skip
        answer = subprocess.run(
            [*enter, *command], capture_output=True, text=True, timeout=timeout_s, check=False,
            env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"},
        )  # fmt: skip
        if check and answer.returncode:
            raise AssertionError(
                f"{shlex.join(command)}: {answer.returncode}: {answer.stdout}{answer.stderr}"
            )
        return answer

    def show(self, unit: str, *names: str) -> dict[str, str]:
        """Properties of a unit."""
        text = self.run("systemctl", "show", unit, *(f"--property={n}" for n in names)).stdout
        return dict(line.partition("=")[::2] for line in text.splitlines())

    def journal(self, unit: str) -> str:
        """Return the log lines of the unit, and those of systemd about it."""
        return self.run("journalctl", "--no-pager", "-o", "short-monotonic", "-u", unit).stdout

    def __exit__(self, *_: object) -> None:
        if self._nspawn is None:
            return
        with contextlib.suppress(psutil.Error):
            family = psutil.Process(self._nspawn.pid).children(recursive=True)
            for process in family:  # the first of a container takes all of it with it
                with contextlib.suppress(psutil.Error):
                    process.kill()
        with contextlib.suppress(ProcessLookupError):
            self._nspawn.kill()
        self._nspawn.wait(10)
        self._nspawn = None
        shutil.rmtree(self.files, ignore_errors=True)
