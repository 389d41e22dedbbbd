// Fleet: the halls of a hub with power, budget and share, and the division of shared feeders, loops and contracts.
import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { live, may, ownHallsAlone, useLive, usePoll } from "../live";
import { Act, DURATION, Empty, Failure, GLYPHS, Grid, Panel, REASON, Tabs, Tag } from "../parts";
import { part } from "../api";
import { History } from "./fleethistory";
import { Figure, Policies, Recent, Wrong, type Grave } from "./overview";
import { alike, hrefOf, instant, known, num, plural, quantity, span } from "../words";

interface Hold { id: string; author: string; budget_w: number; expires_ns: number; reason: string; halls: number }
interface Hall {
  hall: string; name: string; url: string | null; priority: number; power_w: number | null; demand_w: number | null; budget_w: number; held_w: number;
  guaranteed_w: number; most_w: number; headroom_w: number | null; age_s: number | null; heard: boolean; heard_pu: number | null; full: string; why: string;
  gpu_count: number | null; gpu_out_count: number | null; alarms: Record<string, number | null>; asked_w: number | null; holds: Hold[];
}
interface Share { hall: string; part_w: number; guaranteed_w: number; why: string }
interface Shared { feeder: string; kind: string; why: string; side: string; lost: boolean; budget_w: number | null; power_w: number | null; held_w: number | null; other_w: number | null; left_w: number | null; parts: Share[] }
interface Told { site: string; tick: number; role: string; simulated: boolean; authority: string; suspended: boolean; only: string[]; archive: string | null; halls: Hall[]; feeders: Shared[] }

const EVERY_MS = 2000, OLD_MS = 10_000; // between two answers, and from when on what is shown is called old
const SHOWN_BY_FILE = 12; // more halls begin with the gravest
const CONTROL = "rack.hall_budget_w";
const COLOURS = 6;

const local = (name: string): string => name.split("/").pop()!;
const over = (h: Hall): boolean => known(h.power_w) && h.power_w > h.budget_w * 1.01;
const grave = (h: Hall): string => (!h.heard ? "unknown" : over(h) || h.alarms.critical ? "critical" : h.alarms.warning ? "warning" : "ok");
const RANK: Record<string, number> = { critical: 0, unknown: 1, warning: 2, ok: 3 };
const sum = (values: (number | null)[]): number => values.filter(known).reduce((s, v) => s + v, 0);

// The problems that a person on duty must know first. A silent hall is unknown, and unknown is never healthy.
function told(t: Told): Grave[] {
  const out: Grave[] = [], each = (halls: Hall[], severity: string, text: (of: string) => string) => {
    if (halls.length) out.push({ severity, text: text(`${halls.slice(0, 6).map((h) => h.hall).join(", ")}${halls.length > 6 ? ` and ${num(halls.length - 6)} more` : ""}`) });
  };
  const rung = new Set(live.alarms.filter((a) => a.state !== "shelved").flatMap((a) => a.entities)); // told by alarms
  for (const f of t.feeders) if (f.lost && !rung.has(f.feeder)) out.push({ severity: "critical", text: `${local(f.feeder)}${f.side ? `, side ${f.side},` : ""} is lost: the halls below it reduce their load by priority` });
  for (const f of t.feeders) if (f.why && !f.lost) out.push({ severity: "warning", text: `${local(f.feeder)}: ${plainly(f.why)}` });
  each(t.halls.filter(over), "critical", (of) => `above its budget: ${of}`);
  each(t.halls.filter((h) => h.heard && h.alarms.critical), "critical", (of) => `critical alarms in ${of}`);
  each(t.halls.filter((h) => !h.heard && !rung.has(h.name)), "unknown", (of) => `no power reading from ${of}: power unknown, budget at the guaranteed share`);
  if (t.authority !== "act" || t.suspended) out.push({ severity: "warning", text: `hall_budgets is ${t.suspended ? "suspended" : `in authority ${t.authority}`}: no budget is lent, and each hall has its guaranteed share` });
  return out;
}

