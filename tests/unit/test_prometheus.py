"""Pages of exporters become readings by the packaged mappings; a bad line costs only itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from connectors import prometheus
from connectors.prometheus import PageDecoder, PrometheusSource, ScrapeSettings
from connectors.series import Sums
from connectors.series_map import SeriesMap, load_map
from tests.support.builders import site_of, two_racks
from twin.catalogue import BadMessage, ConfigError
from twin.site import Site
from twin.telemetry import Block, Reading

T = 1_700_000_000 * 10**9
PLAIN = site_of(two_racks())


@pytest.fixture(scope="module")
def site() -> Site:
    tree = two_racks(storage=[{"name": "scratch"}])
    tree["halls"][0]["planes"] = [{"name": "rail", "links_per_node": 4}, {"name": "eth", "links_per_node": 1}]
    return site_of(tree)


def decoder(site: Site, name: str, place: str | None = "lab/h/r1/node0") -> PageDecoder:
    return PageDecoder(site, *load_map(name), place)


def cells(items: Sequence[Reading | Block]) -> dict[tuple[str, int, str], Any]:
    out: dict[tuple[str, int, str], Any] = {}
    for item in items:
        if isinstance(item, Reading):
            out[item.table, item.entity, item.signal] = item.value
            continue
        for names, matrix in ((item.signals, item.values), (item.counters, item.counts)):
            for k, name in enumerate(names):
                for j, v in enumerate(matrix[k].tolist()):
                    out[item.table, item.start + j, name] = v
    return out


DCGM = """\
# HELP DCGM_FI_DEV_SM_CLOCK SM clock frequency (in MHz).
# TYPE DCGM_FI_DEV_SM_CLOCK gauge
DCGM_FI_DEV_SM_CLOCK{gpu="1",UUID="GPU-c2",device="nvidia1",Hostname="pod-x7k2p"} 1965
DCGM_FI_DEV_POWER_USAGE{gpu="1",UUID="GPU-c2",Hostname="pod-x7k2p"} 1012.5
# TYPE DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION counter
DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{gpu="1",Hostname="pod-x7k2p"} 123456789012
DCGM_FI_DEV_FB_USED{gpu="1",Hostname="pod-x7k2p"} 50
DCGM_FI_DEV_FB_FREE{gpu="1",Hostname="pod-x7k2p"} 150
DCGM_FI_DEV_MEMORY_TEMP{gpu="1",Hostname="pod-x7k2p"} 0
DCGM_FI_DEV_GPU_UTIL{gpu="1",Hostname="pod-x7k2p"} 9223372036854775794
DCGM_FI_DEV_GPU_UTIL{gpu="1",GPU_I_ID="3",GPU_I_PROFILE="1g.10gb",Hostname="pod-x7k2p"} 50
DCGM_FI_DEV_CLOCKS_EVENT_REASONS{gpu="1",Hostname="pod-x7k2p"} 4
DCGM_FI_DEV_XID_ERRORS{gpu="1",Hostname="pod-x7k2p",err_code="79",err_msg="fallen off the bus"} 79
DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{gpu="1",Hostname="pod-x7k2p"} 0.25
"""


def test_dcgm_of_today(site: Site) -> None:
    found = cells(decoder(site, "dcgm").decode(DCGM.encode(), T))
    for name in ("hbm_temp_c", "util_pu"):  # a sensor that is not there, DCGM's code for "not supported"
        nothing = found.pop(("gpu", 1, name))
        assert nothing != nothing
    assert found == {
        ("gpu", 1, "sm_clock_hz"): pytest.approx(1965e6),
        ("gpu", 1, "power_w"): 1012.5,
        ("gpu", 1, "energy_mj"): 123456789012,
        ("gpu", 1, "mem_used_pu"): 0.25,
        ("gpu", 1, "clock_event_bits"): 4,
        ("gpu", 1, "xid_code"): 79,
        ("gpu", 1, "tensor_active_pu"): 0.25,
    }


def test_dcgm_by_its_old_names_and_by_host(site: Site) -> None:
    page = (
        'dcgm_gpu_temp{gpu="0",uuid="GPU-8f"} 34\ndcgm_power_usage{gpu="0",uuid="GPU-8f"} 50\n'
        'DCGM_FI_DEV_GPU_TEMP{gpu="0",Hostname="r2/node1"} 41\n'
    )
    found = cells(decoder(site, "dcgm").decode(page.encode(), T))
    assert found == {("gpu", 0, "temp_c"): 34, ("gpu", 0, "power_w"): 50, ("gpu", 76, "temp_c"): 41}


def test_ascend(site: Site) -> None:
    labels = 'container_name="",id="2",model_name="910B",vdie_id="185"'
    page = (
        f"npu_chip_info_power{{{labels}}} 73.9 1700000000123\n"
        f"npu_chip_info_utilization{{{labels}}} 60 1700000000123\n"
        f"npu_chip_info_health_status{{{labels}}} 0 1700000000123\n"
        f"npu_chip_info_hbm_used_memory{{{labels}}} 32768 1700000000123\n"
        f"npu_chip_info_hbm_total_memory{{{labels}}} 65536 1700000000123\n"
    )
    items = decoder(site, "ascend").decode(page.encode(), T)
    assert {i.t_ns for i in items} == {1700000000123 * 10**6}
    assert cells(items) == {
        ("gpu", 2, "power_w"): 73.9,
        ("gpu", 2, "util_pu"): 0.6,
        ("gpu", 2, "health_state"): 1,
        ("gpu", 2, "mem_used_pu"): 0.5,
    }


def test_neuron(site: Site) -> None:
    at = 'instance_id="i-09",instance_name="",instance_type="trn2.48xlarge"'
    page = "".join(
        f'neuroncore_utilization_ratio{{{at},neuroncore="{c}",runtime_tag="367"}} {0.5 if c < 8 else 0.25}\n'
        for c in range(16)
    )
    page += "".join(
        f'hardware_ecc_events_total{{{at},event_type="{e}",neuron_device_index="1"}} {n}.0\n'
        for e, n in (("mem_ecc_corrected", 5), ("sram_ecc_corrected", 2), ("mem_ecc_uncorrected", 1))
    )
    d = decoder(site, "neuron")
    found = cells(d.decode(page.encode(), T))
    assert found["gpu", 0, "util_pu"] == 0.5
    assert found["gpu", 1, "util_pu"] == 0.25
    more = cells(
        d.decode(
            page.replace(
                '_corrected",neuron_device_index="1"} ', '_corrected",neuron_device_index="1"} 1'
            ).encode(),
            T,
        )
    )
    assert more["gpu", 1, "ecc_sbe_count"] == 20
    assert more["gpu", 1, "ecc_dbe_count"] == 0


def test_node_and_storage(site: Site) -> None:
    page = """\
