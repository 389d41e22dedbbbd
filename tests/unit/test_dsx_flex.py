"""DSX Flex in: what is taken, what a message does to targets that are held, what is refused and why."""

from __future__ import annotations

import json
import uuid
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from connectors.dsx import FlexDecoder, FlexTrust, KeySet, Signer
from connectors.dsx.flex_wire import child_of, instant_ns, text_of
from tests.support.builders import START_NS, Twin, two_racks
from tests.support.flex_messages import CORRELATION, envelope, key, key_set, message, signer, target
from twin.catalogue import NS, BadMessage, ConfigError
from twin.contracts import LoadTarget
from twin.telemetry import Ignored, LoadTargetSet, LoadTargetWithdrawn

FEEDS = {"main-a": "lab/h/a", "main-b": "lab/h/b"}


class Desk:
    """A decoder before an engine: what it says is taken in at once, unless `late`."""

    def __init__(self, keys: bytes | None = None, **more: Any) -> None:
        self.twin = Twin(two_racks())
        self.more = more
        self.keys = KeySet(keys or key_set(), "keys") if keys != b"none" else None
        self.restart()

    def restart(self) -> None:
        self.decoder = FlexDecoder(FEEDS, self.keys, lambda: self.held, self._seen, FlexTrust(**self.more))

    def _seen(self) -> list[str]:
        return [known.partition(":")[2] for known in self.twin.engine.intake.seen]

    @property
    def held(self) -> tuple[LoadTarget, ...]:
        return self.twin.engine.intake.load_targets.current(self.twin.site)

    def say(self, event: Any, at_s: float = 1.0, isv: str = "acme", topic: str | None = None) -> Any:
        got = self.decoder.decode(message(event, at_s, isv, topic))
        if not isinstance(got, Ignored):
            self.twin.now_ns = max(self.twin.now_ns + 1, START_NS + round(at_s * NS)) - NS
            self.twin.tick(None, *got)
            assert not [r for r in self.twin.records("event") if "refused" in r]
        return got

    def spans(self) -> dict[str, tuple[float, float | None, float]]:
        """Of each held target, or piece of one: from, to (s), limit (kW)."""
        return {t.name.replace(CORRELATION, "c").partition("@")[0]: (
            (t.start_ns - START_NS) / NS, None if t.end_ns is None else (t.end_ns - START_NS) / NS,
            t.limit_w / 1e3) for t in self.held}  # fmt: skip


def other() -> str:
    return str(uuid.uuid4())


def test_a_target_without_feeds_is_each_feeds_own() -> None:
    desk = Desk()
    got = desk.say(envelope(target(250, start_s=60, end_s=3660, strategy={"best_effort": True})))
    assert all(isinstance(e, LoadTargetSet) for e in got)
    assert [(e.target, e.feeders, e.limit_w, e.kind, e.author, e.best_effort) for e in got] == [
        (f"{CORRELATION}/{tag}", (feeder,), 250e3, "flex", "//grid/v1/isv/acme", True)
        for tag, feeder in FEEDS.items()]  # fmt: skip
    assert desk.spans() == {"c/main-a": (60, 3660, 250), "c/main-b": (60, 3660, 250)}
    assert desk.decoder.counts["sets"] == 1


@pytest.mark.parametrize(
    "value, unit, limit_w", [(5, "watt", 5), (2.5, "kilowatt", 2500), (1, "megawatt", 1e6)]
)
def test_units(value: float, unit: str, limit_w: float) -> None:
    one = target(1, "main-a") | {"load_constraint": {"value": value, "unit": unit}}
    (event,) = Desk().say(envelope(one))
    assert event.limit_w == limit_w


def test_the_site_may_be_a_feed() -> None:
    decoder = FlexDecoder({"all": ""}, KeySet(key_set(), "keys"), lambda: ())
    got = decoder.decode(message(envelope(target(9))))
    assert not isinstance(got, Ignored)
    assert [(e.target, e.feeders) for e in got if isinstance(e, LoadTargetSet)] == [
        (f"{CORRELATION}/all", ())
    ]


