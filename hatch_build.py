"""Build hook: compiles the kernels of `twin/kernels` in place, where there is a C compiler.

`python hatch_build.py` does it for a checkout. Without a compiler, or without the headers of Python, nothing
is compiled, and the NumPy versions of the kernels serve: the same results, more slowly.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "twin" / "kernels"
SOURCE, BUILT = FOLDER / "native.c", FOLDER / "_native.abi3.so"
# No fused operations: they round once where NumPy rounds twice. The last two drop what nobody reads, errno
# and floating-point traps, and leave all results as they are.
FLAGS = (
    "-O3",
    "-fPIC",
    "-shared",
    "-std=gnu11",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
)
LIMIT_S = 300.0


def compiler() -> list[str] | None:
    """Return the command of the C compiler, `$CC` first; None without one."""
    for words in (shlex.split(os.environ.get("CC", "")), ["cc"], ["gcc"], ["clang"]):
        if words and shutil.which(words[0]):
            return words
    return None


def compiled() -> str:
    """Compile; "" where that went well, else why it did not. What was compiled before never stays."""
    BUILT.unlink(missing_ok=True)
    command = compiler()
    if command is None:
        return "no C compiler (cc, gcc, clang, or $CC)"
    name = hashlib.blake2b(SOURCE.read_bytes(), digest_size=16).hexdigest()
    with tempfile.TemporaryDirectory(dir=FOLDER, prefix=".build-") as folder:
        made = Path(folder) / BUILT.name
        words = [*command, *FLAGS, f'-DRACKTWIN_SOURCE="{name}"', f"-I{sysconfig.get_path('include')}"]
        words += [str(SOURCE), "-o", str(made), "-lm"]
        if sys.platform == "darwin":
            words += ["-undefined", "dynamic_lookup"]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or [
                f"exit {done.returncode}"
            ]
            return lines[0]
        made.replace(BUILT)
    return ""


def tag() -> str:
    """The wheel's tag with kernels: the stable ABI of CPython 3.11 on this platform."""
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    return f"cp311-abi3-{platform}"


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # compiled by hand
    pass
else:

    class KernelsHook(BuildHookInterface):  # type: ignore[type-arg, misc]
        """Compiles before a wheel or an editable install is made."""

        PLUGIN_NAME = "custom"

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            """Add the kernels to the wheel, which then is of this platform."""
            if self.target_name != "wheel":
                return
            why = compiled()
            if why:
                self.app.display_warning(f"kernels were not compiled: {why}; NumPy does their work")
                return
            build_data["artifacts"].append("twin/kernels/*.so")
            build_data["pure_python"], build_data["tag"] = False, tag()


if __name__ == "__main__":
    sys.exit(compiled() or None)
