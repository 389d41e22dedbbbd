"""`racktwin trace list | fetch | verify`: the public recordings, where they lie, whether they are whole.

`recordings.yaml` beside this file is the list; a recording is data of others and never part of the wheel.
Reads and writes below one folder (`trace_root`), and opens outgoing HTTPS for `fetch` only. A file is renamed
into place once its SHA-256 is right, so there are no half files.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import lzma
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

import msgspec
import yaml
from rich.console import Console

from twin.catalogue import ConfigError, ConnectorError, StorageError, TwinError
from twin.cli.arguments import present
from twin.cli.grammar import Verb
from twin.report import grid, print_line, safe_text
from twin.run import ProgressBar, atomic_write
from twin.site import convert

RAW_BASE = "https://raw.githubusercontent.com"
MAX_DOWNLOAD_BYTES = 64 << 20  # of a file that is cut here: its own size is not in the list
SOCKET_TIMEOUT_S = 30.0
FILE_TIMEOUT_S = 900.0
_CHUNK_BYTES = 1 << 16
_LIST = Path(__file__).with_name("recordings.yaml")
_REPOSITORY = re.compile(r"^https://github\.com/([A-Za-z0-9_.-]+)/([A-Za-z0-9_.-]+)$")


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class Cut(_Strict, frozen=True):
    """Filter of the events of a JSON list: it keeps those whose `key` lies below the bound."""

    key: str
    below: float


class TraceFile(_Strict, frozen=True):
    """One file: where it lies here and in the repository, and what its content must be."""

    local: str
    path: str
    size: int
    sha256: str
    licence: str | None = None
    transform: Literal["verbatim", "xz", "packed", "cut"] = "verbatim"
    cut: Cut | None = None


class Recording(_Strict, frozen=True):
    """A recording: its source, its licence (SPDX) and its files."""

    name: str
    title: str
    repository: str
    commit: str
    licence: str
    exercises: str
    files: list[TraceFile]
    note: str = ""


class _List(_Strict, frozen=True):
    recordings: list[Recording]


class FileCheck(NamedTuple):
    """Result of `verify` or `fetch` for one file; `detail` says what was expected when it is not ok."""

    recording: str
    file: str
    state: Literal["ok", "fetched", "missing", "size", "hash", "unreadable"]
    detail: str = ""


def trace_root(env: Mapping[str, str]) -> Path:
    """Return the folder of recordings: RACKTWIN_TRACES, else the user's cache folder."""
    if chosen := env.get("RACKTWIN_TRACES"):
        return Path(chosen).expanduser()
    cache = env.get("XDG_CACHE_HOME", "")
    # the XDG rules say that a relative path there is to be ignored
    root = Path(cache) if os.path.isabs(cache) else Path(env.get("HOME") or Path.home()) / ".cache"
    return root / "racktwin" / "traces"


def _faults(listed: _List, file: str) -> list[str]:
    """Check what the types cannot: names are unique, paths stay inside, sources are whole."""
    faults: list[str] = []
    seen: set[str] = set()
    for r in listed.recordings:
        at = f"{file}: {r.name}"
        if r.name in seen or not re.fullmatch(r"[a-z0-9-]+", r.name):
            faults.append(f"{at}: expected a unique name of a-z, 0-9 and -")
        seen.add(r.name)
        if _REPOSITORY.match(r.repository) is None:
            faults.append(f"{at}.repository: expected https://github.com/OWNER/NAME, got {r.repository!r}")
        if not re.fullmatch(r"[0-9a-f]{40}", r.commit):
            faults.append(f"{at}.commit: expected 40 hex digits, got {r.commit!r}")
        for f in r.files:
            path = PurePosixPath(f.local)
            if path.is_absolute() or ".." in path.parts or not path.parts:
                faults.append(f"{at}: expected a local path inside the recording's folder, got {f.local!r}")
            if not re.fullmatch(r"[0-9a-f]{64}", f.sha256):
                faults.append(f"{at}/{f.local}: expected a SHA-256 of 64 hex digits, got {f.sha256!r}")
            compressed = f.local.endswith(".xz")
            if (f.transform == "cut") != (f.cut is not None) or (
                f.transform in ("xz", "packed")
            ) != compressed:
                faults.append(f"{at}/{f.local}: transform {f.transform!r} does not fit the file")
    return faults


