"""GPUs that jobs hold and wait for in Slurm, counted from its own listings."""

from __future__ import annotations

import pytest

from connectors.demand import DemandBook, JobClaim, Stock
from connectors.slurm.demand import SlurmGpus, count_of, tasks_of
from connectors.slurm.jobs import Listed, parse_listing
from connectors.slurm.nodes import gpus_in, parse_nodes
from tests.support.builders import site_of, two_racks
from tests.support.inlets import RecordingInlet
from twin.catalogue import NS, ConfigError
from twin.telemetry import Reading

NOW_S = 1_700_000_600
SITE = site_of({**two_racks(), "queues": [{"name": "train"}, {"name": "serve"}],
                "tenants": [{"name": "phys"}, {"name": "ada"}],
                "priorities": [{"name": "urgent", "least": 5000},
                               {"name": "usual", "least": 50}]})  # fmt: skip
NODES = """\
gpu1|mixed|train|gpu:a100:8(S:0-1)|gpu:a100:3(IDX:0-1,4)|none|
gpu1|mixed|debug|gpu:a100:8(S:0-1)|gpu:a100:3(IDX:0-1,4)|none|
gpu2|idle|train|gpu:a100:8(S:0-1)|gpu:a100:0(IDX:N/A)|none|
gpu3|draining|train|gpu:a100:8|gpu:a100:2(IDX:0-1)|fan | broke|
gpu4|down*|train|gpu:a100:8|gpu:a100:0|Not responding|
gpu5|idle|train|gpu:a100:8|gpu:a100:0|none|
cpu1|allocated|cpu|(null)|(null)|none|
"""


def job(
    state: str = "PENDING",
    hosts: str = "",
    *,
    nodes: str = "1",
    tasks: str = "1",
    tres: str = "N/A",
    ask: tuple[str, str, str, str] = ("N/A", "gres:gpu:4", "N/A", "N/A"),
    array: str = "N/A",
    shared: str = "OK",
    reason: str = "Resources",
    partition: str = "train",
    account: str = "phys",
    start: str = "N/A",
    qos: str = "(null)",
    priority: int = 100,
) -> Listed:
    head = f"{state}|7|{start}|1:00:00|{priority}|{account}|ada|{partition}|{hosts}|{nodes}|{tasks}|2|{tres}|"
    jobs, bad = parse_listing(
        f"{head}{'|'.join(ask)}|{array}|1700000000|1700000100|{shared}|{qos}|{reason}|\n"
    )
    assert not bad
    return jobs[0]


def none(host: str) -> int:
    return 0


def claim(listed: Listed) -> JobClaim:
    (found,) = SlurmGpus(parse_nodes(NODES), none).claims([listed])
    return found


@pytest.mark.parametrize(
    "spec, gpus",
    [
        ("gpu", 1), ("gres:gpu", 1), ("gres:gpu:a100", 1), ("gres/gpu:4", 4), ("gres/gpu:a100=4", 4),
        ("gpu:a100:8(S:0-1),nic:2", 8), ("gpu:a100:4,gpu:v100:2", 6), ("gpu:(null):5(IDX:0-2,4-5)", 5),
        ("nic:2", 0), ("(null)", 0), ("mygpu:3", 0), ("shard:gpu", 0), ("", 0),
    ],
)  # fmt: skip
def test_gpus_are_read_off_resources(spec: str, gpus: int) -> None:
    assert gpus_in(spec) == gpus


@pytest.mark.parametrize(
    "text, tasks",
    [("N/A", 1), ("", 1), ("1-30%2", 30), ("0-9:3", 4), ("1,3,5-7", 5), ("[4]", 1), ("9-1", 1)],
)
def test_tasks_of_an_array_are_counted(text: str, tasks: int) -> None:
    assert tasks_of(text) == tasks


def test_numbers_that_slurm_shortens() -> None:
    assert [count_of(t) for t in ("18", "2-4", "1K", "1.50K", "N/A", "*")] == [18, 2, 1024, 1536, 0, 0]


@pytest.mark.parametrize(
    "listed, gpus",
    [
        (job(nodes="3"), 12),
        (job(ask=("gres:gpu:5", "N/A", "N/A", "N/A"), nodes="2"), 5),
        (job(ask=("N/A", "N/A", "gres:gpu:2", "N/A"), tasks="6"), 12),
        (job(ask=("N/A", "N/A", "N/A", "gres:gpu"), nodes="3"), 6),
        (job(tres="cpu=1,gres/gpu=16,gres/gpu:a100=16"), 16),
        (job(ask=("N/A",) * 4), 0),
        (job(ask=("N/A",) * 4, shared="NO", nodes="2"), 16),
        (job(shared="NO", nodes="2"), 16),
    ],
)
def test_gpus_that_a_job_asks_for(listed: Listed, gpus: int) -> None:
    assert claim(listed).gpus == gpus