node_infiniband_state_id{device="mlx5_0",port="1"} 1
node_infiniband_symbol_error_total{device="mlx5_0",port="1"} 12
node_infiniband_port_data_received_bytes_total{device="mlx5_0",port="1"} 1.5e+15
node_network_up{device="eth0"} 1
node_network_up{device="docker0"} 0
ipmi_temperature_celsius{id="4",name="Inlet Temp"} 23
"""
    assert cells(decoder(site, "node").decode(page.encode(), T)) == {
        ("link", 0, "up_state"): 1,
        ("link", 0, "symbol_error_count"): 12,
        ("link", 0, "rx_bytes"): 1_500_000_000_000_000,
        ("link", 4, "up_state"): 0,
        ("node", 0, "inlet_temp_c"): 23,
    }
    page = """\
lustre_write_bytes_total{component="ost",operation="write",target="scratch-OST0001"} 10
lustre_write_bytes_total{component="ost",operation="write",target="scratch-OST0002"} 20
node_filesystem_size_bytes{device="a",fstype="lustre",mountpoint="/scratch"} 100
node_filesystem_avail_bytes{device="a",fstype="lustre",mountpoint="/scratch"} 40
node_filesystem_size_bytes{device="b",fstype="ext4",mountpoint="/scratch"} 7
"""
    found = cells(decoder(site, "storage", None).decode(page.encode(), T))
    assert found == {
        ("storage", 0, "written_bytes"): 0,
        ("storage", 0, "used_pu"): 0.6,
        ("storage", 0, "flush_bytes_per_s"): None,  # of one page nobody knows a rate
    }


def test_bytes_of_nodes_that_mount_a_file_system_add_up(site: Site) -> None:
    pages = """\
