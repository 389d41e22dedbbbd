// Overview: what is wrong and what is done about it, power against budget, cooling, GPUs, jobs, the halls.
import type { ComponentChildren } from "preact";
import { isHub, live, seenMargins, seenPower, useLive, usePoll, type Alarm, type Line } from "../live";
import { HallMap } from "../hallmap";
import { Chart, bridged, type Series } from "../chart";
import { Acknowledge, Bar, Entities, GLYPHS, Panel, Said, Tag, Value } from "../parts";
import { brief, clock, control, counted, hrefOf, instant, isInstant, known, table as tableWords, num, plural, quantity, short, since, span, tableOf, title } from "../words";

const SHOWN_ALARMS = 6;

// Number of entities that an alarm concerns: one for a device's own fault, whatever its count of readings.
export const concerned = (a: Alarm): number => (a.entities.length >= 4 ? Math.max(a.count, a.entities.length) : a.entities.length);

// Faults of one kind at several places are told once, the others by their places.
function alikeAlarms(alarms: Alarm[]): Alarm[][] {
  const out = new Map<string, Alarm[]>();
  for (const a of alarms) {
    const [head, kind] = a.id.split("/"), key = head === "fault" ? `${kind} ${a.severity} ${a.action} ${a.ack_author ?? ""}` : a.id;
    out.set(key, [...(out.get(key) ?? []), a]);
  }
  return [...out.values()];
}

// The racks that an alarm of coolant or air concerns.
function racksOf(a: Alarm): number[] {
  const l = live.layout!, out = new Set<number>();
  for (const e of a.entities) {
    const whole = e.split("#")[0], own = live.rowOf.get(whole), cdu = l.cdus.indexOf(whole);
    if (own !== undefined) out.add(own);
    else if (cdu >= 0) l.cdu.forEach((c, i) => { if (c === cdu) out.add(i); });
    else if (l.loops.includes(whole) || l.halls.includes(whole)) l.names.forEach((_, i) => { if (!l.halls.includes(whole) || l.halls[l.hall[i]] === whole) out.add(i); });
    else return [];
  }
  return [...out];
}

const STEADY_K_PER_MIN = 1; // the margins are shown in steps of half a kelvin
const AHEAD_S = 3600;

// The margin to the nearest temperature guard, and its trend.
function Spare({ a }: { a: Alarm }) {
  useLive("racks");
  const racks = racksOf(a), c = live.columns, margin = c.margin_k ?? [], read = racks.filter((i) => known(margin[i]));
  if (!read.length) return null;
  const at = read.reduce((x, y) => (margin[y]! < margin[x]! ? y : x)), k = margin[at]!, hot = Math.max(...racks.map((i) => c.gpu_temp_c?.[i] ?? -Infinity));
  const now = (live.state!.now_ns ?? 0) / 1e9, before = seenMargins.find((m) => m.t >= now - 60 && known(m.k[at])), over = before ? now - before.t : 0;
  const rate = over >= 20 ? (before!.k[at]! - k) / over : null, left = rate !== null && rate * 60 >= STEADY_K_PER_MIN && k > 0 ? k / rate : null;
  const trend = rate === null ? "" : left !== null && left <= AHEAD_S ? <b class="w">; at this rate, none left in {span(left)}</b> : rate * 60 <= -STEADY_K_PER_MIN ? "; it grows" : "; steady over the last minute";
  return <p class="where">{k <= 0 ? <b class="w">{short(live.layout!.names[at])} has reached a temperature guard</b> : <><b>{num(k, 1)} K</b> left to the temperature guard, least in {short(live.layout!.names[at])}</>}{hot > 0 && `, hottest GPU ${num(hot)} °C`}{trend}</p>;
}

