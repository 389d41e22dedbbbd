// One entity: measured beside expected over time, health with evidence, jobs, commands, forecasts, decisions.
import { useRef, useState } from "preact/hooks";
import { part } from "../api";
import { live, useLive, usePoll, type Alarm, type Line } from "../live";
import { Chart, type Series } from "../chart";
import { HallMap } from "../hallmap";
import { Maintenance } from "./alarms";
import { Act, DURATION, Empty, Entities, Entity, Explained, Facts, Failure, Grid, Panel, REASON, Tabs, Tag, Value, signal } from "../parts";
import { Sentence, folded, orders } from "./overview";
import { alike, brief, clock, control, hrefOf, isInstant, table as tableWords, instant, known, num, plural, quantity, short, since, span, tableOf, title } from "../words";

const RANGES: [string, string][] = [["900", "15 min"], ["3600", "1 h"], ["21600", "6 h"], ["86400", "1 d"], ["604800", "7 d"], ["2592000", "30 d"]];
const FIRST: Record<string, string[]> = {
  rack: ["power_w", "supply_temp_c", "return_temp_c", "flow_lpm", "inlet_temp_c"], node: ["power_w", "inlet_temp_c", "cpu_power_w"],
  gpu: ["power_w", "temp_c", "hbm_temp_c", "sm_clock_hz", "util_pu"], cdu: ["supply_temp_c", "flow_lpm", "diff_pressure_pa", "filter_diff_pressure_pa"],
  feeder: ["power_w", "current_a", "voltage_v"], loop: ["supply_temp_c", "return_temp_c", "flow_lpm"],
};
const LATE = 1.5;

interface Seen { t: number; expected: number | null; band: number | null }

export function EntityPage({ table, name }: { table: string; name: string }) {
  useLive("state");
  const got = usePoll<any>(`entities/${part(table)}/${part(name)}`, 3000);
  const d = got.data, seen = useRef(new Map<string, Seen[]>());
  const [last, setLast] = useState("900");
  if (d) for (const c of d.comparisons) {
    const key = `${c.signal}|${c.from}`, list = seen.current.get(key) ?? [];
    if (list.at(-1)?.t !== d.now_ns / 1e9) list.push({ t: d.now_ns / 1e9, expected: c.expected, band: c.band });
    seen.current.set(key, list.slice(-2000));
  }
  if (!d) return <div class="page"><h1>{short(name)}</h1><Failure text={got.error} />{!got.error && <p class="soft">Loading …</p>}</div>;
  const alarms = d.alarms as Alarm[], i = live.rowOf.get(d.name), shown = d.job && table === "job" ? d.job.job : short(d.name);
  const asked = table === "job" && d.job ? d.job.job : d.name;
  return <div class="page">
    <p class="crumbs"><Crumbs name={d.name} />{d.serial && <span class="soft"> · serial {d.serial}</span>}</p>
    <div class="row wrap"><h1>{title(tableWords(table, 1))} {shown}</h1>
      {i !== undefined && live.layout!.spare[i] && <span class="chip">spare</span>}
      <span class="grow" />
      <RequestControl table={table} name={d.name} />
      {!["site", "job"].includes(table) && <Maintenance names={[d.name]} table={table} />}</div>
    <Failure text={got.error} />
    {alarms.length > 0 && <Panel title="Alarms here"><ul class="wrongs">{alarms.slice(0, 8).map((a) => <Sentence key={a.id} a={a} />)}</ul></Panel>}
    {table === "job" && <><JobFacts d={d} /><Explanations name={asked} inside={HOLDERS.includes(table) ? d.name : ""} /></>}
    {table !== "job" && <div class="row wrap"><h2>Over time</h2><Tabs label="Time range" now={last} pick={setLast} of={RANGES} /></div>}
    <div class="charts">{table !== "job" && chosen(table, d).map((s) => <SignalChart key={`${s}${last}`} table={table} d={d} name={s} last={Number(last)} seen={seen.current} />)}</div>
    <div class="two">
      <div class="stack"><Comparisons d={d} />{CALIBRATED.includes(table) && <Learned table={table} name={d.name} />}<Readings d={d} /></div>
      <div class="stack">
        {["rack", "node", "gpu", "cdu"].includes(table) && <HealthOf name={d.name} />}
        <Leases d={d} table={table} />
        {table !== "job" && <JobOf d={d} table={table} />}
        <Inside d={d} table={table} />
        <Forecasts d={d} />
      </div>
    </div>
    {table !== "job" && <Explanations name={asked} inside={HOLDERS.includes(table) ? d.name : ""} />}
    <Here name={asked} />
  </div>;
}