def test_a_message_counts_once_also_after_a_restart_and_a_copy_does_not_count() -> None:
    desk = Desk()
    event = envelope(target(250))
    desk.say(event)
    assert isinstance(desk.say(event, 2), Ignored)
    assert desk.decoder.counts["again"] == 1
    with pytest.raises(BadMessage, match="the same signature came before"):
        desk.say(event | {"id": other()}, 3)
    desk.say(envelope(target(100), correlationid=other()), 4)
    desk.restart()
    assert isinstance(desk.say(event, 5), Ignored)
    assert {limit for _, _, limit in desk.spans().values()} == {100}
    lax = Desk(copies="accept")
    lax.say(event)
    lax.say(event | {"id": other()})


def test_ecdsa_can_be_turned_into_another_signature_that_holds_and_still_is_a_copy() -> None:
    import base64

    desk, event = Desk(), envelope(target(250))
    desk.say(event)
    head, _, signature = event["data"].rpartition(".")
    raw = base64.urlsafe_b64decode(signature + "==")
    order = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
    turned = raw[:32] + (order - int.from_bytes(raw[32:], "big")).to_bytes(32, "big")
    data = f"{head}.{base64.urlsafe_b64encode(turned).decode().rstrip('=')}"
    assert KeySet(key_set(), "k").verify(data, "acme").payload  # it does hold
    with pytest.raises(BadMessage, match="the same signature came before"):
        desk.say(event | {"id": other(), "data": data})


def test_what_covers_all_that_is_left_of_an_earlier_target_replaces_it() -> None:
    desk = Desk()
    desk.say(envelope(target(300, "main-a")))
    desk.say(envelope(target(200, "main-a", start_s=100, end_s=200), correlationid=other(), at_s=2), 2)
    assert sorted(desk.spans().values()) == [(1, None, 300), (100, 200, 200)]  # both hold, the lower counts
    new = other()
    desk.say(envelope(target(400, "main-a"), correlationid=new, at_s=3), 3)
    assert desk.spans() == {f"{new}/main-a": (3, None, 400)}
    desk.say(envelope(target(350, "main-b"), correlationid=other(), at_s=4), 4)
    assert len(desk.spans()) == 2  # another feed is another matter


def test_the_same_correlation_is_set_as_a_whole() -> None:
    desk = Desk()
    hours = [target(300 - n, "main-a", start_s=100 * n, end_s=100 * n + 100) for n in range(1, 4)]
    desk.say(envelope(*hours))
    assert desk.spans() == {"c/main-a": (100, 200, 299), "c/main-a/1": (200, 300, 298),
                            "c/main-a/2": (300, 400, 297)}  # fmt: skip
    desk.say(envelope(*hours[:2], at_s=2), 2)
    assert list(desk.spans()) == ["c/main-a", "c/main-a/1"]


def test_targets_of_one_message_do_not_replace_each_other() -> None:
    desk = Desk()
    desk.say(envelope(target(200, "main-a", end_s=100), target(300, "main-a")))
    assert desk.spans() == {"c/main-a": (1, 100, 200), "c/main-a/1": (1, None, 300)}


NULLS: list[tuple[Any, Any, dict[str, tuple[float, float | None, float]]]] = [
    ((None, None), (None, None), {}),
    ((None, 900.0), (None, None), {}),
    ((500.0, 900.0), (None, None), {"c/main-a": (500, 900, 300)}),  # begins later: stays
    ((None, None), (100.0, None), {"c/main-a": (1, 100, 300)}),
    ((None, None), (None, 200.0), {"c/main-a+1": (200, None, 300)}),
    ((None, None), (100.0, 200.0), {"c/main-a": (1, 100, 300), "c/main-a+1": (200, None, 300)}),
    ((None, 150.0), (100.0, 200.0), {"c/main-a": (1, 100, 300)}),
    ((None, 50.0), (100.0, 200.0), {"c/main-a": (1, 50, 300)}),
]


