"""A proposed change adds exactly the lines that a site's file lacks, in the file's own form."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import yaml

from connectors.mqtt import Router
from tests.support.builders import two_racks
from tests.support.in_process_daemon import Pod, serve, serving_aside
from tests.support.patience import PATIENCE_S
from twin.api import client
from twin.api.answers import LIVE
from twin.api.page import site_changes
from twin.catalogue import TwinError
from twin.config import load_site, spec_of
from twin.report import sentence
from twin.simulation.plant_wire import PlantWire
from twin.site import Site, build_site
from twin.telemetry import Message
from twin.wiring import SelfDescription, SiteChange, propose

BLOCK = """\
# The pod of the second floor.
site: lab
halls:
  - name: h  # the cold one
    racks:
      - {name: 'r[1-2]', profile: gb200-nvl72}

    # CDUs are numbered from the door
    cdus:
      - name: cdu1
        serves: ['r[1-2]']  # both
    feeders:
      - {name: a, side: A, budget_w: 300000, serves: ['r[1-2]']}
      - {name: b, side: B, budget_w: 300000, serves: ['r[1-2]']}
# the end
policies: {thermal_guard: {authority: advise}}
"""
INDENTED = BLOCK.replace("      - {name: 'r[1-2]', profile", "    - {name: 'r[1-2]', profile").replace(
    "serves: ['r[1-2]']  # both", "serves:\n        - r[1-2]"
)
FLOW = json.dumps(two_racks(policies={"thermal_guard": {"authority": "advise"}}), indent=2)
FORMS = {"block": BLOCK, "indented": INDENTED, "flow": FLOW, "crlf": BLOCK.replace("\n", "\r\n"),
         "one line": json.dumps(two_racks()), "no end": BLOCK.rstrip()}  # fmt: skip


def built(tree: dict[str, Any]) -> Site:
    return build_site(spec_of(tree, None, "site"))


def description_of(tree: dict[str, Any], *frames: str) -> SelfDescription:
    """All that the BMS of such a site retains, and agents on these paths, for a daemon of two racks."""
    router = Router(built(two_racks()))
    for message in PlantWire(built(tree)).metadata(1):
        router.decode(message)
    for path in frames:
        payload = b'{"t_ns": 1700000000000000000, "gpu": {"temp_c": [40, 41, 42, 43]}}'
        router.decode(Message(1, f"IT/v1/PUB/Frame/{path}", payload))
    return SelfDescription(router.described(), router.unplaced())


def grown() -> dict[str, Any]:
    """The same pod with a third rack on the known CDU and feed A, and a fourth that is new altogether."""
    tree = two_racks(racks="r[1-3]", loops=[{"name": "loop1"}])
    hall = tree["halls"][0]
    hall["racks"].append({"name": "r4", "profile": "gb200-nvl72"})
    hall["feeders"][1]["serves"] = ["r[1-2]"]
    hall["cdus"].append({"name": "cdu2", "serves": ["r4"], "loop": "loop1"})
    hall["feeders"].append({"name": "c", "serves": ["r4"]})
    return tree


def changed(folder: Path, text: str, heard: SelfDescription, profile: str | None = None) -> SiteChange:
    path = folder / "site.yaml"
    path.write_bytes(text.encode())
    return propose(path, heard, profile)


@pytest.mark.parametrize("form", FORMS)
def test_new_lines_stand_in_the_form_of_the_file(tmp_path: Path, form: str) -> None:
    text = FORMS[form]
    change = changed(tmp_path, text, description_of(grown()))
    assert not change.problems
    assert change.profile == "gb200-nvl72"
    # All that a person wrote is there still, in its order
    rest = iter(change.after.splitlines())
    kept = [row for row in text.splitlines() if "serves" not in row and row.strip() not in ("}", "]")]
    if form in ("block", "indented", "crlf", "no end"):
        assert all(row in rest for row in kept if "name: a" not in row)
        assert "# CDUs are numbered from the door" in change.after
    assert ("\r\n" in change.after) is (form == "crlf")
    # It is the site that was heard
    before, after = yaml.safe_load(text), yaml.safe_load(change.after)
    site, wanted = built(after), built(grown())
    for table in ("rack", "cdu", "feeder", "loop", "node", "gpu"):
        assert sorted(site.names.get(table, [])) == sorted(wanted.names.get(table, []))
        assert site.sizes[table] == wanted.sizes[table]
    of_rack = {name: site.cdu_of_rack[i] for i, name in enumerate(site.names["rack"])}
    assert [site.names["cdu"][of_rack[f"lab/h/r{k}"]] for k in (1, 2, 3, 4)] == [
        "lab/h/cdu1", "lab/h/cdu1", "lab/h/cdu1", "lab/h/cdu2"]  # fmt: skip
    assert site.racks_below(site.names["feeder"].index("lab/h/a")).tolist() == [0, 1, 2]
    # Nothing was taken out, and there is nothing more to add
    assert after["halls"][0]["racks"][0] == before["halls"][0]["racks"][0]
    again = changed(tmp_path, change.after, description_of(grown()))
    assert again.diff() == ""
    assert again.before == again.after


def test_a_diff_shows_exactly_the_new_lines(tmp_path: Path) -> None:
    change = changed(tmp_path, BLOCK, description_of(grown()))
    assert change.added() == [
        "      - {name: r3, profile: gb200-nvl72}", "      - {name: r4, profile: gb200-nvl72}",
        "        serves: ['r[1-2]', r3]  # both", "      - {name: cdu2, serves: [r4], loop: loop1}",
        "      - {name: a, side: A, budget_w: 300000, serves: ['r[1-2]', r3]}",
        "      - {name: c, serves: [r4]}",
        "loops:", "  - {name: loop1, cooling: tower}"]  # fmt: skip
    assert any("r3 is taken for gb200-nvl72" in note for note in change.notes)


def test_without_a_profile_nothing_is_guessed_and_the_note_says_what_that_means(tmp_path: Path) -> None:
    change = changed(tmp_path, BLOCK, description_of(grown()), "none")
    assert not change.problems
    assert "      - {name: r3}" in change.added()
    assert "rack r3: nothing says what stands in it; without a profile nothing guards it" in change.notes


def test_agents_tell_nodes_and_gpus(tmp_path: Path) -> None:
    paths = [*(f"lab/h/r9/node{k}" for k in range(3)), "lab/h2/r1", "pod/h/r1/node0", "lab/h/r1/node30"]
    heard = description_of(two_racks(), *paths)
    change = changed(tmp_path, BLOCK, heard, "none")
    assert change.added() == ["  - {name: h2, racks: [{name: r1}]}",
                              "      - {name: r9, nodes: 3, gpus_per_node: 4}"][::-1]  # fmt: skip
    assert "agents speak for other sites too: pod" in change.notes
    assert any("r1 has 18 nodes in the file; an agent speaks for node30" in n for n in change.notes)
    assert changed(tmp_path, BLOCK, heard).added()[0] == "      - {name: r9, profile: gb200-nvl72}"


def test_racks_that_have_gpus_and_no_profile_get_the_one_that_fits(tmp_path: Path) -> None:
    bare = BLOCK.replace("profile: gb200-nvl72}", "nodes: 18, gpus_per_node: 4}")
    either = changed(tmp_path, bare, description_of(two_racks()))
    assert either.diff() == ""
    assert any(
        "r[1-2]: without a profile nothing guards it; gb200-nvl72, gb300-nvl72 have" in n
        for n in either.notes
    )
    chosen = changed(tmp_path, bare, description_of(two_racks()), "gb300-nvl72")
    assert chosen.added() == ["      - {name: 'r[1-2]', profile: gb300-nvl72, nodes: 18, gpus_per_node: 4}"]
    empty = bare.replace("gpus_per_node: 4}", "gpus_per_node: 4, profile: null}")
    assert (
        "profile: gb300-nvl72}" in changed(tmp_path, empty, description_of(two_racks()), "gb300-nvl72").after
    )


def test_what_a_program_cannot_write_is_said(tmp_path: Path) -> None:
    shared = BLOCK.replace("    cdus:", "    cdus: &same").replace("# the end", "  - {name: g, cdus: *same}")
    change = changed(tmp_path, shared.replace("['r[1-2]']  # both", "[]"), description_of(grown()))
    assert "add them by hand" in change.problems[0]
    ranged = BLOCK.replace("- name: cdu1", "- name: cdu[1-1]").replace("cdu[1-1]", "'cdu[0-1]'")
    told = changed(tmp_path, ranged, description_of(grown()))
    assert any("cdu1 serves r3 too" in n and n.endswith("cdu[0-1]") for n in told.notes)


def approval(tree: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"digest": tree["digest"], "reason": "two racks were delivered", "profile": tree["profile"]} | more


def test_it_is_approved_with_a_reason_written_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"

    async def check(pod: Pod) -> None:
        path.write_text(BLOCK)
        path.chmod(0o640)
        pod.live.describe = lambda: description_of(grown())
        problems: list[str] = []
        asked: list[str] = []

        async def reload(name: str) -> list[str]:
            asked.append(f"{name} {len(load_site(path)[1].names['rack'])}")
            return problems

        pod.live.reload = reload
        _, tree = await pod.ask("GET", "/api/v1/site/change")
        assert tree["writable"]
        assert "+  - {name: loop1, cooling: tower}" in tree["diff"]
        where = "/api/v1/site/change"
        assert (await pod.ask("POST", where, "operator", approval(tree)))[0] == 403
        assert (await pod.ask("POST", where, "admin", approval(tree, reason=" ")))[0] == 400
        assert (await pod.ask("POST", where, "admin", approval(tree, profile="none")))[0] == 409
        assert (await pod.ask("GET", f"{where}?profile=abacus"))[0] == 400
        path.write_text(BLOCK.replace("name: h ", "nme: h "))
        _, faulty = await pod.ask("GET", where)
        assert (faulty["diff"], "nme" in faulty["problems"][0]) == ("", True)
        path.write_text(BLOCK)
        assert path.read_text() == BLOCK
        assert not asked

        problems.append("no")
        status, said = await pod.ask("POST", where, "admin", approval(tree))
        assert (status, said["error"]) == (409, "the old file is kept: no")
        assert path.read_text() == BLOCK
        problems.clear()
        status, said = await pod.ask("POST", where, "admin", approval(tree))
        assert (status, said["lines"]) == (200, 8)
        assert asked == ["admin-1 4", "admin-1 4"]
        assert path.stat().st_mode & 0o777 == 0o640
        kind, body = pod.notes[-1]
        assert (kind, body["author"], body["reason"]) == ("site_file", "admin-1", "two racks were delivered")
        assert "      - {name: r3, profile: gb200-nvl72}" in body["lines"]
        assert [b.get("refused", []) for k, b in pod.notes if k == "site_file"] == [["no"], []]
        line = pod.live.lines[-1].record if pod.live.lines else None
        assert line is None or "approves 8 lines" in sentence(line, pod.twin.site)
        _, tree = await pod.ask("GET", where)
        assert (tree["diff"], tree["digest"]) == ("", None)
        assert (await pod.ask("POST", where, "admin", approval(tree, digest="x")))[0] == 409

    serve(tmp_path, check)


def test_where_the_daemon_may_not_write_it_says_so_and_the_terminal_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "site.yaml"

    async def check(pod: Pod) -> None:
        path.write_text(BLOCK)
        pod.live.describe = lambda: description_of(grown())
        monkeypatch.setattr("twin.api.page.site_changes._is_writable", lambda _: False)
        _, tree = await pod.ask("GET", "/api/v1/site/change")
        assert tree["writable"] is False
        status, said = await pod.ask("POST", "/api/v1/site/change", "admin", approval(tree))
        assert status == 409
        assert "use `racktwin site apply` on its host" in said["error"]
        status, said = await pod.ask(
            "POST", "/api/v1/site/change", "admin", approval(tree, writer="terminal")
        )
        assert (status, said["before"]) == (200, BLOCK)
        assert path.read_text() == BLOCK
        assert pod.notes[-1][1]["writer"] == "terminal"

    serve(tmp_path, check)


def test_it_is_worked_out_beside_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop goes on while a large site is read."""

    async def check(pod: Pod) -> None:
        (tmp_path / "site.yaml").write_text(BLOCK)
        ticks = pod.live.stats.ticks

        def slow(*given: Any) -> SiteChange:
            future = asyncio.run_coroutine_threadsafe(asyncio.sleep(0.2), loop)
            future.result(10)
            return propose(*given)

        loop = asyncio.get_running_loop()
        monkeypatch.setattr("twin.api.page.site_changes.propose", slow)
        assert (await pod.ask("GET", "/api/v1/site/change"))[0] == 200
        assert pod.live.stats.ticks == ticks

    serve(tmp_path, check)