function Crumbs({ name }: { name: string }) {
  const parts = name.split("/"), out = [];
  for (let k = 2; k < parts.length; k++) {
    const head = parts.slice(0, k).join("/"), of = tableOf(head);
    if (of && of !== "hall") out.push(<><a href={hrefOf(of, head)}>{parts[k - 1]}</a> / </>);
    else out.push(<span>{parts[k - 1]} / </span>);
  }
  return <><a href="#/">{parts[0]}</a> / {out}<b>{parts.at(-1)}</b></>;
}

function chosen(table: string, d: any): string[] {
  const there = Object.keys(d.signals).filter((s) => d.signals[s].kind !== "counter" && !d.signals[s].states);
  const first = (FIRST[table] ?? []).filter((s) => there.includes(s));
  const compared = d.comparisons.map((c: any) => c.signal).filter((s: string) => there.includes(s));
  return [...new Set([...first, ...compared, ...(first.length ? [] : there)])].slice(0, 6);
}

function SignalChart({ table, d, name, last, seen }: { table: string; d: any; name: string; last: number; seen: Map<string, Seen[]> }) {
  const step = Math.max(1, last / 400);
  const got = usePoll<any>(!live.state!.history ? null : `history?signal=${table}.${name}&name=${encodeURIComponent(d.name)}&last_s=${last}&step=${step}`, last <= 3600 ? 5000 : 30_000);
  const s = d.signals[name], c = d.comparisons.find((x: any) => x.signal === name && x.state === "learned") ?? d.comparisons.find((x: any) => x.signal === name);
  const kept = !!c && (live.state!.expected_kept ?? []).includes(table);
  const record = (what: string) => (kept ? `history?signal=${encodeURIComponent(`${table}.${name}/${what}`)}&name=${encodeURIComponent(d.name)}&last_s=${last}&step=${step}` : null);
  const was = usePoll<any>(record("expected"), last <= 3600 ? 10_000 : 60_000).data, bands = usePoll<any>(record("band"), last <= 3600 ? 10_000 : 60_000).data;
  const points = new Map<number, [number | null, number | null, number | null, number | null]>();
  const values: (number | null)[] = got.data ? Object.values(got.data.values)[0] as any : [];
  got.data?.t_ns.forEach((ns: number, i: number) => points.set(ns / 1e9, [values[i] ?? null, null, null, null]));
  // What was expected then, as recorded; each with the band of its instant.
  const halves = new Map<number, number>();
  bands?.t_ns.forEach((ns: number, i: number) => { const b = (Object.values(bands.values)[0] as any)?.[i]; if (known(b)) halves.set(ns, b); });
  let recorded = 0;
  was?.t_ns.forEach((ns: number, i: number) => {
    const v = (Object.values(was.values)[0] as any)?.[i], b = halves.get(ns), at = points.get(ns / 1e9) ?? [null, null, null, null];
    if (known(v)) { recorded += 1; points.set(ns / 1e9, [at[0], v, known(b) ? v - b : null, known(b) ? v + b : null]); }
  });
  const now = d.now_ns / 1e9, list = (c && seen.get(`${c.signal}|${c.from}`)) ?? [];
  for (const x of list) if (x.t >= now - last) {
    const at = points.get(x.t) ?? [null, null, null, null], b = x.band;
    points.set(x.t, [at[0], x.expected, known(x.expected) && known(b) ? x.expected - b : null, known(x.expected) && known(b) ? x.expected + b : null]);
  }
  if (known(s.value)) { const at = points.get(now) ?? [null, null, null, null]; points.set(now, [s.value, at[1], at[2], at[3]]); }
  const t = [...points.keys()].sort((a, b) => a - b);
  // Instants of the two kinds differ: a line goes on where the other one has a point.
  const filled = (k: number, most: number) => { let was: number | null = null, at = 0; return t.map((x, i) => { const v = points.get(x)![k]; if (known(v)) { was = v; at = t[i]; return v; } return was !== null && x - at <= most ? was : null; }); };
  const series: Series[] = [{ label: "measured", y: filled(0, Math.max(30, step * 2)), colour: "main" }];
  const lasts = Math.max(15, recorded ? 2 * step : 0);
  if (list.length > 1 || recorded) series.push({ label: "expected", y: filled(1, lasts), colour: "expected", dash: true, band: [filled(2, lasts), filled(3, lasts)] });
  const most = Math.max(...(series[0].y.filter(known) as number[]), -Infinity), least = Math.min(...(series[0].y.filter(known) as number[]), Infinity);
  const off: string[] = [];
  for (const [k, label, colour] of [["guard", "guard", "limit"], ["max", "limit", "danger"]] as const) {
    const v = s[k];
    if (!known(v)) continue;
    const size = Math.max(Math.abs(most), 1);
    if (v <= most + size * 0.35 && v >= least - size * 0.6) series.push({ label, y: t.map(() => v), colour, dash: true });
    else off.push(`${label} ${quantity(v, s.unit)}`);
  }
  return <section class="panel" aria-label={signal(name)}><header class="panel-head"><h3>{title(signal(name))}</h3>
    <Value v={s.value} unit={s.unit} age={s.late ? s.age_s : null} class="big" /></header>
    {t.length > 1 ? <Chart t={t} series={series} unit={s.unit} label={signal(name)} height={150} key={name} /> : <Empty>{got.error ? `Recorded values: ${got.error}` : live.state!.history ? "No value is recorded yet." : "This daemon keeps no history of its own."}</Empty>}
    <p class="soft chart-foot">{c && (c.state === "learned" ? <>Expected {compared(c)[1]} {compared(c)[3]} {brief(c.from)}{Math.abs(c.residual) > c.band * LATE && <b class="w"> · beyond its band</b>}. {!recorded && list.length < 20 && "Expected values begin when this page was opened. "}</> : <>Expected value: {c.state}{known(c.left_s) && `, ${span(c.left_s)} left`}. </>)}{off.length > 0 && <>Off the scale: {off.join(", ")}.</>}</p>
  </section>;
}

