// Jobs and replacement: what runs, and which nodes are on their way out and back, as the policies explain it.
import { useState } from "preact/hooks";
import { live, useLive, usePoll } from "../live";
import { Act, Empty, Entities, Entity, Explained, Failure, GLYPHS, Grid, Panel, REASON, Tag } from "../parts";
import { Topics, policiesOf } from "./policies";
import { part } from "../api";
import { brief, clock, hrefOf, instant, known, num, plural, since, span, title } from "../words";

export function Jobs() {
  useLive("state");
  const [name, setName] = useState(""), got = usePoll<any>(`jobs?limit=200${name ? `&name=${encodeURIComponent(name)}` : ""}`, 4000), rows = got.data?.jobs ?? [];
  return <div class="page">
    <h1>Jobs</h1>
    <div class="row wrap"><label class="inline">Name contains <input value={name} onInput={(e) => setName(e.currentTarget.value)} /></label><span class="soft">{got.data && plural(got.data.total, "job")}</span></div>
    <Failure text={got.error} />
    <Panel title="Running">{got.data && !rows.length ? <Empty>No job is known. A scheduler or the jobs themselves tell of them: <a href="#/setup">Set up</a>.</Empty> :
      <Grid label="Running jobs" heads={["Job", "Kind", "Nodes", "GPUs", "Capped", "Priority", "Runs for", "Saves each", "Last save", "Ends", "Trained", "Held back by"]} right={[2, 3, 4, 5, 6, 7, 8, 9, 10]}
        rows={rows.map((j: any) => [<a href={hrefOf("job", j.entity)} title={j.name}>{j.name}</a>, j.kind, num(j.nodes), num(j.gpus), j.capped_gpus ? <b class="w">{num(j.capped_gpus)}</b> : "0", j.priority, j.started_ns ? since(j.started_ns) : "unknown", known(j.interval_s) ? span(j.interval_s) : "not told", j.saved_ns ? `${since(j.saved_ns)} ago` : "not told", j.expected_end_ns ? `${j.expected_end_by === "progress" ? "" : "at most "}${instant(j.expected_end_ns)}` : "not known", known(j.goodput_pu) ? `${(100 * j.goodput_pu).toFixed(0)} %` : "unknown", j.held_back_by ? <><Entity name={j.held_back_by.entity} />, {(100 * (j.held_back_by.slowdown - 1)).toFixed(0)} % slower</> : ""])} />}</Panel>
    {policiesOf("job").map((p) => <Panel key={p} title={`${title(p.replaceAll("_", " "))}: what is advised, kept and why`}><Topics policy={p} /></Panel>)}
    <Why />
  </div>;
}

// What a cap costs, and why: topics of the API that any policy may serve.
function Why() {
  const [hours] = useState(24), got = usePoll<any>(`power/cost?form=explanation&hours=${hours}`, 30_000);
  if (!got.data) return null;
  return <Panel title="What caps cost, last 24 h"><Explained e={got.data} /></Panel>;
}

export function Replacement() {
  useLive("state");
  const h = live.state!.health, got = usePoll<any>("replacement/history?limit=60&days=30", 15_000), rows = got.data?.events ?? got.data?.history ?? got.data?.rows ?? [];
  return <div class="page">
    <h1>Replacement</h1>
    <Panel title="Nodes that stand out">
      {!h.worst.length && <Empty>✓ No node stands out.</Empty>}
      <ul class="plain">{h.worst.map((r: any) => <li><Tag kind={r.level}>{r.level}</Tag> <Entity name={r.name} table="node" /> {brief(r.why ?? "")} {r.action !== "none" && r.action !== "watch" && <b>{title(r.do)}. </b>}<span class="soft">{known(r.day?.mean) && `fails within a day: ${num(100 * r.day.mean, 2)} %`}{r.lemon && " · a lemon"}</span></li>)}</ul>
      {h.stand_out > h.worst.length && <p class="soft">and {num(h.stand_out - h.worst.length)} more</p>}
    </Panel>
    {policiesOf("node").map((p) => <Panel key={p} title={`${title(p.replaceAll("_", " "))}: nodes on their way out and back, spares`}><Topics policy={p} /></Panel>)}
    <Panel title="Report work on a node" more={<div class="row">
      <Act small label="Repaired" title="Report a repair" fields={[{ name: "node", label: "Node", needed: true, hint: "Such as r01/node3" }, REASON]} send={(v) => ({ method: "POST", path: `nodes/${part(v.node)}/repaired`, body: { reason: v.reason } })} />
    </div>}><p class="soft">A repair reported here lets the node be tested and taken back.</p></Panel>
    <Panel title="History, 30 days"><Failure text={got.error} />
      {!rows.length && !got.error && <Empty>Nothing was withdrawn or brought back.</Empty>}
      <ul class="lines">{rows.map((r: any) => <li><time class="num">{new Date(r.at_ns / 1e6).toISOString().slice(5, 10)} {clock(r.at_ns)}</time> <span class="kind">{r.kind.replaceAll("_", " ")}</span> <span>{r.nodes.length > 0 && <><Entities names={r.nodes} count={r.count} most={3} />: </>}{brief(r.text)}</span></li>)}</ul></Panel>
    {h.parts?.node?.unknown > 0 && <p class="soft">{GLYPHS.unknown} {plural(h.parts.node.unknown, "node")} not judged yet.</p>}
  </div>;
}