gpfs_perf_write_bytes{fs="scratch",nodename="n%d"} %d
node_mountstats_nfs_total_read_bytes_total{export="nas:/vol/scratch",mountaddr="10.0.0.1",protocol="tcp"} %d
node_mountstats_nfs_total_read_bytes_total{export="nas:/home",mountaddr="10.0.0.1",protocol="tcp"} 5
"""
    sums, found = Sums(), []
    nodes = [PageDecoder(site, load_map("storage")[0], "storage.yaml", f"r1/node{i}", sums) for i in range(2)]
    for add in (0, 100, 300):
        for i, node in enumerate(nodes):
            found.append(cells(node.decode((pages % (i, add + i, 2 * add)).encode(), T + add * 10**9)))
    assert found[-1]["storage", 0, "written_bytes"] == 600
    assert found[-1]["storage", 0, "read_bytes"] == 1200
    # Each node wrote 200 bytes and read 400 in the last 200 s
    assert found[-1]["storage", 0, "flush_bytes_per_s"] == pytest.approx(2.0)
    assert found[-1]["storage", 0, "restore_bytes_per_s"] == pytest.approx(4.0)
    assert found[-2]["storage", 0, "flush_bytes_per_s"] is None  # the other node has not told yet


WEKA = """\
weka_fs_stats{cluster="w",fs_id="0",fs_name="scratch",stat="WRITE_BYTES",unit="bytespersec"} 5e+09
weka_fs_stats{cluster="w",fs_id="0",fs_name="scratch",stat="READ_BYTES",unit="bytespersec"} 2e+09
weka_fs_stats{cluster="w",fs_id="0",fs_name="scratch",stat="WRITE_LATENCY",unit="microsecs"} 800
weka_fs_stats{cluster="w",fs_id="0",fs_name="scratch",stat="THROUGHPUT",unit="bytespersec"} 7e+09
weka_fs_stats{cluster="w",fs_id="1",fs_name="home",stat="WRITE_BYTES",unit="bytespersec"} 1
weka_fs{cluster="w",name="scratch",stat="total_percent_used"} 61
weka_fs{cluster="w",name="scratch",stat="ssd_percent_used"} 99
"""  # synthetic, by the exporter's source


def test_weka_tells_rates_latency_and_use_of_each_file_system(site: Site) -> None:
    reader = decoder(site, "weka", None)
    found = cells(reader.decode(WEKA.encode(), T))
    assert found.pop(("storage", 0, "used_pu")) == pytest.approx(0.61)
    assert found.pop(("storage", 0, "write_latency_s")) == pytest.approx(8e-4)
    assert found == {("storage", 0, "flush_bytes_per_s"): 5e9, ("storage", 0, "restore_bytes_per_s"): 2e9}
    assert [why for why, _ in reader.strangers.take()] == ["no storage 'home' in the site file"]


VAST = """\
vast_cluster_online{cluster="scratch"} %d
vast_cluster_physical_space{cluster="scratch"} 1000
vast_cluster_physical_space_in_use{cluster="scratch"} 250
vast_cnode_metrics_ProtoMetrics_write_size_sum{cluster="scratch",hostname="c1",proto_name="ProtoCommon"} %d
vast_cnode_metrics_ProtoMetrics_write_size_sum{cluster="scratch",hostname="c2",proto_name="ProtoCommon"} %d
vast_cnode_metrics_ProtoMetrics_write_size_sum{cluster="scratch",hostname="c2",proto_name="NFSCommon"} %d
"""  # synthetic, by VAST's own Grafana boards


def test_vast_tells_the_sum_of_its_nodes_and_whether_it_is_online(site: Site) -> None:
    reader = decoder(site, "vast", None)
    found = cells(reader.decode((VAST % (1, 100, 7, 7)).encode(), T))
    assert found["storage", 0, "flush_bytes_per_s"] is None
    assert (found["storage", 0, "health_state"], found["storage", 0, "used_pu"]) == (0, 0.25)
    found = cells(reader.decode((VAST % (0, 400, 107, 107)).encode(), T + 20 * 10**9))
    assert found["storage", 0, "flush_bytes_per_s"] == pytest.approx(20.0)
    assert found["storage", 0, "written_bytes"] == 400
    assert found["storage", 0, "health_state"] == 2


def test_vast_tells_views_by_the_last_part_of_their_path(site: Site) -> None:
    page = 'vast_view_metrics_ViewMetrics_read_bw_sum{cluster="v",guid="g",name="n",path="/ai/scratch"} %d\n'
    reader = decoder(site, "vast", None)
    reader.decode((page % 5).encode(), T)
    found = cells(reader.decode((page % 65).encode(), T + 60 * 10**9))
    assert found["storage", 0, "restore_bytes_per_s"] == pytest.approx(1.0)


NVME = """\
node_disk_written_bytes_total{device="nvme0n1"} 1000000
node_disk_written_bytes_total{device="nvme1n1"} %d
node_nvmesubsystem_namespace_info{device="nvme0n1",subsystem="nvme-subsys0"} 1
node_nvmesubsystem_namespace_info{device="nvme1n1",subsystem="nvme-subsys1"} 1
node_nvmesubsystem_info{iopolicy="numa",model="SSD",nqn="nqn.2014:disk.scratch",subsystem="nvme-subsys0"} 1
node_nvmesubsystem_info{iopolicy="numa",model="Linux",nqn="nqn.2024:pool:scratch",subsystem="nvme-subsys1"} 1
node_nvmesubsystem_path_state{controller="nvme0",state="dead",subsystem="nvme-subsys0",transport="pcie"} 1
node_nvmesubsystem_path_state{controller="nvme1",state="dead",subsystem="nvme-subsys1",transport="rdma"} 0
node_nvmesubsystem_path_state{controller="nvme2",state="dead",subsystem="nvme-subsys1",transport="rdma"} %d
"""  # synthetic, by node_exporter's own tests


def test_volumes_over_fabrics_are_known_by_their_nqn_and_local_disks_left_alone(site: Site) -> None:
    sums = Sums()
    nodes = [PageDecoder(site, *load_map("storage"), f"r1/node{i}", sums) for i in range(2)]
    found: dict[Any, Any] = {}
    for at_s, dead in ((0, 0), (20, 1)):
        for i, node in enumerate(nodes):
            page = NVME % (at_s * 100 * (i + 1), dead * i)
            found = cells(node.decode(page.encode(), T + at_s * 10**9))
    assert found == {
        ("storage", 0, "written_bytes"): 6000,
        ("storage", 0, "flush_bytes_per_s"): pytest.approx(300.0),
        ("storage", 0, "health_state"): 1,
    }
    lone = "\n".join(NVME.splitlines()[:2]) % 5  # without the collector nobody knows which disks are remote
    with pytest.raises(BadMessage, match="no series to read"):
        nodes[0].decode(lone.encode(), T + 40 * 10**9)


DPU = """\
node_hwmon_temp_celsius{chip="0000:02:00_0_0000:03:00_0",sensor="temp1"} %g
node_hwmon_temp_celsius{chip="0000:02:00_0_0000:03:00_0",sensor="temp2"} 120
node_hwmon_temp_celsius{chip="nvme_nvme0",sensor="temp1"} 119
node_systemd_system_running %d
node_systemd_unit_state{name="openvswitch-switch.service",state="active",type="forking"} %d
node_systemd_unit_state{name="openvswitch-switch.service",state="failed",type="forking"} %d
node_systemd_unit_state{name="cron.service",state="failed",type="simple"} 1
node_network_receive_errs_total{device="p0"} %d
node_network_transmit_errs_total{device="p1"} 0
node_network_receive_errs_total{device="pf0hpf"} 999
"""


def test_each_dpu_of_a_node_tells_of_itself(site: Site) -> None:
    sums = Sums()
    one, other, its_bmc = (
        PageDecoder(site, *load_map("dpu"), f"lab/h/r1/node0#dpu{side}", sums) for side in (1, 2, 2)
    )

    def read(d: PageDecoder, at_s: float, *values: float) -> dict[str, Any]:
        found = cells(d.decode((DPU % values).encode(), T + round(at_s * 10**9)))
        assert {(table, entity) for table, entity, _ in found} == {("node", 0)}
        assert not d.strangers.take()  # interfaces and services that are nobody's are routine
        return {signal: value for (_, _, signal), value in found.items()}

    well, ill = (70, 1, 1, 0), (99, 0, 0, 1)
    assert read(one, 0, *well, 1000) == {
        "dpu1_temp_c": 70,
        "dpu1_health_state": 0,
        "dpu1_offload_state": 0,
        "dpu1_port_error_count": 0,
    }
    read(other, 1, *ill, 5)
    assert read(other, 31, *ill, 12) == {
        "dpu2_temp_c": 99,
        "dpu2_health_state": 1,
        "dpu2_offload_state": 1,
        "dpu2_port_error_count": 7,
    }
    assert read(one, 32, *well, 1007)["dpu1_port_error_count"] == 7
    # Of what a DPU and its BMC both tell, the worse counts
    page = """\