@pytest.mark.parametrize(
    "reason, state",
    [
        ("Resources", "pending"), ("Priority", "pending"), ("None", "pending"),
        ("ReqNodeNotAvail, UnavailableNodes:gpu4", "pending"),
        ("Dependency", "held"), ("DependencyNeverSatisfied", "held"), ("JobHeldUser", "held"),
        ("JobHeldAdmin", "held"), ("JobArrayTaskLimit,BeginTime", "held"),
        ("BeginTime", "held"), ("JobArrayTaskLimit", "held"),
        ("QOSMaxGRESPerUser", "held"), ("AssocGrpGRES", "held"), ("PartitionDown", "held"),
    ],
)  # fmt: skip
def test_what_waits_for_something_else_is_held(reason: str, state: str) -> None:
    assert claim(job(reason=reason)).state == state


def test_an_array_counts_by_its_tasks_and_partitions_once_each() -> None:
    found = claim(job(array="1-10%2", partition="train,debug", start="1700001000"))
    assert (found.jobs, found.queues, found.limit_s, found.start_s) == (
        10,
        ("train", "debug"),
        3600.0,
        1.7e9 + 1000,
    )


def test_free_gpus_are_idle_spare_or_out_of_service() -> None:
    inventory = SlurmGpus(parse_nodes(NODES), none)
    assert inventory.stock(lambda host: host == "gpu5") == Stock(idle=5 + 8, spare=8, out=6 + 8)
    assert set(inventory.partitions) == {"train", "debug", "cpu"}


def test_a_slurm_that_counts_no_gpus_is_counted_by_nodes() -> None:
    nodes = parse_nodes("gpu1|allocated|train|(null)|(null)|none|\ngpu2|idle|train|(null)|(null)|none|\n")
    inventory = SlurmGpus(nodes, lambda host: 4)
    bare = ("N/A",) * 4
    running = [job("RUNNING", "gpu1", ask=bare), job("RUNNING", "gpu1", ask=bare)]
    readings = values([*running, job(nodes="2", ask=bare)], inventory)
    # two jobs share a node, whose GPUs count once
    assert readings["site", 0, "gpu_running_count"] == 4
    assert readings["site", 0, "job_running_count"] == 2
    assert readings["site", 0, "gpu_pending_count"] == 8
    assert readings["site", 0, "gpu_idle_count"] == 4


def values(listing: list[Listed], inventory: SlurmGpus) -> dict[tuple[str, int, str], float | None]:
    book = DemandBook(SITE, ["slurm"])
    stock = inventory.stock(lambda host: False)
    return table(book.take("slurm", inventory.claims(listing), stock, inventory.partitions, NOW_S * NS, 30.0))


def table(readings: list[Reading]) -> dict[tuple[str, int, str], float | None]:
    out = {(r.table, r.entity, r.signal): r.value for r in readings}
    assert len(out) == len(readings)
    return out


def test_the_order_in_which_partitions_are_listed_changes_no_node() -> None:
    lines = [f"gpu1|idle|{name}|gpu:8|gpu:0|none|\n" for name in ("train", "debug", "train")]
    found, other = parse_nodes("".join(lines)), parse_nodes("".join(lines[1:]))
    assert found == other
    assert found["gpu1"].share.partitions == ("debug", "train")


def test_rows_of_queues_and_tenants() -> None:
    listing = [
        job("RUNNING", "gpu1"),
        job(array="1-3", start=str(NOW_S + 60)),
        job(reason="JobHeldUser", account=""),
        job(partition="debug", account="bio"),
    ]
    found = values(listing, SlurmGpus(parse_nodes(NODES), none))
    assert [found["site", 0, f"gpu_{s}_count"] for s in ("running", "pending", "held")] == [4, 16, 4]
    assert [found["queue", 0, f"gpu_{s}_count"] for s in ("running", "pending", "held")] == [4, 12, 4]
    assert [found["queue", 0, f"job_{s}_count"] for s in ("running", "pending", "held")] == [1, 3, 1]
    assert found["queue", 0, "oldest_wait_s"] == 500
    assert found["queue", 0, "next_start_s"] == 60
    assert found["queue", 0, "pending_gpu_s"] == 12 * 3600
    # `serve` is no partition of this Slurm: unknown, not empty
    assert found["queue", 1, "gpu_pending_count"] is None
    # no account: the user is the tenant; `bio` has an account, but its user is listed
    assert [found["tenant", e, "gpu_pending_count"] for e in (0, 1)] == [12, 4]
    assert [found["tenant", e, "gpu_held_count"] for e in (0, 1)] == [0, 4]


