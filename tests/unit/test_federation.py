"""Federation: noise that hides a node, the ledger of its budget, and files only their signer makes."""

from __future__ import annotations

import json
import math
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml

from models.failure import SENSITIVITY, parse_prior, site_statistics
from tests.support.fault_logs import fleet, log_of
from tests.support.golden_story import spec
from twin.anchor import HeadSigner, make_keys
from twin.catalogue import NS, ConfigError, StorageError
from twin.cli.main import main
from twin.config import make_engine
from twin.config.engine import make_model
from twin.federation import (
    PERIOD_D,
    SHARES,
    BudgetLedger,
    Spending,
    StatisticsFile,
    TrustedKey,
    chosen_spans,
    discrete_laplace,
    epsilon_of,
    file_bytes,
    noise_scale,
    noise_variance,
    privacy,
    publish,
    read_file,
    sign_file,
    verified,
)
from twin.run import Recorder
from twin.site import ModelEntry, build_site
from twin.telemetry import Frame

PRIVATE, PUBLIC = make_keys()
SIGNER = HeadSigner.of_pem(PRIVATE, "key")
STRANGER = HeadSigner.of_pem(make_keys()[0], "key")
NOW_NS = 1_700_000_000 * NS
DAY_NS = 86_400 * NS


@pytest.fixture
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same draws in each run of the tests."""
    monkeypatch.setattr(privacy.secrets, "randbelow", random.Random(7).randrange)


def test_noise_is_of_the_law_that_it_promises(seeded: None) -> None:
    scale = Fraction(3, 2)
    draws = np.array([discrete_laplace(scale) for _ in range(4000)])
    a = math.exp(-1.0 / 1.5)
    for k in range(-3, 4):
        p = (1.0 - a) / (1.0 + a) * a ** abs(k)
        assert np.mean(draws == k) == pytest.approx(p, abs=5.0 * math.sqrt(p / 4000))
    assert draws.var() == pytest.approx(2.0 * a / (1.0 - a) ** 2, rel=0.15)


def test_the_shares_are_one_budget() -> None:
    assert sum(SHARES.values()) == 1
    assert SHARES.keys() == SENSITIVITY.keys()
    # Worst case of each group: what one node moves over the scale is its share; together epsilon
    loss = sum(SENSITIVITY[name] / noise_scale(name, Fraction(2)) for name in SHARES)
    assert loss == 2
    assert noise_variance("again", Fraction(1)) == pytest.approx(2 * 8**2, rel=0.01)


def test_neighbours_cannot_be_told_apart_beyond_the_budget(seeded: None) -> None:
    """A fleet with and without a node that failed as often as is counted: how likely what both publish is.

    The node moves each group as far as a node can. Events are thresholds on the sum of cells that it is in,
    where the two laws differ most.
    """
    rows = [(0, float(day), day + 0.1, 0) for day in range(1, 9)]
    rows += [(node, 3.0 * node, 3.0 * node + 0.1, 0) for node in range(1, 8)]
    rows.sort(key=lambda row: row[1])
    whole = log_of(rows, 8, 40.0)
    less = log_of([(n - 1, a, b, k) for n, a, b, k in rows if n], 7, 40.0)
    fleets = [site_statistics(log, 0.0, 40.0) for log in (whole, less)]
    moved = {name: fleets[0][name] - fleets[1][name] for name in SHARES}
    assert {name: int(np.abs(part).sum()) for name, part in moved.items()} == dict(SENSITIVITY)
    epsilon, n = Fraction(1), 700
    seen: list[Any] = []
    for groups in fleets:
        draws = [publish(groups, epsilon) for _ in range(n)]
        # The log-likelihood ratio of each publication: bounded by epsilon for every one of them
        seen.append(np.array([_loss(draw, fleets, epsilon) for draw in draws]))
    assert np.abs(np.concatenate(seen)).max() <= float(epsilon) + 1e-9
    for level in (-0.5, 0.0, 0.5):
        p, q = (float(np.mean(part > level)) for part in seen)
        slack = 4.0 * math.sqrt(1.0 / n)
        assert p <= math.exp(epsilon) * q + slack
        assert q <= math.exp(epsilon) * p + slack
        assert 1.0 - p <= math.exp(epsilon) * (1.0 - q) + slack
    assert np.mean(seen[0]) > np.mean(seen[1])  # and yet they differ: the draws are of both


def _loss(draw: dict[str, list[int]], fleets: list[Any], epsilon: Fraction) -> float:
    """Logarithm of how much likelier a publication is for the first fleet than for the second."""
    out = 0.0
    for name, cells in draw.items():
        far = [np.abs(np.array(cells) - groups[name]).sum() for groups in fleets]
        out += float(far[1] - far[0]) / float(noise_scale(name, epsilon))
    return out


def test_a_published_count_is_never_the_count_itself_by_rule(seeded: None) -> None:
    groups = site_statistics(fleet(1), 0.0, 120.0)
    draws = np.array([publish(groups, Fraction(1))["counts"] for _ in range(50)])
    assert (draws.std(axis=0) > 1.0).all()
    assert draws.mean(axis=0) == pytest.approx(groups["counts"], abs=4.0)


def test_the_ledger_refuses_what_is_beyond_the_budget(tmp_path: Path) -> None:
    ledger = BudgetLedger(tmp_path / "privacy.jsonl")
    for day in range(4):
        left = ledger.spend(Spending("1", 0, 30, NOW_NS + day * DAY_NS), Fraction(4))
        assert left == 3 - day
    with pytest.raises(ConfigError, match=r"4 of 4 was spent in the last 365 days.*free again on 2024-11-13"):
        ledger.spend(Spending("1", 0, 30, NOW_NS + 4 * DAY_NS), Fraction(4))
    assert len(ledger.spendings()) == 4  # a refused one is not written down
    later = Spending("1", 0, 30, NOW_NS + (PERIOD_D + 1) * DAY_NS)
    assert ledger.spend(later, Fraction(4)) == 1  # those of the first two days count no longer
    ledger.path.write_bytes(ledger.path.read_bytes() + b"{")
    with pytest.raises(StorageError, match="line 6"):
        ledger.spend(later, Fraction(400))


def test_budgets_are_numbers() -> None:
    assert epsilon_of("0.1", "--epsilon") == Fraction(1, 10)
    assert epsilon_of(".5", "--epsilon") == epsilon_of("0.50", "--epsilon") == Fraction(1, 2)
    texts = ("", "x", "-1", "0", "1e9", "nan", "1/0", "1" * 30, "1/2", "1_0", "\N{FULLWIDTH DIGIT ONE}")
    for text in (*texts, "1e1"):  # no exponents: one of a billion would take hours
        with pytest.raises(ConfigError, match="--epsilon"):
            epsilon_of(text, "--epsilon")


def file_of(site: str = "north", since: int = 0, until: int = 100, seed: int = 0) -> StatisticsFile:
    log = fleet(seed, n=200, days=100.0, rate=0.006, excite=0.05)
    groups = publish(site_statistics(log, 0.0, 100.0), Fraction(20))
    return StatisticsFile(site=site, since_day=since, until_day=until, epsilon="20", groups=groups)


def test_a_file_is_believed_as_it_was_signed(tmp_path: Path) -> None:
    path = tmp_path / "north.json"
    path.write_bytes(file_bytes(sign_file(file_of(), SIGNER)))
    assert len(path.read_bytes()) < 2000
    assert verified(path, [TrustedKey(STRANGER.verifier), TrustedKey(SIGNER.verifier)]) == read_file(path)
    with pytest.raises(StorageError, match=r"is not trusted.*expected --key"):
        verified(path, [TrustedKey(STRANGER.verifier)])
    tree = json.loads(path.read_text())
    for key, value in (("site", "south"), ("until_day", 99), ("epsilon", "0.1"), ("signature", "AAAA")):
        path.write_text(json.dumps(tree | {key: value}))
        with pytest.raises(StorageError, match="signature does not fit"):
            verified(path, [TrustedKey(SIGNER.verifier)])
    tree["groups"]["again"][0] += 1
    path.write_text(json.dumps(tree))
    with pytest.raises(StorageError, match="signature does not fit"):
        verified(path, [TrustedKey(SIGNER.verifier)])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "x"}, "is no such file"), ({"version": 2}, "of version 2"), ({"groups": {}}, "groups"),
        ({"since_day": 100}, "days 100 to 100"), ({"epsilon": "0"}, "epsilon"), ({"nodes": ["a"]}, "nodes"),
        ({"site": "x" * 20_000}, "bytes"),
    ],
)  # fmt: skip
def test_what_is_no_such_file_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(json.dumps(json.loads(file_bytes(sign_file(file_of(), SIGNER))) | change))
    with pytest.raises(StorageError, match=words):
        read_file(path)


def test_counts_that_no_noise_makes_are_refused(tmp_path: Path) -> None:
    path, file = tmp_path / "file.json", file_of()
    groups = file.groups | {"repairs": [-21, *file.groups["repairs"][1:]]}  # scale of the noise: 0.4
    path.write_bytes(file_bytes(sign_file(msgspec.structs.replace(file, groups=groups), SIGNER)))
    with pytest.raises(StorageError, match=r"repairs: a count of -21, which .* noise of epsilon 20"):
        read_file(path)


def test_garbage_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    for data in (b"", b"\xff\xfe", b"[1]", b"{", b"[" * 50_000, b"null"):
        path.write_bytes(data)
        with pytest.raises(StorageError, match="expected a file of"):
            read_file(path)
    with pytest.raises(StorageError, match="cannot be read"):
        read_file(tmp_path / "nowhere")


def test_a_site_counts_once() -> None:
    north, south = sign_file(file_of(), SIGNER), sign_file(file_of("south"), SIGNER)
    longer = sign_file(file_of(since=100, until=400), SIGNER)
    chosen, notes = chosen_spans([("a", north), ("b", longer), ("c", south)])
    assert chosen == [longer, south]
    assert notes == ["a is left out: b is of the same site"]
    with pytest.raises(ConfigError, match="overlap"):
        chosen_spans([("a", north), ("b", north)])
    with pytest.raises(ConfigError, match="another key"):
        chosen_spans([("a", north), ("b", sign_file(file_of(since=200, until=300), STRANGER))])


@pytest.fixture
def sites(tmp_path: Path) -> Path:
    """Logs of two sites and their keys."""
    for seed, name in enumerate(("north", "south")):
        log = fleet(seed, n=300, days=200.0, rate=0.004, excite=0.04)
        rows = zip(log.node, log.start_d, log.end_d, strict=True)
        lines = [f"n{node},{a:.4f},{'' if np.isinf(b) else f'{b:.4f}'}" for node, a, b in rows]
        (tmp_path / f"{name}.csv").write_text("\n".join(["node,start,end", *lines]) + "\n")
        private, public = make_keys()
        (tmp_path / f"{name}.key").write_text(private)
        (tmp_path / f"{name}.pub").write_text(public)
    return tmp_path


def test_priors_travel(sites: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Export at two sites, merge, import: the printed setting makes a model that starts from the merger."""

    def call(*words: str) -> int:
        named = (word.rpartition("=") for word in words)
        return main(["models", *(f"{a}{b}{sites / c}" if "." in c else a + b + c for a, b, c in named)])

    def export(name: str, *more: str) -> int:
        words = ["export", "--events", f"{name}.csv", "--nodes", "300", "--site", name, "--epsilon", "2"]
        return call(*words, "--sign-key", f"{name}.key", "--out", f"{name}.json", *more)

    assert export("north") == export("south") == 0
    assert "epsilon 2 spent; 2 of 4 left" in capsys.readouterr().out
    assert (sites / "north.json").stat().st_size < 10_000
    held = json.loads((sites / "north.json").read_text())
    del held["signature"], held["key"]  # may spell anything
    assert "n1" not in json.dumps(held).replace("north", "")
    assert export("north") == 1  # is there
    assert export("north", "--force") == 0
    assert export("north", "--force") == 1  # the budget is spent
    assert "4 of 4 was spent" in capsys.readouterr().err
    merge = ["merge", "north.json", "south.json", "--sign-key", "south.key", "--out", "prior.json"]
    assert call(*merge, "--key", "south.pub") == 1
    assert "is not trusted" in capsys.readouterr().err
    assert call(*merge, "--key", "north=north.pub", "--key", "=south.pub") == 1
    assert "expected FILE, or SITE=FILE" in capsys.readouterr().err, "or it would be a key of every site"
    assert call(*merge, "--key", "south=south.pub", "--key", "elsewhere=north.pub") == 1
    assert "is trusted for 'elsewhere' alone" in capsys.readouterr().err.replace("\n", " ")
    assert call(*merge, "--key", "south=south.pub", "--key", "north=north.pub") == 0
    assert call("import", "prior.json", "--key", "north.pub") == 1
    assert call("import", "prior.json", "--key", "south=south.pub") == 1, "a merger is of no site"
    capsys.readouterr()
    assert call("import", "prior.json", "--key", "south.pub") == 0
    printed = capsys.readouterr().out
    entry = yaml.safe_load(printed[printed.index("models:") :])["models"]["failure"]
    model = make_model("failure", ModelEntry(settings=entry["settings"]))
    prior = parse_prior(entry["settings"]["prior"])
    assert model.prior == prior  # type: ignore[attr-defined]
    assert 0.002 < prior.rate_per_d < 0.02
    assert prior.excess_per_d[0] > prior.excess_per_d[-1]
    assert call("show", "prior.json") == call("show", "north.json", "--key", "north.pub") == 0
    shown = capsys.readouterr().out
    assert "not checked: give --key" in shown
    assert "and the signature fits" in shown
    assert "one node more or less" in shown


