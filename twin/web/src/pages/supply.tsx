// Power and cooling as one-line diagrams: live flows, headroom, binding limits, effect of a lost feed.
import { useState } from "preact/hooks";
import { get } from "../api";
import { live, useLive, usePoll } from "../live";
import { Diagram, type Flow, type Place } from "../diagram";
import { Empty, Entity, ExplainedTable, Failure, GLYPHS, Grid, Panel, Said, Tabs, Tag, Value } from "../parts";
import { PowerChart } from "./overview";
import { clock, known, num, plural, quantity, short, span, title } from "../words";
import { useEffect } from "preact/hooks";

// The scenario that the page of what-ifs opens with.
export const wanted = { kind: "feed", entity: "" };

const MOST_PLACES = 60; // drawn at once; beyond it, racks are one box and branches open one by one

interface Feeder { name: string; parent: string | null; side: string; budget_w: number | null; racks: string[]; metered: boolean; external: boolean; inferred: boolean }
interface Topology { feeders: Feeder[]; loops: string[]; cdus: { name: string; loop: string | null; racks: string[] }[] }

export function useTopology(): Topology | null {
  const [tree, set] = useState<Topology | null>(null), hash = live.layout?.site_hash;
  useEffect(() => {
    const read = () => get<any>("topology").then(set, () => {});
    read();
    const t = setInterval(read, 30_000); // budgets from outside change
    return () => clearInterval(t);
  }, [hash]);
  return tree;
}

function useTable(table: string, signals: string): Map<string, Record<string, { value: number | null; late: boolean; age: number | null }>> {
  const got = usePoll<any>(`state/${table}?limit=1000&signals=${signals}`, 2000), out = new Map();
  for (const [i, name] of (got.data?.names ?? []).entries()) {
    out.set(name, Object.fromEntries(Object.entries<any>(got.data.signals).map(([k, s]) => [k, { value: s.quality[i] === "good" || s.quality[i] === "missing" ? s.value[i] : null, late: s.late?.[i] || s.quality[i] !== "good", age: s.age_s[i] }])));
  }
  return out;
}

const stateOf = (share: number | null): string => (share === null ? "unknown" : share >= 1 ? "critical" : share >= 0.9 ? "warning" : "ok");

function alarmAt(name: string): string | null {
  const found = live.alarms.find((a) => a.state !== "shelved" && a.entities.includes(name));
  return found ? found.severity : null;
}

function rackPlace(name: string): Place {
  const i = live.rowOf.get(name)!, c = live.columns, w = c.power_w[i], state = live.layout!.states[c.state[i] ?? 0];
  return { id: name, table: "rack", name, head: short(name).split("/").pop()!, lines: [quantity(w, "W"), ...(c.capped[i] ? [`${c.capped[i]} GPUs capped`] : [])], share: null, state: state === "unknown" ? "unknown" : state, said: `${name}: ${quantity(w, "W")}, ${state}` };
}

const GRAVEST = ["critical", "warning", "unknown", "info", "maintenance"];

// Racks in one box, in the gravest state of any of them.
function groupPlace(id: string, racks: string[]): Place {
  const c = live.columns, rows = racks.map((n) => live.rowOf.get(n) ?? -1), states = rows.map((i) => live.layout!.states[c.state[i] ?? 0]), state = GRAVEST.find((s) => states.includes(s)) ?? "ok";
  const w = rows.some((i) => c.reporting[i]) ? quantity(rows.reduce((t, i) => t + (c.power_w[i] ?? 0), 0), "W") : "power unknown";
  const lines = [w, ...(state === "ok" ? [] : [`${num(states.filter((s) => s === state).length)} ${state}`])];
  return { id, table: "", name: "", head: plural(racks.length, "rack"), lines, share: null, state, said: `${racks.length} racks: ${lines.join(", ")}` };
}

// Headroom as the API tells it, by place.
function useHeadroom(): { by: Map<string, Record<string, any>>; told: any; error: string } {
  const got = usePoll<any>("power?form=explanation&limit=40", 5000), by = new Map<string, Record<string, any>>();
  const table = got.data?.tables.find((t: any) => t.name === "places");
  for (const r of table?.rows ?? []) {
    const row = Object.fromEntries(table.columns.map((c: any, i: number) => [c.name, r[i]]));
    by.set(row.place, row);
  }
  return { by, told: got.data, error: got.error };
}

