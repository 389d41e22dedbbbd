// Charts over time: measured lines, what is expected with its band, and limits.
import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { live, on } from "./live";
import { known, scaled } from "./words";

// A null ends a line, undefined does not.
export interface Series { label: string; y: (number | null | undefined)[]; colour: "main" | "other" | "expected" | "limit" | "danger"; dash?: boolean; band?: [(number | null)[], (number | null)[]]; step?: boolean }

const JOINED = 3; // usual spacings that a line goes on without a point

// Points without a value between two that are near each other, as what a line passes over; longer gaps stay open.
export function bridged(t: number[], y: (number | null | undefined)[]): (number | null | undefined)[] {
  const at = y.flatMap((v, i) => (known(v) ? [i] : [])), steps = at.slice(1).map((i, k) => t[i] - t[at[k]]).sort((a, b) => a - b);
  const most = JOINED * (steps[Math.floor(steps.length / 2)] ?? 0), out = [...y];
  at.slice(1).forEach((i, k) => { if (t[i] - t[at[k]] <= most) for (let j = at[k] + 1; j < i; j++) out[j] = undefined; });
  return out;
}

const VARS = { main: "--line", other: "--line2", expected: "--line3", limit: "--warning", danger: "--critical" } as const;

function colours(): Record<string, string> {
  const css = getComputedStyle(document.documentElement);
  return Object.fromEntries([...Object.entries(VARS), ["ink", "--soft"], ["rule", "--rule"], ["band", "--band"]].map(([k, v]) => [k, css.getPropertyValue(v).trim()]));
}

// A unit for a whole axis, so that its numbers are short.
function axisUnit(unit: string, most: number): { factor: number; unit: string } {
  if (unit === "1") return { factor: 100, unit: "%" };
  const size = Math.abs(most) || 1, shown = scaled(size, unit);
  const factor = { MW: 1e-6, kW: 1e-3, MVA: 1e-6, kVA: 1e-3, kPa: 1e-3, GHz: 1e-9, MHz: 1e-6, MWh: 1e-6, kWh: 1e-3 }[shown.unit];
  return { factor: factor ?? 1, unit: shown.unit };
}