// Power inside the budget inside the most that a hall may have; a tick at its share, a dashed one at its forecast.
function PowerBar({ h }: { h: Hall }) {
  const most = Math.max(h.most_w, h.power_w ?? 0), at = (w: number) => (200 * w) / most, [power, budget, share, forecast] = alike([h.power_w, h.budget_w, h.guaranteed_w, h.demand_w], "W");
  const tone = over(h) ? "critical" : known(h.power_w) && h.power_w >= 0.97 * h.budget_w ? "warning" : "ok";
  const label = `${h.hall}: ${h.heard ? `draws ${power}` : "power unknown"}, budget ${budget}, guaranteed ${share}, forecast ${forecast}`;
  return <svg class={`hallbar b-${h.heard ? tone : "unknown"}`} viewBox="0 0 200 14" preserveAspectRatio="none" role="img" aria-label={label}><title>{label}</title>
    <rect class="whole" width="200" height="14" /><rect class="lent" width={at(h.budget_w)} height="14" />
    {known(h.power_w) && <rect class="drawn" y="3" width={at(h.power_w)} height="8" />}
    <line class="share" x1={at(h.guaranteed_w)} x2={at(h.guaranteed_w)} y1="0" y2="14" />
    {known(h.demand_w) && <line class="ahead" x1={at(Math.min(h.demand_w, most))} x2={at(Math.min(h.demand_w, most))} y1="0" y2="14" />}</svg>;
}

function Power({ h }: { h: Hall }) {
  const [power, budget] = alike([h.power_w, h.budget_w], "W");
  return <div class="hallpower"><PowerBar h={h} /><span class="num">{known(h.power_w) ? power : <span class="unknown">unknown</span>}<span class="soft"> of {budget}</span></span></div>;
}

function Name({ h }: { h: Hall }) {
  const kind = grave(h);
  return <div class="hallname"><span class="nobr"><span class={`t-${kind}`} aria-hidden="true">{GLYPHS[kind]}</span><span class="sr">{kind}</span> {ownHallsAlone() ? <b>{h.hall}</b> : <a class="entity" href={hrefOf("rack", h.name)}><b>{h.hall}</b></a>}</span>
    {h.url && <a class="own" href={h.url} rel="noreferrer noopener" target="_blank" title={`The page of ${h.hall}: ${h.url}`}><span class="its">its page </span>↗</a>}</div>;
}

function Alarms({ h }: { h: Hall }) {
  if (!h.heard) return <span class="unknown">unknown</span>;
  const rung = Object.entries(h.alarms).filter(([, n]) => n !== 0);
  if (!rung.length) return <span class="soft">none</span>;
  return <>{rung.map(([severity, n], i) => <>{i > 0 && " "}<Tag kind={severity}>{known(n) ? num(n) : "?"}<span class="sr"> {severity}</span></Tag></>)}</>;
}

function Gpus({ h }: { h: Hall }) {
  if (!known(h.gpu_count)) return <span class="unknown">unknown</span>;
  return <><span class="nobr">{num(h.gpu_count - (h.gpu_out_count ?? 0))}<span class="soft"> of {num(h.gpu_count)}</span></span>{h.gpu_out_count ? <b class="w nobr"> {num(h.gpu_out_count)} out</b> : null}</>;
}

function Heard({ h }: { h: Hall }) {
  if (!h.heard) return <Tag kind="unknown">{known(h.age_s) ? `silent, ${span(h.age_s)}` : "never reported"}</Tag>;
  return <><span class="nobr">{span(Math.round(h.age_s ?? 0))} ago</span>{known(h.heard_pu) && h.heard_pu < 0.995 ? <span class="w nobr" title="Share of its GPUs that report"> · {num(100 * h.heard_pu)} %<span class="its"> of its GPUs</span></span> : null}</>;
}

const READS: Record<string, string> = { feeder: "its meter reads", loop: "its flow and temperatures give", contract: "the load is" };

const scaleOf = (w: number): [number, string] => (w >= 2e6 ? [1e6, "MW"] : [1e3, "kW"]);

