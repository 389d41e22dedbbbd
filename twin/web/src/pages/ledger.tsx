// Ledger: energy with its 90 % interval, GPU-hours by class, cost and carbon of a month, by one division of the site.
import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { live, ownRowsAlone, useLive, usePoll } from "../live";
import { Empty, Entity, Facts, Failure, GLYPHS, Grid, Panel, Tabs, download } from "../parts";
import { csv, known, num, plural, short, title } from "../words";

interface Row {
  name: string; part: string; tenant: string; queue: string; account: string; energy_kwh: number; energy_pm_kwh: number; gpu_energy_kwh: number | null;
  ungauged_kwh: number | null; cost_usd: number | null; unpriced_kwh: number | null; carbon_kg: number | null; uncounted_kwh: number | null;
  granted_h: number | null; gpu_h: Record<string, number> | null;
}
interface Statement {
  by: string; begin_ns: number; now_ns: number; hours: number; watched_ns: number; total: Row; rows: Row[]; left_out: number;
  pue: number | null; pue_known_pu: number; tue: number | null; tue_known_pu: number; wue_l_per_kwh: number | null; wue_known_pu: number; unmetered_node_h: number; refused_counters: number;
}

const DIVISIONS = ["site", "hall", "rack", "queue", "tenant", "job"];
const KEPT_MONTHS = 27; // 800 days
const MOST_ROWS = 200;
// From work to loss, as they stand in a bar.
const CLASSES = ["busy", "idle", "free", "checkpoint", "restart", "capped", "throttled", "failed", "repair", "unknown"];
const PARTS: Record<string, string> = { site: "site", idle: "idle nodes", unplaced: "nodes, jobs not reported", rest: "racks, other than nodes", cooling: "cooling", losses: "losses" };

const monthOf = (ns: number): string => new Date(ns / 1e6).toISOString().slice(0, 7);
const monthName = (month: string): string => new Date(`${month}-01`).toLocaleString("en", { month: "long", year: "numeric", timeZone: "UTC" });

function monthsUntil(ns: number): string[] {
  const last = new Date(ns / 1e6);
  return Array.from({ length: KEPT_MONTHS }, (_, i) => new Date(Date.UTC(last.getUTCFullYear(), last.getUTCMonth() - i, 1)).toISOString().slice(0, 7));
}

// Digits after the point for a value with an error of this size.
const digitsOf = (error: number): number => (error > 0 ? Math.max(0, Math.min(3, 1 - Math.floor(Math.log10(error)))) : 2);
const hours = (v: number | null): string => num(v, v === null || v >= 1000 || v === 0 ? 0 : v >= 10 ? 1 : 2);
const amount = (v: number | null): string => num(v, known(v) && v < 1000 ? 2 : 0);
const total = (of: Record<string, number> | null): number | null => of && Object.values(of).reduce((s, v) => s + v, 0);

function nameOf(row: Row, by: string): ComponentChildren {
  if (by === "rack") return <Entity name={row.name} table="rack" />;
  if (row.part !== "job") return row.name ? short(row.name) : <span class="soft">{PARTS[row.part] ?? row.part}</span>;
  if (by !== "job") return row.name || <span class="unknown">no {by} reported</span>;
  return <>{row.name}<span class="soft"> {[row.tenant, row.queue].filter(Boolean).join(", ")}</span></>;
}

// GPU time of a row as one bar of its whole; the table of hours has its numbers.
function Stack({ of }: { of: Record<string, number> | null }) {
  const sum = total(of);
  if (!of || !sum) return <span class="soft">–</span>;
  const parts = CLASSES.filter((c) => of[c] > 0), label = parts.map((c) => `${c} ${num((100 * of[c]) / sum, 1)} %`).join(", ");
  let end = 0;
  return <svg class="stack" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label={label}><title>{label}</title>
    {parts.map((c) => { const width = (100 * of[c]) / sum, x = end; end += width; return <rect class={`g-${c}`} x={x} y={0} width={width} height={10} />; })}</svg>;
}

function Total({ of }: { of: Statement }) {
  const t = of.total, digits = digitsOf(t.energy_pm_kwh), own = ownRowsAlone();
  const figure = (v: number | null, unit = "") => (known(v) ? <>{amount(v)}{unit && ` ${unit}`}</> : <span class="unknown">unknown</span>);
  // If a meter was missing for some hours, the figure covers the other hours.
  const over = (v: number | null, share: number, unit = "") => <>{figure(v, unit)}{known(v) && share < 0.9995 && <span class="soft"> over {num(100 * share, 1)} % of the time</span>}</>;
  const missing = (v: number | null, text: string) => known(v) && v > 0 && <p class="w">{GLYPHS.warning} {num(v, digits)} kWh had no known {text}.</p>;
  return <>
    <Facts rows={[
      ["Energy", `${num(t.energy_kwh, digits)} kWh ± ${num(t.energy_pm_kwh, digits)} kWh (90 %)`], ["GPU-hours", `${hours(total(t.gpu_h))}, of which jobs held ${hours(t.granted_h)}`],
      ["Cost", figure(t.cost_usd, "USD")], ["Carbon", figure(t.carbon_kg, "kg CO2")],
      ...(own ? [] : [["PUE", over(of.pue, of.pue_known_pu)], ["TUE", over(of.tue, of.tue_known_pu)], ["WUE", over(of.wue_l_per_kwh, of.wue_known_pu, "L/kWh")]] as [string, ComponentChildren][]),
      ["Records", `${plural(of.hours, "hour")}, ${num(of.watched_ns / 3.6e12, 2)} h watched`],
    ]} />
    {missing(t.unpriced_kwh, "price: not in the cost")}
    {missing(t.uncounted_kwh, "carbon intensity: not in the carbon")}
    {missing(t.ungauged_kwh, "share of GPUs: not in the energy of GPUs")}
    {of.unmetered_node_h > 0 && <p class="w">{GLYPHS.warning} The power of {hours(of.unmetered_node_h)} node-hours is unknown: not in the energy.</p>}
    {of.refused_counters > 0 && <p class="w">{GLYPHS.warning} {plural(of.refused_counters, "reading")} of energy counters differed from their power meters by more than a quarter, and were not used.</p>}
  </>;
}