function Binding({ told, kinds }: { told: any; kinds: string[] }) {
  if (!told) return null;
  const t = told.tables.find((x: any) => x.name === "places");
  return <Panel title="What binds first">
    {kinds.includes("feeder") && told.sentences.filter((s: any) => s.kind !== "note").map((s: any) => <p class={`said s-${s.kind}`}>{s.kind === "warning" && GLYPHS.warning} <Said text={s.text} /></p>)}
    {t && <ExplainedTable table={{ ...t, total: null, text: `headroom of each place, now${known(told.now_ns) ? ` (${clock(told.now_ns)} UTC)` : ""}, if a side fails, and forecast`, rows: fullest(t, kinds) }} />}
    {t && fullest(t, kinds, Infinity).length > SHOWN_PLACES && <p class="soft">The fullest {SHOWN_PLACES} of {num(fullest(t, kinds, Infinity).length)} places that the daemon lists.</p>}
    <details><summary>Basis of these figures</summary>{told.sentences.filter((s: any) => s.kind === "note").map((s: any) => <p class="soft"><Said text={s.text} /></p>)}</details>
  </Panel>;
}

const SHOWN_PLACES = 30, SHOWN_BRANCHES = 10;

// Places of these kinds, the fullest first, those without a limit at the end.
function fullest(t: any, kinds: string[], most = SHOWN_PLACES): any[][] {
  const kind = t.columns.findIndex((c: any) => c.name === "kind"), use = t.columns.findIndex((c: any) => c.name === "use_pu"), rows = t.rows.filter((r: any[]) => kinds.includes(r[kind]));
  return rows.length <= most ? rows : [...rows].sort((a, b) => (b[use] ?? -1) - (a[use] ?? -1)).slice(0, most);
}

