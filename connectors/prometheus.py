"""Prometheus exporters as sources: a page is fetched each period and read by a mapping.

`PageDecoder` is a pure function of the page's bytes (the text format, read by `prometheus_client`);
`PrometheusSource` fetches with aiohttp. It follows no redirect, uses no proxy of the environment and takes no
page beyond a limit.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from connectors.http_answer import body_of, failing_as
from connectors.series import SeriesFaults, SeriesSample, SeriesTable, Sums, packed, remedy_of
from connectors.series_map import SeriesMap, load_map
from twin.catalogue import BadMessage, ConfigError, ConnectorError
from twin.contracts import Inlet
from twin.telemetry import Block, Names, Reading

MAX_PAGE = 32 * 2**20
MAX_SAMPLES = 500_000  # of a page that the mapping names
MAX_LINE = 16 * 2**10
SLICE = 200  # lines that are read at a stretch, between which the loop goes on
PIECE = 2**16  # bytes that are searched for such lines at a stretch
FAILURES = 3  # fetches on end before the link counts as down
_END = b"{ \t"
_NAME = re.compile(rb"[a-zA-Z_:][a-zA-Z0-9_:]*")
HEADERS = {"Accept": "text/plain;version=0.0.4", "Accept-Encoding": "identity"}
HINTS = {
    401: "; expected 200: the exporter requires a `token_file`",
    403: "; expected 200: the exporter requires another token, or a client certificate (`tls`)",
    404: "; expected 200: check the path, usually /metrics",
}


class PageDecoder:
    """Reads pages of one exporter. `place` is the entity of series without an entity in their labels."""

    def __init__(
        self,
        site: Names,
        mapping: SeriesMap,
        file: str = "mapping",
        place: str | None = None,
        sums: Sums | None = None,
    ) -> None:
        self._table, self._file = SeriesTable(mapping, site, file, place, sums), file
        self._wanted = {name.encode() for name in self._table.wanted}

    @property
    def faults(self) -> SeriesFaults:
        """Return the bad lines and values of pages that were otherwise read."""
        return self._table.faults

    @property
    def strangers(self) -> SeriesFaults:
        """Return names outside the site on pages that were partly read."""
        return self._table.strangers

    def decode(self, page: bytes, t_ns: int) -> list[Reading | Block]:
        """Parse a page of that instant. Raises BadMessage if it is no page of this kind."""
        return self.readings([s for some in self.parse(page) for s in some], t_ns)

    def parse(self, page: bytes) -> Iterator[list[SeriesSample]]:
        """Return the samples of a page that the mapping names, some lines at a time. Raises BadMessage."""
        if len(page) > MAX_PAGE:
            raise BadMessage(f"a page of {len(page)} bytes; expected at most {MAX_PAGE}")
        count = bad = 0
        why = ""
        for chunk in self._lines(page):
            try:
                samples = list(_samples(b"\n".join(chunk))) if chunk else []
            except ValueError:
                samples = []
                for line in chunk:
                    try:
                        samples += _samples(line)
                    except ValueError as error:
                        bad += 1
                        why = f"line {line[:60]!r}: {str(error)[:100]}"
                        self.faults.add(why)
            count += len(samples)
            if count > MAX_SAMPLES:
                raise BadMessage(f"more than {MAX_SAMPLES} samples; expected fewer on one page")
            yield samples
        if bad and not count:
            raise BadMessage(f"{why}; {bad} bad lines and no good one")
        if not count:
            raise BadMessage(self._why_nothing(page))

    def readings(self, samples: list[SeriesSample], t_ns: int) -> list[Reading | Block]:
        """Return readings from the samples of a page. Raises BadMessage if none of them is of the site."""
        return self._packed(self._table.read(samples, t_ns), samples)

    async def read(self, page: bytes, t_ns: int) -> list[Reading | Block]:
        """`decode` in slices, between which the loop goes on."""
        samples: list[SeriesSample] = []
        for some in self.parse(page):
            samples += some
            await asyncio.sleep(0)
        steps = self._table.steps(samples, t_ns)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return self._packed(end.value, samples)
            await asyncio.sleep(0)

    def _packed(self, readings: list[Reading], samples: list[SeriesSample]) -> list[Reading | Block]:
        if not readings:
            strange = self.strangers.take()
            why = f": {strange[0][0]}; {remedy_of(strange[0][0])}" if strange else ""
            raise BadMessage(f"no series to read: none of {len(samples)} is of an entity of the site{why}")
        return packed(readings)

    def _why_nothing(self, page: bytes) -> str:
        """Return the reason why a page has no series of the mapping."""
        if page.lstrip()[:1] == b"<":
            return (
                "a page of HTML; expected metrics in the text format of Prometheus: check that the "
                "path is /metrics"
            )
        heads = (re.split(rb"[{ \t]", line, maxsplit=1)[0] for line in page.split(b"\n", 2000))
        names = [n.decode("utf-8", "replace")[:60] for n in dict.fromkeys(heads) if _NAME.fullmatch(n)]
        wanted = ", ".join(sorted(self._table.wanted)[:2])
        has = f"it has {', '.join(names[:3])}" if names else "the page has no series"
        return f"no series to read: {self._file} reads {wanted[:120]} and the like, {has}; check `map`"

    def _lines(self, page: bytes) -> Iterator[list[bytes]]:
        """Return the lines of series that the mapping names, of one piece of the page after the other.

        An exporter has many others, and comments: a piece may have none.
        """
        begin = 0
        while begin < len(page):
            end = page.find(b"\n", begin + PIECE)
            end = len(page) if end < 0 else end
            wanted = [line for line in page[begin:end].split(b"\n") if self._is_wanted(line)]
            begin = end + 1
            for at in range(0, max(1, len(wanted)), SLICE):
                yield wanted[at : at + SLICE]

    def _is_wanted(self, line: bytes) -> bool:
        cut = min((i for c in _END if (i := line.find(c)) >= 0), default=-1)
        return cut > 0 and line[:cut] in self._wanted and len(line) <= MAX_LINE


def _samples(text: bytes) -> Iterator[SeriesSample]:
    """Return the samples of some lines. Raises ValueError if one of them is malformed."""
    for family in text_string_to_metric_families(text.decode("utf-8") + "\n"):
        for sample in family.samples:
            at = None
            if sample.timestamp is not None:
                since_ms = float(sample.timestamp) * 1e3  # infinite where there are too many digits
                if not 1 <= since_ms < 2**62 / 10**6:
                    raise ValueError(f"time {since_ms:g}; expected milliseconds since 1970")
                at = round(since_ms) * 10**6
            yield SeriesSample(sample.name, sample.labels, sample.value, at)


@dataclass(frozen=True, kw_only=True)
class ScrapeSettings:
    """Settings of a scrape. `place`: see `PageDecoder`; `token` is sent as a bearer token.

    `renewed` gives the present one where the exporter refuses it. Raises ConfigError.

    For https, `ca_file` is whom to trust, `cert_file` and `key_file` are ours.
    """

    period_s: float = 15.0
    timeout_s: float = 5.0
    place: str | None = None
    token: str | None = field(default=None, repr=False)
    renewed: Callable[[], str | None] = field(default=lambda: None, repr=False)
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None


def _trust(settings: ScrapeSettings) -> ssl.SSLContext:
    """Return a TLS context with the trusted authority and the own certificate. Raises ConfigError."""
    try:
        context = ssl.create_default_context(cafile=settings.ca_file)
        if settings.cert_file is not None:
            context.load_cert_chain(settings.cert_file, settings.key_file)
    except (OSError, ValueError) as error:
        files = ", ".join(f for f in (settings.ca_file, settings.cert_file, settings.key_file) if f)
        raise ConfigError(f"{files}: expected certificates and a key in PEM: {error}") from error
    return context


class PrometheusSource:
    """Scrapes one exporter. `mapping` is one with its file's name, one alone, or a packaged one's name.

    Raises ConfigError for a mapping or a file that cannot be used.
    """

    def __init__(
        self,
        url: str,
        mapping: tuple[SeriesMap, str] | SeriesMap | str,
        site: Names,
        settings: ScrapeSettings,
        sums: Sums | None = None,
    ) -> None:
        self.map = "mapping"
        if isinstance(mapping, str):
            mapping = load_map(mapping)
        if isinstance(mapping, tuple):
            mapping, self.map = mapping
        self.decoder = PageDecoder(site, mapping, self.map, settings.place, sums)
        self._url, self._period_s, self._timeout_s = url, settings.period_s, settings.timeout_s
        self._tls = _trust(settings) if url.startswith("https:") else None
        self._shown = re.sub(r"//[^/@]*@", "//", url)  # without a password
        self.name = f"exporter {self._shown}"
        self.origins = (self.name,)
        self.settle_s = settings.timeout_s + 1.0  # a run that lasts longer has had an answer
        self._failed = 0  # fetches on end, over restarts of `run`
        self._token, self._renewed = settings.token, settings.renewed

    async def run(self, inlet: Inlet) -> None:
        """Scrape each period. Raises ConnectorError when the exporter has not answered three times on end,
        and again each time until it does.
        """
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        async with aiohttp.ClientSession(
            timeout=timeout,
            trust_env=False,
            headers=HEADERS,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        ) as session:
            # the first at once, the others at a phase of its own: many exporters are not asked all at once
            due_s = time.monotonic() - self._period_s * (1 - zlib.crc32(self.name.encode()) / 2**32)
            while True:
                asked_ns = time.time_ns()
                try:
                    page = await self._fetch(session)
                except ConnectorError as error:
                    self._failed += 1
                    inlet.fail(str(error), "check that the exporter runs")
                    if self._failed >= FAILURES:
                        raise
                else:
                    self._failed = 0
                    await self._take(page, asked_ns, inlet)
                due_s = max(due_s + self._period_s, time.monotonic())
                await asyncio.sleep(due_s - time.monotonic())

    async def _take(self, page: bytes, asked_ns: int, inlet: Inlet) -> None:
        """Stage the readings of a page, as of the time of the request.

        A large one is read in slices, so that the loop is not held up.
        """
        now_ns = time.time_ns()
        try:
            inlet.stage(await self.decoder.read(page, asked_ns), now_ns, self._period_s)
        except BadMessage as error:
            inlet.fail(
                f"{self._shown}: {error}", "compare `map`, `place` and `url` with the series of its page"
            )
        for why, count in self.decoder.faults.take():
            inlet.reject(self._shown, why if count == 1 else f"{why} ({count} times)")
        for why, _ in self.decoder.strangers.take():
            inlet.skip("name", why, self._shown, remedy_of(why))

    async def _fetch(self, session: aiohttp.ClientSession) -> bytes:
        """Return one page. Raises ConnectorError with the exporter's answer."""
        options: dict[str, Any] = {} if self._tls is None else {"ssl": self._tls}
        if self._token is not None:
            options["headers"] = {"Authorization": f"Bearer {self._token}"}
        with failing_as(ConnectorError, self._shown, self._timeout_s):
            async with session.get(self._url, allow_redirects=False, **options) as answer:
                if answer.status in (401, 403) and self._token is not None:
                    with suppress(ConfigError):  # a file that is being replaced
                        self._token = self._renewed() or self._token
                if answer.status != 200:
                    hint = HINTS.get(answer.status, "; expected 200")
                    raise ConnectorError(f"{self._shown}: answers {answer.status}{hint}")
                return await body_of(answer, self._shown, MAX_PAGE, ConnectorError)