// Measured, expected, difference and band in one unit; a difference of temperatures is in K.
function compared(c: any): string[] {
  const all = c.unit === "degC" ? [...alike([c.measured, c.expected], "degC"), ...alike([c.residual, c.band], "K")] : alike([c.measured, c.expected, c.residual, c.band], c.unit);
  return c.band === null ? all : [...all.slice(0, 3), `± ${all[3]}`];
}

function Comparisons({ d }: { d: any }) {
  if (!d.comparisons.length) return null;
  return <Panel title="Measured and expected">
    <Grid label="Measured and expected" heads={["Signal", "Measured", "Expected", "Difference", "90 % band", ""]} right={[1, 2, 3, 4]}
      rows={d.comparisons.map((c: any) => [<><b>{title(signal(c.signal))}</b> <span class="soft">{brief(c.from)}</span></>, ...compared(c),
        c.state === "learned" ? (Math.abs(c.residual) > c.band ? <Tag kind="warning">beyond</Tag> : <Tag kind="ok">within</Tag>) : <span class="soft">{c.state}{known(c.left_s) && `, ${span(c.left_s)} left`}</span>])} />
  </Panel>;
}

const CALIBRATED = ["gpu", "node", "rack", "cdu", "loop", "feeder"];

// A learned value or its band: small ones with their digits.
const learned = (v: unknown, digits = 3): string => (known(v) ? (Math.abs(v) >= 1000 ? num(v) : num(v, v === 0 ? 0 : Math.min(6, Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(v))))))) : "–");
const learnedUnit = (unit: string): string => (unit === "1" ? "" : ` ${unit.replaceAll("min2/l2", "min²/l²")}`);