def test_the_terminal_shows_and_applies_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(BLOCK)
    answers: list[list[str]] = [["no"], []]

    async def reload(_: str) -> list[str]:
        assert "loop1" in path.read_text()
        return answers.pop(0)

    with serving_aside(tmp_path, monkeypatch) as desk:
        desk.pod.live.describe = lambda: description_of(grown())
        desk.pod.live.reload = reload
        monkeypatch.setattr("twin.api.page.site_changes._is_writable", lambda _: False)
        assert desk.run("site", "diff", role="viewer") == 0
        said = capsys.readouterr().out
        assert "+      - {name: r3, profile: gb200-nvl72}" in said
        digest = said.split("racktwin site apply ")[1].split()[0]
        words = ("site", "apply", digest, "--profile", "gb200-nvl72", "--reason", "delivered")
        assert desk.run(*words, role="operator") != 0
        assert desk.run(*words, role="admin") != 0  # the daemon refuses the new file
        assert path.read_text() == BLOCK
        capsys.readouterr()
        assert desk.run(*words, "--json", role="admin") == 0
        assert json.loads(capsys.readouterr().out)["lines"] == 8
        assert len(load_site(path)[1].names["rack"]) == 4
        assert [b["reason"] for k, b in desk.pod.notes if k == "site_file"] == ["delivered"] * 2
        assert desk.run("site", "diff", role="viewer") == 0
        assert "nothing to add" in capsys.readouterr().out