// Racks have energy alone: GPU time, cost and carbon are kept by hall and job.
function Rows({ of }: { of: Statement }) {
  const whole = of.by !== "rack", rows = of.rows.slice(0, MOST_ROWS), lines = whole ? [...rows, of.total] : rows, spent = of.total.gpu_h ?? {}, classes = CLASSES.filter((c) => spent[c] > 0);
  const name = (row: Row) => (row === of.total ? <b>Sum</b> : nameOf(row, of.by));
  const more = of.rows.length - rows.length + of.left_out;
  const energy = (row: Row) => { const d = digitsOf(row.energy_pm_kwh); return [num(row.energy_kwh, d), num(row.energy_pm_kwh, d)]; };
  return <>
    {whole && <div class="legend">{classes.map((c) => <span class={`swatch g-${c}`}>{c} {hours(spent[c])} h</span>)}</div>}
    <Grid label="Rows of the statement" heads={[title(of.by), "kWh", "± 90 %", "GPU-hours", "By class", "USD", "kg CO2"]} right={[1, 2, 3, 5, 6]}
      rows={lines.map((r) => [name(r), ...energy(r), hours(total(r.gpu_h)), <Stack of={r.gpu_h} />, amount(r.cost_usd), amount(r.carbon_kg)])} />
    {more > 0 && <p class="soft">and {num(more)} more{of.left_out ? "" : ": the CSV has all"}</p>}
    {whole && classes.length > 0 && <><h3>GPU-hours by class</h3>
      <Grid label="GPU-hours by class" heads={[title(of.by), ...classes.map(title)]} right={classes.map((_, i) => i + 1)} rows={lines.map((r) => [name(r), ...classes.map((c) => hours(r.gpu_h && r.gpu_h[c]))])} /></>}
    {!whole && <p class="soft">GPU time, cost and carbon are reported by site, hall, queue, tenant or job. A hall's energy beyond its racks is cooling and losses.</p>}
  </>;
}

// Columns as `racktwin ledger --format csv` names them; what is not known is empty.
function csvOf(of: Statement): string {
  const heads = ["name", "part", "tenant", "queue", "account", "energy_kwh", "energy_pm_kwh", "gpu_energy_kwh", "ungauged_kwh", "cost_usd", "unpriced_kwh", "carbon_kg", "uncounted_kwh", "granted_h", ...CLASSES.map((c) => `gpu_h.${c}`)];
  return csv([heads, ...of.rows.map((r) => {
    const cells: Record<string, unknown> = { ...r, ...Object.fromEntries(CLASSES.map((c) => [`gpu_h.${c}`, r.gpu_h?.[c]])) };
    return heads.map((h) => cells[h]);
  })]);
}

export function Ledger() {
  useLive("who");
  const [month, setMonth] = useState(""), [by, setBy] = useState("tenant"), own = ownRowsAlone();
  const [now, setNow] = useState(0), [isEmpty, setEmpty] = useState(false);
  // A ledger that has just begun is booked each 10 s
  const got = usePoll<Statement>(`ledger?by=${by}${month && `&month=${month}`}`, isEmpty ? 10_000 : 300_000), s = got.data;
  if (s && s.now_ns > now) setNow(s.now_ns);
  if (s && !s.rows.length !== isEmpty) setEmpty(!s.rows.length);
  const of = s && monthOf(s.begin_ns);
  return <div class="page">
    <h1>Ledger</h1>
    <div class="row wrap">
      <label class="inline">Month <select name="month" value={month} onChange={(e) => setMonth(e.currentTarget.value)}>{(now ? monthsUntil(now) : []).map((m, i) => <option value={i ? m : ""} selected={month === (i ? m : "")}>{monthName(m)}{i ? "" : ", so far"}</option>)}</select></label>
      <Tabs label="By" now={by} pick={setBy} of={DIVISIONS.filter((d) => !own || d !== "rack").map((d) => [d, title(d)])} />
      <span class="grow" />
      <button type="button" class="small" disabled={!s?.rows.length} onClick={() => s && download(`ledger-${of}-${by}.csv`, "text/csv", csvOf(s))}>CSV</button>
    </div>
    {own && <p class="soft">The token {live.who?.name} can see only its own rows.</p>}
    <Failure text={got.error} />
    {!s && !got.error && <p class="soft">Loading …</p>}
    {s && of && !s.rows.length && <Empty>The ledger has no entry for {monthName(of)} (UTC){own ? " for this token" : ""}.</Empty>}
    {s && of && s.rows.length > 0 && <>
      <Panel title={`${monthName(of)} (UTC)${of === monthOf(s.now_ns) ? ", so far" : ""}`}><Total of={s} /></Panel>
      <Panel title={`By ${by}`}><Rows of={s} /></Panel>
    </>}
  </div>;
}