function drifted(p: any, v: number | null): string {
  if (!known(v)) return "–";
  const text = p.drift_pu === null || !p.reference ? learned(v, 2) + learnedUnit(p.unit) : `${num(100 * v / Math.abs(p.reference), 1)} %`;
  return v > 0 ? `+${text}` : text;
}

function Learned({ table, name }: { table: string; name: string }) {
  const got = usePoll<any>(`calibration/${part(`${table}:${name}`)}`, 30_000), c = got.data;
  if (!c || !c.parameters.length) return null;
  const means = c.parameters.filter((p: any) => p.means);
  return <Panel title="Learned">
    <Grid label="Learned parameters" heads={["Parameter", "Value", "Nominal", "Drift", "A week", ""]} right={[1, 2, 3, 4]}
      rows={c.parameters.map((p: any) => [<span title={p.parameter}>{title(p.text)}</span>,
        p.state === "unknown" ? <span class="unknown">unknown</span> : `${learned(p.value)}${known(p.band) ? ` ± ${learned(p.band, 2)}` : ""}${learnedUnit(p.unit)}`,
        known(p.nominal) ? <span title={`from: ${p.nominal_from}`}>{learned(p.nominal)}</span> : "",
        <span title={p.since_ns ? `since ${instant(p.since_ns)}; band ${drifted(p, p.drift_band).replace("+", "± ")}` : "no reference yet"}>{drifted(p, p.drift)}</span>, drifted(p, p.per_week),
        p.drifted ? <Tag kind="warning">drifts</Tag> : p.state === "learned" ? <Tag kind="ok">learned</Tag> : <span class="soft">{p.state}</span>])} />
    {(means.length > 0 || c.wear.length > 0) && <ul class="plain">
      {means.map((p: any) => <li><Tag kind="warning" /> {title(p.text)}: {p.means}{p.since_ns && <span class="soft"> since {instant(p.since_ns)}</span>}</li>)}
      {c.wear.map((w: string) => <li><Tag kind="warning" /> {w}</li>)}
    </ul>}
  </Panel>;
}

const late = (s: any): boolean => s.late || s.quality !== "good";

function Readings({ d }: { d: any }) {
  const rows = Object.entries<any>(d.signals);
  if (!rows.length) return <Panel title="Readings"><Empty>This entity has never reported.</Empty></Panel>;
  return <Panel title="Readings"><Grid label="Readings" heads={["Signal", "Value", "Guard", "Limit", "Age"]} right={[1, 2, 3, 4]}
    rows={rows.map(([k, s]) => [title(signal(k)), s.states && known(s.value) ? <span class={late(s) ? "value stale" : "value"}>{String(s.states[s.value] ?? s.value).replaceAll("_", " ")}{late(s) && <span class="age"> {span(s.age_s)} old</span>}</span> : s.quality === "good" || known(s.value) ? <Value v={s.value} unit={s.unit} age={late(s) ? s.age_s : null} /> : <span class="unknown">{s.quality}</span>,
      known(s.guard) ? quantity(s.guard, s.unit) : "", known(s.max) ? quantity(s.max, s.unit) : "", known(s.age_s) ? span(s.age_s) : "never"])} /></Panel>;
}

const CHANCE = (p: unknown): string => (!known(p) ? "unknown" : p < 1e-4 ? "below 0.01 %" : p > 0.99 ? "above 99 %" : `${num(100 * p, p < 0.001 ? 3 : p < 0.1 ? 2 : 0)} %`);

