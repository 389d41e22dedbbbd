// Decisions: the journal's lines, the latest from memory and older ones from its files, and the way of one from finding to read-back.
import { useEffect, useRef, useState } from "preact/hooks";
import { act, get } from "../api";
import { live, may, on, type Line } from "../live";
import { Empty, Entity, Explained, Facts, Failure, Panel, Tabs, cell, download } from "../parts";
import { folded } from "./overview";
import { brief, clock, control, csv, instant, num, plural, title, words } from "../words";

const GROUPS: [string, string, string][] = [
  ["", "All", ""],
  ["finding", "Findings", "finding,cleared,faults"],
  ["command", "Commands", "command,lapsed,failed,deferred,narrowed,protected,kept_back,settled"],
  ["advice", "Advice", "advice"],
  ["people", "People", "access,alarm,authority,resumed,reload,site_file,approval_expired,request_expired"],
  ["event", "Events", "event"],
  ["account", "Phases", "account"],
];
// The stages of a decision, in order, by the kinds of lines that tell of them.
const STAGES: [string, string[]][] = [
  ["Finding", ["finding", "faults"]], ["Proposal", ["proposals"]], ["Verdict", ["narrowed", "protected", "deferred", "kept_back", "advice"]],
  ["Command", ["command", "failed", "lapsed"]], ["Read-back", ["acks", "settling", "settled"]],
];
const PAGE = 100, ENOUGH = 20, MOST_PAGES = 8;

interface Asked { kind: string; entity: string[]; policy: string; from: string; to: string }
interface Reach { since: number; until: number; begin: number; notes: string[] }

function read(query: string): Asked & { at: string } {
  const q = new URLSearchParams(query), one = (k: string) => q.get(k) ?? "";
  return { kind: one("kind"), entity: q.getAll("entity"), policy: one("policy"), from: one("from"), to: one("to"), at: one("at") };
}

function write(a: Asked, at = ""): string {
  const q = new URLSearchParams();
  for (const [k, v] of Object.entries({ ...a, at })) for (const one of [v].flat()) if (one) q.append(k, one);
  return `#/decisions/${encodeURIComponent(q.toString())}`;
}

// Instants of the fields are UTC to the second, and each end counts whole: a day alone is from its first second, or to its last.
function seconds(text: string, end = false): number {
  const [, day, at] = /^(\d{4}-\d\d-\d\d)(?:[ T](\d\d:\d\d(?::\d\d)?))?$/.exec(text.trim()) ?? [];
  return day ? Math.floor(Date.parse(`${day}T${at ?? (end ? "23:59:59" : "00:00:00")}Z`) / 1000) : NaN;
}
const field = (ns: number): string => new Date(Math.floor(ns / 1e9) * 1000).toISOString().slice(0, 19).replace("T", " ");

function filters(a: Asked): string {
  const q = new URLSearchParams({ whole: "true" }), kinds = GROUPS.find(([k]) => k === a.kind)?.[2];
  if (kinds) q.set("kind", kinds);
  if (a.policy) q.set("policy", a.policy);
  for (const name of a.entity) q.append("entity", name);
  if (a.entity.length) q.set("below", "true");
  if (a.from) q.set("since", `${seconds(a.from)}000000000`);
  if (a.to) q.set("until", `${seconds(a.to, true)}999999999`);
  return q.toString();
}

const policyOf = (l: Line): string => l.body?.policy ?? "";
const entityOf = (l: Line): string => l.body?.from ?? l.body?.names?.[0] ?? l.body?.entities?.[0]?.replace(/^(?!job:)[a-z]+:/, "") ?? l.body?.account?.node ?? l.body?.event?.nodes?.[0] ?? l.body?.event?.names?.[0] ?? "";
const keyOf = (l: Line): string => l.at ?? `${l.now_ns} ${l.text}`;