export function Sentence({ a, more = [] }: { a: Alarm; more?: Alarm[] }) {
  const aside = a.state === "shelved" ? `shelved by ${a.shelf_author}: ${a.shelf_reason}` : a.ack_author ? `acknowledged by ${a.ack_author}${a.ack_note ? `: ${a.ack_note}` : ""}` : "";
  return <li class={`wrong w-${a.severity} ${aside ? "aside" : ""}`}>
    <span class="mark" aria-hidden="true">{GLYPHS[a.severity]}</span>
    <div>
      <p class="what"><a href={`#/alarms/${encodeURIComponent(a.id)}`}><span class="sr">{a.severity}: </span>{brief(a.title)}</a>
        {a.raised_ns ? <span class="soft"> since {instant(a.raised_ns)} ({since(a.raised_ns)} ago)</span> : null}{aside && <span class="soft"> · {aside}</span>}</p>
      <p class="where"><Entities names={a.entities} count={concerned(a)} />{a.evidence.length > 0 && <span class="soft"> · {a.evidence.slice(0, 3).map(brief).join(" · ")}</span>}</p>
      <Spare a={a} />
      {more.length > 0 && <p class="where"><b>{plural(more.length, "other")} like it:</b> <Entities names={more.map((m) => m.entities[0])} most={8} /></p>}
      {(a.doing ?? []).map((d) => <p class="doing"><b>racktwin:</b> {brief(d)}</p>)}
      {!a.doing?.length && <p class="doing soft">racktwin sends no command for this alarm.</p>}
      {a.action && <p class="do"><b>You:</b> <Said text={a.action} /> {!a.ack_author && a.severity !== "info" && <Acknowledge a={a} />}</p>}
    </div>
  </li>;
}

function unheard(): string[] {
  return Object.entries(live.state?.heard ?? {}).filter(([, c]: any) => c.heard < c.of).map(([t, c]: any) => `${num(c.of - c.heard)} of ${num(c.of)} ${tableWords(t, c.of)}`);
}

// The caps in force while nothing is wrong; the policies list the other commands.
function Capped() {
  const caps = live.state!.commanded.filter((c: any) => c.control.endsWith("power_cap_w")).sort((a: any, b: any) => b.count - a.count)[0];
  return caps ? <>; {counted(caps.control, caps.count)} {caps.count === 1 ? "is" : "are"} capped{caps.reasons[0] && <span class="soft">, as {brief(caps.reasons[0])}</span>}</> : null;
}

// A problem that a page finds beside the alarms of the daemon.
export interface Grave { severity: string; text: string }