function HealthOf({ name }: { name: string }) {
  const got = usePoll<any>(`health/${part(name)}`, 8000), h = got.data;
  if (!h) return null;
  if (!h.level) return <Panel title="Health">
    <HealthRows parts={h.rows ?? (Array.isArray(h.parts) ? h.parts : [])} />
    {h.evidence?.length > 0 && <ul class="plain">{h.evidence.slice(0, 8).map((e: any) => <li><Tag kind={e.level} /> {brief(e.text)} <span class="soft">{e.source}</span></li>)}</ul>}
  </Panel>;
  return <Panel title="Health" more={<Tag kind={h.level}>{h.level}</Tag>}>
    <p><b>{title(brief(h.why || h.level))}</b>{h.sure ? ` · ${h.sure}` : ""}</p>
    {h.action !== "none" && <p class="do"><b>You:</b> {h.do}</p>}
    {h.changes && <p class="soft">{h.changes}</p>}
    {h.evidence?.length > 0 && <><h3>Evidence</h3><ul class="plain">{h.evidence.slice(0, 8).map((e: any) => <li><Tag kind={e.level} /> {brief(e.text)} <span class="soft">{e.source}{known(e.age_s) && `, ${span(e.age_s)} ago`}</span></li>)}</ul></>}
    {h.failed_words && <><h3>Probability of failure</h3><p>None: {h.node === h.name ? "it" : <>its node <Entity name={h.node} table="node" /></>} {h.failed_words}.</p></>}
    {h.chance?.length > 0 && !h.failed_words && <><h3>Probability of failure</h3><Facts rows={h.chance.map((c: any) => [`within ${span(c.horizon_s)}`, <>{CHANCE(c.mean)}{known(c.lo) && <span class="soft"> ({CHANCE(c.lo)} to {CHANCE(c.hi)})</span>}</>])} /></>}
    {h.nvlinks && <Nvlinks links={h.nvlinks} />}
    {h.lemon?.is && <p><Tag kind="warning">a lemon</Tag> {h.lemon.why[0]}</p>}
    {h.missing?.length > 0 && <><h3>Missing data</h3><ul class="plain soft">{h.missing.map((m: any) => <li>{m.what}: {m.state}; {m.connect}</li>)}</ul></>}
    {h.parts?.length > 0 && <><h3>Parts</h3><HealthRows parts={h.parts} /></>}
  </Panel>;
}

const LINK_COUNTS = { recoveries: "recoveries", failures: "failed recoveries", errors: "errors", replays: "replays", symbols: "symbol errors" };

function Nvlinks({ links }: { links: { read: number; counted: any[] } }) {
  return <><h3>NVLinks</h3>
    <p class="soft">{links.read ? `${plural(links.read, "link")} read, ${num(links.counted.length)} of them with counts since the driver was loaded, or with an XID` : "Not read: the node agent reports them."}</p>
    <ul class="plain">{links.counted.map((l) => <li><Tag kind={l.level}>{l.level}</Tag> <span title={l.name}>{l.name.slice(l.name.lastIndexOf("/nvlink") + 1)}</span> <span class="soft">{[...Object.entries(LINK_COUNTS).filter(([k]) => l.counts[k] > 0).map(([k, words]) => `${num(l.counts[k])} ${words}`), l.recovered > 0 ? `${num(l.recovered)} recoveries in 28 days` : ""].filter(Boolean).join(", ")}</span></li>)}</ul>
  </>;
}

function HealthRows({ parts }: { parts: any[] }) {
  if (!parts.length) return <Empty>No part has a health level yet.</Empty>;
  return <ul class="plain">{parts.slice(0, 40).map((p: any) => <li><Tag kind={p.level}>{p.level}</Tag> {p.name.includes("#") ? <span title={p.name}>{p.name.split("#")[1]}</span> : <Entity name={p.name} text={p.name.split("/").pop()} />} <span class="soft">{[brief(p.why ?? ""), p.failed_words ? p.failed_words : known(p.day?.mean) ? `fails within a day: ${CHANCE(p.day.mean)}` : "", p.lemon ? "a lemon" : ""].filter(Boolean).join(" · ")}</span></li>)}</ul>;
}

const HOLDERS = ["rack", "node", "hall", "job"];