function Holding({ h, again }: { h: Hall; again: () => void }) {
  const [scale, unit] = scaleOf(h.most_w), from = (w: number) => String(Number((w / scale).toPrecision(4)));
  if (!may("operator")) return null;
  return <span class="hallacts"><Act small label="Hold" title={`Hold the budget of ${h.hall}`} text="While the hold is in force, the hall gets at most this budget and never less than its guaranteed share. Other halls may use the rest."
    fields={[{ name: "most", label: `At most, ${unit}`, kind: "number", value: from(h.budget_w), needed: true, hint: `From ${from(h.guaranteed_w)} to ${from(h.most_w)} ${unit}; now ${from(h.budget_w)} ${unit}` }, DURATION, REASON]}
    send={(v) => ({ method: "POST", path: "requests", body: { control: CONTROL, names: [h.name], hi: Number(v.most) * scale, for_s: Number(v.for_s), reason: v.reason } })} done={again} /></span>;
}

function Holds({ h, again }: { h: Hall; again: () => void }) {
  return <>{h.holds.map((x) => <p class="hold"><span class="chip c-warning">held to {quantity(x.budget_w, "W")}</span> by {x.author}{x.expires_ns ? ` until ${instant(x.expires_ns)}` : ""}: {x.reason}
    {x.halls === 1 && may("operator") && <> <Act small label="Release" title={`Release the budget of ${h.hall}`} fields={[]} send={() => ({ method: "DELETE", path: `requests/${part(x.id)}` })} done={again} /></>}</p>)}</>;
}

// A full name in a reason is a long one: the halls and feeders of a fleet go by their own.
const plainly = (why: string): string => why.replace(/[\w.-]+(\/[\w.-]+)+/g, local);

function Halls({ halls, again }: { halls: Hall[]; again: () => void }) {
  const [order, pick] = useState(halls.length > SHOWN_BY_FILE ? "grave" : "file");
  const shown = order === "file" ? halls : [...halls].sort((a, b) => RANK[grave(a)] - RANK[grave(b)] || Number(b.holds.length > 0) - Number(a.holds.length > 0) || b.priority - a.priority);
  return <Panel title={plural(halls.length, "hall")} class={`fleet-halls ${halls.length > SHOWN_BY_FILE ? "dense" : ""}`} more={halls.length > 1 && <Tabs label="Order" now={order} pick={pick} of={[["file", "As in the site file"], ["grave", "Gravest first"]]} />}>
    <p class="legend"><span class="swatch q-drawn">drawn</span><span class="swatch q-lent">budget</span><span class="swatch q-share">guaranteed share</span><span class="swatch q-ahead">forecast</span><span class="soft">The full bar is the maximum budget of the hall.</span></p>
    <Grid label="Halls" heads={["Hall", "Priority", "Power of budget", "Headroom", "Forecast", "GPUs in service", "Alarms", "Last report", "Reason for its budget", ""]} right={[1, 3, 4]}
      rows={shown.map((h) => [<Name h={h} />, num(h.priority), <Power h={h} />, known(h.headroom_w) ? <span class={h.headroom_w < 0 ? "w" : ""}>{quantity(h.headroom_w, "W")}</span> : <span class="unknown">unknown</span>,
        known(h.demand_w) ? quantity(h.demand_w, "W") : <span class="unknown">unknown</span>, <Gpus h={h} />, <Alarms h={h} />, <Heard h={h} />,
        <div class="why">{plainly(h.why)}<Holds h={h} again={again} /></div>, <Holding h={h} again={again} />])} />
  </Panel>;
}

const Width = ({ of, kind, label, children }: { of: number; kind: string; label: string; children?: ComponentChildren }) =>
  of <= 0 ? null : <span class={`piece ${kind}`} style={{ width: `${100 * of}%` }} title={label}><span>{children}</span></span>;

