"""Prior files: the statistics that a site exports, and the prior that is merged from them. Signed JSON.

Neither holds names of nodes, times of failures or lines of a log.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np

from models.failure import GROUPS, FailurePrior, FleetStatistics, merge_statistics, parse_prior
from twin.anchor import HeadSigner, HeadVerifier
from twin.catalogue import ConfigError, ContractError, StorageError, clean
from twin.federation.privacy import epsilon_of, noise_scale, noise_variance

VERSION = 1
MAX_BYTES = 10_000  # of a site's statistics
MAX_MERGED_BYTES = 100_000
MAX_COUNT = 10**9
MOST_NOISE = 50  # scales of noise that make a count of 0 negative: more do so with e^-50. source: estimate
STATISTICS: Final = "racktwin failure statistics"
MERGED: Final = "racktwin failure prior"
DOMAIN = b"racktwin failure prior 1\n"  # so that a signature says nothing about anything else
_encode = msgspec.json.Encoder(order="deterministic").encode
Signed = TypeVar("Signed", "StatisticsFile", "PriorFile")


class StatisticsFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Noisy counts of a site over the days from `since_day` to before `until_day`, under a budget `epsilon`
    (delta is 0).
    """

    kind: Literal["racktwin failure statistics"] = STATISTICS
    version: int = VERSION
    site: str
    since_day: int
    until_day: int
    epsilon: str
    groups: dict[str, list[int]]
    key: str = ""
    signature: str = ""

    @property
    def days(self) -> int:
        return self.until_day - self.since_day


class PriorSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file that a prior was merged from; `digest` is of its bytes as signed."""

    site: str
    since_day: int
    until_day: int
    epsilon: str
    key: str
    digest: str


class PriorFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The prior of a fleet that is none of the sources."""

    kind: Literal["racktwin failure prior"] = MERGED
    version: int = VERSION
    prior: str
    sources: list[PriorSource]
    key: str = ""
    signature: str = ""


def _content(file: StatisticsFile | PriorFile) -> bytes:
    """The bytes that are signed."""
    return DOMAIN + _encode(msgspec.structs.replace(file, signature=""))


def sign_file(file: Signed, signer: HeadSigner) -> Signed:
    """The file with the key's name and signature."""
    named = msgspec.structs.replace(file, key=signer.verifier.name)
    return msgspec.structs.replace(named, signature=signer.signature(_content(named)))


def file_bytes(file: StatisticsFile | PriorFile) -> bytes:
    """It as bytes for a file. Raises ConfigError if they are too many."""
    data = msgspec.json.format(_encode(file), indent=1) + b"\n"
    most = MAX_BYTES if isinstance(file, StatisticsFile) else MAX_MERGED_BYTES
    if len(data) > most:
        raise ConfigError(f"{len(data):,} bytes; expected at most {most:,}: merge fewer files")
    return data