export function Wrong({ more = [] }: { more?: Grave[] }) {
  useLive("alarms", "state");
  const rung = live.alarms.filter((a) => a.state !== "shelved"), c = live.alarmCounts;
  const missing = isHub() ? [] : unheard(), s = live.state!, groups = alikeAlarms(rung);
  const parts = s.parts.filter((p: any) => p.state !== "running");
  const head = [c.critical && plural(c.critical, "critical alarm"), c.warning && plural(c.warning, "warning"), c.info && plural(c.info, "notice")].filter(Boolean).join(", ");
  const over = s.alarms_missed as { total: number; alarms: Alarm[] }, calm = !head && !missing.length && !parts.length && !more.length;
  const guards = s.policies.filter((p: any) => p.urgent).map((p: any) => p.name), guarded = s.commanded.some((x: any) => guards.includes(x.policy));
  const fine = over.total ? `No alarm stands; ${plural(over.total, "cleared alarm")} not acknowledged` : guarded ? `${GLYPHS.info} No alarm stands` : "✓ Nothing is wrong";
  return <Panel title="What is wrong, and what is done about it" class="wrong-panel" more={<a href="#/alarms">All alarms</a>}>
    <p class={`headline ${c.critical || more.some((g) => g.severity === "critical") ? "h-critical" : c.warning || missing.length || parts.length || more.length ? "h-warning" : c.info || over.total || guarded ? "h-info" : "h-ok"}`}>
      {calm ? <>{fine}<Capped /></> : [more.length && `${plural(more.length, "problem")} in the fleet`, head].filter(Boolean).join(", ") || "No alarms, but not everything reports"}
      {c.shelved ? <span class="soft"> · {c.shelved} shelved</span> : null}{c.suppressed ? <span class="soft"> · {c.suppressed} suppressed as consequences</span> : null}
    </p>
    {more.map((g) => <p class={`wrong w-${g.severity}`}><span class="mark" aria-hidden="true">{GLYPHS[g.severity]}</span><span>{title(g.text)}</span></p>)}
    {missing.length > 0 && <p class="wrong w-warning"><span class="mark" aria-hidden="true">{GLYPHS.unknown}</span><span>No data from {missing.join(", ")}. <a href="#/setup">Set up</a> shows what arrives.</span></p>}
    {parts.map((p: any) => <p class="wrong w-warning"><span class="mark" aria-hidden="true">{GLYPHS.warning}</span><span>The {p.kind} {p.name} is {p.state}{p.error && `: ${p.error}`}.</span></p>)}
    <ul class="wrongs">{groups.slice(0, SHOWN_ALARMS).map(([a, ...more]) => <Sentence key={a.id} a={a} more={more} />)}</ul>
    {over.alarms.length > 0 && <><h3>Cleared, but not acknowledged</h3><ul class="wrongs">{over.alarms.map((a) => <li class="wrong aside" key={a.id}><span class="mark" aria-hidden="true">{GLYPHS[a.severity]}</span>
      <div><p class="what"><a href={`#/alarms/${encodeURIComponent(a.id)}`}><span class="sr">{a.severity}: </span>{brief(a.title)}</a> <span class="soft">from {instant(a.raised_ns!)} to {instant(a.cleared_ns!)} ({span((a.cleared_ns! - a.raised_ns!) / 1e9)})</span> <Acknowledge a={a} /></p></div></li>)}</ul>
      {over.total > over.alarms.length && <p class="soft">and {num(over.total - over.alarms.length)} more</p>}</>}
    {groups.length > SHOWN_ALARMS && <p><a href="#/alarms">and {num(groups.slice(SHOWN_ALARMS).reduce((n, g) => n + g.length, 0))} more</a></p>}
  </Panel>;
}

export function orders(c: any): string {
  if (isInstant(c.control)) return `${control(c.control)} of ${counted(c.control, c.count)}`;
  const at = c.means || (c.low === c.high ? quantity(c.low, c.unit) : `${quantity(c.low, c.unit)} to ${quantity(c.high, c.unit)}`);
  return `${control(c.control)} of ${counted(c.control, c.count)} at ${at}`;
}

// The effect of a policy on a control, in words.
export const holding = (c: any): string => (isInstant(c.control) ? `asks for a ${orders(c)}` : `holds the ${orders(c)}`);
export const wouldHold = (c: any): string => (isInstant(c.control) ? `would ask for a ${orders(c)}` : `would hold the ${orders(c)}`);