export function Decisions({ query }: { query: string }) {
  const asked = read(query), past = asked.from !== "" || asked.to !== "", [rows, setRows] = useState<Line[]>([]), [next, setNext] = useState<string | null>(null), [error, setError] = useState(""), [reach, setReach] = useState<Reach | null>(null), [busy, setBusy] = useState(false), [newer, setNewer] = useState(0), turn = useRef(0);
  const load = async (before: string | null = null) => {
    const mine = ++turn.current, path = filters(asked);
    const had = before ? rows : [], until = before ? reach?.until : undefined;
    let from = before, found: Line[] = [], first = 0;
    setBusy(true);
    try {
      for (let pages = 0; pages < MOST_PAGES; pages++) {
        const tree = await get(`decisions?limit=${PAGE}&${path}${from ? `&before=${from}` : ""}`);
        if (mine !== turn.current) return;
        found = [...found, ...tree.decisions];
        first ||= until ?? Math.min(tree.searched_ns[1], asked.to ? seconds(asked.to, true) * 1e9 : Infinity);
        setRows([...had, ...found]);
        setReach({ since: tree.searched_ns[0], until: first, begin: tree.begin_ns, notes: tree.notes });
        setNext(from = tree.next);
        // Without a range, one page from memory is enough.
        if (!from || found.length >= ENOUGH || (!before && !past)) break;
      }
      if (!before) setNewer(0);
      setError("");
    } catch (e) { if (mine === turn.current) { setError((e as Error).message); if (!before) setRows([]); } }
    if (mine === turn.current) setBusy(false);
  };
  useEffect(() => {
    load();
    let due = 0;
    opened.clear();
    // The list does not move while somebody reads it: newer lines wait while a line is open or the page is scrolled.
    const off = past ? () => {} : on("decisions", () => { if (!due) due = window.setTimeout(() => { due = 0; if (scrollY < 400 && !opened.size) load(); else setNewer((n) => n + 1); }, 1500); });
    return () => { off(); clearTimeout(due); turn.current++; };
  }, [query]);
  const go = (change: Partial<Asked>) => { location.hash = write({ ...asked, ...change }); };
  const save = (kind: "json" | "csv") => exported(asked, rows, reach).then((tree) => (kind === "json" ? download("decisions.json", "application/json", JSON.stringify(tree, null, 1)) : download("decisions.csv", "text/csv", csvOf(tree))), (e) => setError(e.message));
  return <div class="page">
    <h1>Decisions</h1>
    <div class="row wrap">
      <Tabs label="Kind" now={asked.kind} pick={(kind) => go({ kind })} of={GROUPS.map(([k, t]) => [k, t])} />
      <label class="inline">Policy <select value={asked.policy} onChange={(e) => go({ policy: e.currentTarget.value })}>
        <option value="">all</option>{(live.state?.policies ?? []).map((p: any) => <option value={p.name} selected={p.name === asked.policy}>{p.name}</option>)}</select></label>
      <span class="grow" />
      <button type="button" class="small" onClick={() => save("json")}>JSON</button>
      <button type="button" class="small" onClick={() => save("csv")}>CSV</button>
    </div>
    <Range key={query} asked={asked} go={go} />
    <Failure text={error} />
    {asked.at && reach && !rows.some((l) => l.at === asked.at) && <Linked at={asked.at} asked={asked} />}
    {newer > 0 && <p><button type="button" class="small" onClick={() => { opened.clear(); load(); scrollTo(0, 0); }}>Show newer lines</button></p>}
    {live.missed > 0 && <p class="soft">This page missed some updates and has reloaded the list from the daemon.</p>}
    {reach && <p class="soft reach" role="status">{busy ? "Searching … " : ""}Shows {plural(rows.length, "line")}: searched {reach.since ? `from ${instant(reach.since)} ` : ""}to {instant(reach.until)}; the journal begins at {instant(reach.begin)}.{reach.notes.map((n) => ` ${title(n)}.`)}</p>}
    <ol class="timeline">{folded(rows).map((g) => <Group key={keyOf(g.at(-1)!)} of={g} asked={asked} />)}</ol>
    {!rows.length && !error && reach && !busy && <Empty>No line of this kind since {instant(reach.since)}.{next ? " “Older” continues into the journal on disk." : " The journal holds no more lines for this time."}</Empty>}
    {next && <button type="button" aria-disabled={busy} onClick={() => { if (!busy) load(next); }}>Older</button>}
    <Record />
  </div>;
}

