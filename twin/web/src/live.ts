// State of the site in the browser, by topic. The event stream keeps it up to date.
import { useEffect, useState } from "preact/hooks";
import { ApiError, dropToken, follow, get } from "./api";

export type Topic = "state" | "racks" | "alarms" | "decisions" | "link" | "who" | "look";

export interface Alarm {
  id: string; severity: string; title: string; entities: string[]; evidence: string[]; action: string; count: number;
  confidence_pu?: number; raised_ns?: number; state: string; times?: number; flapping?: boolean; cause?: string;
  ack_author?: string; ack_note?: string; ack_ns?: number; shelved_until_ns?: number; shelf_author?: string;
  shelf_reason?: string; first_up?: boolean; doing?: string[]; cleared_ns?: number;
}
export interface Line { kind: string; tick: number; now_ns: number; text: string; body?: Record<string, any>; at?: string }
export interface Layout {
  site_hash: string; names: string[]; halls: string[]; hall: number[]; cdus: string[]; cdu: number[]; spare: boolean[];
  gpus: number[]; power_guard_w: (number | null)[]; states: string[]; feeders: string[]; loops: string[];
}
export type Column = (number | null)[];

const SHOWN_LINES = 200, SHOWN_EVENTS = 40;

// Lines of decisions, newest first, with at most so many events: these must not crowd out what was commanded.
export function withFewEvents<T extends { kind: string }>(lines: T[], most: number): T[] {
  let events = 0;
  return lines.filter((l) => l.kind !== "event" || ++events <= most);
}

export const live = {
  state: null as Record<string, any> | null,
  stateAt: 0,
  layout: null as Layout | null,
  rowOf: new Map<string, number>(),
  columns: {} as Record<string, Column>,
  alarms: [] as Alarm[],
  alarmsAt: 0, // time of the last update; 0: none yet
  alarmCounts: {} as Record<string, number>,
  alarmsTotal: 0,
  lines: [] as Line[],
  missed: 0,
  who: null as { name: string; role: string; halls: string[] } | null,
  asking: true, // for a token
  why: "",
  words: { signals: {}, controls: {} } as { signals: Record<string, string>; controls: Record<string, string> }, // for keys
  heardAt: 0,
  silent: "", // the reason that the values shown are old
};

const listeners = new Map<Topic, Set<() => void>>();

export function changed(topic: Topic): void {
  for (const f of [...(listeners.get(topic) ?? [])]) f();
}

export function on(topic: Topic, f: () => void): () => void {
  const set = listeners.get(topic) ?? new Set();
  listeners.set(topic, set);
  set.add(f);
  return () => set.delete(f);
}

export function useLive(...topics: Topic[]): typeof live {
  const [, again] = useState(0);
  useEffect(() => {
    const off = topics.map((t) => on(t, () => again((n) => n + 1)));
    return () => off.forEach((f) => f());
  }, []);
  return live;
}

// Polls a path of the API. The last answer stays while a request fails.
export function usePoll<T = Record<string, any>>(path: string | null, everyMs = 5000): { data: T | null; error: string; again: () => void } {
  const [got, set] = useState<{ path: string | null; data: T | null; error: string }>({ path, data: null, error: "" });
  const [turn, again] = useState(0);
  useEffect(() => {
    if (path === null) return;
    let over = false, timer = 0;
    const ask = async () => {
      try {
        const data = await get<T>(path);
        if (!over) set({ path, data, error: "" });
      } catch (e) {
        if (!over) set((was) => ({ path, data: was.path === path ? was.data : null, error: (e as Error).message }));
      }
      if (!over) timer = window.setTimeout(ask, document.hidden ? 4 * everyMs : everyMs);
    };
    ask();
    return () => { over = true; clearTimeout(timer); };
  }, [path, everyMs, turn]);
  return got.path === path ? { ...got, again: () => again((n) => n + 1) } : { data: null, error: "", again: () => again((n) => n + 1) };
}

// A token of a job or tenant reads its rows of the ledger and nothing else.
export const ownRowsAlone = (): boolean => live.who?.role === "job";

// A token of some halls of a fleet reads the page of the fleet, and of that its own rows.
export const ownHallsAlone = (): boolean => !!live.who?.halls?.length;
// The daemon of a hub: its racks are halls with daemons of their own.
export const isHub = (): boolean => !!live.state?.halls_total;

export const may = (role: "operator" | "admin"): boolean =>
  live.who?.role === "admin" || (role === "operator" && live.who?.role === "operator");

let generation = 0, last = "", aborter = new AbortController();

async function readLayout(): Promise<void> {
  const tree = await get<Layout & { columns: Record<string, Column> }>("racks");
  live.layout = tree;
  live.rowOf = new Map(tree.names.map((n, i) => [n, i]));
  live.columns = tree.columns;
  changed("racks");
}