@pytest.mark.parametrize("was, null, left", NULLS)
def test_null_ends_what_runs(was: Any, null: Any, left: Any) -> None:
    desk = Desk()
    desk.say(envelope(target(300, "main-a", start_s=was[0], end_s=was[1]), target(7, "main-b")))
    desk.say(
        envelope(target(None, "main-a", start_s=null[0], end_s=null[1]), correlationid=other(), at_s=2), 2
    )
    assert {n: s for n, s in desk.spans().items() if "main-a" in n} == left
    assert any("main-b" in name for name in desk.spans())


@pytest.mark.parametrize("at_s", [3, 4, 10, 400, 401, 500])
@pytest.mark.parametrize("hole", [(5.0, 401.0), (None, 401.0)])
def test_what_is_taken_back_for_good_does_not_come_back_behind_an_earlier_removal(
    hole: tuple[float | None, float], at_s: int
) -> None:
    """100 kW, a removal of some minutes, and within it one for good: nothing is held any more."""
    desk = Desk()
    desk.say(envelope(target(100, "main-a")))
    gone = target(None, "main-a", start_s=hole[0], end_s=hole[1])
    desk.say(envelope(gone, correlationid=other(), at_s=2), 2)
    assert [span[0] for span in desk.spans().values()][-1] == 401.0
    desk.restart()
    desk.say(envelope(target(None, "main-a"), correlationid=other(), at_s=at_s), at_s)
    assert desk.spans() == {}


def test_a_removal_before_a_target_begins_leaves_it_whatever_was_cut_out_of_it() -> None:
    desk = Desk()
    desk.say(envelope(target(100, "main-a", start_s=500, end_s=900)))
    for n, (start, end) in enumerate(((600, 700), (500, 600), (None, 400), (None, None))):
        gone = target(None, "main-a", start_s=start, end_s=end)
        desk.say(envelope(gone, correlationid=other(), at_s=2 + n), 2 + n)
    assert [*desk.spans().values()] == [(700, 900, 100)]


def test_what_was_told_a_moment_ago_is_known_before_a_tick_took_it() -> None:
    desk = Desk()
    desk.decoder.decode(message(envelope(target(300, "main-a")), 1))
    got = desk.decoder.decode(message(envelope(target(None, "main-a"), correlationid=other(), at_s=1), 1.1))
    assert not isinstance(got, Ignored)
    assert [(type(e), e.target) for e in got] == [(LoadTargetWithdrawn, f"{CORRELATION}/main-a")]
    assert desk.decoder.decode(message(envelope(target(None, "main-a"), at_s=1), 1.2)) == []


def test_others_targets_are_left_alone() -> None:
    desk = Desk()
    desk.twin.tick(None, LoadTargetSet(author="op", target="mine", limit_w=5e5, feeders=("a",)))
    desk.say(envelope(target(300, "main-a"), isv="acme"))
    desk.say(envelope(target(200, "main-a"), isv="bolt", correlationid=other()), 2, "bolt")
    desk.say(envelope(target(None), isv="bolt", correlationid=other(), at_s=3), 3, "bolt")
    assert sorted(limit for _, _, limit in desk.spans().values()) == [300, 500]


def test_a_message_that_comes_out_of_order_replaces_and_removes_nothing() -> None:
    desk = Desk()
    desk.say(envelope(target(300, "main-a"), at_s=100), 100)
    desk.say(envelope(target(400, "main-a"), at_s=50, correlationid=other()), 101)
    assert sorted(limit for _, _, limit in desk.spans().values()) == [300, 400]
    desk.say(envelope(target(None, "main-a"), at_s=60, correlationid=other()), 102)
    assert len(desk.spans()) == 2
    desk.say(envelope(target(500, "main-a"), at_s=70), 103)  # nor takes the place of its own successor
    assert sorted(limit for _, _, limit in desk.spans().values()) == [300, 400]
    assert [f.rpartition(": ")[2] for f in desk.decoder.faults] == ["older than the target in force"] * 2


def test_what_a_broker_held_for_hours_counts_all_the_same() -> None:
    desk = Desk()
    desk.say(envelope(target(300, "main-a", start_s=-7200, end_s=7200), at_s=-7000))
    assert desk.spans() == {"c/main-a": (-7200, 7200, 300)}