export function Power() {
  useLive("racks", "alarms");
  const tree = useTopology(), read = useTable("feeder", "power_w,breaker_state"), { by, told, error } = useHeadroom(), [lost, setLost] = useState(""), [open, setOpen] = useState("");
  if (!tree) return <div class="page"><h1>Power</h1><p class="soft">Loading …</p></div>;
  const sides = [...new Set(tree.feeders.map((f) => f.side).filter(Boolean))], kids = (n: string | null) => tree.feeders.filter((f) => f.parent === n);
  const racks = live.layout!.names.length, small = tree.feeders.length + racks <= MOST_PLACES;
  const roots = kids(null), branch = open && tree.feeders.some((f) => f.name === open) ? open : tree.feeders.length > MOST_PLACES ? roots[0]?.name ?? "" : "";
  const below = branch ? kids(branch).sort((a, b) => (by.get(b.name)?.use_pu ?? -1) - (by.get(a.name)?.use_pu ?? -1)) : [], rest = below.slice(SHOWN_BRANCHES);
  const shownFeeders = branch ? [tree.feeders.find((f) => f.name === branch)!, ...below.slice(0, SHOWN_BRANCHES)] : tree.feeders;
  const places: Place[] = [], flows: Flow[] = [], have = new Set(shownFeeders.map((f) => f.name));
  for (const f of shownFeeders) {
    const r = read.get(f.name)?.power_w, h = by.get(f.name), dead = lost !== "" && f.side === lost;
    const load = dead ? 0 : lost ? h?.lost_w ?? null : known(h?.load_w) ? h!.load_w : r?.value ?? null, share = known(load) && known(f.budget_w) ? load / f.budget_w! : null;
    const tripped = read.get(f.name)?.breaker_state?.value === 1, alarm = alarmAt(f.name);
    const lines = [dead ? "lost" : `${quantity(load, "W")}${f.budget_w ? ` of ${quantity(f.budget_w, "W")}` : ""}`, known(f.budget_w) && known(load) ? `${quantity(f.budget_w! - load, "W")} left` : f.budget_w ? "load unknown" : "no budget"];
    const alone = by.get(f.name)?.lost_w;
    if (!lost && !dead && known(f.budget_w) && known(alone)) lines.push(`${quantity(f.budget_w! - alone, "W")} left, A/B fails`);
    if (!known(r?.value) && !lost) lines.push("not metered now"); else if (r?.late && !lost) lines.push("reading is old");
    places.push({ id: f.name, table: "feeder", name: f.name, head: `${short(f.name).split("/").pop()}${f.side ? ` · ${f.side}` : ""}`, lines, share, side: f.side, state: dead || tripped ? "critical" : alarm ?? stateOf(share), said: `feeder ${f.name}${f.side ? `, side ${f.side}` : ""}: ${lines.join(", ")}` });
    if (f.parent && have.has(f.parent)) flows.push({ from: f.parent, to: f.name, dead });
  }
  if (rest.length) {
    const load = rest.reduce((t, f) => t + (by.get(f.name)?.load_w ?? 0), 0), lines = [`${quantity(load, "W")} together`, "less full than these"];
    places.push({ id: "rest", table: "", name: "", head: `${rest.length} more`, lines, share: null, state: "ok", side: rest[0].side, said: `${rest.length} more feeders below ${branch}` });
    flows.push({ from: branch, to: "rest" });
  }
  if (small) {
    const fed = new Set(tree.feeders.flatMap((f) => f.racks));
    for (const n of fed) places.push(rackPlace(n));
    for (const f of tree.feeders) for (const n of f.racks) flows.push({ from: f.name, to: n, dead: lost !== "" && f.side === lost });
  } else for (const f of shownFeeders) if (f.racks.length) { places.push(groupPlace(`${f.name}/…`, f.racks)); flows.push({ from: f.name, to: `${f.name}/…`, dead: lost !== "" && f.side === lost }); }
  return <div class="page">
    <h1>Power</h1>
    <div class="row wrap">
      {sides.length > 1 && <Tabs label="Show" now={lost} pick={setLost} of={[["", "As it is now"], ...sides.map((s) => [s, `If side ${s} is lost`] as [string, string])]} />}
      {tree.feeders.length > MOST_PLACES && <label class="inline">Below <select onChange={(e) => setOpen(e.currentTarget.value)}>{roots.map((f) => <option value={f.name} selected={f.name === branch}>{short(f.name)}</option>)}</select></label>}
      <span class="grow" /><a href="#/whatif">Simulate it</a>
    </div>
    {lost && <p class="said s-warning">{GLYPHS.warning} Hypothetical: the load that the other side would carry at the present draw, before any cap. <a href="#/whatif">What if</a> simulates the course.</p>}
    <Failure text={error} />
    {places.length ? <Panel title="One-line diagram"><Diagram places={places} flows={flows} label="Power from the feeds to the racks" /></Panel> : <Empty>The site file lists no feeders, so racktwin knows no budget. <a href="#/setup">Set up</a></Empty>}
    <Panel title="Power, last 30 min and what is expected"><PowerChart height={200} /></Panel>
    <Binding told={told} kinds={["site", "feeder", "rack"]} />
    <Targets />
  </div>;
}

function Targets() {
  const got = usePoll<any>("load-targets?limit=50", 10_000), rows = got.data?.targets ?? got.data?.load_targets ?? [];
  if (!rows.length) return null;
  return <Panel title="Load targets from outside"><Grid label="Load targets" heads={["Target", "At most", "Load", "Kept"]} right={[1, 2]}
    rows={rows.map((t: any) => [<span title={t.name}>{t.name}</span>, quantity(t.limit_w, "W"), quantity(t.places[0]?.load_w, "W"), !t.runs ? "to come" : t.within === false ? <Tag kind="critical">exceeded</Tag> : t.within === true ? <Tag kind="ok">kept</Tag> : <Tag kind="unknown" />])} /></Panel>;
}

const CDU = "supply_temp_c,return_temp_c,flow_lpm,pump1_speed_pu,pump2_speed_pu,facility_supply_temp_c,filter_diff_pressure_pa,available_state";
const HEAT = 69.0; // W per l/min and K, of water with glycol; source: estimate