// The form that filters lines by time and entity.
function Range({ asked, go }: { asked: Asked; go: (change: Partial<Asked>) => void }) {
  const [entity, setEntity] = useState(asked.entity.join(", ")), [from, setFrom] = useState(asked.from), [to, setTo] = useState(asked.to);
  const filled = asked.from || asked.to || asked.entity.length > 0, [wrong, setWrong] = useState("");
  const search = () => {
    const bad = [from && seconds(from), to && seconds(to, true)].some(Number.isNaN);
    setWrong(bad ? "From and To: expected a time in UTC, such as 2026-03-14 or 2026-03-14 02:00" : from && to && seconds(from) > seconds(to, true) ? "From is after To" : "");
    if (!bad && !(from && to && seconds(from) > seconds(to, true))) go({ entity: entity.split(/,\s*/).map((x) => x.trim()).filter(Boolean), from: from.trim(), to: to.trim() });
  };
  return <form class="row wrap" onSubmit={(e) => { e.preventDefault(); search(); }}>
    <label class="inline">Entity <input name="entity" value={entity} onInput={(e) => setEntity(e.currentTarget.value)} placeholder="r01/node3 or job:NAME" /></label>
    <label class="inline">From (UTC) <input name="from" size={18} placeholder="2026-03-14 02:00" value={from} onInput={(e) => setFrom(e.currentTarget.value)} /></label>
    <label class="inline">To (UTC) <input name="to" size={18} placeholder="2026-03-15" value={to} onInput={(e) => setTo(e.currentTarget.value)} /></label>
    <button type="submit" class="small">Search</button>
    {filled && <button type="button" class="small" onClick={() => go({ entity: [], from: "", to: "" })}>Show the latest</button>}
    <Failure text={wrong} />
  </form>;
}

// The decision of a link that the list does not show, read from the journal, or the error.
function Linked({ at, asked }: { at: string; asked: Asked }) {
  const [found, set] = useState<Dossier | null>(null), [error, setError] = useState("");
  useEffect(() => { get<Dossier>(`decisions/${at}`).then(set, (e) => setError(e.message)); }, [at]);
  const around = found && write({ ...asked, from: field(found.decision.now_ns - 600e9), to: field(found.decision.now_ns + 600e9) }, at);
  return <Panel title="The decision of this link" more={around && <a href={around}>Lines around it</a>}>
    <Failure text={error && title(error)} />
    {found && <ol class="timeline"><Row l={found.decision} open link={write(asked, at)} /></ol>}
  </Panel>;
}

