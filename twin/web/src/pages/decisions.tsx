// Decisions: the journal's latest lines, and the way of one from finding to read-back.
import { useEffect, useState } from "preact/hooks";
import { act, get } from "../api";
import { live, may, on, type Line } from "../live";
import { Empty, Entity, Explained, Failure, Panel, Tabs, cell, download } from "../parts";
import { folded } from "./overview";
import { brief, clock, control, instant, num, quantity, plural, title, words } from "../words";

const GROUPS: [string, string, string][] = [
  ["", "All", ""],
  ["finding", "Findings", "finding,cleared,faults"],
  ["command", "Commands", "command,lapsed,failed,deferred,narrowed,protected,kept_back,settled"],
  ["advice", "Advice", "advice"],
  ["people", "People", "access,alarm,authority,resumed,reload,site_file,approval_expired,request_expired"],
  ["event", "Events", "event"],
];
// The stages of a decision, in order, by the kinds of lines that tell of them.
const STAGES: [string, string[]][] = [
  ["Finding", ["finding", "faults"]], ["Proposal", ["proposals"]], ["Verdict", ["narrowed", "protected", "deferred", "kept_back", "advice"]],
  ["Command", ["command", "failed", "lapsed"]], ["Read-back", ["acks", "settling", "settled"]],
];
const PAGE = 100;

interface Asked { kind: string; entity: string; policy: string }

function read(query: string): Asked & { at: string } {
  const q = new URLSearchParams(query);
  return { kind: q.get("kind") ?? "", entity: q.get("entity") ?? "", policy: q.get("policy") ?? "", at: q.get("at") ?? "" };
}

function write(a: Asked, at = ""): string {
  const q = new URLSearchParams();
  for (const [k, v] of Object.entries({ ...a, at })) if (v) q.set(k, v);
  return `#/decisions/${encodeURIComponent(q.toString())}`;
}

const policyOf = (l: Line): string => l.body?.policy ?? "";
const entityOf = (l: Line): string => l.body?.from ?? l.body?.names?.[0] ?? l.body?.entities?.[0] ?? l.body?.event?.nodes?.[0] ?? l.body?.event?.names?.[0] ?? "";

export function Decisions({ query }: { query: string }) {
  const asked = read(query), [rows, setRows] = useState<Line[]>([]), [next, setNext] = useState<string | null>(null), [error, setError] = useState(""), [kept, setKept] = useState(0), [newer, setNewer] = useState(0), [entity, setEntity] = useState(asked.entity);
  const kinds = GROUPS.find(([k]) => k === asked.kind)?.[2] ?? "";
  const path = (before = "") => `decisions?limit=${PAGE}${kinds ? `&kind=${kinds}` : ""}${asked.entity ? `&below=true&entity=${encodeURIComponent(asked.entity)}` : ""}${before ? `&before=${before}` : ""}`;
  const load = async (before = "") => {
    try {
      const tree = await get(path(before));
      setRows((was) => (before ? [...was, ...tree.decisions] : tree.decisions));
      setNext(tree.next);
      setKept(tree.kept);
      setNewer(0);
      setError("");
    } catch (e) { setError((e as Error).message); if (!before) setRows([]); }
  };
  useEffect(() => {
    load();
    let due = 0;
    opened.clear();
    // What is being read does not move: newer lines wait while one is open or the page is scrolled.
    const off = on("decisions", () => { if (!due) due = window.setTimeout(() => { due = 0; if (scrollY < 400 && !opened.size) load(); else setNewer((n) => n + 1); }, 1500); });
    return () => { off(); clearTimeout(due); };
  }, [query]);
  const shown = rows.filter((l) => !asked.policy || policyOf(l) === asked.policy);
  const go = (change: Partial<Asked>) => { location.hash = write({ ...asked, ...change }); };
  return <div class="page">
    <h1>Decisions</h1>
    <div class="row wrap">
      <Tabs label="Kind" now={asked.kind} pick={(kind) => go({ kind })} of={GROUPS.map(([k, t]) => [k, t])} />
      <label class="inline">Policy <select value={asked.policy} onChange={(e) => go({ policy: e.currentTarget.value })}>
        <option value="">all</option>{(live.state?.policies ?? []).map((p: any) => <option value={p.name} selected={p.name === asked.policy}>{p.name}</option>)}</select></label>
      <form class="inline" onSubmit={(e) => { e.preventDefault(); go({ entity: entity.trim() }); }}>
        <label class="inline">Entity <input value={entity} onInput={(e) => setEntity(e.currentTarget.value)} placeholder="r01/node3 or a job" /></label></form>
      <span class="grow" />
      <button type="button" class="small" onClick={() => download("decisions.json", "application/json", JSON.stringify(shown, null, 1))}>JSON</button>
      <button type="button" class="small" onClick={() => download("decisions.csv", "text/csv", csv(shown))}>CSV</button>
    </div>
    <Failure text={error} />
    {newer > 0 && <p><button type="button" class="small" onClick={() => { opened.clear(); load(); scrollTo(0, 0); }}>Newer lines wait: show them</button></p>}
    {live.missed > 0 && <p class="soft">This screen missed some updates; the list is read anew from the daemon.</p>}
    <ol class="timeline">{folded(shown).map((g) => <Group key={g.at(-1)!.at} of={g} asked={asked} />)}</ol>
    {!shown.length && !error && <Empty>Nothing of this kind among the last {num(kept)} lines. The journal on disk has all: racktwin journal.</Empty>}
    {next && <button type="button" onClick={() => load(next)}>Older</button>}
  </div>;
}