def test_two_approvals_at_once_do_not_take_back_what_is_in_force(tmp_path: Path) -> None:
    """The second finds a reload under way; what it restored was the file of before the first."""
    path = tmp_path / "site.yaml"

    async def check(pod: Pod) -> None:
        path.write_text(BLOCK)
        pod.live.describe = lambda: description_of(grown())
        is_reloading = False

        async def reload(_: str) -> list[str]:
            nonlocal is_reloading
            if is_reloading:
                return ["a reload is under way"]
            is_reloading = True
            await asyncio.sleep(0.5)
            is_reloading = False
            return []

        pod.live.reload = reload
        _, tree = await pod.ask("GET", "/api/v1/site/change")
        found = await asyncio.gather(
            *(pod.ask("POST", "/api/v1/site/change", "admin", approval(tree)) for _ in range(2))
        )
        assert sorted(status for status, _ in found) == [200, 409]
        assert "loop1" in path.read_text()

    serve(tmp_path, check)


def test_an_approval_whose_client_is_gone_ends_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"

    async def check(pod: Pod) -> None:
        path.write_text(BLOCK)
        pod.live.describe = lambda: description_of(grown())
        is_asked, goes_on = asyncio.Event(), asyncio.Event()

        async def reload(_: str) -> list[str]:
            is_asked.set()
            await goes_on.wait()
            return ["no"]

        pod.live.reload = reload
        _, tree = await pod.ask("GET", "/api/v1/site/change")
        request = SimpleNamespace(app={LIVE: pod.live})
        monkey = pytest.MonkeyPatch()
        with monkey.context() as patch:
            patch.setattr(site_changes, "author", lambda _: "ada")
            patch.setattr(site_changes, "body_of", read_approval(approval(tree)))
            task = asyncio.create_task(site_changes.approve(request))  # type: ignore[arg-type]
            await is_asked.wait()
            task.cancel()  # the interface itself ends with this reload
            await asyncio.gather(task, return_exceptions=True)
            goes_on.set()
            async with asyncio.timeout(PATIENCE_S):
                while path.read_text() != BLOCK or not pod.notes:
                    await asyncio.sleep(0.01)
        assert pod.notes[-1][1]["refused"] == ["no"]

    serve(tmp_path, check)