export function Policies() {
  useLive("state");
  const s = live.state!;
  const rows = s.policies.map((p: any) => {
    const of = (list: any[]) => list.filter((c: any) => c.policy === p.name), acts = of(s.commanded), wants = of(s.wanting), would = wants.length ? [] : of(s.preview);
    const waits = new Map<string, number>();
    for (const w of wants) waits.set(w.control, (waits.get(w.control) ?? 0) + w.count);
    const told = [...acts.map((c: any) => holding(c)), ...[...waits].map(([k, n]) => `waits for approval: ${control(k)} of ${counted(k, n)}`), ...would.map((c: any) => wouldHold(c))];
    // What the policy itself warns of
    const says = (s.sections.find((x: any) => x.policy === p.name)?.sentences ?? []).filter((x: any) => x.kind === "warning").slice(0, 1);
    return { p, told, says, why: [...acts, ...would].flatMap((c: any) => c.reasons).concat(wants.map((w: any) => w.reason)).slice(0, 1) };
  });
  const busy = rows.filter((r: any) => r.told.length || r.p.suspended || r.says.length), idle = rows.filter((r: any) => !busy.includes(r));
  const name = (p: any) => <><a href={`#/policies/${p.name}`}>{p.name.replaceAll("_", " ")}</a> <span class={`chip a-${p.authority}`}>{p.authority}</span></>;
  return <Panel title="What each policy does" more={<a href="#/policies">Policies</a>}>
    <ul class="policies">{busy.map(({ p, told, why, says }: any) => <li>{name(p)} {p.suspended && <Tag kind="critical">suspended</Tag>}
      <p>{told.length ? title(told.slice(0, 2).join("; ")) : s.mode === "normal" ? "Nothing to do now" : "Sends nothing: commands are released"}{why.length > 0 && <span class="soft">: {brief(why[0])}</span>}</p>
      {says.map((x: any) => <p class="w"><Said text={x.text} /></p>)}</li>)}</ul>
    {idle.length > 0 && <p class="idle"><span class="soft">{busy.length ? "The others have nothing to do now: " : "None has anything to do now: "}</span>{idle.map(({ p }: any) => <span class="nobr">{name(p)}</span>)}</p>}
  </Panel>;
}

function sum(column: (number | null)[] | undefined): number {
  return (column ?? []).reduce((t: number, v) => t + (v ?? 0), 0);
}

function least(column: (number | null)[] | undefined): [number, number] {
  let at = -1, low = Infinity;
  (column ?? []).forEach((v, i) => { if (known(v) && v < low) { low = v; at = i; } });
  return [at, low];
}

export function Figure({ label, href, children, under, tone }: { label: string; href?: string; children: ComponentChildren; under?: ComponentChildren; tone?: string }) {
  const kind = `figure ${tone ? `f-${tone}` : ""}`, told = <><span class="figure-label">{label}</span><span class="figure-value">{children}</span><span class="figure-under">{under}</span></>;
  return href === undefined ? <div class={kind}>{told}</div> : <a class={kind} href={href}>{told}</a>;
}

// The sum counts a rack that is silent as last read; where all are, it is unknown.
export function totalPower(): { w: number | null; unread: number; silent: number } {
  const c = live.columns.power_w ?? [], now = live.columns.reporting ?? [], unread = c.filter((v) => v === null).length, silent = c.filter((v, i) => v !== null && !now[i]).length;
  return { w: unread + silent < c.length ? sum(c) : null, unread, silent };
}

