// Fleet history: the halls of a hub over a day or a month, from the ClickHouse of the fleet or the hub's own store.
import { useState } from "preact/hooks";
import { Chart, type Series } from "../chart";
import { live, usePoll } from "../live";
import { Empty, Failure, Panel, Tabs } from "../parts";
import { known, quantity, span } from "../words";

export interface Hall { hall: string; name: string; most_w: number }
type Line = [signal: string, label: string, colour: Series["colour"]];
type Values = Map<string, Map<number, number>>; // by name, by the second that a step begins

const POINTS = 288, LEAST_POINTS = 12, LEAST_STEP_S = 15, TOGETHER = 12; // of a line; of its axis at least; halls that are drawn at once
const SPANS: [string, string][] = [["3600", "1 h"], ["86400", "24 h"], ["2592000", "30 days"]];
// Drawn beside its budget where there are two; of counts the most of each step.
const SHOWN: Record<string, { text: string; unit: string; of: "mean" | "max"; lines: Line[] }> = {
  power: { text: "Power", unit: "W", of: "mean", lines: [["hall_power_w", "drawn", "main"], ["hall_budget_readback_w", "budget", "limit"]] },
  forecast: { text: "Forecast", unit: "W", of: "mean", lines: [["hall_demand_w", "expected demand", "other"], ["hall_budget_readback_w", "budget", "limit"]] },
  out: { text: "GPUs out of service", unit: "", of: "max", lines: [["hall_gpu_out_count", "out of service", "main"]] },
  alarms: { text: "Alarms", unit: "", of: "max", lines: [["hall_alarm_critical_count", "critical", "danger"], ["hall_alarm_warning_count", "warning", "limit"]] },
};

const minute = (at: number): string => `${new Date(at * 1e3).toISOString().slice(0, 16).replace("T", " ")} UTC`;

// Answers of both stores in one form.
function valuesOf(got: any, names: string[], step: number, of: "mean" | "max"): Values {
  const out: Values = new Map(names.map((n) => [n, new Map()]));
  const put = (name: string, ns: number, v: unknown) => { if (known(v)) out.get(name)?.set(Math.floor(ns / 1e9 / step) * step, v); };
  for (const r of got?.rows ?? []) put(r.entity, r.t_ns, r[of]);
  for (const [name, values] of Object.entries<any[]>((of === "max" && got?.max) || (got?.values ?? {}))) values.forEach((v, i) => put(name, got.t_ns[i], v));
  return out;
}

function OneHall({ h, t, from, step, every, lines, unit, kept }: { h: Hall; t: number[]; from: number; step: number; every: number; lines: Line[]; unit: string; kept: Values[] }) {
  const series: Series[] = lines.map(([, label, colour], k) => ({ label, colour, y: t.map((at) => kept[k].get(h.name)?.get(at) ?? null), step: colour === "limit" || !unit }));
  const first = t.findIndex((_, i) => series.some((s) => known(s.y[i]))), main = series[0].y, until = t.length - 1; // the last step is not over
  const unknown = first < 0 ? 0 : main.slice(first, until).filter((v) => !known(v)).length * step, top = Math.max(...(main.filter(known) as number[]), -Infinity);
  const peak = main.indexOf(top), said = first < 0 ? [] : [
    Number.isFinite(top) && (unit || top > 0) && `maximum ${unit ? quantity(top, unit) : top} at ${minute(t[peak])}`,
    unknown > 0 && `unknown for ${span(unknown)} in all`, first > 1 && `stored since ${minute(t[first])}`].filter(Boolean);
  return <section class="panel" aria-label={`${h.hall} over time`}><header class="panel-head"><h3>{h.hall}</h3></header>
    {first < 0 ? <Empty>No value is stored for this time. The chart begins when the hall reports. It is refreshed every {span(every / 1000)}.</Empty> : <Chart t={t.slice(from)} series={series.map((s) => ({ ...s, y: s.y.slice(from) }))} unit={unit} label={h.hall} height={180} low={0} key={lines[0][0]} />}
    <p class="soft chart-foot">{said.join("; ")}</p></section>;
}

export function History({ halls, archive }: { halls: Hall[]; archive: string | null }) {
  const [last, setLast] = useState("86400"), [what, setWhat] = useState("power"), [one, setOne] = useState("");
  const own = !!live.state?.history, { unit, of, lines } = SHOWN[what], points = Math.min(POINTS, Number(last) / LEAST_STEP_S), step = Number(last) / points, every = Number(last) > 86_400 ? 300_000 : Number(last) > 3600 ? 60_000 : 15_000;
  const shown = halls.length > TOGETHER ? halls.filter((h) => h.hall === (one || halls[0].hall)) : halls, names = shown.map((h) => h.name);
  const asked = (signal: string | undefined, from: "fleet" | "own") => {
    const range = `signal=rack.${signal}&last_s=${last}&step=${step}`, list = names.map(encodeURIComponent).join(",");
    return !signal ? null : from === "fleet" ? `fleet/history?${range}&hall=${encodeURIComponent(archive!)}&entity=${list}` : `history?${range}&name=${list}`;
  };
  const far = lines.length && archive !== null, signals = [lines[0][0], lines[1]?.[0]];
  const fleet = signals.map((s) => usePoll<any>(far ? asked(s, "fleet") : null, every)), failed = fleet.find((f) => f.error)?.error ?? "";
  const near = own && (!far || failed), store = signals.map((s) => usePoll<any>(near ? asked(s, "own") : null, every)), got = near ? store : fleet;
  const kept = got.map((g) => valuesOf(g.data, names, step, of)), end = Math.floor(Math.max(0, ...got.map((g) => (g.data?.until_ns ?? 0) / 1e9)) / step) * step;
  const t = Array.from({ length: points }, (_, i) => end - (points - 1 - i) * step);
  // Values that are younger than the window have the axis to themselves
  const first = Math.min(...kept.flatMap((k) => [...k.values()].flatMap((v) => [...v.keys()]))), from = Math.min(Math.max(0, t.findIndex((at) => at >= first) - 1), points - LEAST_POINTS);
  const source = !near ? "From the ClickHouse of the fleet." : failed ? "Showing this hub's own store instead." : <>From this hub's own store. Configure ClickHouse (<code>history.clickhouse</code>) to keep years.</>;
  return <Panel title="Over time" class="fleet-history" more={<div class="row wrap"><Tabs label="Time" now={last} pick={setLast} of={SPANS} /><Tabs label="Quantity" now={what} pick={setWhat} of={Object.entries(SHOWN).map(([k, v]) => [k, v.text])} /></div>}>
    {!far && !own ? <Empty>No history: no ClickHouse is configured (<code>history.clickhouse</code>), and this hub has no store of its own (<code>history.embedded: false</code>).</Empty> : <>
      <Failure text={[failed, ...(near ? store.map((s) => s.error) : [])].filter(Boolean)[0] ?? ""} />
      <p class="soft">{source} A gap means that the hall did not report.</p>
      {halls.length > TOGETHER && <label class="row">Hall <select value={one || halls[0].hall} onChange={(e) => setOne(e.currentTarget.value)}>{halls.map((h) => <option value={h.hall}>{h.hall}</option>)}</select></label>}
      {got[0].data ? <div class="charts">{shown.map((h) => <OneHall h={h} t={t} from={from} step={step} every={every} lines={lines} unit={unit} kept={kept} key={h.name} />)}</div> : !failed && <p class="soft">Loading …</p>}</>}
  </Panel>;
}
