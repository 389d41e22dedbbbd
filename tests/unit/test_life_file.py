"""Life files: each published form becomes the same kind of log; what is malformed is refused by its line."""

from __future__ import annotations

import lzma
import os
from pathlib import Path

import numpy as np
import pytest

from twin.catalogue import ConfigError
from twin.cli.traces import trace_root
from twin.tables import read_lives, read_node_faults
from twin.tables.life_file import form_of

TITAN = """SN,location,insert,remove,duration,out,event
0320117100060,c11-2c1s4n1,2017-04-09 21:36:19,2019-08-01 20:07:33,72916274,FALSE,
0320117100219,c13-5c2s2n1,2017-04-09 21:36:19,2018-03-03 10:04:58,28301319,FALSE,DBE
0320117100219,c3-2c1s3n0,2018-03-27 13:36:01,2018-05-12 22:41:16,4007115,FALSE,OTB
0320117100060,c11-2c1s4n1,,2018-01-01 00:00:00,,,OTB
0999999999999,c11-2c1s4n1,,2018-01-01 00:00:00,,,DBE
"""
LANL_HEAD = (
    "System,machine type,nodes,nodenumz,Prob Started,Prob Fixed,Facilities,Hardware,Human Error,Network,"
    "Undetermined,Software\n"
)
LANL = (
    LANL_HEAD
    + "2,cluster,3,0,6/21/2005 10:54,6/21/2005 11:54,,Memory Dimm,,,,\n"
    + "2,cluster,3,0,6/21/2005 11:00,6/21/2005 12:00,,,,,,OS\n"
    + "2,cluster,3,2,6/25/2005 00:00,6/26/2005 00:00,,,,,Undetermined,\n"
    + "17,cluster,,,6/25/2005 00:00,6/26/2005 00:00,,,,,Undetermined,\n"
)
G5K_HEAD = (
    "# event_id component_id node_id platform_id node_name event_type event_start_time event_stop_time\n"
)
G5K = G5K_HEAD + "".join(
    f"{i}\t0\t0\t5\t{node}\t{kind}\t{begin}\t{end}\tNULL\n"
    for i, (node, kind, begin, end) in enumerate(
        [
            ("G1/site1/c1/node1", 0, 1_000_000_000, 1_000_086_400),
            ("G1/site1/c1/node1", 1, 1_000_086_400, 1_000_172_800),
            ("G1/site1/c1/node1", 0, 1_000_172_800, 1_000_259_200),
            ("G1/site1/c1/node1", 1, 1_000_259_200, 1_000_432_000),
            ("G1/site2/c1/node7", 1, 1_000_000_000, 1_000_432_000),
        ]
    )
)
DISKS = (
    ",Timestamp,Rack id,Unique enclosure,Slot\n"
    "0,2019-01-04T14:41:12-0500,8,1,29\n"
    "1,2019-01-09T15:47:17-0500,8,1,29\n"
    "2,2019-01-10T15:47:17,9,1,30\n"
)
GENERAL = (
    "asset,position,begin,end,class\n"
    "a,cage=0 slot=1,0,4.5,GPU\n"
    "a,cage=1 slot=1,5,,\n"
    "b,cage=0 slot=1,6,30,\n"
    "a,cage=1 slot=1,,7,NIC\n"
)


def written(folder: Path, text: str) -> Path:
    path = folder / "lives"
    path.write_text(text)
    return path


def test_titan(tmp_path: Path) -> None:
    read = read_lives(written(tmp_path, TITAN))
    log = read.log
    assert (read.form, log.levels) == ("titan", ("column", "row", "cage", "slot", "node"))
    assert log.assets == ("0320117100060", "0320117100219")
    assert log.places.tolist() == [[11, 2, 1, 4, 1], [13, 5, 2, 2, 1], [3, 2, 1, 3, 0]]
    assert [log.classes[k] for k in log.kind] == ["OTB", "DBE", "OTB"]
    assert log.stay.tolist() == [0, 1, 2]
    assert log.ending.tolist() == [2, 1, 1]
    assert "1 faults left out of devices that were in no place at the time" in read.notes
    assert read.zero is not None
    assert read.zero.date().isoformat() == "2017-04-09"


def test_lanl_knows_the_nodes_that_never_failed(tmp_path: Path) -> None:
    read = read_lives(written(tmp_path, LANL))
    log = read.log
    assert log.assets == ("2/0", "2/1", "2/2")
    assert log.k == 4  # node 1 never failed: one stay; node 2 was under repair when the log ended
    assert [log.classes[k] for k in log.kind] == ["Hardware", "Undetermined"]
    assert log.ending.tolist().count(1) == 2
    assert "1 failures left out that began while their node was under repair" in read.notes
    assert "1 failures left out that name no node" in read.notes


def test_grid5000_and_disks(tmp_path: Path) -> None:
    log = read_lives(written(tmp_path, G5K)).log
    assert log.places.tolist() == [[1, 1, 1], [2, 1, 7]]
    assert log.classes == ("unavailable",)
    assert np.diff(log.day).size == 0  # what lies before the first availability is no fault
    disks = read_lives(written(tmp_path, DISKS)).log
    assert len(disks.places) == 4  # two racks, one enclosure, two slots
    assert len(disks.assets) == 4 + 3  # every replacement is a new disk
    assert disks.ending.tolist().count(1) == 3