// Integrity of the journal: its first and last line, its last hash and the verified part of its chain.
function Record() {
  const [of, set] = useState<any>(null), [error, setError] = useState("");
  const look = () => { get("journal").then((t) => { set(t); setError(""); }, (e) => setError(e.message)); };
  useEffect(look, []);
  const mb = (bytes: number) => (bytes < 1e6 ? "less than 1 MB" : `${num(bytes / 1e6)} MB`);
  return <Panel title="Record" more={<button type="button" class="small" onClick={look}>Check again</button>}>
    <Failure text={error} />
    {of && !of.folder && <p>This daemon records no run. It keeps its latest {num(of.lines)} lines in memory only, and they cannot be verified.</p>}
    {of?.folder && <>
      <Facts rows={[
        ["First line", <>{instant(of.first_ns)} (line {num(of.first_line)})</>], ["Last line", instant(of.last_ns)], ["Lines", num(of.lines)],
        ["Hash of the last line", <code class="hash">{of.head}</code>],
        ["Chain", of.chain.holds ? `holds over the last ${plural(of.chain.lines, "line")}${of.chain.since_ns ? `, since ${instant(of.chain.since_ns)}` : ", all of it"}; verified just now` : <b>broken: {of.chain.fault}</b>],
        ["Verification of the whole journal", <code>{of.verify}</code>],
        ["Kept", `up to ${mb(of.kept.quota_bytes)}; now ${mb(of.kept.bytes)} in ${plural(of.kept.segments, "file")}${of.kept.days ? `. At this rate that is ${of.kept.days > 3650 ? "more than ten years" : `about ${num(of.kept.days)} days`}` : ""}`],
      ]} />
      <p class="soft">Each line contains the hash of the line before it. Keep the last hash elsewhere to detect any later change to the lines before it.</p></>}
  </Panel>;
}

interface Export { export: Record<string, any>; lines: Line[] }

async function exported(asked: Asked, rows: Line[], reach: Reach | null): Promise<Export> {
  const journal = await get("journal"), at = (ns: number | undefined) => (ns ? new Date(ns / 1e6).toISOString() : "");
  return { export: {
    site: live.state?.site ?? journal.site, exporter: live.who?.name ?? "", exported: new Date().toISOString(), lines: rows.length, kind: asked.kind, policy: asked.policy, entity: asked.entity.join(", "),
    from: asked.from, to: asked.to, searched_from: at(reach?.since), searched_to: at(reach?.until), journal_since: at(journal.first_ns), journal_lines: journal.lines, journal_last_line: at(journal.last_ns), journal_last_hash: journal.head ?? "", verify: journal.verify ?? "",
  }, lines: rows };
}

function csvOf(tree: Export): string {
  const head = Object.entries(tree.export), lines = tree.lines.map((l) => [new Date(l.now_ns / 1e6).toISOString(), l.at ?? "", l.tick, l.kind, policyOf(l), entityOf(l), l.text]);
  return csv([...head, [], ["time", "place", "tick", "kind", "policy", "entity", "text"], ...lines]);
}

function Group({ of, asked }: { of: Line[]; asked: Asked & { at: string } }) {
  const [all, show] = useState(of.slice(1).some((l) => l.at === asked.at));
  const row = (l: Line) => <Row key={keyOf(l)} l={l} open={asked.at !== "" && l.at === asked.at} link={write(asked, l.at ?? "")} />;
  if (of.length === 1) return row(of[0]);
  return <>{row(of[0])}<li class="more"><button type="button" class="small" aria-expanded={all} onClick={() => show(!all)}>{num(of.length - 1)} similar since {stamp(of.at(-1)!.now_ns)}</button></li>{all && of.slice(1).map(row)}</>;
}

const stamp = (ns: number): string => instant(ns).replace(/ UTC$/, "");

const opened = new Set<string>(); // lines that are being read

interface Dossier {
  decision: Line; notes: string[];
  verdict: { policy: string; authority: string; by: string; at_ns: number | null; reason: string; basis: string; approval: { by: string; at_ns: number; reason: string } | null } | null;
  confirmation: { state: string; at_ns: number | null; text: string } | null;
  case: { entities: string[]; since_ns: number; until_ns: number } | null;
}