function takeRacks(tree: { site_hash: string; columns: Record<string, any> }): void {
  if (live.layout?.site_hash !== tree.site_hash) {
    readLayout().catch(() => {});
    return;
  }
  for (const [name, part] of Object.entries(tree.columns)) {
    if (part.all) live.columns[name] = part.all;
    else part.at.forEach((i: number, k: number) => { live.columns[name][i] = part.to[k]; });
  }
  changed("racks");
  remember();
}

// The power of the site since this page was opened: where no history is kept, the chart shows this.
export const seenPower: { t: number[]; w: number[] } = { t: [], w: [] };

// Cooling margins of the racks over the last two minutes, so that a trend is seen.
export const seenMargins: { t: number; k: Column }[] = [];

function remember(): void {
  const now = (live.state?.now_ns ?? 0) / 1e9;
  if (now >= (seenMargins.at(-1)?.t ?? -Infinity) + 5) {
    seenMargins.push({ t: now, k: [...(live.columns.margin_k ?? [])] });
    while (seenMargins[0].t < now - 120) seenMargins.shift();
  }
  const t = (live.state?.now_ns ?? 0) / 1e9, w = (live.columns.power_w ?? []).reduce((s: number, v) => s + (v ?? 0), 0);
  if (!t || t <= (seenPower.t.at(-1) ?? 0) || !w || !live.columns.reporting?.some(Boolean)) return;
  seenPower.t.push(t);
  seenPower.w.push(w);
  if (seenPower.t.length > 1900) { seenPower.t.shift(); seenPower.w.shift(); }
}

function take(kind: string, tree: any, id: string): void {
  if (id) last = id;
  if (kind === "state") {
    live.state = tree.whole ? tree : { ...live.state, ...tree };
    live.stateAt = performance.now();
    changed("state");
  } else if (kind === "racks") takeRacks(tree);
  else if (kind === "alarms") {
    live.alarms = tree.alarms;
    live.alarmsAt = performance.now();
    live.alarmCounts = tree.counts;
    live.alarmsTotal = tree.total;
    changed("alarms");
  } else if (kind === "decisions") {
    live.lines = withFewEvents([...tree.decisions.reverse(), ...live.lines], SHOWN_EVENTS).slice(0, SHOWN_LINES);
    changed("decisions");
  } else if (kind === "missed") {
    live.missed += 1;
    changed("decisions");
  }
}

export async function start(): Promise<void> {
  const mine = ++generation;
  let tries = 0;
  live.asking = false;
  changed("who");
  while (mine === generation) {
    try {
      if (!live.who) {
        live.who = await get<any>("whoami");
        changed("who");
      }
      if (ownRowsAlone() || ownHallsAlone()) return;
      await Promise.all([
        live.layout ? null : readLayout(), Object.keys(live.words.signals).length ? null : get<typeof live.words>("words").then((w) => { live.words = w; }),
        last ? null : get("decisions?limit=60&events=few").then((d) => { live.lines = d.decisions; changed("decisions"); }),
      ]);
      aborter = new AbortController();
      await follow(last, (kind, tree, id) => { tries = 0; if (mine === generation) take(kind, tree, id); },
        () => { live.heardAt = performance.now(); }, aborter.signal);
    } catch (e) {
      if (e instanceof ApiError && (e.status === 401 || e.status === 403)) { forget(e.message); return; }
    }
    tries += 1;
    await new Promise((done) => setTimeout(done, Math.min(8000, 400 * 2 ** tries) * (0.5 + Math.random() / 2)));
  }
}

export function forget(why: string): void {
  generation += 1;
  aborter.abort();
  last = "";
  Object.assign(live, { state: null, layout: null, columns: {}, alarms: [], alarmsAt: 0, lines: [], who: null, asking: true, why, heardAt: 0, silent: "" });
  dropToken();
  changed("who");
}

const LATE_S = 3;

// A daemon that is silent, or does not tick, is seen within three seconds.
export function watch(): void {
  setInterval(() => {
    let why = "";
    if (live.heardAt && live.state) {
      const silentS = (performance.now() - live.heardAt) / 1000;
      const ageS = live.state.ticks.age_s + (performance.now() - live.stateAt) / 1000;
      const lateS = Math.max(LATE_S, 3 * live.state.ticks.every_s);
      // Its updates come each second: without one for longer, it is silent rather than slow.
      if (silentS > LATE_S || (ageS > lateS && silentS > 1.5)) why = `No update from the daemon for ${Math.round(silentS)} s: the values shown are old`;
      else if (ageS > lateS) why = `The daemon has not ticked for ${Math.round(ageS)} s: the values shown are old`;
    }
    if (why !== live.silent) {
      live.silent = why;
      changed("link");
    }
  }, 500);
}