// Commands on the entities inside, by policy and control.
function useInside(d: any, table: string): { key: string; policy: string; unit: string; n: number; low: number; high: number; ends: number; means: Set<string> }[] | null {
  const holds = HOLDERS.includes(table), got = usePoll<any>(holds ? `leases?prefix=${encodeURIComponent(d.name)}&limit=1000` : null, 4000), out = new Map<string, any>();
  for (const l of got.data?.leases ?? []) {
    if (l.name === d.name) continue;
    const k = `${l.policy} ${l.control}`, o = out.get(k) ?? { key: l.control, policy: l.policy, unit: l.unit, n: 0, low: Infinity, high: -Infinity, ends: Infinity, means: new Set<string>() };
    if (l.means) o.means.add(l.means);
    out.set(k, { ...o, n: o.n + 1, low: Math.min(o.low, l.value), high: Math.max(o.high, l.value), ends: Math.min(o.ends, l.expires_ns) });
  }
  return holds && !got.data && !got.error ? null : [...out.values()];
}

function Leases({ d, table }: { d: any; table: string }) {
  const inside = useInside(d, table);
  return <Panel title="Commands and leases">
    {inside === null && <p class="soft">Loading …</p>}
    {inside?.length === 0 && !d.leases.length && <Empty>No command is in force here{["cdu", "feeder", "loop"].includes(table) && "; the pages of the racks below list theirs"}.</Empty>}
    {inside?.map((o) => <p><b>{title(orders({ control: o.key, count: o.n, unit: o.unit, low: o.low, high: o.high, means: [...o.means].join(", ") }))}</b> by <a href={`#/policies/${o.policy}`}>{o.policy}</a>; the first ends {instant(o.ends)} unless renewed</p>)}
    <ul class="plain">{d.leases.map((l: any) => <li><b>{title(control(l.control))}{isInstant(l.control) ? "" : ` ${l.means ?? quantity(l.value, l.unit)}`}</b> by <a href={`#/policies/${l.policy}`}>{l.policy}</a>{known(l.begun_ns) && `, without a break since ${instant(l.begun_ns)}`}; this value for {since(l.issued_ns)}, ends {instant(l.expires_ns)} unless renewed
      <p class="soft">{l.state.replaceAll("_", " ")}; {known(l.readback) ? `the device reads ${l.means ? (l.readback === l.value ? "the same value" : "a different value") : quantity(l.readback, l.unit)}` : "no read-back"}{!l.means && `; value before it ${quantity(l.found, l.unit)}`}; on expiry: {l.on_expiry === "safe" ? "the safe value" : l.on_expiry}</p></li>)}</ul>
  </Panel>;
}

function JobOf({ d, table }: { d: any; table: string }) {
  const j = d.job;
  if (!j) return table === "node" || table === "gpu" ? <Panel title="Job"><Empty>No job runs here.</Empty></Panel> : null;
  return <Panel title="Job"><p><a href={hrefOf("job", j.entity)}><b>{j.job}</b></a> on {plural(j.nodes, "node")}, priority {j.priority}, for {since(j.started_ns)}</p></Panel>;
}

function JobFacts({ d }: { d: any }) {
  const j = d.job, contact = live.state!.contact;
  if (!j) return <Empty>This job is not running.</Empty>;
  return <Panel title="Job"><Facts rows={[
    ["GPUs", <>{num(j.gpus)} on {plural(j.nodes, "node")}{j.capped_gpus > 0 && <>, <b class="w">{num(j.capped_gpus)} capped</b></>}</>],
    ["Kind, priority", `${j.kind}, ${j.priority}`], ["Tenant", j.tenant || "not reported"],
    ["Runs", j.started_ns ? `for ${since(j.started_ns)}, since ${instant(j.started_ns)}` : "start not reported"],
    ["Ends", j.expected_end_ns ? `${instant(j.expected_end_ns)}, ${j.expected_end_by === "progress" ? "by its own progress" : "at the latest, by its time limit"}` : "unknown"],
    ["Save interval", known(j.interval_s) ? span(j.interval_s) : "not reported"], ["Last save", j.saved_ns ? `${since(j.saved_ns)} ago` : "not reported"],
    ["Goodput", known(j.goodput_pu) ? `${(100 * j.goodput_pu).toFixed(1)} % of ${span(j.trained_s + j.still_s + j.lost_s)} observed; stood still ${span(j.still_s)}, lost ${span(j.lost_s)} by ${plural(j.restarts, "restart")}` : "unknown"],
    ["Held back by", j.held_back_by ? <><Entity name={j.held_back_by.entity} />: {(100 * (j.held_back_by.slowdown - 1)).toFixed(0)} % slower for {since(j.held_back_by.since_ns)}, {j.straggler_gpu_h.toFixed(1)} GPU-hours{j.held_back_by.evidence.map((e: string) => <p class="soft">{e}</p>)}</> : "no member stands out"],
    ...(contact ? [["Questions", contact] as [string, string]] : []),
  ]} /></Panel>;
}