function Row({ l, open, link }: { l: Line; open: boolean; link: string }) {
  const [shown, set] = useState(open), [dossier, setDossier] = useState<Dossier | null>(null), key = keyOf(l);
  const show = (to: boolean) => { set(to); if (to) opened.add(key); else opened.delete(key); };
  useEffect(() => { if (open) opened.add(key); return () => { opened.delete(key); }; }, []);
  useEffect(() => { if (shown && l.at && !dossier) get<Dossier>(`decisions/${l.at}`).then(setDossier, () => {}); }, [shown]);
  const [day, at] = stamp(l.now_ns).includes(" ") ? stamp(l.now_ns).split(" ") : ["", clock(l.now_ns)];
  const of = dossier?.case, whole = of && write({ kind: "", policy: "", entity: of.entities, from: field(of.since_ns), to: field(of.until_ns + 999_999_999) });
  return <li class={`k-${l.kind}`}>
    <button type="button" class="line" aria-expanded={shown} onClick={() => show(!shown)}>
      <time class="num" title={instant(l.now_ns)}>{day && <span class="day">{day} </span>}{at}</time><span class="kind">{l.kind.replaceAll("_", " ")}</span><span class="text" title={l.text}>{brief(l.text)}</span></button>
    {shown && <div class="line-more">
      <Chain l={l} of={dossier} />
      <Why l={l} />
      <Body l={l} />
      {dossier?.notes.map((n) => <p class="soft">{title(n)}.</p>)}
      <p class="row wrap">{whole && <button type="button" class="small" title={`All lines about ${of.entities.join(", ")} during this case`} onClick={() => { location.hash = whole; }}>Whole case</button>}{l.kind === "command" && <HadNot l={l} />}{l.at && <a href={link}>Link to this decision</a>}</p>
    </div>}
  </li>;
}

// Starts a simulation from the state just before this decision with all commands lapsed, to compare with the measured course.
function HadNot({ l }: { l: Line }) {
  const [error, setError] = useState(""), allowed = may("operator");
  return <><button type="button" class="small" aria-disabled={!allowed} title={allowed ? "Simulates the site from just before this decision with all commands lapsed; sends no commands" : "needs the role operator"}
    onClick={() => { if (allowed) act("POST", "simulations", { name: `Had nobody acted at ${clock(l.now_ns)}`, before: l.tick, horizon_s: 1800 }).then((run) => { location.hash = `#/whatif/${run.id}`; }, (e) => setError(e.message)); }}>What if we had not?</button>
    <Failure text={error} /></>;
}

function Body({ l }: { l: Line }) {
  const flat = (tree: any, head = ""): [string, any][] => Object.entries(tree ?? {}).flatMap(([k, v]) => (v !== null && typeof v === "object" && !Array.isArray(v) ? flat(v, `${head}${k}.`) : [[head + k, v] as [string, any]]));
  const of = String(l.body?.control ?? ""), own = /_w$/.test(of) ? "W" : /_s$/.test(of) && !/since_s$/.test(of) ? "s" : /_c$/.test(of) ? "degC" : "";
  const unit = (k: string) => (/^(value|lo|hi|want)/.test(k) ? own : /_ns$/.test(k) ? "ns" : /_w$/.test(k) ? "W" : /_s$/.test(k) ? "s" : /_pu$/.test(k) ? "1" : "");
  return <dl class="facts">{flat(l.body).filter(([k]) => own || !of || !/^(value|lo|hi|want)\b/.test(k)).slice(0, 30).map(([k, v]) => <div><dt>{title(words(k))}</dt><dd>{Array.isArray(v) ? v.slice(0, 6).map((x, i) => <>{i > 0 && ", "}{typeof x === "object" ? JSON.stringify(x) : cell(x, "")}</>) : k === "control" ? title(control(String(v))) : cell(v, unit(k))}</dd></div>)}</dl>;
}