export function Cooling() {
  useLive("racks", "alarms");
  const tree = useTopology(), cdus = useTable("cdu", CDU), loops = useTable("loop", "supply_temp_c,return_temp_c,flow_lpm"), { by, told, error } = useHeadroom(), [open, setOpen] = useState("");
  if (!tree) return <div class="page"><h1>Cooling</h1><p class="soft">Loading …</p></div>;
  if (!tree.cdus.length) return <div class="page"><h1>Cooling</h1><Air /></div>;
  const racks = tree.cdus.reduce((n, c) => n + c.racks.length, 0), small = tree.cdus.length + tree.loops.length + racks <= MOST_PLACES;
  const byLoop = tree.cdus.length > MOST_PLACES ? open || tree.loops[0] : "";
  const all = byLoop ? tree.cdus.filter((c) => c.loop === byLoop).sort((a, b) => Number(!!alarmAt(b.name)) - Number(!!alarmAt(a.name)) || (by.get(b.name)?.use_pu ?? -1) - (by.get(a.name)?.use_pu ?? -1)) : tree.cdus;
  const shown = all.slice(0, small || !byLoop ? 1000 : SHOWN_BRANCHES), places: Place[] = [], flows: Flow[] = [];
  for (const n of tree.loops.filter((x) => !byLoop || x === byLoop)) {
    const r = loops.get(n);
    places.push({ id: n, table: "loop", name: n, head: short(n), lines: [`${quantity(r?.supply_temp_c?.value, "degC")} → ${quantity(r?.return_temp_c?.value, "degC")}`, quantity(r?.flow_lpm?.value, "l/min")], share: null, state: alarmAt(n) ?? (r ? "ok" : "unknown"), said: `facility loop ${n}` });
  }
  for (const c of shown) {
    const r = cdus.get(c.name), h = by.get(c.name), flow = r?.flow_lpm?.value, warm = known(r?.supply_temp_c?.value) && known(r?.return_temp_c?.value) ? r!.return_temp_c.value! - r!.supply_temp_c.value! : null;
    const heat = known(h?.load_w) ? h!.load_w : known(flow) && known(warm) ? flow! * warm! * HEAT : null, share = known(h?.use_pu) ? h!.use_pu : null;
    const pump = (k: string) => { const v = r?.[k]?.value; return known(v) ? (v! <= STANDS_PU ? "stands" : `${num(v! * 100)} %`) : "?"; };
    const lines = [`${quantity(r?.supply_temp_c?.value, "degC")} → ${quantity(r?.return_temp_c?.value, "degC")}`, `${quantity(flow, "l/min")} · ${quantity(heat, "W")}`, `pumps ${pump("pump1_speed_pu")}, ${pump("pump2_speed_pu")}`];
    if (known(h?.left_w)) lines.push(`${quantity(h!.left_w, "W")} left`);
    places.push({ id: c.name, table: "cdu", name: c.name, head: short(c.name).split("/").pop()!, lines, share, state: alarmAt(c.name) ?? (r ? stateOf(share ?? 0) : "unknown"), said: `CDU ${c.name}: ${lines.join(", ")}` });
    if (c.loop) flows.push({ from: c.loop, to: c.name });
    if (small) for (const n of c.racks) {
      const i = live.rowOf.get(n)!, k = live.columns, state = live.layout!.states[k.state[i] ?? 0];
      places.push({ id: n, table: "rack", name: n, head: short(n).split("/").pop()!, lines: [`${quantity(k.supply_temp_c[i], "degC")} → ${quantity(k.return_temp_c[i], "degC")}`, quantity(k.flow_lpm[i], "l/min"), known(k.margin_k[i]) ? `margin ${quantity(k.margin_k[i], "K")}` : "margin unknown"], share: null, state, said: `rack ${n}, ${state}` });
      flows.push({ from: c.name, to: n });
    } else { places.push(groupPlace(`${c.name}/…`, c.racks)); flows.push({ from: c.name, to: `${c.name}/…` }); }
  }
  return <div class="page">
    <h1>Cooling</h1>
    <div class="row wrap">{byLoop && <label class="inline">Loop <select onChange={(e) => setOpen(e.currentTarget.value)}>{tree.loops.map((n) => <option value={n} selected={n === byLoop}>{short(n)}</option>)}</select></label>}<span class="grow" /><a href="#/whatif">Simulate a lost pump</a></div>
    <Failure text={error} />
    <Panel title="One-line diagram"><Diagram places={places} flows={flows} label="Coolant from the facility loop to the racks" />
      {all.length > shown.length && <p class="soft">Those with alarms and the fullest {shown.length} of {all.length} CDUs.</p>}</Panel>
    <LostPump cdus={tree.cdus} read={cdus} by={by} />
    <Binding told={told} kinds={["loop", "cdu"]} />
    <Air />
  </div>;
}