GOOD = target(300, "main-a")
BAD: list[tuple[Any, str]] = [
    (b"", "not a CloudEvent"), (b"[]", "not a CloudEvent"), (b"\xff\xfe", "not a CloudEvent"),
    (b"[" * 100_000, "not a CloudEvent"), (b'{"specversion": "1.0.2"}', "missing required field"),
    (envelope(GOOD, specversion="2.0"), "specversion '2.0'; expected 1.0.2"),
    (envelope(GOOD, id="7"), "id '7'; expected a UUID"),
    (envelope(GOOD, correlationid="7"), "correlationid '7'; expected a UUID"),
    (envelope(GOOD, type="grid.loadtarget.get.v1"), "expected grid.loadtarget.set.v1"),
    (envelope(GOOD, source="//grid/v1/isv/bolt"), "expected //grid/v1/isv/acme"),
    (envelope(GOOD, source="//grid/v1/infra/acme"), "expected //grid/v1/isv/acme"),
    (envelope(GOOD, datacontenttype="text/plain"), "expected application/json"),
    (envelope(GOOD, time="yesterday"), "time 'yesterday'; expected ISO 8601"),
    (envelope(GOOD, time="2023-11-14T22:13:20"), "expected ISO 8601 with an offset"),
    (envelope(GOOD, at_s=302), "s ahead of our clock"),
    (envelope(GOOD, at_s=-86_402), "s old; expected at most"),
    (envelope(GOOD, data={"targets": [GOOD]}), "data is not signed"),
    (envelope(GOOD, data=5), "data is not signed"),
    (envelope(GOOD, data="a.b"), "expected a JWS in compact form"),
    (envelope(GOOD, data="e30.e30.e30"), "invalid signature|signed with"),
    (envelope(GOOD, by=signer("k2")), "signed with key 'k2', which is not in the key file"),
    (envelope(), "0 targets; expected 1 to 1000"),
    (envelope(*[GOOD] * 1001), "1001 targets; expected 1 to 1000"),
    (envelope(*[target(300)] * 600), "comes to more than 1000 targets of feeds"),
    (envelope(target(0, "main-a")), "load_constraint of 0 W; expected more than 0"),
    (envelope(target(-5, "main-a")), "load_constraint of -5000 W"),
    (envelope(target(1e9, "main-a")), "load_constraint of 1e\\+12 W"),
    (envelope(target(300, "main-c")), "no feed 'main-c'; expected one of main-a, main-b"),
    (envelope(target(300, "x" * 300)), "feed_tags: expected at most"),
    (envelope(target(300, "main-a", start_s=9, end_s=8)), "ends before it begins"),
    (envelope(target(300, "main-a", start_s=-9, end_s=-8)), "over already, 9 s ago"),
    (envelope(target(300, "main-a", start_s=367 * 86_400)), "begins in more than a year"),
    (envelope({"interval": {"start_time": "soon"}, "load_constraint": None}), "start_time 'soon'"),
    (envelope({"interval": {}}), "missing required field `load_constraint`"),
    (envelope({"load_constraint": None}), "missing required field `interval`"),
    (envelope(GOOD | {"load_constraint": {"value": 1, "unit": "horsepower"}}), "Invalid enum value"),
    (envelope(GOOD | {"load_constraint": {"value": "1", "unit": "watt"}}), "Expected `float`"),
    (json.dumps(envelope(GOOD)).encode() + b" " * 2**20, "bytes; expected at most 1048576"),
]  # fmt: skip


@pytest.mark.parametrize("event, words", BAD, ids=[str(n) for n in range(len(BAD))])
def test_what_is_refused_changes_nothing(event: Any, words: str) -> None:
    desk = Desk()
    desk.say(envelope(target(100, "main-b")))
    before = desk.held
    with pytest.raises(BadMessage, match=words):
        desk.say(event)
    assert desk.held == before
    assert desk.decoder.counts["refused"] == 1
    desk.say(envelope(GOOD, at_s=1), 2)  # and the next one counts


def test_a_refused_message_uses_up_no_id() -> None:
    desk, name = Desk(), other()
    with pytest.raises(BadMessage, match="no feed"):
        desk.say(envelope(target(300, "main-c"), id=name))
    desk.say(envelope(target(300, "main-a"), id=name))
    assert len(desk.held) == 1