def read_file(path: Path) -> StatisticsFile | PriorFile:
    """A file as it is; the signature is not looked at. Raises StorageError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_MERGED_BYTES + 1)
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        return _parsed(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, ContractError, ConfigError, RecursionError) as error:
        raise StorageError(
            f"{path}: {clean(str(error), 300)}; expected a file of `racktwin models export` or `merge`"
        ) from error


def _parsed(data: bytes) -> StatisticsFile | PriorFile:
    tree = msgspec.json.decode(data)
    kind = tree.get("kind") if isinstance(tree, dict) else None
    if kind not in (STATISTICS, MERGED):
        raise ContractError("is no such file")
    if tree.get("version") != VERSION:
        raise ContractError(f"is of version {tree.get('version')!r}, and this racktwin reads {VERSION}")
    if len(data) > (MAX_BYTES if kind == STATISTICS else MAX_MERGED_BYTES):
        raise ContractError(f"holds {len(data):,} bytes, too many")
    if kind == MERGED:
        prior = msgspec.convert(tree, PriorFile)
        parse_prior(prior.prior)
        return prior
    file = msgspec.convert(tree, StatisticsFile)
    epsilon = epsilon_of(file.epsilon, "epsilon")
    if not -(10**6) <= file.since_day < file.until_day <= 10**6:
        raise ContractError(f"is of the days {file.since_day} to {file.until_day}")
    if {name: len(counts) for name, counts in file.groups.items()} != dict(GROUPS):
        raise ContractError("groups: are not those of this version")
    if any(abs(count) > MAX_COUNT for counts in file.groups.values() for count in counts):
        raise ContractError(f"groups: a count beyond {MAX_COUNT:,}")
    for name, counts in file.groups.items():
        if min(counts) < -MOST_NOISE * noise_scale(name, epsilon):
            raise ContractError(
                f"{name}: a count of {min(counts):,}, which is too far below 0 for noise of epsilon "
                f"{file.epsilon}"
            )
    return file


class TrustedKey(NamedTuple):
    """A public key that files are believed of; with a `site`, statistics of that site alone."""

    verifier: HeadVerifier
    site: str = ""


def verified(path: Path, trusted: Sequence[TrustedKey]) -> StatisticsFile | PriorFile:
    """A file that one of the trusted keys signed as it is, and may sign. Raises StorageError."""
    file = read_file(path)
    signers = [one.verifier for one in trusted if one.verifier.name == file.key]
    if not signers:
        keys = ", ".join(one.verifier.name for one in trusted) or "none"
        raise StorageError(
            f"{path}: signed by the key {clean(file.key or 'none', 40)}, which is not trusted ({keys}); "
            "expected --key with the public key of the site, as it sent it on another way"
        )
    if not signers[0].confirms(file.signature, _content(file)):
        raise StorageError(f"{path}: the signature does not fit: it was changed, or cut; fetch it again")
    site = file.site if isinstance(file, StatisticsFile) else ""
    sites = [one.site for one in trusted if one.verifier.name == file.key]
    if not {"", site} & set(sites):
        what = f"the site {site!r}" if site else "a merger, which is of no site"
        raise StorageError(
            f"{path}: is of {clean(what, 120)}, and the key {file.key} is trusted for "
            f"{', '.join(map(repr, sites))} alone; expected that name, or --key without one"
        )
    return file


def fleet_of(file: StatisticsFile) -> FleetStatistics:
    """The statistics as the merger takes them."""
    epsilon = epsilon_of(file.epsilon, "epsilon")
    groups = {name: np.array(counts, np.float64) for name, counts in file.groups.items()}
    return FleetStatistics(float(file.days), groups, {name: noise_variance(name, epsilon) for name in GROUPS})


def chosen_spans(files: Sequence[tuple[str, StatisticsFile]]) -> tuple[list[StatisticsFile], list[str]]:
    """(one file of each site, notes): that of the longest span, the later of two as long.

    Raises ConfigError for two of one site whose days overlap, or that two keys signed.
    """
    by_site: dict[str, list[tuple[str, StatisticsFile]]] = {}
    problems = []
    for path, file in files:
        for other, known in by_site.setdefault(file.site, []):
            if known.key != file.key:
                problems.append(f"{path}: the site {file.site!r} is that of {other}, signed by another key")
            elif known.since_day < file.until_day and file.since_day < known.until_day:
                problems.append(
                    f"{path}: days {file.since_day} to {file.until_day} of {file.site!r} overlap those of "
                    f"{other}; expected each day of a site once"
                )
        by_site[file.site].append((path, file))
    if problems:
        raise ConfigError([clean(problem, 400) for problem in problems])
    chosen, notes = [], []
    for mine in by_site.values():
        path, best = max(mine, key=lambda one: (one[1].days, one[1].until_day))
        chosen.append(best)
        notes += [f"{other} is left out: {path} is of the same site" for other, _ in mine if other != path]
    return chosen, notes


def merge_files(files: Sequence[StatisticsFile]) -> PriorFile:
    """The prior from one file of each site, unsigned. Raises ConfigError where noise hides everything."""
    try:
        prior: FailurePrior = merge_statistics([fleet_of(file) for file in files])
    except ContractError as error:
        raise ConfigError(str(error)) from error
    sources = [
        PriorSource(
            site=file.site,
            since_day=file.since_day,
            until_day=file.until_day,
            epsilon=file.epsilon,
            key=file.key,
            digest=hashlib.blake2b(_content(file), digest_size=16).hexdigest(),
        )
        for file in files
    ]
    return PriorFile(prior=prior.text, sources=sources)


def prior_of(file: StatisticsFile | PriorFile) -> FailurePrior:
    """The prior that a file stands for; a single site's statistics are a merger of one."""
    return parse_prior((merge_files([file]) if isinstance(file, StatisticsFile) else file).prior)
