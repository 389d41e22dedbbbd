// Jobs and node replacement, as the policies explain them.
import { useState } from "preact/hooks";
import { live, useLive, usePoll } from "../live";
import { Act, Empty, Entities, Entity, Explained, Failure, GLYPHS, Grid, Panel, REASON, Tag } from "../parts";
import { Topics, policiesOf } from "./policies";
import { part } from "../api";
import { brief, clock, hrefOf, instant, known, num, plural, short, since, span, title } from "../words";

export function Jobs() {
  useLive("state");
  const [name, setName] = useState(""), got = usePoll<any>(`jobs?limit=200${name ? `&name=${encodeURIComponent(name)}` : ""}`, 4000), rows = got.data?.jobs ?? [];
  return <div class="page">
    <h1>Jobs</h1>
    <div class="row wrap"><label class="inline">Name contains <input value={name} onInput={(e) => setName(e.currentTarget.value)} /></label><span class="soft">{got.data && plural(got.data.total, "job")}</span></div>
    <Failure text={got.error} />
    <Panel title="Running">{got.data && !rows.length ? <Empty>No job is known. Connect a scheduler, or let jobs report themselves: <a href="#/setup">Set up</a>.</Empty> :
      <Grid label="Running jobs" heads={["Job", "Kind", "Nodes", "GPUs", "Capped", "Priority", "Known for", "Save interval", "Last save", "Ends", "Trained so far", "Held back by"]} right={[2, 3, 4, 5, 6, 7, 8, 9, 10]}
        rows={rows.map((j: any) => [<a href={hrefOf("job", j.entity)} title={j.name}>{j.name}</a>, j.kind, num(j.nodes), num(j.gpus), j.capped_gpus ? <b class="w">{num(j.capped_gpus)}</b> : "0", j.priority, j.started_ns ? since(j.started_ns) : "unknown", known(j.interval_s) ? span(j.interval_s) : "not reported", j.saved_ns ? `${since(j.saved_ns)} ago` : "not reported", j.expected_end_ns ? `${j.expected_end_by === "progress" ? "" : "at most "}${instant(j.expected_end_ns)}` : "unknown", known(j.goodput_pu) ? `${(100 * j.goodput_pu).toFixed(0)} %` : "unknown", j.held_back_by ? <><Entity name={j.held_back_by.entity} />, {(100 * (j.held_back_by.slowdown - 1)).toFixed(0)} % slower</> : ""])} />}
      {rows.length > 0 && <p class="soft">Known for: time since this daemon first heard of the job, which may be after its start. Trained so far: share of that time spent training.</p>}</Panel>
    <Demand />
    {policiesOf("job").map((p) => <Panel key={p} title={`${title(p.replaceAll("_", " "))}: advice and reasons`}><Topics policy={p} /></Panel>)}
    <Why />
  </div>;
}

interface DemandRow { table: string; name: string; [signal: string]: string | number | null }