def test_the_general_form(tmp_path: Path) -> None:
    read = read_lives(written(tmp_path, GENERAL))
    log = read.log
    assert log.levels == ("cage", "slot")
    assert log.assets == ("a", "b")
    assert log.day.tolist() == [4.5, 7.0]
    assert log.until_d == 30.0
    assert read.zero is None


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (TITAN.replace("c13-5c2s2n1", "c13-5"), "line 3: location 'c13-5': expected one such as c11-2c1s4n1"),
        (TITAN.replace("FALSE,DBE", "FALSE,XYZ"), "line 3: event 'XYZ': expected DBE, OTB or nothing"),
        (
            TITAN.replace("2018-03-03 10", "2016-03-03 10"),
            "line 3: remove 2016-03-03 10:04:58: expected insert",
        ),
        (TITAN.replace("2019-08-01 20:07:33", "soon"), "line 2: remove 'soon': expected a time such as"),
        (TITAN.replace(",,,OTB", ",,OTB"), "line 5: 6 values, expected 7"),
        (
            LANL.replace("6/25/2005 00:00,6/26/2005", "6/27/2005 00:00,6/26/2005"),
            "line 4: Prob Fixed 6/26/2005",
        ),
        (LANL.replace(",3,2,", ",3,x,"), "line 4: nodenumz 'x': expected a whole number"),
        (
            G5K.replace("\t1\t1000086400", "\t7\t1000086400"),
            "line 3: event_type '7': expected 0 (unavailable)",
        ),
        (G5K.replace("G1/site2/c1/node7", "node7"), "line 6: node_name 'node7': expected one such as"),
        (
            G5K.replace("1000086400", "nan"),
            "line 2: event_start_time, event_stop_time ('1000000000', 'nan'): expected seconds",
        ),
        (DISKS.replace(",9,1,30", ",9,?,30"), "line 4: Rack id, Unique enclosure, Slot"),
        (
            GENERAL.replace("cage=1 slot=1,5", "slot=1,5"),
            "line 3: position 'slot=1': expected levels such as",
        ),
        (GENERAL.replace("6,30", "6,3"), "line 4: end 3: expected begin 6 or later"),
        (GENERAL.replace(",7,NIC", ",7,"), "line 5: begin: expected a time, or an end and a class"),
        ("x,y\n1,2\n", "line 1: 'x,y': expected the head of one of these forms"),
    ],
)
def test_what_is_malformed_is_refused_by_its_line(tmp_path: Path, text: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_lives(written(tmp_path, text))
    assert any(line in problem for problem in caught.value.problems), caught.value.problems


def test_the_failure_backtest_reads_them_as_nodes(tmp_path: Path) -> None:
    read = read_node_faults(written(tmp_path, LANL), None)
    assert (read.log.n, read.names) == (3, ("2/0", "2/1", "2/2"))
    assert read.log.node.tolist() == [0, 2]
    # The first repair lasts until the later one that began within it ends; the last goes on.
    assert (read.log.end_d - read.log.start_d).tolist() == pytest.approx([66 / 1440, np.inf])
    titan = read_node_faults(written(tmp_path, TITAN), 5)
    assert titan.log.n == 5
    assert titan.log.end_d.tolist()[0] == titan.log.start_d.tolist()[0]  # the GPU stayed
    assert titan.log.end_d.tolist()[1:] == [np.inf, np.inf]  # nothing came back to these places
    with pytest.raises(ConfigError, match=r"--part 9/: .* names no such node; expected one such as 2/0"):
        read_node_faults(written(tmp_path, LANL), None, part="9/")
    with pytest.raises(ConfigError, match=r"--nodes 2: .* names 3 nodes"):
        read_node_faults(written(tmp_path, LANL), 2)
    plain = written(tmp_path, "node,start,end,class\na,1.5,4.0,GPU\n")
    assert read_node_faults(plain, 4).log.n == 4
    with pytest.raises(ConfigError, match="--nodes: expected the number of nodes"):
        read_node_faults(plain, None)


def test_packed_files_and_a_fleet_without_names(tmp_path: Path) -> None:
    path = tmp_path / "lives.xz"
    path.write_bytes(lzma.compress(TITAN.encode()))
    assert read_lives(path).form == "titan"
    faults = written(tmp_path, "node,start,end,class\na,1.5,4.0,GPU\nb,6,,NIC\n")
    log = read_lives(faults, 4).log
    assert (len(log.assets), log.k, log.ending.tolist().count(1)) == (4, 5, 2)
    with pytest.raises(ConfigError, match="expected --nodes"):
        read_lives(faults)


def test_the_recording_of_titan() -> None:
    path = trace_root(os.environ) / "gpu-lives-titan" / "gc_full.csv"
    if not path.exists():
        pytest.skip("recording gpu-lives-titan: `racktwin trace fetch gpu-lives-titan`")
    log = read_lives(path).log
    assert (len(log.assets), len(log.places)) == (30_207, 18_687)
    # Per 1000 lines: 37,343 of which 6,367 tell an event; 35 of those of a GPU that was in no place.
    assert (log.k, len(log.day), int(log.episode.sum())) == (36_185, 6_332, 5_578)
    assert form_of(path.read_text().partition("\n")[0]) == "titan"