function Figures() {
  useLive("state", "racks");
  const s = live.state!, c = live.columns, { w, unread, silent } = totalPower();
  const sides = s.supply as { side: string; budget_w: number | null }[];
  const alone = sides.filter((x) => x.side).map((x) => x.budget_w).filter(known) as number[];
  const budget = alone.length === 2 ? Math.min(...alone) : sides.length && known(sides[0].budget_w) ? sides[0].budget_w : null;
  const share = known(w) && known(budget) ? w / budget : null;
  const [at, margin] = least(c.margin_k?.map((v, i) => (c.reporting[i] ? v : null))), j = s.judged, gpus = s.sizes.gpu;
  const capped = sum(c.capped), repair = sum(c.repair), out = Math.max(sum(c.out), repair), failed = sum(c.failed), unknown = j?.table === "gpu" ? j.unknown : 0;
  const suspected = sum(c.suspected);
  return <div class="figures">
    <Figure label="Power" href="#/power" tone={share !== null && share >= 1 ? "critical" : share !== null && share >= 0.9 ? "warning" : ""}
      under={<>{share !== null ? <><Bar share={share} label={`${Math.round(share * 100)} % of the budget`} /> {Math.round(share * 100)} % of {quantity(budget, "W")}{alone.length === 2 ? ", what one side carries alone" : ""}</> : "no budget is known"}{unread > 0 && known(w) ? `; ${plural(unread, "rack")} unread` : ""}{silent > 0 ? `; ${plural(silent, "rack")} silent${known(w) ? ", as last read" : ""}` : ""}</>}>
      <Value v={w} unit="W" /></Figure>
    <Figure label="Cooling margin" href="#/cooling" tone={margin < 2 ? "critical" : margin < 5 ? "warning" : ""}
      under={at >= 0 ? <>least in {short(live.layout!.names[at])}; left to its guard</> : "no temperature with a guard is reported"}>
      {at >= 0 ? <Value v={margin} unit="K" /> : <span class="unknown">unknown</span>}</Figure>
    <Figure label="GPUs" href="#/replacement" tone={failed ? "critical" : suspected || out ? "warning" : ""}
      under={<>{capped ? <b>{num(capped)} capped</b> : "none capped"} · {out ? <b>{num(out)} out{repair ? `, ${repair >= out ? "" : `${num(repair)} `}need repair` : ""}</b> : "none out"}{failed ? <> · <b>{num(failed)} failed</b></> : ""}{suspected ? ` · ${num(suspected)} suspected` : ""}{unknown ? ` · ${num(unknown)} not judged yet` : ""}</>}>
      {num(gpus - out)}<span class="unit"> of {num(gpus)} in service</span></Figure>
    <Demand />
    <Figure label="Jobs" href="#/jobs" under={s.windows.length ? plural(s.windows.length, "maintenance window") : "no maintenance"}>{num(s.jobs)}<span class="unit"> running</span></Figure>
    <Today />
  </div>;
}

// What jobs hold and wait for, what is expected at most, and what the grid or others ask for.
function Demand() {
  const s = live.state!, gpus = s.sizes.gpu, row = (s.forecasts?.rows ?? []).find((r: any) => r.signal === "site.power_w");
  const most = Math.max(...(row?.ahead ?? []).filter((a: any) => a.horizon_s <= 3600).map((a: any) => a.hi).filter(known), -Infinity);
  const targets = usePoll<any>(s.load_targets ? "load-targets?limit=200" : null, 10_000).data?.targets ?? [];
  const over = targets.filter((t: any) => t.runs && t.within === false).length, unsure = targets.filter((t: any) => t.runs && t.within === null).length, ahead = targets.filter((t: any) => !t.runs).length;
  const said = !s.load_targets ? "no load target" : !targets.length ? plural(s.load_targets, "load target") : over ? <b>{num(over)} of {plural(targets.length, "load target")} exceeded</b> : `${plural(targets.length, "load target")}${unsure ? `, ${num(unsure)} not known to be kept` : ahead === targets.length ? " to come" : " kept"}`;
  const q = s.queue, waits = !known(q?.jobs) && !known(q?.gpus) ? "queue not reported" : [known(q.jobs) && plural(q.jobs, "job"), known(q.gpus) && plural(q.gpus, "GPU")].filter(Boolean).join(" on ") + " waiting";
  return <Figure label="Demand" href="#/power" tone={over ? "critical" : ""} under={<>{most > 0 ? `forecast: at most ${quantity(Math.max(most, totalPower().w ?? 0), "W")} within an hour (95 %)` : "no forecast yet"} · {waits} · {said}</>}>
    {num(s.asked_gpus)}<span class="unit"> of {num(gpus)} GPUs granted to jobs</span></Figure>;
}

// The account of the day so far; a ledger of money is another matter.
function Today() {
  const got = usePoll<any>("today", 10_000), d = got.data, a = d?.alarms;
  const rung = a ? a.critical + a.warning + a.info : 0;
  return <Figure label="Today (UTC)" href="#/decisions" under={!d ? got.error || "counting …" : d.cappings === null ? d.notes[0] : <span title={d.notes.join("; ")}>{known(d.energy_wh) && "with cooling and losses, as in the ledger · "}{d.cappings ? <><b>capped {plural(d.cappings, "time")}</b>, {span(Math.round(d.capped_s))}</> : d.capped_s ? `capped ${span(Math.round(d.capped_s))}` : "never capped"} · {plural(d.saves, "report")} of saves · {d.nodes_out ? `${plural(d.nodes_out, "node")} taken out` : "no node taken out"} · {plural(rung, "alarm")}{a.critical ? `, ${num(a.critical)} critical` : ""}</span>}>
    {d ? <Value v={d.energy_wh} unit="Wh" /> : <span class="soft">…</span>}</Figure>;
}

