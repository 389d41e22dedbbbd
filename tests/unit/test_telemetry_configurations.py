"""The configurations of docs/telemetry.md work, and the plugins that they name are read as documented."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from connectors.influx import LineDecoder
from connectors.mqtt import Router, extra_route
from connectors.series_map import load_map
from tests.support.builders import site_of
from twin.config import load_config
from twin.site import Site
from twin.telemetry import Block, Ignored, Message, Reading

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "telemetry.md").read_text(encoding="utf-8")
T_NS = 1_700_000_000 * 10**9
# A line of each plugin as its README shows it, with the host gpu001 and a field per meaning of the mapping.
LINES = {
    "nvidia_smi": "nvidia_smi,compute_mode=Default,host=gpu001,index=0,name=NVIDIA\\ GB200,pstate=P0,"
    "uuid=GPU-823bc202 "
    "fan_speed=100i,memory_free=7563i,memory_total=8112i,memory_used=549i,power_draw=612.3,"
    "temperature_gpu=53i,utilization_gpu=100i,utilization_memory=90i,clocks_current_sm=1965i",
    "ipmi_sensor": "ipmi_sensor,entity_id=7.1,host=gpu001,name=total_power,status_code=ok,"
    "status_desc=presence_detected,unit=watts value=5110",
    "infiniband": "infiniband,device=mlx5_0,host=gpu001,port=1 port_xmit_data=85378896588i,"
    "port_rcv_data=34600185253i,port_xmit_discards=0i,link_downed=0i,symbol_error=0i,"
    "link_error_recovery=0i,port_rcv_errors=0i",
    "net": "net,host=gpu001,interface=eth0 bytes_sent=451838509i,bytes_recv=3284081640i,"
    "packets_sent=2663590i,packets_recv=3585442i,err_in=0i,err_out=0i,drop_in=4i,drop_out=0i",
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)


@pytest.fixture(scope="module")
def telegraf() -> dict[str, Any]:
    (text,) = [block for block in blocks("toml") if "outputs.mqtt" in block]
    return tomllib.loads(text)


@pytest.fixture(scope="module")
def site() -> Site:
    """The bench of deploy/sites/lab.yaml, with links."""
    tree = yaml.safe_load((ROOT / "deploy" / "sites" / "lab.yaml").read_text(encoding="utf-8"))
    tree["halls"][0]["planes"] = [{"name": n, "links_per_node": 4} for n in ("rail", "eth")]
    return site_of(tree)


def test_each_plugin_of_the_telegraf_configuration_is_read(telegraf: dict[str, Any], site: Site) -> None:
    assert telegraf["inputs"].keys() == LINES.keys()
    mapping = load_map("telegraf-lab.yaml", ROOT / "deploy" / "mappings")
    for plugin, line in LINES.items():
        decoder = LineDecoder(site, *mapping)
        found = decoder.decode(Message(T_NS, "telegraf/gpu001/x", f"{line} {T_NS}\n".encode()))
        assert not isinstance(found, Ignored), plugin
        names = {found_in for item in found for found_in in _names(item)}
        assert names, plugin
        assert decoder.faults.take() == [], plugin


def _names(item: Reading | Block) -> tuple[str, ...]:
    return (item.signal,) if isinstance(item, Reading) else (*item.signals, *item.counters)


def test_its_topics_are_those_that_the_daemon_is_told_to_read(telegraf: dict[str, Any], site: Site) -> None:
    (output,) = telegraf["outputs"]["mqtt"]
    assert output["data_format"] == "influx"
    assert output["keep_alive"] > 0, "Mosquitto refuses Telegraf without one"
    (text,) = [block for block in blocks("yaml") if "broker:" in block]
    broker = yaml.safe_load(text)["broker"]
    extra = [extra_route(t, str(ROOT / "deploy" / "mappings" / m)) for t, m in broker["maps"].items()]
    router = Router(site, extra=extra)
    for plugin, line in LINES.items():
        topic = output["topic"].replace("{{ .Hostname }}", "gpu001").replace("{{ .PluginName }}", plugin)
        assert not isinstance(router.decode(Message(T_NS, topic, f"{line} {T_NS}\n".encode())), Ignored), (
            topic
        )


def test_the_configuration_of_the_daemon_is_accepted(site: Site, tmp_path: Path) -> None:
    tree = {"site": str(ROOT / "deploy" / "sites" / "lab.yaml"), "state": "state"}
    for text in blocks("yaml"):
        part = yaml.safe_load(text)
        if "extends" not in part:  # of a mapping
            tree |= part
    path = tmp_path / "racktwin.yaml"
    path.write_text(yaml.safe_dump(tree))
    config = load_config(path).config
    for scrape in config.scrapes:
        load_map(scrape.map)
        assert scrape.place is not None
        assert site.entity("node", scrape.place) is not None, scrape.place


def test_the_subscriptions_of_gnmi_bear_the_names_of_the_mapping() -> None:
    (text,) = [block for block in blocks("toml") if "inputs.gnmi" in block]
    (plugin,) = tomllib.loads(text)["inputs"]["gnmi"]
    rules = yaml.safe_load((ROOT / "connectors" / "exporters" / "gnmi.yaml").read_text())["rules"]
    assert {each["name"] for each in plugin["subscription"]} == {rule["measurement"] for rule in rules}