export function Chart(p: { t: number[]; series: Series[]; unit: string; label: string; height?: number; now?: number; clock?: "utc" | "elapsed"; key?: string; low?: number; fill?: boolean }) {
  const place = useRef<HTMLDivElement>(null), plot = useRef<uPlot | null>(null), made = useRef("");
  const all = p.series.flatMap((s) => [...s.y, ...(s.band ? [...s.band[0], ...s.band[1]] : [])]).filter(known) as number[];
  const top = all.reduce((m, v) => Math.max(m, Math.abs(v)), 0);
  const axis = axisUnit(p.unit, top);
  const data: uPlot.AlignedData = [p.t, ...p.series.flatMap((s) => [s.y, ...(s.band ?? [])].map((y) => y.map((v) => (known(v) ? v * axis.factor : v === undefined ? undefined : null))))];

  // Of a chart that fills its panel the height is the least
  const size = () => ({ width: Math.max(160, place.current?.clientWidth ?? 0), height: Math.max(p.height ?? 200, p.fill ? place.current?.clientHeight ?? 0 : 0) });
  const build = () => {
    const node = place.current;
    if (!node) return;
    plot.current?.destroy();
    const c = colours(), series: uPlot.Series[] = [{}], bands: uPlot.Band[] = [];
    for (const s of p.series) {
      series.push({
        label: s.label, stroke: c[s.colour], width: s.colour === "limit" || s.colour === "danger" ? 1.5 : 2, dash: s.dash ? [6, 5] : undefined,
        points: { show: false }, spanGaps: false, paths: s.step ? uPlot.paths.stepped!({ align: 1 }) : undefined,
        value: (_, v) => (known(v) ? `${v.toLocaleString("en", { maximumFractionDigits: 2 })} ${axis.unit}` : "–"),
      });
      if (s.band) {
        const at = series.length;
        for (const which of ["low", "high"]) series.push({ label: `${s.label}, ${which}`, stroke: "transparent", width: 0, points: { show: false } });
        bands.push({ series: [at + 1, at], fill: c.band });
      }
    }
    const font = `12px ${getComputedStyle(document.body).fontFamily}`;
    const line = { stroke: c.ink, grid: { stroke: c.rule, width: 1 }, ticks: { stroke: c.rule, width: 1 }, font };
    const two = (n: number) => String(n).padStart(2, "0");
    const wall = (_: uPlot, at: number[]) => {
      const span = (at.at(-1) ?? 0) - (at[0] ?? 0);
      return at.map((s) => {
        const d = new Date(s * 1e3), day = `${two(d.getUTCDate())}.${two(d.getUTCMonth() + 1)}.`, time = `${two(d.getUTCHours())}:${two(d.getUTCMinutes())}`;
        return span > 6 * 86400 ? day : span > 86400 ? `${day} ${time}` : span < 240 ? `${time}:${two(d.getUTCSeconds())}` : time;
      });
    };
    const elapsed = (_: uPlot, at: number[]) => at.map((s) => (s >= 3600 ? `${+(s / 3600).toFixed(1)} h` : `${Math.round(s / 60)} min`));
    plot.current = new uPlot({
      ...size(), series, bands,
      padding: [8, 24, 0, 0],
      legend: { show: false }, cursor: { y: false, points: { show: true }, drag: { x: false, y: false } },
      scales: { x: { time: p.clock !== "elapsed" }, y: { range: (_, lo, hi) => range(lo, hi, p.low) } },
      tzDate: (ts) => uPlot.tzDate(new Date(ts * 1e3), "Etc/UTC"),
      axes: [{ ...line, space: 70, ...(p.clock === "elapsed" ? { incrs: [60, 120, 300, 600, 1200, 1800, 3600, 7200] } : {}), values: p.clock === "elapsed" ? elapsed : wall }, { ...line, size: 52 }],
      hooks: {
        draw: [(u) => {
          if (p.now === undefined) return;
          const x = u.valToPos(p.now, "x", true);
          u.ctx.save();
          u.ctx.strokeStyle = c.ink; u.ctx.lineWidth = 1; u.ctx.setLineDash([2, 3]);
          u.ctx.beginPath(); u.ctx.moveTo(x, u.bbox.top); u.ctx.lineTo(x, u.bbox.top + u.bbox.height); u.ctx.stroke();
          u.ctx.restore();
        }],
        setCursor: [(u) => tip(u, p, axis.unit)],
      },
    }, data, node);
    made.current = shape();
  };
  const shape = () => JSON.stringify([p.series.map((s) => [s.label, s.colour, !!s.band]), axis, p.height, p.key, p.now !== undefined]);
  useEffect(() => {
    build();
    const sized = new ResizeObserver(() => plot.current?.setSize(size()));
    if (place.current) sized.observe(place.current);
    const off = on("look", build);
    return () => { sized.disconnect(); off(); plot.current?.destroy(); plot.current = null; };
  }, []);
  useEffect(() => {
    if (made.current !== shape()) build();
    else plot.current?.setData(data);
  });
  const last = (y: (number | null | undefined)[]) => { for (let i = y.length - 1; i >= 0; i--) if (known(y[i])) return `${scaled(y[i] as number, p.unit).text} ${scaled(y[i] as number, p.unit).unit}`.trim(); return "unknown"; };
  return <figure class={`chart ${p.fill ? "fill" : ""}`}>
    <div class="legend">{p.series.map((s) => <span class={`key k-${s.colour} ${s.dash ? "dashed" : ""}`}>{s.label}{s.band && " with 90 % band"}</span>)}<span class="soft axis-unit">{axis.unit}</span></div>
    <div ref={place} class="plot" style={p.fill ? { minHeight: `${p.height ?? 200}px` } : {}} role="img" aria-label={`${p.label}: ${p.series.map((s) => `${s.label} ${last(s.y)}`).join(", ")}`} />
  </figure>;
}

function range(lo: number | null, hi: number | null, low?: number): [number, number] {
  if (lo === null || hi === null || !known(lo) || !known(hi)) return [0, 1];
  const from = low !== undefined ? Math.min(low, lo) : lo, room = Math.max((hi - from) * 0.08, Math.abs(hi) * 0.01, 1e-9);
  return [low !== undefined && from === low ? low : from - room, hi + room];
}

function tip(u: uPlot, p: { t: number[]; series: Series[]; clock?: string }, unit: string): void {
  let box = u.over.querySelector<HTMLElement>(".tip");
  if (!box) {
    box = document.createElement("div");
    box.className = "tip";
    u.over.append(box);
  }
  const i = u.cursor.idx;
  if (i === null || i === undefined || u.cursor.left === undefined || u.cursor.left < 0) { box.hidden = true; return; }
  const t = u.data[0][i], lines = [p.clock === "elapsed" ? `${Math.round(t / 60)} min` : `${new Date(t * 1e3).toISOString().slice(5, 19).replace("T", " ")} UTC`];
  let k = 1;
  for (const s of p.series) {
    const v = u.data[k][i];
    k += s.band ? 3 : 1;
    if (known(v)) lines.push(`${s.label}: ${v.toLocaleString("en", { maximumFractionDigits: 2 })} ${unit}`);
  }
  box.hidden = false;
  box.replaceChildren(...lines.map((text) => { const d = document.createElement("div"); d.textContent = text; return d; }));
  const left = u.cursor.left, right = left > u.over.clientWidth / 2;
  box.style.left = right ? "" : `${left + 12}px`;
  box.style.right = right ? `${u.over.clientWidth - left + 12}px` : "";
}

export const nowS = (): number => (live.state ? live.state.now_ns / 1e9 : Date.now() / 1e3);