def read_approval(body: dict[str, Any]) -> Any:
    async def read(*_: Any) -> Any:
        return msgspec.convert(body, site_changes.NewSiteChange)

    return read


@pytest.mark.parametrize(("status", "stays"), [(409, False), (500, True), (0, True)])
def test_the_terminal_takes_back_only_what_the_daemon_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: int,
    stays: bool,
) -> None:
    """Without an answer the daemon may have taken it over: the old file would undo that later."""
    path = tmp_path / "site.yaml"
    path.write_text(BLOCK)

    async def reload(_: str) -> list[str]:
        if status == 500:
            raise TwinError("the new configuration is in force only in part")
        await asyncio.sleep(0 if status else 60)
        return ["no"]

    with serving_aside(tmp_path, monkeypatch) as desk:
        desk.pod.live.describe = lambda: description_of(grown())
        desk.pod.live.reload = reload
        monkeypatch.setattr("twin.api.page.site_changes._is_writable", lambda _: False)
        assert desk.run("site", "diff", role="viewer") == 0
        digest = capsys.readouterr().out.split("racktwin site apply ")[1].split()[0]
        monkeypatch.setattr(client.Client, "timeout_s", 3.0)
        words = ("site", "apply", digest, "--profile", "gb200-nvl72", "--reason", "delivered")
        assert desk.run(*words, role="admin") != 0
        assert ("loop1" in path.read_text()) == stays
        said = capsys.readouterr().err
        assert (f"{path}: holds the approved lines" in said) == stays, said
