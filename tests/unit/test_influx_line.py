"""Line protocol as Telegraf publishes it becomes readings; bad lines cost nothing but themselves."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st

from connectors.influx import LineDecoder
from connectors.influx.line import MAX_LINE, MAX_LINES, MAX_PAYLOAD
from connectors.series_map import load_map, mapping_of
from tests.support.builders import site_of, two_racks
from twin.catalogue import BadMessage
from twin.site import Site
from twin.telemetry import Block, Ignored, Message, Reading

T = 1_700_000_000 * 10**9


def _site() -> Site:
    tree = two_racks(storage=[{"name": "fs1"}])
    tree["halls"][0]["planes"] = [{"name": "rail", "links_per_node": 4}]
    tree["halls"][0]["switches"] = [{"name": "sw1"}]
    return site_of(tree)


SITE = _site()


@pytest.fixture
def site() -> Site:
    return SITE


@pytest.fixture
def decoder(site: Site) -> LineDecoder:
    return LineDecoder(site, *load_map("telegraf"))


def values(decoder: LineDecoder, text: str | bytes) -> dict[tuple[str, str], float | None]:
    """(entity's table and index, signal) -> value; `T` is when the message came."""
    payload = text.encode() if isinstance(text, str) else text
    found = decoder.decode(Message(T, "telegraf/x", payload))
    assert not isinstance(found, Ignored), found
    out: dict[tuple[str, str], float | None] = {}
    for item in found:
        if isinstance(item, Reading):
            out[f"{item.table}{item.entity}", item.signal] = item.value
            continue
        assert isinstance(item, Block)
        for names, matrix in ((item.signals, item.values), (item.counters, item.counts)):
            for k, name in enumerate(names):
                for j, v in enumerate(matrix[k].tolist()):
                    out[f"{item.table}{item.start + j}", name] = v
    return out


# A line of `telegraf --test` with inputs.nvidia_smi, host renamed
SMI = (
    "nvidia_smi,compute_mode=Default,host=r1/node0,index=2,name=GB200,pstate=P0,uuid=GPU-f9ba driver_version="
    '"570.1",clocks_current_memory=3996i,clocks_current_sm=1965i,memory_free=100i,memory_total=400i,'
    "memory_used=300i,power_draw=1180.25,temperature_gpu=61i,utilization_gpu=97i 1700000000000000000"
)


def test_nvidia_smi(decoder: LineDecoder) -> None:
    found = values(decoder, SMI)
    assert found == {
        ("gpu2", "power_w"): 1180.25,
        ("gpu2", "temp_c"): 61,
        ("gpu2", "util_pu"): pytest.approx(0.97),
        ("gpu2", "sm_clock_hz"): 1965e6,
        ("gpu2", "mem_clock_hz"): 3996e6,
        ("gpu2", "mem_used_pu"): 0.75,
    }


def test_the_other_inputs(decoder: LineDecoder) -> None:
    lines = [
        "ipmi_sensor,host=r1/node1,name=sys_power,unit=watts status=1i,value=8500 1700000000000000000",
        "ipmi_sensor,host=r1/node1,name=fan_1,unit=rpm status=1i,value=6000 1700000000000000000",
        "ipmi_sensor,host=bastion,name=inlet_temp,server=r1/node1,unit=degrees_c value=21",
        "infiniband,device=mlx5_1,host=r1/node0,port=1 port_rcv_data=25i,symbol_error=3i,link_downed=2i",
        "disk,device=x,fstype=lustre,host=login,mode=rw,path=/fs1 used_percent=43.5,total=1i",
        "lustre2,host=oss1,name=fs1-OST0000 write_bytes=100i,read_bytes=7i",
        "interface,agent_host=10.0.0.1,hostname=sw1,ifDescr=swp1 ifHCInOctets=5i,ifInErrors=0i",
        "mem,host=r1/node0 used=5i",
    ]
    found = values(decoder, "\n".join(lines) + "\n")
    assert found["node1", "power_w"] == 8500
    assert found["node1", "fan_hz"] == 100
    assert found["node1", "inlet_temp_c"] == 21
    assert found["link1", "rx_bytes"] == 100
    assert found["link1", "symbol_error_count"] == 3
    assert found["link1", "flap_count"] == 2
    assert found["storage0", "used_pu"] == pytest.approx(0.435)
    assert found["storage0", "written_bytes"] == 0
    assert values(decoder, lines[5].replace("100i", "160i"))["storage0", "written_bytes"] == 60
    assert values(decoder, lines[6].replace("=5i", "=9i").replace("swp1", "swp1"))["switch0", "rx_bytes"] == 4


def test_rates_of_targets_that_come_line_by_line_add_up(site: Site) -> None:
    """Telegraf of each server sends each target in a message of its own (synthetic lines)."""
    decoder = LineDecoder(site, *load_map("telegraf"))

    def rate(target: int, at_s: float, total: int) -> float | None:
        t_ns = T + round(at_s * 10**9)
        line = f"lustre2,host=oss{target},name=fs1-OST{target:04x} write_bytes={total}i {t_ns}"
        found = decoder.decode(Message(t_ns, "telegraf/x", line.encode()))
        assert not isinstance(found, Ignored)
        return {r.signal: r.value for r in found if isinstance(r, Reading)}.get("flush_bytes_per_s", -1.0)

    assert rate(1, 0, 10**12) is None
    assert rate(2, 1, 5 * 10**15) is None  # a server that is heard later did not begin at zero
    assert rate(1, 10, 10**12 + 3000) is None  # of the other target nobody knows yet
    assert rate(2, 11, 5 * 10**15 + 500) == pytest.approx(350.0)
    assert rate(1, 20, 10**12 + 4000) == pytest.approx(150.0)
    assert rate(1, 20, 10**12 + 4000) == -1.0  # a line that comes twice says nothing new
    assert rate(2, 21, 100) == pytest.approx(110.0)  # its server began anew
    assert rate(1, 90, 10**12 + 4000) is None  # the other is silent
    assert rate(1, 700, 10**12 + 4000) == 0.0  # and for ten minutes gone


@pytest.mark.parametrize(
    "precision, text", [("ns", "1700000000000000000"), ("ms", "1700000000000"), ("s", "1700000000")]
)
def test_times_have_a_precision(site: Site, precision: str, text: str) -> None:
    decoder = LineDecoder(site, *load_map("telegraf"), precision=precision)  # type: ignore[arg-type]
    (found,) = decoder.decode(
        Message(5, "t", f"nvidia_smi,host=r1/node0,index=0 power_draw=1 {text}".encode())
    )
    assert isinstance(found, Reading)
    assert found.t_ns == T
    (found,) = decoder.decode(Message(5, "t", b"nvidia_smi,host=r1/node0,index=0 power_draw=1"))
    assert isinstance(found, Reading)
    assert found.t_ns == 5


BAD = [
    "garbage",
    "nvidia_smi,host=r1/node0,index=0 power_draw=NaN 1700000000000000000",
    "nvidia_smi,host=r1/node0,index=0 power_draw=9223372036854775808i",
    "nvidia_smi,host=r1/node0,index=0 power_draw=1 -5",
    "nvidia_smi,host=r1/node0,index=0 power_draw=1 99999999999999999999999",
    "nvidia_smi,host=r1/node0,index=0 power_draw=1 9000000000000000000",
    "nvidia_smi,host=,index=0 power_draw=1",
    "{" * 1000,
    "nvidia_smi power_draw=" + "1" * MAX_LINE,
]


@pytest.mark.parametrize("line", BAD, ids=lambda s: s[-30:])
def test_a_bad_line_costs_only_itself(decoder: LineDecoder, line: str) -> None:
    with pytest.raises(BadMessage):
        decoder.decode(Message(T, "t", line.encode()))
    assert not decoder.faults.take()
    assert values(decoder, f"{SMI}\n{line}\n\n# a comment\n")["gpu2", "power_w"] == 1180.25
    ((why, count),) = decoder.faults.take()
    assert count == 1
    assert len(why) < 250


@pytest.mark.parametrize(
    "payload", [b"\xff\xfe\x00", b"\0", b"x" * (MAX_PAYLOAD + 1)], ids=["bytes", "nul", "huge"]
)
def test_what_is_no_text_or_too_long_is_bad(decoder: LineDecoder, payload: bytes) -> None:
    with pytest.raises(BadMessage):
        decoder.decode(Message(T, "t", payload))


def test_what_nobody_maps_is_ignored(decoder: LineDecoder) -> None:
    for text in ("mem,host=r1/node0 used=5i", SMI.replace("r1/node0", "elsewhere"), "", "\n"):
        assert isinstance(decoder.decode(Message(T, "t", text.encode())), Ignored)
    assert not decoder.faults.take()


def test_values_of_the_wrong_kind_are_no_reading_and_told(decoder: LineDecoder) -> None:
    found = values(decoder, 'nvidia_smi,host=r1/node0,index=0 power_draw="hot",temperature_gpu=50i')
    assert found == {("gpu0", "power_w"): None, ("gpu0", "temp_c"): 50}
    assert decoder.faults.take() == [("power_draw: 'hot'; expected a number", 1)]


def test_lines_are_limited(site: Site) -> None:
    rule = {"table": "gpu", "measurement": "m", "entity": ["{h}"], "signals": {"p": "power_w"}}
    decoder = LineDecoder(site, mapping_of({"rules": [rule]}))
    found = decoder.decode(Message(T, "t", b"m,h=r1/node0/gpu0 p=1\n" * (MAX_LINES + 5)))
    assert len(found) == MAX_LINES
    assert "more than" in decoder.faults.take()[0][0]


def test_many_devices_of_one_gather_are_a_block(decoder: LineDecoder) -> None:
    text = "\n".join(SMI.replace("index=2", f"index={i}") for i in range(4))
    (block,) = decoder.decode(Message(T, "t", text.encode()))
    assert isinstance(block, Block)
    assert block.values.shape == (6, 4)


SCRAPS = st.sampled_from(
    [
        SMI,
        "nvidia_smi,host=r1/node0,index=0 ",
        "power_draw=",
        "1e999",
        "\n",
        '"',
        ",",
        " ",
        "\\",
        "=",
        "i",
        "#",
    ]
)


@hypothesis.given(
    st.binary(max_size=80)
    | st.lists(SCRAPS | st.text(max_size=5), max_size=12).map(lambda x: "".join(x).encode())
)
def test_whatever_arrives_is_answered(payload: bytes) -> None:
    decoder = LineDecoder(SITE, *load_map("telegraf"))
    try:
        found = decoder.decode(Message(T, "t", payload))
    except BadMessage:
        return
    assert isinstance(found, Ignored) or all(0 < item.t_ns < 2**62 for item in found)