function Feeder({ f, colour, halls }: { f: Shared; colour: Map<string, number>; halls: Hall[] }) {
  const carries = f.budget_w ?? sum(f.parts.map((p) => p.part_w)), scale = Math.max(carries, sum(f.parts.map((p) => p.part_w)) + (f.other_w ?? 0)) || 1;
  const groups = f.parts.length > LABELLED ? byPriority(f.parts, halls) : f.parts.map((p) => ({ text: p.hall, part_w: p.part_w, colour: colour.get(p.hall)! }));
  const said = groups.map((g) => `${g.text} ${quantity(g.part_w, "W")}`).join(", ");
  return <div class="feeder">
    <p class="feeder-head"><b>{local(f.feeder)}</b>{f.kind !== "feeder" && <span class="soft"> {f.kind}</span>}{f.side && <span class="soft"> side {f.side}</span>}{f.lost ? <Tag kind="critical">lost</Tag> : <span class="soft"> {f.kind === "feeder" ? "may carry" : f.kind === "loop" ? "takes" : "lets in"} {quantity(f.budget_w, "W")}</span>}
      {known(f.power_w) && <span class="soft"> · {READS[f.kind]} {quantity(f.power_w, "W")}</span>}
      {f.why && <span class="w"> · {plainly(f.why)}</span>}
      {!f.lost && known(f.left_w) && <span class={f.left_w < -1000 ? "w" : "soft"}> · {f.left_w < -1000 ? <b>{quantity(-f.left_w, "W")} over-allocated</b> : <>{quantity(Math.max(0, f.left_w), "W")} left</>}</span>}
      {!f.lost && !known(f.held_w) && <span class="soft"> · the rest is not shown to this token</span>}</p>
    {f.lost ? <p class="empty">No hall holds a part of it.</p> : <div class="pieces" role="img" aria-label={`${local(f.feeder)}: ${said}`}>
      {groups.map((g) => <Width of={g.part_w / scale} kind={`p-${g.colour % COLOURS}`} label={`${g.text} ${quantity(g.part_w, "W")}`}><b>{g.text}</b> {quantity(g.part_w, "W")}</Width>)}
      <Width of={(f.other_w ?? 0) / scale} kind="p-other" label={`reserve and other loads: ${quantity(f.other_w, "W")}`}>others</Width>
    </div>}
  </div>;
}

const LABELLED = 8; // halls whose parts bear their names; more are shown by priority

// Parts of one priority as one.
function byPriority(parts: Share[], halls: Hall[]): { text: string; part_w: number; colour: number }[] {
  const of = new Map(halls.map((h) => [h.hall, h.priority])), found = new Map<number, Share[]>();
  for (const p of parts) found.set(of.get(p.hall)!, [...(found.get(of.get(p.hall)!) ?? []), p]);
  return [...found].sort(([a], [b]) => b - a).map(([priority, those], i) => ({ text: `priority ${priority}: ${plural(those.length, "hall")}`, part_w: sum(those.map((p) => p.part_w)), colour: i }));
}

function Feeders({ t }: { t: Told }) {
  const colour = new Map(t.halls.map((h, i) => [h.hall, i])), living = t.feeders.filter((f) => !f.lost), most = Math.max(0, ...living.map((f) => f.parts.length));
  const rows = t.halls.filter((h) => living.some((f) => f.parts.some((p) => p.hall === h.hall)));
  const shares = alike(rows.map((h) => living.flatMap((f) => f.parts).find((p) => p.hall === h.hall)!.guaranteed_w), "W");
  if (!t.feeders.length) return <Empty>The site file lists no feeder, loop or contract that the halls share.</Empty>;
  return <Panel title="Shared feeders, loops and contracts">
    {t.feeders.map((f) => <Feeder f={f} colour={colour} halls={t.halls} />)}
    <details open={most <= LABELLED}><summary>Parts and reasons</summary>
      <Grid label="Parts of shared feeders, loops and contracts" heads={["Hall", ...living.map((f) => local(f.feeder)), "Guaranteed of each", "Reason"]} right={[...living.map((_, i) => i + 1), living.length + 1]}
        rows={rows.map((h, i) => {
          const own = living.map((f) => f.parts.find((p) => p.hall === h.hall)), first = own.find(Boolean)!;
          return [<b class={most <= LABELLED ? `key-${colour.get(h.hall)! % COLOURS}` : ""}>{h.hall}</b>, ...own.map((p) => (p ? quantity(p.part_w, "W") : "–")), shares[i], plainly(first.why)];
        })} /></details>
  </Panel>;
}