def list_recordings(path: Path = _LIST) -> list[Recording]:
    """All known recordings, in the order of the list."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path.name}: cannot be read: {error}") from error
    listed = convert(_List, tree, path.name)
    faults = _faults(listed, path.name)
    if faults:
        raise ConfigError(faults)
    return listed.recordings


def find_recording(name: str) -> Recording:
    """The recording of this name; ConfigError names the known ones."""
    known = list_recordings()
    for recording in known:
        if recording.name == name:
            return recording
    raise ConfigError(f"no recording is named {name!r}; expected one of {', '.join(r.name for r in known)}")


def _digest(path: Path, limit: int) -> tuple[int, str]:
    """(size, SHA-256) of the content (of an .xz, decompressed); reads at most `limit` + 1 bytes."""
    digest, size = hashlib.sha256(), 0
    with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as stream:
        while size <= limit and (chunk := stream.read(min(_CHUNK_BYTES, limit + 1 - size))):
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()


def _check(recording: Recording, file: TraceFile, root: Path) -> FileCheck:
    path = root / recording.name / file.local
    if not path.exists() and path.suffix == ".xz" and path.with_suffix("").exists():
        path = path.with_suffix("")  # someone decompressed it; the content is what counts
    if not path.exists():
        return FileCheck(recording.name, file.local, "missing", f"expected {path}")
    try:
        size, digest = _digest(path, file.size)
    except (OSError, lzma.LZMAError, EOFError) as error:
        return FileCheck(recording.name, file.local, "unreadable", f"{path}: {error}")
    if size != file.size:
        found = f"more than {file.size}" if size > file.size else str(size)
        return FileCheck(recording.name, file.local, "size", f"expected {file.size} bytes, found {found}")
    if digest != file.sha256:
        return FileCheck(
            recording.name, file.local, "hash", f"expected SHA-256 {file.sha256}, found {digest}"
        )
    return FileCheck(recording.name, file.local, "ok")


def verify(name: str, root: Path | None = None) -> list[FileCheck]:
    """One finding per file of the recording; all `ok` means that it is the one we know."""
    recording, root = find_recording(name), root or trace_root(os.environ)
    return [_check(recording, file, root) for file in recording.files]


def url_of(recording: Recording, file: TraceFile, base: str = RAW_BASE) -> str:
    """Return the download address of a file."""
    match = _REPOSITORY.match(recording.repository)
    assert match is not None, "checked when the list was read"
    return f"{base}/{match[1]}/{match[2]}/{recording.commit}/{urllib.parse.quote(file.path)}"


def _download(url: str, limit: int) -> bytes:
    """The body at `url`; proxies come from the environment. Raises ConnectorError."""
    if not url.startswith(("https://", "http://")):
        raise ConnectorError(f"refused to open {url}: expected http or https")
    deadline, body = time.monotonic() + FILE_TIMEOUT_S, bytearray()
    try:
        request = urllib.request.Request(url, headers={"User-Agent": "racktwin"})
        with urllib.request.urlopen(request, timeout=SOCKET_TIMEOUT_S) as answer:
            while chunk := answer.read(_CHUNK_BYTES):
                body += chunk
                if len(body) > limit:
                    raise ConnectorError(f"{url} sends more than {limit} bytes: not the published file")
                if time.monotonic() > deadline:
                    raise ConnectorError(f"{url} took longer than {FILE_TIMEOUT_S:.0f} s")
            declared = answer.headers.get("Content-Length")
    except urllib.error.HTTPError as error:
        error.close()
        raise ConnectorError(f"cannot download {url}: HTTP {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ConnectorError(f"cannot download {url}: {getattr(error, 'reason', error)}") from error
    if declared is not None and declared.isdigit() and int(declared) != len(body):
        raise ConnectorError(f"cannot download {url}: it broke off after {len(body)} of {declared} bytes")
    return bytes(body)


def _transformed(raw: bytes, file: TraceFile, url: str) -> bytes:
    """The content as it is kept here (before compression)."""
    if file.transform == "packed":
        try:
            # One byte more than expected: what is longer shows by its digest, without being unpacked whole.
            return lzma.LZMADecompressor().decompress(raw, file.size + 1)
        except lzma.LZMAError as error:
            raise ConnectorError(f"{url} cannot be unpacked: {error}; expected an .xz file") from error
    if file.cut is None:
        return raw
    key, below = file.cut.key, file.cut.below
    try:
        events = json.loads(raw)
        kept = [event for event in events if event[key] < below]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConnectorError(f"{url} is not a JSON list of events with {key!r}: {error!r}") from error
    return json.dumps(kept, indent=0).encode()


def _place(content: bytes, target: Path) -> None:
    """Write a file whole, compressed where its name says so. Raises StorageError."""
    stored = lzma.compress(content) if target.suffix == ".xz" else content
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(target, stored, mode=0o644)
    except OSError as error:
        raise StorageError(f"cannot write {target}: {error}") from error


def _fetch_file(recording: Recording, file: TraceFile, root: Path, base: str) -> FileCheck:
    found = _check(recording, file, root)
    if found.state == "ok":
        return found
    url = url_of(recording, file, base)
    content = _transformed(_download(url, MAX_DOWNLOAD_BYTES if file.cut else file.size), file, url)
    digest = hashlib.sha256(content).hexdigest()
    if digest != file.sha256:
        raise ConnectorError(
            f"{url} is not the published file: expected {file.size} bytes, SHA-256 {file.sha256}, "
            f"got {len(content)} bytes with {digest}; nothing was kept of it"
        )
    _place(content, root / recording.name / file.local)
    return FileCheck(recording.name, file.local, "fetched")


def fetch(name: str, root: Path | None = None, base: str = RAW_BASE) -> list[FileCheck]:
    """Download what is missing or wrong of a recording; files that are right are left alone.

    Raises ConnectorError at the first file that cannot be had; those before it stay for the next call.
    """
    recording, root = find_recording(name), root or trace_root(os.environ)
    done: list[FileCheck] = []
    for file in recording.files:
        try:
            done.append(_fetch_file(recording, file, root, base))
        except ConnectorError as error:
            raise ConnectorError(
                f"{recording.name}/{file.local}: {error}\n"
                f"{len(done)} of {len(recording.files)} files are in place. Check the network or the proxy "
                f"settings and try again, or copy the recording to {root / recording.name} (another place: "
                f"set RACKTWIN_TRACES) and run `racktwin trace verify {recording.name}`."
            ) from error
    return done


def _show_list(tree: dict[str, Any], out: Console) -> None:
    print_line(out, f"recordings in {tree['root']}")
    lines = [
        [r["name"], r["title"], r["licence"], f"{r['present_files']}/{len(r['files'])}",
         f"{sum(f['size'] for f in r['files']) / 1024:,.0f}"]
        for r in tree["recordings"]
    ]  # fmt: skip
    grid(out, ("name", "what", "licence", "files", "KiB"), lines, "no recordings", right=(3, 4))


def _show_checks(tree: dict[str, Any], out: Console) -> None:
    heads = ("recording", "file", "state", "detail")
    rows = [
        [safe_text(cell, "" if c["state"] in FINE else "red") for cell in c.values()] for c in tree["files"]
    ]
    grid(out, heads, rows)
    for error in tree["errors"]:
        print_line(out, error, "red")


def _chosen(args: argparse.Namespace) -> Sequence[Recording]:
    return [find_recording(n) for n in args.names] or list_recordings()


def run_list(args: argparse.Namespace, out: Console, *_: Console) -> int:
    """Print the list of public recordings, and how many files of each are here."""
    root = trace_root(os.environ)
    rows = []
    for one in _chosen(args):
        here = sum((root / one.name / file.local).exists() for file in one.files)
        rows.append({**msgspec.to_builtins(one), "present_files": here})
    return present(args, {"root": str(root), "recordings": rows}, _show_list, out)


def run_checks(args: argparse.Namespace, out: Console, err: Console) -> int:
    """Fetch or verify: 0 if all is well, 1 if a file is not, or cannot be had."""
    root, work = trace_root(os.environ), fetch if args.command == "trace fetch" else verify
    checks: list[FileCheck] = []
    errors: list[str] = []
    chosen = _chosen(args)
    sizes = [sum(file.size for file in recording.files) for recording in chosen]
    with ProgressBar(err, "fetching" if work is fetch else "verifying") as bar:
        for i, recording in enumerate(chosen):
            bar.move(sum(sizes[:i]) / max(1, sum(sizes)), recording.name)
            try:
                checks += work(recording.name, root)
            except TwinError as error:
                errors.append(str(error))
    present(args, {"files": [c._asdict() for c in checks], "errors": errors}, _show_checks, out)
    return 1 if errors or any(c.state not in FINE for c in checks) else 0


FINE = ("ok", "fetched")
NAMES = "NAME*>names  recordings; default: all"
VERBS = {
    "trace list": Verb(run_list, NAMES, ("",), rows="recordings"),
    "trace fetch": Verb(run_checks, NAMES, ("dsx-bms-capture",), rows="files"),
    "trace verify": Verb(run_checks, NAMES, ("", "dsx-bms-capture"), rows="files"),
}