export function PowerChart({ height = 230, fill = false }: { height?: number; fill?: boolean }) {
  useLive("state");
  const s = live.state!;
  const got = usePoll<any>(s.history && s.racks_total ? "history?signal=site.power_w&last_s=1800&step=10" : null, 10_000);
  const row = (s.forecasts?.rows ?? []).find((r: any) => r.signal === "site.power_w");
  const now = s.now_ns / 1e9, w = totalPower().w;
  const t: number[] = [], y: (number | null)[] = [];
  if (got.data) got.data.t_ns.forEach((ns: number, i: number) => { t.push(ns / 1e9); y.push(got.data.values[s.site]?.[i] ?? null); });
  if (!s.history) seenPower.t.forEach((at, i) => { if (at > now - 1800) { t.push(at); y.push(seenPower.w[i]); } });
  while (t.length && t[t.length - 1] >= now) { t.pop(); y.pop(); }
  t.push(now); y.push(w);
  const ahead = (row?.ahead ?? []).filter((a: any) => a.horizon_s <= 3600).sort((a: any, b: any) => a.horizon_s - b.horizon_s);
  const mean: (number | null)[] = t.map(() => null), lo = [...mean], hi = [...mean];
  if (ahead.length) { mean[t.length - 1] = lo[t.length - 1] = hi[t.length - 1] = w; }
  for (const a of ahead) { t.push(now + a.horizon_s); y.push(null); mean.push(a.mean); lo.push(a.lo); hi.push(a.hi); }
  const series: Series[] = [{ label: "measured", y: bridged(t, y), colour: "main" }];
  if (ahead.length) series.push({ label: "forecast", y: mean, colour: "expected", dash: true, band: [lo, hi] });
  const most = Math.max(...[...y, ...hi].filter(known) as number[], 0);
  const outside: string[] = [];
  for (const side of s.supply as { side: string; budget_w: number | null }[]) {
    if (!known(side.budget_w)) continue;
    const label = side.side ? `side ${side.side} alone carries` : "budget";
    if (side.budget_w <= most * 2.2) {
      const same = series.find((x) => x.colour === "limit" && x.y[0] === side.budget_w);
      if (same) same.label = "one side alone carries";
      else series.push({ label, y: t.map(() => side.budget_w), colour: "limit", dash: true });
    } else outside.push(`${label} ${quantity(side.budget_w, "W")}`);
  }
  return <>
    {t.length < 2 ? <p class="soft">Measured values begin with the next update.</p> : <Chart t={t} series={series} unit="W" label="Power of the site" height={height} now={now} low={0} fill={fill} />}
    <p class="soft chart-foot">{outside.length > 0 && <>Off the scale: {outside.join(", ")}. </>}{!s.history && "This daemon keeps no history of its own: measured values begin with this page. "}{got.error && <>Recorded values: {got.error}. </>}
      {!ahead.length && (s.forecasts?.awaited ? brief(s.forecasts.awaited.split(".")[0]) + "." : "No forecast of the site's power.")}</p>
    {(s.forecasts?.budgets ?? []).map((b: string) => <p class="wrong w-warning"><span class="mark" aria-hidden="true">{GLYPHS.warning}</span><span>{title(brief(b))}</span></p>)}
  </>;
}