function Figures({ t }: { t: Told }) {
  const heard = t.halls.filter((h) => h.heard), silent = t.halls.length - heard.length, out = sum(heard.map((h) => h.gpu_out_count)), gpus = sum(heard.map((h) => h.gpu_count));
  const [drawn, lent, ahead] = [heard.map((h) => h.power_w), t.halls.map((h) => h.budget_w), heard.map((h) => h.demand_w)].map(sum), lost = t.feeders.filter((f) => f.lost);
  const critical = sum(heard.map((h) => h.alarms.critical)), warning = sum(heard.map((h) => h.alarms.warning));
  const least = t.feeders.filter((f) => !f.lost && known(f.left_w)).sort((a, b) => a.left_w! - b.left_w!)[0], of = silent ? `; ${plural(silent, "hall")} unknown` : "";
  return <div class="figures">
    <Figure label="Power" tone={t.halls.some(over) ? "critical" : ""} under={<>{quantity(lent, "W")} lent{of}</>}>{heard.length ? quantity(drawn, "W") : <span class="unknown">unknown</span>}</Figure>
    <Figure label="Halls reporting" tone={silent ? "warning" : ""} under={silent ? `${num(silent)} silent: unknown` : "each within the last few seconds"}>{num(heard.length)}<span class="unit"> of {num(t.halls.length)}</span></Figure>
    <Figure label="GPUs" under={<>{!heard.length ? "" : out ? <b>{num(out)} out of service</b> : "none out of service"}{heard.length ? of : of.slice(2)}</>}>{heard.length ? <>{num(gpus - out)}<span class="unit"> of {num(gpus)} in service</span></> : <span class="unknown">unknown</span>}</Figure>
    <Figure label="Alarms in halls" tone={critical ? "critical" : warning ? "warning" : ""} under={heard.length ? <>{plural(warning, "warning")}{of}</> : of.slice(2)}>{heard.length ? <>{num(critical)}<span class="unit"> critical</span></> : <span class="unknown">unknown</span>}</Figure>
    <Figure label="Forecast" under={<>expected demand of the halls{of}</>}>{heard.some((h) => known(h.demand_w)) ? quantity(ahead, "W") : <span class="unknown">unknown</span>}</Figure>
    <Figure label="Shared feeders" tone={lost.length ? "critical" : ""} under={lost.length ? <b>{lost.map((f) => local(f.feeder)).join(", ")} lost</b> : least ? `least left: ${local(least.feeder)}` : "what is left is not shown to this token"}>
      {least ? <>{quantity(Math.max(0, least.left_w!), "W")}<span class="unit"> left</span></> : num(t.feeders.length)}</Figure>
  </div>;
}

// Seconds since the last answer once the values shown are old, else 0.
function useSilence(t: Told | null): number {
  const [at, set] = useState(performance.now()), [now, tick] = useState(performance.now());
  useEffect(() => set(performance.now()), [t]);
  useEffect(() => { const timer = setInterval(() => tick(performance.now()), 1000); return () => clearInterval(timer); }, []);
  return now - at > OLD_MS ? Math.round((now - at) / 1000) : 0;
}

export function Fleet() {
  useLive("who", "alarms");
  const { data: t, error, again } = usePoll<Told>("fleet", EVERY_MS), silence = useSilence(t), alone = ownHallsAlone();
  if (!t) return <div class="page"><h1>Fleet</h1>{error ? <Failure text={error} /> : <p class="soft">Loading …</p>}</div>;
  return <div class={`page fleet ${silence ? "late" : ""}`}>
    <h1 class={alone ? "" : "sr"}>{alone ? t.site : "Fleet"}</h1>
    {alone && <p class="soft">{t.simulated && <><span class="chip c-simulated">simulated</span> </>}{t.role !== "leader" && <><span class="chip c-warning">{t.role}</span> </>}The token {live.who?.name} can see only {t.only.join(", ")}.</p>}
    <Failure text={silence ? `no answer for ${silence} s: the values shown are old${error ? `; ${error}` : ""}` : error} />
    <Figures t={t} />
    {alone ? told(t).map((g) => <p class={`wrong w-${g.severity}`}><span class="mark" aria-hidden="true">{GLYPHS[g.severity]}</span><span>{g.text}</span></p>) : <Wrong more={told(t)} />}
    <Halls halls={t.halls} again={again} />
    <Feeders t={t} />
    {!alone && <><History halls={t.halls} archive={t.archive} /><Policies /><Recent /></>}
  </div>;
}