function csv(rows: Line[]): string {
  // A cell that a spreadsheet would take for a formula is text.
  const safe = (v: unknown) => { const t = String(v ?? ""); return `"${(/^[=+\-@\t\r]/.test(t) ? `'${t}` : t).replaceAll('"', '""')}"`; };
  return [["time", "tick", "kind", "policy", "entity", "text"], ...rows.map((l) => [new Date(l.now_ns / 1e6).toISOString(), l.tick, l.kind, policyOf(l), entityOf(l), l.text])].map((r) => r.map(safe).join(",")).join("\r\n");
}

function Group({ of, asked }: { of: Line[]; asked: Asked & { at: string } }) {
  const [all, show] = useState(of.slice(1).some((l) => l.at === asked.at));
  const row = (l: Line) => <Row key={l.at} l={l} open={l.at === asked.at} link={write(asked, l.at)} />;
  if (of.length === 1) return row(of[0]);
  return <>{row(of[0])}<li class="more"><button type="button" class="small" aria-expanded={all} onClick={() => show(!all)}>{num(of.length - 1)} more such since {clock(of.at(-1)!.now_ns)}</button></li>{all && of.slice(1).map(row)}</>;
}

const opened = new Set<string>(); // lines that are being read

function Row({ l, open, link }: { l: Line; open: boolean; link: string }) {
  const [shown, set] = useState(open);
  const show = (to: boolean) => { set(to); if (to) opened.add(l.at!); else opened.delete(l.at!); };
  useEffect(() => { if (open) opened.add(l.at!); return () => { opened.delete(l.at!); }; }, []);
  return <li class={`k-${l.kind}`}>
    <button type="button" class="line" aria-expanded={shown} onClick={() => show(!shown)}>
      <time class="num" title={instant(l.now_ns)}>{clock(l.now_ns)}</time><span class="kind">{l.kind.replaceAll("_", " ")}</span><span class="text" title={l.text}>{brief(l.text)}</span></button>
    {shown && <div class="line-more">
      <Chain l={l} />
      <Why l={l} />
      <Body l={l} />
      <p class="row wrap">{l.kind === "command" && <HadNot l={l} />}<a href={link}>Link to this decision</a></p>
    </div>}
  </li>;
}

// The state just before this decision, run ahead with nobody acting: what came is measured, what would have come is simulated.
function HadNot({ l }: { l: Line }) {
  const [error, setError] = useState(""), allowed = may("operator");
  return <><button type="button" class="small" aria-disabled={!allowed} title={allowed ? "Runs ahead from just before this decision with nobody acting, in a simulated plant beside the loop" : "needs the role operator"}
    onClick={() => { if (allowed) act("POST", "simulations", { name: `Had nobody acted at ${clock(l.now_ns)}`, before: l.tick, horizon_s: 1800 }).then((run) => { location.hash = `#/whatif/${run.id}`; }, (e) => setError(e.message)); }}>What if we had not?</button>
    <Failure text={error} /></>;
}

function Body({ l }: { l: Line }) {
  const flat = (tree: any, head = ""): [string, any][] => Object.entries(tree ?? {}).flatMap(([k, v]) => (v !== null && typeof v === "object" && !Array.isArray(v) ? flat(v, `${head}${k}.`) : [[head + k, v] as [string, any]]));
  const of = String(l.body?.control ?? ""), own = /_w$/.test(of) ? "W" : /_s$/.test(of) && !/since_s$/.test(of) ? "s" : /_c$/.test(of) ? "degC" : "";
  const unit = (k: string) => (/^(value|lo|hi|want)/.test(k) ? own : /_ns$/.test(k) ? "ns" : /_w$/.test(k) ? "W" : /_s$/.test(k) ? "s" : /_pu$/.test(k) ? "1" : "");
  return <dl class="facts">{flat(l.body).filter(([k]) => own || !of || !/^(value|lo|hi|want)\b/.test(k)).slice(0, 30).map(([k, v]) => <div><dt>{title(words(k))}</dt><dd>{Array.isArray(v) ? v.slice(0, 6).map((x, i) => <>{i > 0 && ", "}{typeof x === "object" ? JSON.stringify(x) : cell(x, "")}</>) : k === "control" ? title(control(String(v))) : cell(v, unit(k))}</dd></div>)}</dl>;
}

// What led to it and what came of it: lines on the same entity and control around it.
function Chain({ l }: { l: Line }) {
  const [found, set] = useState<Line[] | null>(null), entity = entityOf(l), of = l.body?.control, [back, setBack] = useState("");
  useEffect(() => {
    if (!entity) return;
    const since = Math.max(0, l.now_ns - 30e9), kinds = STAGES.flatMap(([, k]) => k).join(",");
    get(`decisions?limit=1000&since=${Math.round(since)}&kind=${kinds}&entity=${encodeURIComponent(entity)}`).then(async (d) => {
      // A reason names the place where the trouble lies: the finding on it comes first.
      const place = /[^\s:;,()]+\/[^\s:;,()]+/.exec(String(l.body?.reason ?? ""))?.[0];
      const finding = place ? (await get(`decisions?limit=200&kind=finding&entity=${encodeURIComponent(place)}`).catch(() => ({ decisions: [] }))).decisions.filter((x: Line) => x.now_ns <= l.now_ns).slice(0, 1) : [];
      set([...d.decisions, ...finding]);
    }, () => set([]));
    if (l.kind === "command" && of) get(`leases?control=${of}&prefix=${encodeURIComponent(entity)}&limit=1`).then((d) => {
      const lease = d.leases[0];
      setBack(!lease ? "The command has ended." : lease.issued_ns > l.now_ns + 1e9 ? `Another command runs since ${clock(lease.issued_ns)}: ${lease.means ?? `${quantity(lease.value, lease.unit)}, the device reads ${quantity(lease.readback, lease.unit)}`}.` : `${title(lease.state.replaceAll("_", " "))}${lease.means ? "." : `: the device reads ${quantity(lease.readback, lease.unit)}; before it ${quantity(lease.found, lease.unit)}.`}`);
    }, () => {});
  }, [l.at]);
  if (!entity || !found) return null;
  const near = [...found].sort((a, b) => b.now_ns - a.now_ns).filter((x) => x.now_ns <= l.now_ns + 120e9 && (!of || !x.body?.control || x.body.control === of));
  const stages = STAGES.map(([name, kinds]) => {
    const mine = near.filter((x) => kinds.includes(x.kind));
    const before = mine.filter((x) => x.now_ns <= l.now_ns), pick = name === "Read-back" ? mine.filter((x) => x.now_ns >= l.now_ns).at(-1) : before[0] ?? mine.at(-1);
    return [name, pick] as const;
  });
  if (!stages.some(([, x]) => x)) return null;
  return <ol class="chain" aria-label="From finding to read-back">{stages.map(([name, x]) => <li class={x || (name === "Read-back" && back) ? "" : "none"}>
    <b>{name}</b>{x ? <><time class="num"> {clock(x.now_ns)}</time><p title={x.text}>{brief(x.text)}</p></> : name === "Read-back" && back ? <p>{back}</p> : <p class="soft">{name === "Verdict" ? "as proposed" : "none in the lines kept"}</p>}</li>)}</ol>;
}

function Why({ l }: { l: Line }) {
  const policy = policyOf(l), entity = entityOf(l), [e, set] = useState<any>(null), [error, setError] = useState("");
  if (!policy) return entity ? <p>Concerns <Entity name={entity} />{l.body?.count > 1 && ` and ${plural(l.body!.count - 1, "other")}`}.</p> : null;
  return <div><p>{entity && <>Concerns <Entity name={entity} />{l.body?.count > 1 && ` and ${num(l.body!.count - 1)} more`}. </>}
    <button type="button" class="small" onClick={() => get(`explain/${policy}${entity ? `/${entity.split("/").map(encodeURIComponent).join("/")}` : ""}`).then(set, (x) => setError(x.message))}>{policy} explains it as of now</button></p>
    <Failure text={error} />{e && <Panel title={`${policy} now`}><Explained e={e} /></Panel>}</div>;
}