ipmi_temperature_celsius{id="0",name="bluefield_temp",type="Temperature"} 101
ipmi_temperature_celsius{id="5",name="p0_temp",type="Temperature"} 44
dpu_health_state 2
dpu_offload_state 0
"""
    assert cells(its_bmc.decode(page.encode(), T + 40 * 10**9)) == {
        ("node", 0, "dpu2_temp_c"): 101,
        ("node", 0, "dpu2_health_state"): 2,
        ("node", 0, "dpu2_offload_state"): 1,
    }
    unused = read(one, 130, 70, 1, 0, 0, 1007)
    assert unused["dpu1_offload_state"] is None  # a virtual switch that nobody started says nothing


@pytest.mark.parametrize("place", ["lab/h/r1/node0", "lab/h/r1/node0#dpu3", None])
def test_a_page_of_no_dpu_says_which_places_there_are(site: Site, place: str | None) -> None:
    with pytest.raises(BadMessage, match=r"place .* is none of .*#dpu1 or .*#dpu2"):
        decoder(site, "dpu", place).decode(b"dpu_health_state 2\n", T)
    with pytest.raises(BadMessage, match="no node 'lab/h/r1/node99'"):
        decoder(site, "dpu", "lab/h/r1/node99#dpu1").decode(b"dpu_health_state 2\n", T)


@pytest.mark.parametrize(
    "line",
    [
        'DCGM_FI_DEV_POWER_USAGE{gpu="1",Hostname="x"} hot',
        'DCGM_FI_DEV_POWER_USAGE{gpu="1"',
        "DCGM_FI_DEV_POWER_USAGE{gpu=1} 5",
        'DCGM_FI_DEV_POWER_USAGE{gpu="1"} 5 x',
        'DCGM_FI_DEV_POWER_USAGE{gpu="1"} 5 -7',
        'DCGM_FI_DEV_POWER_USAGE{gpu="1"} 5 99999999999999999999',
        'DCGM_FI_DEV_POWER_USAGE{gpu="\xff"} 5'.encode("latin-1"),
        'DCGM_FI_DEV_POWER_USAGE{gpu="1"}',
    ],
)
def test_a_bad_line_costs_only_itself(site: Site, line: str | bytes) -> None:
    raw = line.encode() if isinstance(line, str) else line
    d = decoder(site, "dcgm")
    assert cells(d.decode(DCGM.encode() + raw + b"\n", T))["gpu", 1, "power_w"] == 1012.5
    ((_, count),) = d.faults.take()
    assert count == 1
    with pytest.raises(BadMessage):
        d.decode(raw, T)


@pytest.mark.parametrize(
    "page", [b"", b"<html>no</html>", b"\xff\x00" * 100, DCGM.replace('gpu="1"', 'gpu="9"').encode()]
)
def test_a_page_of_another_kind_is_bad(site: Site, page: bytes) -> None:
    with pytest.raises(BadMessage, match=r"no series to read|a page of HTML"):
        decoder(site, "dcgm").decode(page, T)


def test_a_page_has_a_limit(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadMessage, match="expected at most"):
        decoder(site, "dcgm").decode(b" " * (prometheus.MAX_PAGE + 1), T)
    monkeypatch.setattr(prometheus, "MAX_SAMPLES", 300)
    with pytest.raises(BadMessage, match="more than 300 samples"):
        decoder(site, "dcgm").decode(DCGM.encode() * 60, T)


def test_unusable_files_are_refused(site: Site, tmp_path: Any) -> None:
    (tmp_path / "ca.pem").write_text("nonsense")
    for ca in (tmp_path / "ca.pem", tmp_path / "none.pem"):
        with pytest.raises(ConfigError, match="expected certificates"):
            PrometheusSource("https://h/metrics", "dcgm", site, ScrapeSettings(ca_file=str(ca)))
    with pytest.raises(ConfigError, match="no such mapping"):
        PrometheusSource("https://h/metrics", "dcgn", site, ScrapeSettings())


SCRAPS = st.sampled_from(
    ["DCGM_FI_DEV_POWER_USAGE", "{", "}", '"', "gpu=", "gpu", ",", " ", "\n", "1", "NaN", "+Inf", "\\", "#"]
)


@hypothesis.given(st.lists(SCRAPS | st.text(max_size=4), max_size=14).map("".join))
def test_whatever_a_page_says_it_is_answered(text: str) -> None:
    d = PageDecoder(PLAIN, *load_map("dcgm"), "lab/h/r1/node0")
    try:
        found = cells(d.decode(text.encode("utf-8", "replace"), T))
    except BadMessage:
        return
    assert all(key[0] == "gpu" for key in found)


# As dcgm-exporter 4.4 on a GB200 tray writes them (NVIDIA/dcgm-exporter, issue 581), with counts
NVLINK5 = """\
# TYPE DCGM_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS counter
DCGM_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS{gpu="0",UUID="GPU-2e2b6342",pci_bus_id="00000008:01:00.0",device="nvidia0",modelName="NVIDIA GB200",Hostname="3f546054f69d"} 505
DCGM_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS{gpu="1",UUID="GPU-67ff7ed1",modelName="NVIDIA GB200",Hostname="3f546054f69d"} 0
DCGM_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS{gpu="0",UUID="GPU-2e2b6342",modelName="NVIDIA GB200",Hostname="3f546054f69d"} 1
DCGM_FI_DEV_NVLINK_COUNT_EFFECTIVE_ERRORS{gpu="0",UUID="GPU-2e2b6342",modelName="NVIDIA GB200",Hostname="3f546054f69d"} 4
DCGM_FI_DEV_NVLINK_COUNT_RX_SYMBOL_ERRORS{gpu="0",UUID="GPU-2e2b6342",modelName="NVIDIA GB200",Hostname="3f546054f69d"} 7
"""  # noqa: E501
NEWER = {
    "COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS": "RECOVERY_SUCCESSFUL_TOTAL",
    "COUNT_LINK_RECOVERY_FAILED_EVENTS": "RECOVERY_FAILED_TOTAL",
    "COUNT_EFFECTIVE_ERRORS": "EFFECTIVE_ERROR_TOTAL",
    "COUNT_RX_SYMBOL_ERRORS": "RX_SYMBOL_ERROR_TOTAL",
}


@pytest.mark.parametrize("newer", [False, True])
def test_nvlink_5_of_dcgm_by_its_older_and_newer_names(site: Site, newer: bool) -> None:
    page = NVLINK5
    for old, new in NEWER.items() if newer else ():
        page = page.replace(old, new)
    d = decoder(site, "dcgm")
    found = cells(d.decode(page.encode(), T))
    # Recoveries as they are, so that those before the first scrape are known
    assert [found["gpu", i, "nvlink_recovery_count"] for i in (0, 1)] == [505, 0]
    more = cells(d.decode(page.replace("} 4\n", "} 6\n").replace("} 7\n", "} 10\n").encode(), T))
    # Symbol errors, which grew too, are corrected
    assert more["gpu", 0, "nvlink_error_count"] - found["gpu", 0, "nvlink_error_count"] == 2


def test_optics_of_a_node(site: Site) -> None:
    page = """\