def test_a_target_that_is_wrong_leaves_the_others_and_is_told() -> None:
    desk = Desk()
    desk.say(envelope(target(300, "main-c", "main-a"), target(0, "main-b"), target(200, "main-b")))
    assert desk.spans() == {"c/main-a": (1, None, 300), "c/main-b/2": (1, None, 200)}
    assert len(desk.decoder.faults) == 2
    assert desk.decoder.counts["part_refused"] == 1


def test_keys_are_bound_to_speakers() -> None:
    acme = key().as_dict(private=False) | {"isv": "acme"}
    bolt = key("k2", "RSA").as_dict(private=False) | {"isv": "bolt"}
    desk = Desk(key_set(acme, bolt))
    desk.say(envelope(GOOD))
    by = signer("k2", "RSA")
    desk.say(envelope(GOOD, isv="bolt", by=by, correlationid=other()), 2, "bolt")
    with pytest.raises(BadMessage, match="key 'k2' is that of bolt, not of acme"):
        desk.say(envelope(GOOD, by=by, correlationid=other()), 3)
    with pytest.raises(BadMessage, match="may not set load targets here"):
        Desk(isvs=("bolt",)).say(envelope(GOOD))


def test_algorithms_that_prove_nothing_are_refused() -> None:
    from joserfc import jwk, jws

    data = json.dumps({"targets": [GOOD]}).encode()
    public = key().as_pem(private=False)
    forged = jws.serialize_compact({"alg": "HS256", "kid": "k1"}, data, jwk.OctKey.import_key(public.hex()),
                                   algorithms=["HS256"])  # fmt: skip
    none = "eyJhbGciOiJub25lIn0." + forged.split(".")[1] + ".e30"
    for text in (forged, none):
        with pytest.raises(BadMessage, match=r"signed with|invalid signature"):
            Desk().say(envelope(GOOD, data=text))


def test_plain_data_is_taken_where_the_site_says_so() -> None:
    plain = envelope(GOOD, data={"targets": [GOOD]})
    desk = Desk(b"none", unsigned="accept")
    desk.say(plain)
    assert len(desk.held) == 1
    with pytest.raises(BadMessage, match="no keys are configured"):
        desk.say(envelope(GOOD))


@pytest.mark.parametrize(
    "topic",
    [
        "grid/v1/isv//loadtarget/set",
        "grid/v1/isv/a/b/loadtarget/set",
        "grid/v1/dsx-flex-agent/x/powerstate/status",
        "grid/v1/isv/loadtarget/set",
    ],
)
def test_other_topics_are_not_for_us(topic: str) -> None:
    assert isinstance(Desk().say(b"{", topic=topic), Ignored)


KEY_FILES: list[tuple[bytes, str]] = [
    (b"", "is not JSON"),
    (b"[]", "expected a key set of 1"),
    (b'{"keys": []}', "expected a key set of 1"),
    (b'{"keys": [5]}', "expected a key set"),
    (b'{"keys": [{"kty": "oct", "k": "aa"}]}', "expected EC"),
    (b'{"keys": [{"kty": "EC"}]}', "is not a key"),
    (b" " * 300_000, "bytes; expected at most"),
    (key_set(key().as_dict(private=True)), "is a private key; expected the public key"),
    (key_set(key().as_dict(private=False), key().as_dict(private=False)), "kid 'k1' is there twice"),
    (key_set(key().as_dict(private=False) | {"use": "enc"}), "is not meant for signatures"),
]