def test_a_run_of_a_daemon_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From its newest snapshot, failures with a cause in common included, by the days that were watched."""
    site = spec(["r1"])
    engine = make_engine(build_site(site))
    recorder = Recorder(engine, site, tmp_path / "run")
    frame = Frame(0, NOW_NS + 40 * DAY_NS, 1.0)
    recorder.before(frame)
    recorder.after(engine, engine.tick(frame))
    rows = engine.health.failures
    rows.begin_ns = NOW_NS
    start_ns = NOW_NS + np.array([10, 10, 20]) * DAY_NS
    rows._rows = {
        "node": np.array([0, 1, 0], np.int32), "start_ns": start_ns, "end_ns": start_ns + 3600 * NS,
        "kind": np.zeros(3, np.uint8), "shared": np.array([True, True, False]),
        "closed": np.zeros(3, np.bool_),
    }  # fmt: skip
    rows.derive()
    recorder.snapshot_job(engine)()
    recorder.close()
    (tmp_path / "key").write_text(PRIVATE)
    words = ["--run", str(tmp_path / "run"), "--sign-key", str(tmp_path / "key"), "--epsilon", "50"]
    assert main(["models", "export", *words, "--budget", "50", "--out", str(tmp_path / "mine.json")]) == 0
    file = read_file(tmp_path / "mine.json")
    assert isinstance(file, StatisticsFile)
    assert file.site == engine.site.file.site
    assert file.days == 40
    assert file.since_day == NOW_NS // DAY_NS + 1
    nodes = engine.site.sizes["node"]
    assert file.groups["counts"][:3] == pytest.approx([nodes - 2, 1, 1], abs=1)
    assert file.groups["again"][-1] == pytest.approx(2, abs=1)
    assert (tmp_path / "run" / "privacy.jsonl").exists()
    assert main(["models", "export", *words, "--out", str(tmp_path / "more.json")]) == 1
    assert "spent in the last 365 days" in capsys.readouterr().err


def test_a_new_site_is_scored_with_a_prior(sites: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (sites / "south.json").write_bytes(file_bytes(sign_file(file_of("south"), SIGNER)))
    words = ["--events", str(sites / "north.csv"), "--nodes", "300", "--prior", str(sites / "south.json")]
    assert main(["backtest", "failures", *words, "--spans", "3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["spans"] == 3
    assert 0 < told["positives"] < told["pairs"]
    assert told["pr_auc_gain"]["low"] <= told["pr_auc_gain"]["relative"] <= told["pr_auc_gain"]["high"]
    assert parse_prior(told["prior"])
    assert told["with_prior"]["brier"] < 1.5 * told["own"]["brier"]
    assert main(["backtest", "failures", *words, "--spans", "2"]) == 0
    assert "with the prior" in capsys.readouterr().out
    assert main(["backtest", "failures", *words, "--until", "40"]) == 1
    assert "expected a log of 60 days or more" in capsys.readouterr().err