export function Overview() {
  useLive("state", "alarms");
  if (!live.state) return null;
  // The columns come out about as high as each other: the policies stand below the shorter one, or below both.
  const wrong = alikeAlarms(live.alarms.filter((a) => a.state !== "shelved")).length, place = wrong === 0 ? "left" : wrong <= 3 ? "below" : "right";
  return <div class="page overview">
    <h1 class="sr">Overview</h1>
    <Figures />
    <div class={`two ${wrong ? "urgent" : ""} ${place === "right" ? "" : "even"}`}>
      <div class="stack"><Wrong />{place === "left" && <Policies />}</div>
      <div class="stack"><Panel title="Power, last 30 min and what is expected" class={place === "right" ? "" : "tall"}><PowerChart height={place === "left" ? 300 : 230} fill={place !== "right"} /></Panel>{place === "right" && <Policies />}</div>
    </div>
    {place === "below" && <Policies />}
    <Panel title={`Halls: ${plural(live.state.racks_total, "rack")}`}><Equipment /><HallMap /></Panel>
    <Recent />
  </div>;
}

// Lines of one kind that say the same but for numbers and instants, as one; the newest first.
export function folded<T extends Line>(lines: T[]): T[][] {
  const out: T[][] = [], shape = (l: Line) => `${l.kind} ${l.text.replace(/[\d.:]+/g, "#").slice(0, 60)}`;
  for (const l of lines) {
    const near = out.slice(-4).find((g) => shape(g[0]) === shape(l) && g.at(-1)!.now_ns - l.now_ns < 60e9);
    if (near) near.push(l);
    else out.push([l]);
  }
  return out;
}

// CDUs, loops and feeders with the gravest alarm of each; of many, those with an alarm alone.
function Equipment() {
  useLive("alarms");
  const l = live.layout!, of = new Map<string, Alarm>();
  for (const a of live.alarms) if (a.state !== "shelved") for (const e of a.entities) if (!of.has(e)) of.set(e, a);
  const all = [...l.loops, ...l.cdus, ...l.feeders], shown = all.length <= 24 ? all : all.filter((n) => of.has(n)).slice(0, 60);
  if (!all.length) return null;
  const heard = live.state!.heard, quiet = (t: string) => heard[t] && heard[t].heard < heard[t].of;
  return <p class="equipment">{shown.map((n) => { const a = of.get(n), state = a ? a.severity : quiet(tableOf(n)) ? "unknown" : "ok"; return <a class={`tile r-${state}`} href={hrefOf(tableOf(n), n)} title={a ? `${n}: ${a.title}` : n}><span aria-hidden="true">{GLYPHS[state]}</span> {short(n)}{state === "unknown" && <span class="sr"> unknown</span>}{a && <span class="sr"> {a.severity}: {a.title}</span>}</a>; })}
    {all.length > shown.length && <span class="soft">{shown.length ? "and " : ""}{num(all.length - shown.length)} CDUs, loops and feeders without an alarm</span>}</p>;
}

const NOISE = ["daemon", "upkeep", "leader", "narrowed", "account"];

// The latest lines alike in one, with at most two of events: these must not crowd out what was commanded.
function latest(): Line[][] {
  let events = 0;
  return folded(live.lines.filter((l) => !NOISE.includes(l.kind) && !/^(EpochChanged|TicksSkipped)/.test(l.text))).filter(([l]) => l.kind !== "event" || ++events <= 2).slice(0, 8);
}

export function Recent() {
  useLive("decisions");
  return <Panel title="Latest decisions" more={<a href="#/decisions">Decisions</a>}>
    <ul class="lines">{latest().map(([l, ...more]) => <li><time class="num">{clock(l.now_ns)}</time> <span class={`kind k-${l.kind}`}>{l.kind.replaceAll("_", " ")}</span> <span title={l.text}>{brief(l.text)}</span>{more.length > 0 && <span class="soft"> · {num(more.length + 1)} such since {clock(more.at(-1)!.now_ns)}</span>}</li>)}</ul>
  </Panel>;
}