@pytest.mark.parametrize("text, words", KEY_FILES)
def test_key_files_that_are_wrong(text: bytes, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        KeySet(text, "keys.json")


def test_our_own_key_may_be_pem_and_must_be_private() -> None:
    for kind in ("EC", "RSA"):
        own = Signer(key("o" + kind, kind).as_pem(private=True), "own.pem", kid="us")
        public = key("o" + kind, kind).as_dict(private=False) | {"kid": "us"}
        assert KeySet(key_set(public), "k").verify(own.sign(b"{}"), "x").payload == b"{}"
        with pytest.raises(ConfigError, match="holds a public key"):
            Signer(key("o" + kind, kind).as_pem(private=False), "own.pem")
    with pytest.raises(ConfigError, match="expected a private key"):
        Signer(b"nonsense", "own.pem")


def test_a_flood_is_bounded() -> None:
    decoder = FlexDecoder(FEEDS, None, lambda: (), trust=FlexTrust(unsigned="accept"))
    plenty = [target(300, "main-a")] * 900
    for _ in range(2):
        decoder.decode(message(envelope(data={"targets": plenty}, correlationid=other())))
    more = message(envelope(data={"targets": plenty}, correlationid=other()))
    with pytest.raises(BadMessage, match="more load targets of"):
        decoder.decode(more)
    decoder.decode(more._replace(t_ns=more.t_ns + 900 * NS))


def test_times_go_both_ways() -> None:
    for t_ns in (START_NS, START_NS + 123 * 10**6):
        assert instant_ns(text_of(t_ns), "t") == t_ns
    assert instant_ns("2026-11-22T07:00:00+01:00", "t") == instant_ns("2026-11-22T06:00:00Z", "t")
    assert child_of("00-" + "a" * 32 + "-" + "b" * 16 + "-01").startswith("00-" + "a" * 32)


steps = st.lists(
    st.tuples(st.sampled_from([None, 100, 200, 300]), st.sampled_from(["main-a", "main-b"]),
              st.one_of(st.none(), st.integers(0, 400)), st.one_of(st.none(), st.integers(401, 800)),
              st.integers(0, 3)),
    max_size=8,
)  # fmt: skip


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(steps)
@example([(100, "main-a", None, None, 0), (None, "main-a", 5, 401, 1), (None, "main-a", None, None, 1)])
@example([(100, "main-a", None, None, 0), (None, "main-a", 5, 401, 1), (200, "main-a", 400, None, 2)])
@example([(100, "main-a", 0, None, 0), (None, "main-a", None, 401, 1), (None, "main-a", 1, None, 1)])
@example([(100, "main-a", 50, None, 0), (None, "main-a", 50, 401, 1), (None, "main-a", None, None, 2)])
@example([(100, "main-a", 0, None, 0), (None, "main-a", 50, 401, 1), (None, "main-a", 60, 500, 2)])
def test_whatever_comes_each_feed_is_as_a_calendar_of_it_says(said: list[Any]) -> None:
    """Against a rival: a list of (from, to, limit), each message by message, second by second."""
    desk = Desk(b"none", unsigned="accept")
    ids = [str(uuid.UUID(int=n, version=4)) for n in range(4)]
    book: dict[tuple[str, str], tuple[int, np.ndarray]] = {}  # when it began, and what it is in each second
    seconds = np.arange(1000)
    for n, (limit, feed, start, end, who) in enumerate(said):
        now = n + 1
        desk.say(envelope(data={"targets": [target(limit, feed, start_s=start, end_s=end)]},
                          correlationid=ids[who], at_s=now), now)  # fmt: skip
        begin, until = (now if start is None else start), (1000 if end is None else end)
        inside = (seconds >= begin) & (seconds < until)
        book.pop((ids[who], feed), None)
        for name, (begun, limits) in list(book.items()):
            if name[1] != feed:
                continue
            live = np.isfinite(limits) & (seconds >= now)
            if limit is None:
                # what has begun when the removal does is out for as long as that lasts
                if begun <= max(begin, now):
                    limits[inside] = np.inf
            elif not (live & ~inside).any():
                del book[name]
        if limit is not None:
            book[ids[who], feed] = begin, np.where(inside, float(limit), np.inf)
    now = len(said)
    for feed, tag in ((0, "main-a"), (1, "main-b")):
        for second in range(now + 1, 1000, 7):
            t_ns = START_NS + second * NS
            got = min((t.limit_w / 1e3 for t in desk.held if t.runs(t_ns) and t.feeders is not None
                       and feed in t.feeders), default=np.inf)  # fmt: skip
            assert got == min((v[second] for k, (_, v) in book.items() if k[1] == tag), default=np.inf)