def test_rows_of_priorities_are_of_qos_then_number_and_add_up_to_the_site() -> None:
    listing = [
        job("RUNNING", "gpu1", qos="urgent"),
        job(qos="usual", priority=9000),
        job(qos="normal", priority=5000),
        job(priority=4999),
        job(qos="rest", priority=49),
        job(priority=0, reason="JobHeldUser"),
    ]
    found = values(listing, SlurmGpus(parse_nodes(NODES), none))
    assert SITE.names["priority"] == [f"{SITE.file.site}/{n}" for n in ("urgent", "usual", "rest")]
    for state, counts in (("running", [4, 0, 0]), ("pending", [4, 8, 4]), ("held", [0, 0, 4])):
        assert [found["priority", e, f"gpu_{state}_count"] for e in range(3)] == counts
        assert found["site", 0, f"gpu_{state}_count"] == sum(counts)


@pytest.mark.parametrize(
    "groups, problem",
    [
        ([{"name": "rest"}], "$.priorities[0].name: rest is the class of all others; expected another name"),
        ([{"name": "a", "least": 1}, {"name": "b", "least": 1}],
         "$.priorities[1].least: $.priorities[0] begins there as well; expected another number"),
        ([{"name": "a[1-2]", "least": 1}],
         "$.priorities[0].least: expected one name without a range, got 'a[1-2]'"),
        ([{"name": "a", "least": 2**31}],
         "$.priorities[0].least: expected -2147483648 to 2147483647, got 2147483648"),
    ],
)  # fmt: skip
def test_classes_of_priority_that_cannot_be(groups: list[dict[str, object]], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        site_of({**two_racks(), "priorities": groups})
    assert problem in str(error.value)


def test_an_empty_queue_is_zero() -> None:
    found = values([], SlurmGpus(parse_nodes(NODES), none))
    assert found["queue", 0, "gpu_pending_count"] == found["queue", 0, "oldest_wait_s"] == 0.0
    assert found["queue", 0, "next_start_s"] is None
    assert found["tenant", 0, "gpu_running_count"] == 0.0


def test_names_that_the_site_does_not_list_are_skipped_once() -> None:
    book, inlet = DemandBook(SITE, ["slurm"]), RecordingInlet()
    for _ in range(2):
        book.take("slurm", [JobClaim("pending", 1, ("debug",), ("bio", "eve"))], None, ["debug"], NS, 30.0)
    book.report(inlet)
    book.report(inlet)
    assert inlet.skipped == [f"the {t} {n!r} of the scheduler is not in the site file"
                             for t, n in (("queue", "debug"), ("tenant", "bio"))]  # fmt: skip
    bare = DemandBook(site_of(two_racks()), ["slurm"])
    bare.take("slurm", [JobClaim("pending", 1, ("debug",), ("bio",))], None, ["debug"], NS, 30.0)
    bare.report(inlet)
    assert len(inlet.skipped) == 2  # a site that lists none wants none


def test_two_schedulers_add_up_while_both_speak() -> None:
    book = DemandBook(SITE, ["slurm", "kubernetes"])
    pending = JobClaim("pending", 4, ("train",), ("phys",))
    key = ("site", 0, "gpu_pending_count")
    assert table(book.take("slurm", [pending], Stock(1, 0, 0), ["train"], NS, 30.0))[key] is None
    both = table(book.take("kubernetes", [pending], Stock(2, 0, 1), ["serve"], 2 * NS, 30.0))
    assert both[key] == 8
    assert [both["queue", e, "gpu_pending_count"] for e in (0, 1)] == [8, 0]
    assert [both["site", 0, f"gpu_{s}_count"] for s in ("idle", "spare", "out")] == [3, 0, 1]
    late = table(book.take("slurm", [pending], Stock(1, 0, 0), ["train"], 40 * NS, 30.0))
    assert late[key] is None