// Causes and results of a decision: lines about the same entity and control around it, and the journal's record of the decision.
function Chain({ l, of: dossier }: { l: Line; of: Dossier | null }) {
  const [found, set] = useState<Line[] | null>(null), entity = entityOf(l), of = l.body?.control;
  useEffect(() => {
    if (!entity) return;
    const around = (lo: number, hi: number) => `since=${Math.round(Math.max(0, l.now_ns + lo * 1e9))}&until=${Math.round(l.now_ns + hi * 1e9)}`, kinds = STAGES.flatMap(([, k]) => k).join(",");
    get(`decisions?limit=1000&${around(-30, 120)}&kind=${kinds}&entity=${encodeURIComponent(entity)}`).then(async (d) => {
      // A reason names the place where the trouble lies: the finding on it comes first.
      const place = /[^\s:;,()]+\/[^\s:;,()]+/.exec(String(l.body?.reason ?? ""))?.[0] ?? (d.decisions.some((x: Line) => x.kind === "finding") ? "" : entity);
      const finding = place ? (await get(`decisions?limit=1&${around(-86400, 0)}&kind=finding&entity=${encodeURIComponent(place)}`).catch(() => ({ decisions: [] }))).decisions : [];
      set([...d.decisions, ...finding]);
    }, () => set([]));
  }, [keyOf(l)]);
  if (!entity || !found) return null;
  const near = [...found].sort((a, b) => b.now_ns - a.now_ns).filter((x) => !of || !x.body?.control || x.body.control === of);
  const stages = STAGES.map(([name, kinds]) => {
    const mine = near.filter((x) => kinds.includes(x.kind));
    const before = mine.filter((x) => x.now_ns <= l.now_ns), pick = name === "Read-back" ? mine.filter((x) => x.now_ns >= l.now_ns).at(-1) : before[0] ?? mine.at(-1);
    return [name, l.kind === "command" && name === "Read-back" ? undefined : name === "Command" && l.kind === "command" ? l : pick] as const;
  });
  const told = dossier?.confirmation, judged = dossier?.verdict;
  if (!stages.some(([, x]) => x) && !told) return null;
  const empty = (name: string) => (name === "Verdict" ? "as proposed" : name === "Read-back" && l.kind === "command" && !dossier ? "" : "none recorded");
  return <ol class="chain" aria-label="From finding to read-back">{stages.map(([name, x]) => { const confirmed = name === "Read-back" ? told : null; return <li class={x || confirmed ? "" : "none"}>
    <b>{name}</b>{x ? <><time class="num"> {stamp(x.now_ns)}</time><p title={x.text}>{brief(x.text)}</p></> : confirmed ? <>{confirmed.at_ns && <time class="num"> {stamp(confirmed.at_ns)}</time>}<p title={confirmed.text}><b>{title(confirmed.state)}</b>: {brief(confirmed.text)}</p></> : <p class="soft">{empty(name)}</p>}
    {name === "Verdict" && judged && <p class="judged">{judged.policy}: authority <b>{judged.authority}</b>{judged.by ? `, given by ${judged.by}` : ""}{judged.at_ns ? ` (${instant(judged.at_ns)})` : ""}{judged.reason ? `: ${judged.reason}` : judged.by ? "" : `, ${judged.basis}`}{judged.approval ? `; approved by ${judged.approval.by} (${instant(judged.approval.at_ns)})${judged.approval.reason ? `: ${judged.approval.reason}` : ""}` : judged.authority === "approve" ? "; no approval is recorded" : ""}</p>}</li>; })}</ol>;
}

function Why({ l }: { l: Line }) {
  const policy = policyOf(l), entity = entityOf(l), [e, set] = useState<any>(null), [error, setError] = useState("");
  if (!policy) return entity ? <p>Concerns <Entity name={entity} />{l.body?.count > 1 && ` and ${plural(l.body!.count - 1, "other")}`}.</p> : null;
  return <div><p>{entity && <>Concerns <Entity name={entity} />{l.body?.count > 1 && ` and ${num(l.body!.count - 1)} more`}. </>}
    <button type="button" class="small" onClick={() => get(`explain/${policy}${entity ? `/${entity.split("/").map(encodeURIComponent).join("/")}` : ""}`).then(set, (x) => setError(x.message))}>Explanation by {policy}, as of now</button></p>
    <Failure text={error} />{e && <Panel title={`${policy} now`}><Explained e={e} /></Panel>}</div>;
}