function Inside({ d, table }: { d: any; table: string }) {
  const rows = Object.entries<any>(d.children).filter(([, c]) => c.total);
  const racks = table === "hall" ? (d.children.rack?.names ?? []).map((n: string) => live.rowOf.get(n)).filter((i: any) => i !== undefined)
    : table === "cdu" ? (live.layout?.cdu ?? []).flatMap((c, i) => (live.layout!.cdus[c] === d.name ? [i] : [])) : [];
  if (racks.length) return <Panel title={table === "cdu" ? "Racks it cools" : "Racks"}><HallMap only={racks} /></Panel>;
  if (!rows.length) return null;
  return <Panel title="Inside">{rows.map(([t, c]) => t === "node" || t === "gpu" ? <Tiles key={t} table={t} names={c.names} total={c.total} parent={d.name} /> : <p>{plural(c.total, t)}: <Entities names={c.names} count={c.total} most={12} /></p>)}</Panel>;
}

function Tiles({ table, names, total, parent }: { table: string; names: string[]; total: number; parent: string }) {
  const got = usePoll<any>(`state/${table}?prefix=${encodeURIComponent(parent)}&limit=200&signals=power_w${table === "gpu" ? ",temp_c,power_limit_w" : ""}`, 4000), health = usePoll<any>(`health?part=${table}&prefix=${encodeURIComponent(parent)}&limit=200`, 10_000);
  const level = new Map<string, string>((health.data?.rows ?? health.data?.parts ?? []).map((r: any) => [r.name, r.level]));
  const at = new Map<string, number>((got.data?.names ?? []).map((n: string, i: number) => [n, i])), s = got.data?.signals ?? {};
  return <><p class="soft">{plural(total, table === "gpu" ? "GPU" : table)}</p><div class="tiles z-middle">{names.map((n) => {
    const i = at.get(n), p = i === undefined ? null : s.power_w?.value[i], temp = i === undefined ? null : s.temp_c?.value[i], lv = level.get(n) ?? "unknown";
    const state = lv === "failed" ? "critical" : lv === "degraded" ? "warning" : lv === "watch" ? "info" : lv === "healthy" ? "ok" : "unknown";
    const text = `${n}, health ${lv}, ${quantity(p, "W")}${known(temp) ? `, ${temp} °C` : ""}`;
    return <a class={`tile r-${state}`} href={hrefOf(table, n)} title={text}><span class="tile-head"><b>{parent && n.startsWith(`${parent}/`) ? n.split("/").pop() : short(n)}</b><span class="sr">health {lv}</span></span><span class="tile-power">{quantity(p, "W")}</span>{known(temp) && <span class="soft">{num(temp)} °C</span>}</a>;
  })}</div></>;
}