transceiver_exporter_module_temperature_degrees_celsius{interface="eth0"} 34.5
transceiver_exporter_laser_rx_power_milliwatts{interface="eth0",laser_index="0"} 0.512
transceiver_exporter_laser_bias_current_milliamperes{interface="eth0",laser_index="0"} 7.25
transceiver_exporter_laser_rx_power_dbm{interface="rail3",laser_index="0"} -10
transceiver_exporter_laser_tx_power_dbm{interface="rail3",laser_index="0"} 0
transceiver_exporter_laser_tx_power_dbm{interface="rail2",laser_index="0"} -Inf
transceiver_exporter_laser_rx_power_milliwatts{interface="lo",laser_index="0"} 1
"""
    found = cells(decoder(site, "optics").decode(page.encode(), T))
    eth, rail = (site.entity("link", f"lab/h/r1/node0/{name}") or 0 for name in ("eth0", "rail3"))
    assert found == {
        ("link", eth, "temp_c"): 34.5,
        ("link", eth, "rx_optical_w"): pytest.approx(0.512e-3),
        ("link", eth, "laser_bias_a"): pytest.approx(7.25e-3),
        ("link", rail, "rx_optical_w"): pytest.approx(1e-4),
        ("link", rail, "tx_optical_w"): pytest.approx(1e-3),
        ("link", rail - 1, "tx_optical_w"): 0.0,
    }


def test_ports_of_an_infiniband_fabric_by_ufm(site: Site) -> None:
    page = """\
SymbolErrorCounterExtended{source="0x0002",node_guid="b83fd2",port_guid="b83fd4",port_num="3"} 5
LinkDownedCounterExtended{source="0x0002",node_guid="b83fd2",port_guid="b83fd4",port_num="3"} 1
Total_Raw_BER{node_guid="b83fd2",port_num="3"} 2.5e-7
PortXmitDataExtended{node_guid="b83fd2",port_num="3"} 900
SymbolErrorCounterExtended{node_guid="b83fd2",port_num="9"} 5
"""
    rules = load_map("ufm")[0].rules
    d = PageDecoder(site, SeriesMap(rules=rules, names={"b83fd2:3": "lab/h/r1/node0/rail0"}), "ufm", None)
    first = cells(d.decode(page.encode(), T))
    more = cells(d.decode(page.replace("} 5", "} 8").encode(), T))
    link = site.entity("link", "lab/h/r1/node0/rail0")
    assert set(first) == {("link", link, n) for n in ("symbol_error_count", "flap_count", "pre_fec_ber_pu")}
    assert first["link", link, "pre_fec_ber_pu"] == pytest.approx(2.5e-7)
    assert more["link", link, "symbol_error_count"] - first["link", link, "symbol_error_count"] == 3
