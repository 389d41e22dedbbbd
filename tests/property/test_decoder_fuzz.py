"""Decoders of everything that comes from outside, fuzzed from a corpus of sound messages.

Whatever is cut out of, put into or repeated in a sound message, a decoder gives items or refuses with the one
error that its callers expect. What found an error once stays in the corpus.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings, strategies as st
from racktwin_agent.wire import Refused, read_plan, read_request

from connectors.agents import ResultDecoder
from connectors.bmc.dcmi import parse_limit, parse_power
from connectors.dsx import KeySet
from connectors.dsx.flex_wire import decode_data, decode_envelope, entries_of
from connectors.influx import LineDecoder
from connectors.jobs.wire import decode_advice, report_of
from connectors.kubernetes.objects import (
    KubernetesNode,
    KubernetesPod,
    fault_of,
    read_change,
    read_items,
    version_of,
)
from connectors.prometheus import PageDecoder
from connectors.series_map import load_map
from connectors.slurm.hostlist import expand_hosts
from connectors.slurm.jobs import parse_listing
from connectors.slurm.nodes import parse_nodes
from connectors.sparkplug.payload import read_payload, rebirth
from tests.support.builders import START_NS, eight_nodes, site_of
from tests.support.flex_messages import envelope, key_set, target
from twin.catalogue import BadMessage, ConfigError, ConnectorError, StorageError
from twin.catalogue.tree import pack, unpack
from twin.daemon.handover import Handover, read_handover
from twin.telemetry import Message

SITE = site_of(eight_nodes())
T = START_NS
REQUEST = {
    "v": 1, "path": "lab/h/r1", "control": "gpu.power_cap_w", "policy": "p", "epoch": 5, "issued_ns": T,
    "expires_ns": T + 30, "names": ["node0/gpu0"], "generations": [0], "commands": [1], "values": [700.0],
    "lapse": [None],
}  # fmt: skip
PLAN = {"v": 1, "path": "lab/h/r1", "epoch": 5, "issued_ns": T, "expires_ns": T + 300,
        "names": ["node0/gpu0"], "caps_w": [500.0], "triggers": ["psu_lost"], "hold_s": 10}  # fmt: skip
REPORT = {"v": 1, "id": "1", "t_ns": T, "save_s": 30.0, "began_ns": T - 5, "tier": "durable"}
ADVICE = {"v": 1, "job": "7", "interval_s": 600.0, "save_since_ns": None, "issued_ns": T, "expires_ns": T + 9,
          "epoch": 3, "reason": "because"}  # fmt: skip
RESULT = {"v": 1, "epoch": 1, "t_ns": T, "names": ["gpu0"], "generations": [0], "commands": [1],
          "states": ["done"], "details": [""]}  # fmt: skip
NODE = {
    "metadata": {"name": "n1", "resourceVersion": "7", "labels": {"a": "b"}},
    "spec": {"unschedulable": True},
    "status": {"conditions": [{"type": "Ready", "status": "True"}]},
}
OWNER = {"kind": "Job", "name": "j", "uid": "u"}
POD = {
    "metadata": {"name": "p1", "namespace": "x", "ownerReferences": [OWNER]},
    "spec": {"nodeName": "n1", "containers": [{"resources": {"requests": {"nvidia.com/gpu": "8"}}}]},
    "status": {"phase": "Running", "startTime": "2026-01-01T00:00:00Z"},
}
LIMIT = """
    Current Limit State: Power Limit Active
    Exception actions:   Hard Power Off & Log Event to SEL
    Power Limit:         500   Watts
    Correction time:     1000 milliseconds
    Sampling period:     1 seconds
"""
POWER = "    Instantaneous power reading:  250 Watts\n    Power reading state is:  activated\n"
PAGE = (
    b"# TYPE DCGM_FI_DEV_POWER_USAGE gauge\n"
    b'DCGM_FI_DEV_POWER_USAGE{gpu="0",Hostname="r1/node0"} 312.5 1700000000000\n'
)
LINES = b"nvidia_smi,host=node0,index=0 power_draw=312.5,temperature_gpu=50i 1700000000000000000\n"


class Never(Exception):
    """Of a decoder that refuses nothing."""


class Fuzzed(NamedTuple):
    """A decoder, what it may raise, and sound input."""

    decode: Callable[[bytes], Any]
    refuses: type[Exception]
    corpus: tuple[bytes, ...]


def text(decode: Callable[[str], Any]) -> Callable[[bytes], Any]:
    """A decoder of text, as programs' output is read."""
    return lambda raw: decode(raw.decode("utf-8", "replace"))


def plain(*trees: Any) -> tuple[bytes, ...]:
    return tuple(json.dumps(tree).encode() for tree in trees)


def change(raw: bytes) -> None:
    told = read_change(raw)
    version_of(told)
    fault_of(told)