function Forecasts({ d }: { d: any }) {
  const rows = d.forecasts.filter((f: any) => known(f.mean[0]));
  if (!d.forecasts.length) return null;
  return <Panel title="Forecast">{!rows.length ? <Empty>The models are still learning: <code>racktwin forecast list</code> shows until when.</Empty> :
    <Grid label="Forecasts" heads={["Signal", "In", "Expected", "90 % band"]} right={[1, 2, 3]} rows={rows.map((f: any) => { const u = /_w$/.test(f.signal) ? "W" : /_pu$/.test(f.signal) ? "1" : /_temp_c$/.test(f.signal) ? "degC" : ""; return [title(signal(f.signal.split(".")[1])), span(f.horizon_s), quantity(f.mean[0], u), known(f.lo[0]) ? `${quantity(f.lo[0], u)} to ${quantity(f.hi[0], u)}` : "none yet"]; })} />}</Panel>;
}

function Here({ name }: { name: string }) {
  const got = usePoll<any>(`decisions?below=true&limit=60&entity=${encodeURIComponent(name)}`, 6000), rows = folded((got.data?.decisions ?? []) as Line[]).slice(0, 12);
  return <Panel title="Latest decisions here" more={<a href={`#/decisions/${encodeURIComponent(`entity=${name}`)}`}>All</a>}>
    <Failure text={got.error} />
    {got.data && !rows.length && <Empty>The lines that the daemon keeps hold no decision here.</Empty>}
    <ul class="lines">{rows.map(([l, ...more]) => <li><time class="num">{clock(l.now_ns)}</time> <span class={`kind k-${l.kind}`}>{l.kind.replaceAll("_", " ")}</span> <span title={l.text}>{brief(l.text)}</span>{more.length > 0 && <span class="soft"> · {num(more.length + 1)} such since {clock(more.at(-1)!.now_ns)}</span>}</li>)}</ul>
  </Panel>;
}

// The policy with the most commands here comes first.
function Explanations({ name, inside }: { name: string; inside: string }) {
  const policies = (live.state?.policies ?? []).filter((p: any) => p.authority !== "off").map((p: any) => p.name) as string[], [picked, pick] = useState("");
  const held = usePoll<any>(inside ? `leases?prefix=${encodeURIComponent(inside)}&limit=1000` : null, 20_000).data, counts = new Map<string, number>();
  for (const l of held?.leases ?? []) counts.set(l.policy, (counts.get(l.policy) ?? 0) + 1);
  const which = picked || ([...counts].sort((a, b) => b[1] - a[1])[0]?.[0] ?? "");
  return <Panel title="Explanations of the policies" more={<Tabs label="Policy" now={which} pick={pick} of={policies.map((p) => [p, p.replaceAll("_", " ")])} />}>
    {which ? <Explanation key={which} policy={which} name={name} /> : <Empty>Choose a policy.</Empty>}</Panel>;
}

function Explanation({ policy, name }: { policy: string; name: string }) {
  const got = usePoll<any>(`explain/${policy}/${part(name)}`, 5000);
  return <><Failure text={got.error} />{got.data && <Explained e={got.data} />}</>;
}

const ASKED: Record<string, [string, string, string][]> = {
  gpu: [["gpu.power_cap_w", "Power cap at most, W", "hi"]], node: [["gpu.power_cap_w", "Power cap of its GPUs at most, W", "hi"], ["node.service_level", "Service level", "want"]],
  rack: [["gpu.power_cap_w", "Power cap of its GPUs at most, W", "hi"]], cdu: [["cdu.supply_temp_target_c", "Supply temperature at most, °C", "hi"]],
};

function RequestControl({ table, name }: { table: string; name: string }) {
  const asked = ASKED[table];
  if (!asked) return null;
  return <Act small label="Request" title={`Request a bound for ${short(name)}`} text="The operator policy proposes this bound. The arbiter combines it with all other proposals."
    fields={[{ name: "which", label: "What", kind: "choice", value: "0", choices: asked.map(([, t], i) => [String(i), t]) }, { name: "value", label: "Value", needed: true }, DURATION, REASON]}
    send={(v) => { const [key, , how] = asked[Number(v.which)], x = v.value.trim(); return { method: "POST", path: "requests", body: { control: key, names: [name], [how]: x !== "" && !Number.isNaN(Number(x)) ? Number(x) : x, for_s: Number(v.for_s), reason: v.reason } }; }} />;
}