const STANDS_PU = 0.01; // of full speed

// A pump that is lost leaves the other one at full speed at most; the flow goes with the sum of their speeds.
function pumpLoss(one: number | null, two: number | null): { kind: string; said: string } {
  if (!known(one) && !known(two)) return { kind: "unknown", said: "pump speeds are unknown" };
  if (!known(one) || !known(two)) return { kind: "critical", said: "one pump is known to run: if it stops, the racks below lose their coolant" };
  const still = [one, two].findIndex((v) => v <= STANDS_PU), most = Math.max(one, two), both = one + two;
  if (most <= STANDS_PU) return { kind: "critical", said: "stopped now: neither pump turns" };
  if (still >= 0) return { kind: "critical", said: `stopped now: pump ${still + 1} stands still, the other one runs at ${num(100 * most)} %; if that stops too, the racks below lose their coolant` };
  return both > 1 ? { kind: "warning", said: `the other one cannot make up for it: at full speed it carries ${num(100 / both)} % of the flow, ${num(100 * (1 - 1 / both))} % less than now` }
    : { kind: "ok", said: `the other one can carry all of the flow, at ${num(100 * both)} % of its speed` };
}

// Effect of a lost pump at the present load of its CDU.
function LostPump({ cdus, read, by }: { cdus: { name: string; racks: string[] }[]; read: Map<string, any>; by: Map<string, any> }) {
  const grave: Record<string, number> = { critical: 0, warning: 1, unknown: 2, info: 3, ok: 4 };
  const judged = cdus.map((c) => {
    const r = read.get(c.name), one = r?.pump1_speed_pu, two = r?.pump2_speed_pu, h = by.get(c.name), loss = pumpLoss(one?.value ?? null, two?.value ?? null), age = Math.max(one?.age ?? 0, two?.age ?? 0);
    const rung = loss.kind === "ok" && alarmAt(c.name), old = loss.kind !== "unknown" && (one?.late || two?.late) ? `; the speeds are ${span(age)} old` : "";
    return { c, h, kind: rung || (old && loss.kind === "ok" ? "warning" : loss.kind), said: `${loss.said}${old}${rung ? "; an alarm of this CDU stands" : ""}` };
  }).sort((a, b) => grave[a.kind] - grave[b.kind]);
  const rows = judged.slice(0, 16).map(({ c, h, kind, said }) => [<Entity name={c.name} table="cdu" />, plural(c.racks.length, "rack"), known(h?.left_w) ? quantity(h.left_w, "W") : "unknown", <Tag kind={kind}>{title(said)}</Tag>, <a href="#/whatif" onClick={() => Object.assign(wanted, { kind: "pump", entity: c.name })}>Simulate it</a>]);
  return <Panel title="If a pump stops"><Grid label="If a pump stops" heads={["CDU", "Cools", "Heat to spare now", "Then", ""]} right={[2]} rows={rows} />
    {judged.length > rows.length && <p class="soft">and {num(judged.length - rows.length)} more, {num(judged.slice(rows.length).filter((x) => x.kind === "ok").length)} of them with room, {num(judged.slice(rows.length).filter((x) => x.kind === "unknown").length)} unknown</p>}</Panel>;
}

function Air() {
  useLive("racks");
  const c = live.columns, l = live.layout!;
  const rows = l.names.map((n, i) => [n, c.margin_k[i], i] as const).filter(([, m]) => known(m)).sort((a, b) => a[1]! - b[1]!).slice(0, 12);
  if (!rows.length) return <Panel title="Least margin"><Empty>No guarded temperature is read.</Empty></Panel>;
  return <Panel title="Racks with the least cooling margin"><Grid label="Least margin" heads={["Rack", "Margin", "Hottest GPU", "Coolant", "Flow", "Inlet air"]} right={[1, 2, 3, 4, 5]}
    rows={rows.map(([n, m, i]) => [<Entity name={n} table="rack" />, quantity(m, "K"), known(c.gpu_temp_c[i]) ? `${c.gpu_temp_c[i]} °C` : "–", `${quantity(c.supply_temp_c[i], "degC")} → ${quantity(c.return_temp_c[i], "degC")}`, <Value v={c.flow_lpm[i]} unit="l/min" />, quantity(c.inlet_temp_c[i], "degC")])} /></Panel>;
}