DECODERS: dict[str, Fuzzed] = {
    "influx line": Fuzzed(
        lambda raw: LineDecoder(SITE, load_map("telegraf")[0]).decode(Message(T, "telegraf/x", raw)),
        BadMessage,
        (LINES, LINES * 2, b'm,host=\\ a\\,b f="x\\"y",g=t 1'),
    ),
    "prometheus": Fuzzed(
        lambda raw: PageDecoder(SITE, load_map("dcgm")[0]).decode(raw, T), BadMessage, (PAGE, PAGE * 2)
    ),
    "sparkplug": Fuzzed(read_payload, BadMessage, (rebirth(1700000000000),)),
    "squeue": Fuzzed(
        text(parse_listing),
        BadMessage,
        (
            b"RUNNING|12|1767225600|1-00:00:00|100|a|u|p|n[1-4]|4|4|*|N/A|N/A|gres:gpu:8|N/A|N/A|N/A|1|1|OK|normal|None|\n",
            b"PENDING|7|N/A|UNLIMITED|1|a|u|p||1-2|2|*|N/A|gpu:3|N/A|N/A|N/A|1-9%2|1|N/A|NO|normal|Resources|\n",
        ),
    ),
    "sinfo": Fuzzed(
        text(parse_nodes),
        Never,
        (b"n[1-3],m|idle|all|gpu:a:8(S:0-1)|gpu:a:2(IDX:0,3)|none|\nn2|drained*||||racktwin:3:why|\n",),
    ),
    "host list": Fuzzed(text(expand_hosts), ValueError, (b"n[1-4,7],m[01-03]x", b"gpu-a[1-2]-[1-2]")),
    "node of Kubernetes": Fuzzed(
        lambda raw: read_items(raw, KubernetesNode), BadMessage, plain({"items": [NODE]})
    ),
    "pod of Kubernetes": Fuzzed(
        lambda raw: read_items(raw, KubernetesPod), BadMessage, plain({"items": [POD, POD]})
    ),
    "watch of Kubernetes": Fuzzed(
        change,
        BadMessage,
        plain({"type": "ADDED", "object": NODE}, {"type": "ERROR", "object": {"code": 410}}),
    ),
    "limit of ipmitool": Fuzzed(text(parse_limit), ConnectorError, (LIMIT.encode(),)),
    "power of ipmitool": Fuzzed(text(parse_power), ConnectorError, (POWER.encode(),)),
    "report of a job": Fuzzed(lambda raw: report_of(raw, "7", T), BadMessage, plain(REPORT)),
    "advice": Fuzzed(decode_advice, BadMessage, plain(ADVICE)),
    "result of an agent": Fuzzed(
        lambda raw: ResultDecoder(SITE, "racktwin").decode(
            Message(T, "IT/v1/racktwin/Result/gpu.power_cap_w/lab/h/r1/node0", raw)
        ),
        BadMessage,
        plain(RESULT),
    ),
    "envelope of Flex": Fuzzed(decode_envelope, BadMessage, plain(envelope(target(300, "main-a")))),
    "data of Flex": Fuzzed(
        lambda raw: entries_of(decode_data(raw), T),
        BadMessage,
        plain({"targets": [target(300, "main-a", end_s=9)]}),
    ),
    "keys of Flex": Fuzzed(lambda raw: KeySet(raw, "keys"), ConfigError, (key_set(),)),
    "request to an agent": Fuzzed(
        lambda raw: read_request("gpu.power_cap_w", "lab/h/r1", raw), Refused, plain(REQUEST)
    ),
    "plan of an agent": Fuzzed(lambda raw: read_plan("lab/h/r1", raw), Refused, plain(PLAN)),
    "handover": Fuzzed(
        text(read_handover), Never, (Handover("h", {"p": "act"}, {"p": 1}, "held", [], []).text().encode(),)
    ),
    "snapshot": Fuzzed(unpack, StorageError, (pack({"a": [1, 2.5, "x"], "b": {"c": None}}),)),
}
WILD = (
    b"", b"\0", b"\xff\xfe", b"null", b"-1", b"1e999", b"NaN", b"99999999999999999999", b"[[[[[[[[", b"{}",
    b"\"", b"\\u0000", b"\xed\xa0\x80", b"\n", b",", b"|", b"=", b"\x1b[2J", b"\xe2\x80\xae", b"true", b"[",
    b"]", b"-",
)  # fmt: skip
CHANGES = st.lists(
    st.tuples(st.sampled_from(["cut", "drop", "twice", "put", "byte"]), st.floats(0, 1), st.integers(0, 40),
              st.sampled_from(WILD), st.integers(0, 255)),
    max_size=4,
)  # fmt: skip


def changed(raw: bytes, changes: list[Any]) -> bytes:
    for what, place, length, wild, byte in changes:
        at = int(place * len(raw))
        part = raw[at : at + length]
        if what == "cut":
            raw = raw[:at]
        elif what == "drop":
            raw = raw[:at] + raw[at + length :]
        elif what == "twice":
            raw = raw[:at] + part * 3 + raw[at:]
        elif what == "put":
            raw = raw[:at] + wild + raw[at + length :]
        else:
            raw = raw[:at] + bytes([byte]) + raw[at + 1 :]
    return raw


@pytest.mark.parametrize("name", DECODERS)
def test_the_corpus_is_sound(name: str) -> None:
    for raw in DECODERS[name].corpus:
        DECODERS[name].decode(raw)


@pytest.mark.parametrize("name", DECODERS)
@given(st.data())
@settings(max_examples=30, deadline=None)
def test_a_decoder_gives_items_or_the_error_that_its_callers_expect(name: str, data: st.DataObject) -> None:
    fuzzed = DECODERS[name]
    raw = data.draw(
        st.one_of(st.builds(changed, st.sampled_from(fuzzed.corpus), CHANGES), st.binary(max_size=60))
    )
    with suppress(fuzzed.refuses):
        fuzzed.decode(raw)
