"""Lines of Telegraf's input gnmi become readings of switches and of the links at their ports.

The lines are written by hand after Telegraf's documentation and OpenConfig's paths; no switch was recorded.
"""

from __future__ import annotations

import pytest

from connectors.influx import LineDecoder
from connectors.series_map import load_map, mapping_of
from tests.support.builders import site_of, two_racks
from twin.site import Site
from twin.telemetry import Message, Reading

T = 1_700_000_000 * 10**9
LINES = f"""\
interface_counters,source=leaf1,name=swp1,path=/interfaces in_errors=3i,carrier_transitions=4i,in_octets=900i {T}
interface_counters,source=leaf1,name=swp2,path=/interfaces in_errors=1i,carrier_transitions=0i,in_octets=50i {T}
interface_state,source=leaf1,name=swp2 oper_status="DOWN" {T}
transceiver_channel,source=leaf1,name=swp1,index=0 input_power/instant=-2.5,output_power/instant=1.0,laser_bias_current/instant=7.5 {T}
transceiver,source=leaf1,name=swp1 pre_fec_ber/instant=3.1e-7 {T}
"""  # noqa: E501


@pytest.fixture(scope="module")
def site() -> Site:
    tree = two_racks()
    tree["halls"][0] |= {
        "planes": [{"name": "rail", "links_per_node": 1}],
        "switches": [{"name": "leaf1", "serves": ["r[1-2]"], "planes": ["rail"]}],
    }
    return site_of(tree)


def test_counters_of_ports_are_their_switchs_and_optics_their_links(site: Site) -> None:
    own = mapping_of({"extends": "gnmi", "names": {"leaf1:swp[1-18]": "lab/h/r1/node[0-17]/rail0"}})
    packaged, _ = load_map("gnmi")
    whole = type(packaged)(rules=packaged.rules, names=own.names)
    decoder = LineDecoder(site, whole, "gnmi.yaml")
    later = LINES.replace("=3i", "=8i").replace("=4i", "=9i")
    first, again = read(decoder, LINES), read(decoder, later)
    link = [site.entity("link", f"lab/h/r1/node{n}/rail0") for n in (0, 1)]
    for counter in ("error_count", "flap_count"):
        assert again["switch", 0, counter] - first["switch", 0, counter] == 5
    assert again["switch", 0, "flap_count"] - first["switch", 0, "flap_count"] == 5
    assert {"switch", "link"} == {table for table, _, _ in first}
    assert first["link", link[0], "rx_optical_w"] == pytest.approx(1e-3 * 10**-0.25)
    assert first["link", link[0], "tx_optical_w"] == pytest.approx(1e-3 * 10**0.1)
    assert first["link", link[0], "laser_bias_a"] == pytest.approx(7.5e-3)
    assert first["link", link[0], "pre_fec_ber_pu"] == pytest.approx(3.1e-7)
    assert first["link", link[1], "up_state"] == 1


@pytest.mark.parametrize(
    ("status", "state"), [("UP", 0), ("NOT_PRESENT", 1), ("DORMANT", 1), ("TESTING", 1), ("UNKNOWN", None)]
)
def test_every_state_of_a_port_that_passes_no_packets_is_down(
    site: Site, status: str, state: int | None
) -> None:
    own = mapping_of({"names": {"leaf1:swp[1-18]": "lab/h/r1/node[0-17]/rail0"}})
    decoder = LineDecoder(site, type(own)(rules=load_map("gnmi")[0].rules, names=own.names), "gnmi.yaml")
    found = read(decoder, f'interface_state,source=leaf1,name=swp2 oper_status="{status}" {T}\n')
    assert list(found.values()) == [state]
    assert not decoder.faults.take()


def read(decoder: LineDecoder, lines: str) -> dict[tuple[str, int, str], float]:
    """Cells of one message."""
    items = decoder.decode(Message(T, "telegraf/leaf1/gnmi", lines.encode()))
    assert isinstance(items, list)
    return {(i.table, i.entity, i.signal): i.value for i in items if isinstance(i, Reading)}


def test_telegrafs_ethtool_tells_of_the_physical_layer(site: Site) -> None:
    decoder = LineDecoder(site, load_map("telegraf")[0], "telegraf")
    line = f"ethtool,host=lab/h/r1/node1,interface=rail0 rx_symbol_err_phy=4i,rx_bytes=9i {T}\n"
    first, again = read(decoder, line), read(decoder, line.replace("4i", "11i"))
    link = site.entity("link", "lab/h/r1/node1/rail0")
    assert again["link", link, "symbol_error_count"] - first["link", link, "symbol_error_count"] == 7
    assert len(first) == 1


@pytest.mark.parametrize(("word", "state"), [("No", 0), ("Yes", 1)])
def test_telegrafs_nvidia_smi_tells_of_remapped_rows_in_words(site: Site, word: str, state: int) -> None:
    # source: telegraf/plugins/inputs/nvidia_smi/schema_v12/parser.go gives both as text
    decoder = LineDecoder(site, load_map("telegraf")[0], "telegraf")
    fields = ",".join(f'remapped_rows_{name}="{word}"' for name in ("pending", "failure"))
    line = f"nvidia_smi,host=lab/h/r1/node1,index=0 {fields} {T}"
    found = read(decoder, line)
    assert {signal: value for (_, _, signal), value in found.items()} == {
        "row_remap_pending_state": state,
        "row_remap_failed_state": state,
    }
    assert not decoder.faults.take()