// GPUs that jobs hold and want, by the divisions that the site file lists, and requests of services.
function Demand() {
  const got = usePoll<{ rows: DemandRow[] }>("demand", 5000), rows = got.data?.rows ?? [], site = rows[0], of = (r: DemandRow, signal: string) => r[signal] as number | null;
  const count = (r: DemandRow, signal: string) => num(of(r, signal)), wait = (r: DemandRow, signal: string) => span(of(r, signal));
  const jobs = rows.filter((r) => r.table !== "service"), services = rows.filter((r) => r.table === "service");
  if (!site) return <Failure text={got.error} />;
  const stock = [["granted", "gpu_running_count"], ["busy by their activity", "gpu_busy_count"], ["idle", "gpu_idle_count"], ["spare", "gpu_spare_count"], ["out of service", "gpu_out_count"]];
  return <><Panel title="Demand">
    <Failure text={got.error} />
    <p>GPUs: {stock.map(([words, signal], i) => <>{i > 0 && ", "}{known(of(site, signal)) ? count(site, signal) : <span class="unknown">unknown</span>} {words}</>)}.</p>
    {!known(of(site, "gpu_pending_count")) ? <Empty>No scheduler reports waiting jobs: <a href="#/setup">Set up</a>.</Empty> :
      <Grid label="Demand" heads={["", "GPUs granted", "GPUs waiting", "GPUs held back", "Jobs run", "Jobs wait", "Jobs held back", "Oldest wait", "Next start"]} right={[1, 2, 3, 4, 5, 6, 7, 8]}
        rows={jobs.map((r) => [r.table === "site" ? "site" : <>{short(r.name)} <span class="soft">{r.table}</span></>, ...["gpu_running_count", "gpu_pending_count", "gpu_held_count", "job_running_count", "job_pending_count", "job_held_count"].map((s) => count(r, s)), wait(r, "oldest_wait_s"), wait(r, "next_start_s")])} />}
  </Panel>
    {services.length > 0 && <Panel title="Inference services"><Grid label="Requests of services" heads={["Service", "Requests/s", "Running", "Waiting", "Tokens/s", "KV cache", "First token", "Latency"]} right={[1, 2, 3, 4, 5, 6, 7]}
      rows={services.map((r) => [short(r.name), num(of(r, "requests_per_s"), 1), count(r, "running_request_count"), count(r, "waiting_request_count"), count(r, "generated_tokens_per_s"), known(of(r, "kv_cache_used_pu")) ? `${num(100 * (of(r, "kv_cache_used_pu") as number))} %` : "–", known(of(r, "first_token_s")) ? `${num(of(r, "first_token_s"), 2)} s` : "–", known(of(r, "latency_s")) ? `${num(of(r, "latency_s"), 2)} s` : "–"])} /></Panel>}
  </>;
}

// Cost of caps with reasons, from a topic of the API that any policy may serve.
function Why() {
  const [hours] = useState(24), got = usePoll<any>(`power/cost?form=explanation&hours=${hours}`, 30_000);
  if (!got.data) return null;
  return <Panel title="Cost of caps, last 24 h"><Explained e={got.data} /></Panel>;
}

export function Replacement() {
  useLive("state");
  const h = live.state!.health, got = usePoll<any>("replacement/history?limit=60&days=30", 15_000), rows = got.data?.events ?? got.data?.history ?? got.data?.rows ?? [];
  return <div class="page">
    <h1>Replacement</h1>
    <Panel title="Nodes that stand out">
      {!h.worst.length && <Empty>✓ No node stands out.</Empty>}
      <ul class="plain">{h.worst.map((r: any) => <li><Tag kind={r.level}>{r.level}</Tag> <Entity name={r.name} table="node" /> {brief(r.why ?? "")} {r.action !== "none" && r.action !== "watch" && <b>{title(r.do)}. </b>}<span class="soft">{r.failed_words ? r.failed_words : known(r.day?.mean) && `fails within a day: ${num(100 * r.day.mean, 2)} %`}{r.lemon && " · a lemon"}</span></li>)}</ul>
      {h.stand_out > h.worst.length && <p class="soft">and {num(h.stand_out - h.worst.length)} more</p>}
    </Panel>
    {policiesOf("node").map((p) => <Panel key={p} title={title(p.replaceAll("_", " "))}><Topics policy={p} /></Panel>)}
    <Panel title="Report work on a node" more={<div class="row">
      <Act small label="Repaired" title="Report a repair" fields={[{ name: "node", label: "Node", needed: true, hint: "Such as r01/node3" }, REASON]} send={(v) => ({ method: "POST", path: `nodes/${part(v.node)}/repaired`, body: { reason: v.reason } })} />
    </div>}><p class="soft">After a repair is reported, the node can be tested and returned to service.</p></Panel>
    <Panel title="History, 30 days"><Failure text={got.error} />
      {!rows.length && !got.error && <Empty>No node was withdrawn or returned.</Empty>}
      <ul class="lines">{rows.map((r: any) => <li><time class="num">{new Date(r.at_ns / 1e6).toISOString().slice(5, 10)} {clock(r.at_ns)}</time> <span class="kind">{r.kind.replaceAll("_", " ")}</span> <span>{r.nodes.length > 0 && <><Entities names={r.nodes} count={r.count} most={3} />: </>}{brief(r.text)}</span></li>)}</ul></Panel>
    {h.parts?.node?.unknown > 0 && <p class="soft">{GLYPHS.unknown} {plural(h.parts.node.unknown, "node")} not judged yet.</p>}
  </div>;
}
