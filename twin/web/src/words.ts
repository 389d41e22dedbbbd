// Numbers with their units, ages, instants and names, as people read them.
import { live } from "./live";

export const known = (v: unknown): v is number => typeof v === "number" && Number.isFinite(v);

// Making a format costs more than using it a hundred times.
const FORMATS = new Map<number, Intl.NumberFormat>();

function format(digits: number): Intl.NumberFormat {
  let found = FORMATS.get(digits);
  if (!found) FORMATS.set(digits, found = new Intl.NumberFormat("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }));
  return found;
}

export function num(v: unknown, digits = 0): string {
  const text = known(v) ? format(digits).format(v) : "–";
  return /^-[0.,]*$/.test(text) ? text.slice(1) : text; // no negative nothing
}

// Three significant digits.
function three(v: number): string {
  const size = Math.abs(v);
  return num(v, size >= 100 || size === 0 || Number.isInteger(v) ? 0 : size >= 10 ? 1 : 2);
}

const SCALES: Record<string, [number, number, string][]> = {
  W: [[2e6, 1e6, "MW"], [2e3, 1e3, "kW"], [0, 1, "W"]],
  VA: [[2e6, 1e6, "MVA"], [2e3, 1e3, "kVA"], [0, 1, "VA"]],
  Wh: [[2e6, 1e6, "MWh"], [2e3, 1e3, "kWh"], [0, 1, "Wh"]],
  Pa: [[2e3, 1e3, "kPa"], [0, 1, "Pa"]],
  mJ: [[3.6e8, 3.6e9, "kWh"], [3.6e5, 3.6e6, "Wh"], [0, 1e3, "J"]],
  Hz: [[2e8, 1e9, "GHz"], [2e5, 1e6, "MHz"], [0, 1, "Hz"]],
};
const NAMES: Record<string, string> = { degC: "°C", count: "", state: "", code: "", bits: "", "1/s": "per s" };

export function scaled(v: number, unit: string): { text: string; unit: string } {
  if (unit === "1") return { text: three(100 * v), unit: "%" };
  if (unit === "s") return { text: span(v), unit: "" };
  if (unit === "ns") return { text: span(v / 1e9), unit: "" };
  const scale = SCALES[unit]?.find(([from]) => Math.abs(v) >= from);
  if (scale) return { text: three(v / scale[1]), unit: scale[2] };
  if (unit === "degC" || unit === "K") return { text: num(v, 1), unit: NAMES[unit] ?? unit };
  return { text: three(v), unit: NAMES[unit] ?? unit };
}

export function quantity(v: unknown, unit: string): string {
  if (!known(v)) return "–";
  const { text, unit: u } = scaled(v, unit);
  return u ? `${text} ${u}` : text;
}

// Numbers of one row in the unit of the largest of them, so that they compare.
export function alike(values: unknown[], unit: string): string[] {
  const most = Math.max(0, ...values.filter(known).map(Math.abs)), scale = SCALES[unit]?.find(([from]) => most >= from);
  if (!scale) return values.map((v) => quantity(v, unit));
  return values.map((v) => (known(v) ? `${num(v / scale[1], decimals(v / scale[1]))} ${scale[2]}` : "–"));
}

const decimals = (v: number): number => (v === 0 || Math.abs(v) >= 100 ? 0 : Math.abs(v) >= 10 ? 1 : 2);

export function span(s: unknown): string {
  if (!known(s)) return "–";
  const size = Math.abs(s);
  if (size < 120) return `${num(s, size < 10 && !Number.isInteger(s) ? 1 : 0)} s`;
  return size < 7200 ? `${Math.round(s / 60)} min` : size < 172800 ? `${Math.round(s / 3600)} h` : `${Math.round(s / 86400)} d`;
}

export const nowNs = (): number => live.state?.now_ns ?? Date.now() * 1e6;
export const since = (ns: number): string => span(Math.max(0, (nowNs() - ns) / 1e9));

export function clock(ns: number): string {
  const d = new Date(ns / 1e6);
  return Number.isNaN(d.getTime()) ? "–" : d.toISOString().slice(11, 19);
}

export function instant(ns: number): string {
  const d = new Date(ns / 1e6);
  if (Number.isNaN(d.getTime())) return "–";
  const day = d.toISOString().slice(0, 10), today = new Date(nowNs() / 1e6).toISOString().slice(0, 10);
  return `${day === today ? "" : `${day} `}${clock(ns)} UTC`;
}

// A name without the prefix that all names of the site share.
export function short(name: string): string {
  const site = live.state?.site ?? "";
  let out = site && name.startsWith(`${site}/`) ? name.slice(site.length + 1) : name;
  const halls = live.layout?.halls ?? [];
  if (halls.length === 1) {
    const hall = halls[0].slice(site.length + 1) + "/";
    if (out.startsWith(hall)) out = out.slice(hall.length);
  }
  return out;
}

// A sentence of the daemon with its names shortened, and without the date of today.
export function brief(text: string): string {
  const site = live.state?.site;
  if (!site) return text;
  const today = new Date(nowNs() / 1e6), halls = live.layout?.halls ?? [];
  if (!Number.isNaN(today.getTime())) text = text.split(`${today.toISOString().slice(0, 10)} `).join("");
  return text.split(halls.length === 1 ? `${halls[0]}/` : `${site}/`).join("");
}

// Controls whose value is an instant: the request begins at that time.
export const isInstant = (key: string): boolean => key.endsWith("_since_s");
export const control = (key: string): string => live.words.controls[key] ?? words(key.replace(/^[^.]*\./, ""));
export const words = (name: string): string => name.replace(/_(w|s|ns|pu|kwh|c|lpm|k|hz|pa|va|v|a|mj)(?=_|$)/g, "").replaceAll("_", " ").replaceAll(".", ": ");
export const signal = (name: string): string => live.words.signals[name.replace(/^[a-z]+\./, "")] ?? words(name);

const TABLES: Record<string, [string, string]> = { gpu: ["GPU", "GPUs"], cdu: ["CDU", "CDUs"], switch: ["switch", "switches"] };
export const table = (name: string, n = 2): string => (name === "rack" && live.state?.halls_total ? ["hall", "halls"] : TABLES[name] ?? [name, `${name}s`])[n === 1 ? 0 : 1];
// Entities of a control: `72 GPUs`.
export const counted = (key: string, n: number): string => `${num(n)} ${table(key.split(".")[0], n)}`;

// Lines of a CSV file. Text that a spreadsheet would take for a formula has ' in front.
export function csv(rows: unknown[][]): string {
  const safe = (v: unknown) => { const t = String(v ?? ""); return known(v) ? t : `"${(/^[=+\-@\t\r]/.test(t) ? `'${t}` : t).replaceAll('"', '""')}"`; };
  return rows.map((r) => r.map(safe).join(",")).join("\r\n");
}

export const plural = (n: number, one: string, many = `${one}s`): string => `${num(n)} ${n === 1 ? one : many}`;
// A sentence or heading; the name of a policy or setting at its beginning stays as it is.
export const title = (text: string): string => (/^[a-z0-9]+_[a-z0-9_]+\b/.test(text) ? text : text.charAt(0).toUpperCase() + text.slice(1));

// The table of an entity, as its name says.
export function tableOf(name: string): string {
  const l = live.layout;
  if (/\/gpu\d+$/.test(name)) return "gpu";
  if (/\/node\d+$/.test(name)) return "node";
  if (!l || live.rowOf.has(name)) return "rack";
  if (l.cdus.includes(name)) return "cdu";
  if (l.feeders.includes(name)) return "feeder";
  if (l.loops.includes(name)) return "loop";
  if (l.halls.includes(name)) return "hall";
  return "";
}

export const hrefOf = (table: string, name: string): string => `#/e/${table}/${name.split("/").map(encodeURIComponent).join("/")}`;
