// What if: a scenario simulated from the present state with and without the policies; plots both.
import { useEffect, useState } from "preact/hooks";
import { act } from "../api";
import { live, may, useLive, usePoll } from "../live";
import { Chart, type Series } from "../chart";
import { Empty, Explained, Failure, GLYPHS, Grid, Panel, Tag, announce } from "../parts";
import { useTopology, wanted } from "./supply";
import { brief, instant, known, num, plural, quantity, short, since, span, title, words } from "../words";

const CURVES: Record<string, [string, string, number]> = {
  it_power_kw: ["IT power", "W", 1000], hottest_gpu_c: ["Hottest GPU", "degC", 1], lowest_flow_lpm: ["Least coolant flow of a rack", "l/min", 1], warmest_supply_c: ["Warmest coolant supply", "degC", 1], throttled_gpus: ["GPUs slowed by heat", "count", 1],
};
const UNITS: [RegExp, string][] = [[/_kwh$/, "kWh"], [/_temp_c$/, "degC"], [/_lpm$/, "l/min"], [/_s$/, "s"], [/_usd$/, "USD"], [/_kg$/, "kg"], [/_l$/, "l"], [/_gpu_h$/, "GPU h"]];

const FIGURES: Record<string, string> = {
  first_throttle_s: "First GPU slowed by heat after", throttled_gpu_s: "GPU time slowed by heat", throttled_gpus: "GPUs slowed by heat", shut_down_gpus: "GPUs shut down", breaker_trips: "Breakers tripped", highest_gpu_temp_c: "Hottest GPU", lowest_rack_flow_lpm: "Least coolant flow of a rack",
  it_energy_kwh: "IT energy", total_energy_kwh: "Total energy", pue: "PUE (total energy per IT energy)", cost_usd: "Cost", carbon_kg: "CO₂", water_l: "Water", done_work_gpu_h: "Work done", lost_work_gpu_h: "Work lost", checkpoint_gpu_h: "Spent on saves", slowed_work_gpu_h: "Work slowed by caps or heat", interrupted_jobs: "Jobs interrupted", commands: "Commands", faults_told: "Faults reported",
};

function figure(name: string, v: unknown): string {
  if (!known(v)) return name === "first_throttle_s" ? "never" : "–";
  if (/_gpu_s$/.test(name)) return `${num(v)} GPU s`;
  const unit = UNITS.find(([r]) => r.test(name))?.[1] ?? "";
  return unit && ["kWh", "USD", "kg", "l", "GPU h"].includes(unit) ? `${num(v, Math.abs(v) < 10 ? 2 : 0)} ${unit}` : quantity(v, unit);
}

type Kind = "feed" | "pump" | "heat" | "racks" | "budget" | "setting" | "authority" | "blocked";
const KINDS: [Kind, string][] = [["feed", "Lose a feed"], ["pump", "Lose a pump"], ["heat", "Heat wave"], ["blocked", "A rack loses its coolant"], ["racks", "More racks"], ["budget", "Another budget"], ["setting", "Another setting of a policy"], ["authority", "Another authority"]];

export function WhatIf({ id }: { id: string }) {
  useLive("state", "who");
  const got = usePoll<any>("simulations", 2000), runs = got.data?.simulations ?? [], running = runs.find((r: any) => r.state === "running");
  const shown = id || runs.find((r: any) => r.state === "done")?.id || "";
  return <div class="page">
    <h1>What if</h1>
    <p class="soft">Simulates the site ahead from its present state, twice: with the policies, and with nobody acting. A simulation sends no commands.</p>
    <Failure text={got.error} />
    {running ? <Running run={running} runs={runs} again={got.again} /> : <Ask again={got.again} />}
    <MoreRacks />
    {shown && <Outcome key={shown} id={shown} />}
    <Panel title="Recent runs">{runs.length > 0 && <Grid label="Runs" heads={["What if", "Started by", "Initial state", "Took", "Outcome"]} rows={runs.map((r: any) => [<a href={`#/whatif/${r.id}`}>{r.name}</a>, r.author, instant(r.from_ns), r.ended_ns ? span((r.ended_ns - r.begun_ns) / 1e9) : "runs", r.state === "failed" ? <><Tag kind="critical">failed</Tag> {r.error}</> : r.state === "done" ? <Tag kind="ok">done</Tag> : r.state])} />}
      {!runs.length && <Empty>No runs yet. The daemon keeps the last five until it restarts.</Empty>}</Panel>
  </div>;
}

// Asks the policy that serves the topic, from recorded history without simulation, if more racks fit on a feeder.
function MoreRacks() {
  const tree = useTopology(), [asked, ask] = useState<{ feeder: string; n: number; risk: string } | null>(null);
  const got = usePoll<any>(asked ? `power/fit?form=explanation&feeder=${encodeURIComponent(asked.feeder)}&risk=${asked.risk}` : null, 600_000), e = got.data;
  const feeders = (tree?.feeders ?? []).filter((f) => f.racks.length);
  const figure = (name: string): unknown => e?.figures.find((f: any) => f.name === name)?.value;
  const verdict = (label: string, name: string) => { const v = figure(name); return known(v) ? <li><Tag kind={v >= asked!.n ? "ok" : "warning"}>{v >= asked!.n ? "fits" : "does not fit"}</Tag> {label}: {plural(v, "rack")}</li> : <li><Tag kind="unknown">unknown</Tag> {label}</li>; };
  if (!feeders.length) return null;
  return <Panel title="Do more racks fit?">
    <form class="ask" onSubmit={(ev) => { ev.preventDefault(); const v = new FormData(ev.currentTarget); ask({ feeder: String(v.get("more_feeder")), n: Number(v.get("more")), risk: String(v.get("risk")) }); }}>
      <div class="row wrap fields">
        <label>Racks<input name="more" inputMode="numeric" defaultValue="12" required pattern="[0-9]+" /></label>
        <label>On the feeder<select name="more_feeder">{feeders.slice(0, 1000).map((f) => <option value={f.name}>{short(f.name)}</option>)}</select></label>
        <label>Risk that a limit is exceeded<select name="risk">{[["0.001", "0.1 % per hour"], ["0.01", "1 % per hour"], ["0.05", "5 % per hour"]].map(([v, t]) => <option value={v} selected={v === "0.01"}>{t}</option>)}</select></label>
        <button type="submit" class="main">Ask</button></div></form>
    {asked && !e && !got.error && <p class="soft">Loading …</p>}
    <Failure text={got.error} />
    {e && asked && <><h3>{plural(asked.n, "more rack")} on {short(asked.feeder)}</h3>
      <ul class="plain">{verdict("by nameplate, if one side fails", "lost.nameplate")}{verdict("by their peaks, if one side fails", "lost.peaks")}{verdict("with diversity, the lower end, if one side fails", "lost.low")}{verdict("by nameplate, while both sides live", "both.nameplate")}{verdict("with diversity, the lower end, while both sides live", "both.low")}</ul>
      <Explained e={e} figures={false} />
      <p class="soft">The capacity of a CDU or loop comes from the profiles of its racks. If the plant was built for more, the result is too low. <b>More racks</b> above simulates power and heat.</p></>}
  </Panel>;
}

function Running({ run, runs, again }: { run: any; runs: any[]; again: () => void }) {
  const [, turn] = useState(0), paces = runs.filter((r) => r.state === "done").map((r) => (r.ended_ns - r.begun_ns) / 1e9 / r.asked.horizon_s).sort((a, b) => a - b);
  const usual = paces.length ? paces[Math.floor(paces.length / 2)] * run.asked.horizon_s : null;
  useEffect(() => { const t = setInterval(() => turn((n) => n + 1), 1000); return () => clearInterval(t); }, []);
  return <Panel title={`Runs: ${run.name}`} class="w-panel"><div class="row"><p class="grow" role="status">Started by {run.author}, running for {span(Math.max(0, Math.round(Date.now() / 1e3 - run.begun_ns / 1e9)))}; simulates {span(run.asked.horizon_s)} twice{known(usual) ? `; recent runs suggest about ${span(usual)} in all` : "; the duration on this host is not known yet"}.</p>
    <button type="button" class="small" disabled={!may("operator")} onClick={() => act("DELETE", `simulations/${run.id}`).then(again, again)}>Cancel</button></div></Panel>;
}

function Ask({ again }: { again: () => void }) {
  const tree = useTopology(), [kind, setKind] = useState<Kind>(wanted.kind as Kind), [error, setError] = useState(""), s = live.state!, policies = usePoll<any>("policies", 60_000).data?.policies ?? [], profiles = usePoll<any>(kind === "racks" ? "site" : null, 600_000).data;
  const [policy, setPolicy] = useState("");
  const feeders = (tree?.feeders ?? []).filter((f) => f.side), cdus = tree?.cdus ?? [], racks = live.layout!.names;
  const withSettings = policies.filter((p: any) => p.settings.length), chosen = withSettings.find((p: any) => p.name === policy) ?? withSettings[0];
  const options = (names: string[], name: string) => <label>{title(name)}<select name="entity">{names.slice(0, 1000).map((n) => <option value={n} selected={n === wanted.entity}>{short(n)}</option>)}</select></label>;
  const allowed = may("operator");
  const missing = kind === "feed" && !feeders.length ? "The site file names no feeder with a side." : (kind === "pump") && !cdus.length ? "The site has no CDU." : "";
  return <Panel title="Ask">
    <form class="ask" onSubmit={async (e) => {
      e.preventDefault();
      const v = Object.fromEntries([...new FormData(e.currentTarget).entries()].map(([k, x]) => [k, String(x)])), horizon = Number(v.horizon), begin = Number(v.begin);
      const label = KINDS.find(([k]) => k === kind)![1], body: any = { name: label, horizon_s: horizon };
      const fault = (name: string, more: any) => { body.faults = [{ kind: name, begin_s: begin, ...more }]; };
      if (kind === "feed") { fault("feed_lost", { entity: v.entity, ...(v.back ? { end_s: begin + Number(v.back) } : {}) }); body.name = `${label}: ${short(v.entity)}`; }
      if (kind === "pump") { fault("pump_trip", { entity: v.entity, part: v.part }); body.name = `${label}: ${short(v.entity)}`; }
      if (kind === "heat") { fault("heat_wave", { severity: Number(v.kelvin) / 20, ramp_s: 600 }); body.name = `${label}: ${v.kelvin} K`; }
      if (kind === "blocked") { fault("branch_blocked", { entity: v.entity }); body.name = `${short(v.entity)} loses its coolant`; }
      if (kind === "racks") {
        body.more_racks = { count: Number(v.count), beside: v.entity, ...(v.profile ? { profile: v.profile } : {}), ...(v.load ? { load_pu: Number(v.load) } : {}) };
        body.name = `${plural(Number(v.count), "more rack")} beside ${short(v.entity)}${v.profile ? `, ${v.profile}` : ""}`;
      }
      if (kind === "budget") { body.budget_pu = Number(v.percent) / 100; body.name = `Budgets at ${v.percent} %`; }
      if (v.arm === "all") { body.policies = Object.fromEntries(s.policies.filter((p: any) => p.authority !== "off").map((p: any) => [p.name, "act"])); }
      if (kind === "authority") { body.policies = { [v.policy]: v.level }; body.name = `${v.policy} at ${v.level}`; }
      if (kind === "setting" && chosen) {
        const was = chosen.settings.find((x: any) => x.name === v.setting)?.value, raw = v.value.trim();
        const value = typeof was === "boolean" ? raw === "true" || raw === "yes" : raw !== "" && !Number.isNaN(Number(raw)) ? Number(raw) : raw;
        body.settings = { [chosen.name]: { [v.setting]: value } };
        body.name = `${chosen.name}: ${v.setting} = ${raw}`;
      }
      try { const run = await act("POST", "simulations", body); setError(""); announce(`${body.name}: begun`); location.hash = `#/whatif/${run.id}`; again(); } catch (why) { setError((why as Error).message); }
    }}>
      <div class="tabs" role="group" aria-label="Scenario">{KINDS.map(([k, t]) => <button type="button" class="small" aria-pressed={k === kind} onClick={() => setKind(k)}>{t}</button>)}</div>
      <div class="row wrap fields">
        {kind === "feed" && <>{options(feeders.map((f) => f.name), "feed")}<label>Back after<select name="back"><option value="">not within the run</option><option value="300">5 min</option><option value="900">15 min</option></select></label></>}
        {kind === "pump" && <>{options(cdus.map((c) => c.name), "CDU")}<label>Pump<select name="part"><option value="1">1</option><option value="2">2</option><option value="both">both</option></select></label></>}
        {kind === "heat" && <label>Hotter by<select name="kelvin">{[5, 8, 12, 16, 20].map((k) => <option value={k} selected={k === 12}>{k} K</option>)}</select></label>}
        {kind === "blocked" && options(racks, "rack")}
        {kind === "racks" && <><label>Racks<input name="count" inputMode="numeric" defaultValue="12" required pattern="[0-9]+" /></label>{options(racks, "beside rack")}
          <label>Type<select name="profile"><option value="">same as that rack</option>{[...(profiles?.profiles ?? []), ...(profiles?.packaged ?? []).filter((p: string) => !profiles.profiles.includes(p))].map((p: string) => <option value={p}>{p}</option>)}</select></label>
          <label>Their GPUs<select name="load"><option value="">as busy as the busy GPUs now</option><option value="1">fully busy</option><option value="0.5">half busy</option><option value="0">idle</option></select></label></>}
        {kind === "budget" && <label>All budgets at, %<input name="percent" inputMode="decimal" defaultValue="80" required pattern="[0-9.]+" /></label>}
        {kind === "setting" && chosen && <><label>Policy<select onChange={(e) => setPolicy(e.currentTarget.value)}>{withSettings.map((p: any) => <option value={p.name} selected={p === chosen}>{p.name}</option>)}</select></label><label>Setting<select name="setting">{chosen.settings.map((x: any) => <option value={x.name}>{x.name} (now {String(x.value)})</option>)}</select></label><label>Value<input name="value" required /></label></>}
        {kind === "authority" && <><label>Policy<select name="policy">{s.policies.map((p: any) => <option value={p.name}>{p.name} (now {p.authority})</option>)}</select></label><label>Authority<select name="level">{["off", "advise", "act"].map((x) => <option>{x}</option>)}</select></label></>}
        {!["budget", "setting", "authority", "racks"].includes(kind) && <label>Begins after<select name="begin">{[[60, "1 min"], [300, "5 min"], [600, "10 min"]].map(([v, t]) => <option value={v}>{t}</option>)}</select></label>}
        {kind !== "authority" && <label>Policies<select name="arm"><option value="now">as they stand now</option><option value="all">all act</option></select></label>}
        <label>Run ahead<select name="horizon">{[[600, "10 min"], [1800, "30 min"], [3600, "1 h"], [14400, "4 h"]].map(([v, t]) => <option value={v} selected={v === 1800}>{t}</option>)}</select></label>
        <button type="submit" class="main" disabled={!allowed || !!missing} title={allowed ? "" : "needs the role operator"}>Run it</button>
      </div>
      {kind === "racks" && <p class="soft">The new racks join the hall, feeders and CDU of that rack. CDUs, loops and feeders keep their capacity.</p>}
      {missing && <p class="soft">{missing}</p>}
      {!allowed && <p class="soft">Only operators and administrators start runs; this token has the role {live.who?.role}.</p>}
      {error && <p class="failure" role="alert">{error}</p>}
    </form></Panel>;
}

// Limits that are reached, with times, and the nearest of the others.
function Limits({ policies, nothing }: { policies: any[]; nothing: any[] }) {
  if (!policies.length && !nothing.length) return null;
  const list = (rows: any[]) => <ul class="plain">{rows.slice(0, 6).map((r) => <li><Tag kind={known(r.reached_s) ? "critical" : r.used_pu >= 0.9 ? "warning" : "ok"}>{known(r.reached_s) ? "reached" : quantity(r.used_pu, "1")}</Tag> {title(brief(r.text))}</li>)}</ul>;
  const broken = policies.filter((r) => known(r.reached_s));
  return <><h3>What binds first</h3><p class="said s-summary">{broken.length ? <><Tag kind="critical">beyond a limit</Tag> With the policies, {plural(broken.length, "limit")} of these {broken.length === 1 ? "is" : "are"} reached; the first: {brief(broken[0].text)}</> : <><Tag kind="ok">within all limits</Tag> With the policies, no known limit is reached.</>}</p><div class="two"><div><h4>With the policies</h4>{list(policies)}</div><div><h4>Nobody acts</h4>{list(nothing)}</div></div></>;
}

// The value of a series of (second, value) that is nearest to a second, within 15 s.
function at(series: [number, number | null][], s: number): number | null {
  let best: number | null = null, off = 15;
  for (const [t, v] of series) if (Math.abs(t - s) <= off) { off = Math.abs(t - s); best = v; }
  return best;
}

function Outcome({ id }: { id: string }) {
  const [run, set] = useState<any>(null), over = run && run.state !== "running", got = usePoll<any>(over ? null : `simulations/${id}`, 1500);
  useEffect(() => { if (got.data) set(got.data); }, [got.data]);
  const r = run?.result, asked = live.state?.history && run?.state === "done" && known(run.asked.before);
  const told = usePoll<any>(asked ? `history?signal=site.power_w&since=${run.from_ns}&until=${run.from_ns + Math.round(run.asked.horizon_s * 1e9)}&step=10` : null, 30_000).data;
  const measured: [number, number | null][] = told ? told.t_ns.map((ns: number, i: number) => [(ns - run.from_ns) / 1e9, told.values[live.state!.site]?.[i] ?? null]) : [];
  if (!run || run.state === "running") return <Failure text={got.error} />;
  if (run.state === "failed") return <Panel title={run.name}><Failure text={run.error} /></Panel>;
  if (!r) return null;
  const one = r.cases[0], names = Object.keys(one.policies ?? {}).filter((k) => !["faults", "limits"].includes(k) && (known(one.policies[k]) || known(one.nothing?.[k])));
  const differ = names.filter((k) => one.policies[k] !== one.nothing?.[k]);
  const t: number[] = r.curves?.policies?.time_s ?? r.curves?.nothing?.time_s ?? [], past = run.asked.before !== null && run.asked.before !== undefined;
  return <Panel title={run.name} more={<span class="chip c-simulated">simulated</span>}>
    {past && <p>One line is measured. The two other lines are simulated from the state just before the decision, {instant(run.from_ns)}: one with the policies deciding as they did then, one with nobody acting, so that all running commands lapse. The difference between the first simulated line and the measured line shows how far to trust the second. The simulation does not continue a fault that was not found by that moment{r.not_carried?.length ? <>, nor {r.not_carried.join(", ")}</> : ""}.</p>}
    <p>From the state of {instant(run.from_ns)}, {span(r.horizon_s)} ahead, {since(run.ended_ns)} ago. Policies: {Object.entries(r.authority).map(([n, l]) => `${n} ${l}`).join(", ")}.{r.held_workload && " Every GPU keeps its workload of that moment: a job that was saving or waiting does so throughout."}</p>
    {r.warnings?.map((w: string) => <p class={past ? "said s-warning" : "soft"}>{GLYPHS.warning} {w}</p>)}
    <div class="charts">{Object.entries(CURVES).map(([key, [label, unit, factor]]) => {
      const series: Series[] = [["policies", "with the policies", "main"], ["nothing", "nobody acts", "other"]].flatMap(([arm, said, colour]) => { const y = r.curves?.[arm]?.[key]; return y && y.some(known) ? [{ label: said, y: y.map((v: any) => (known(v) ? v * factor : null)), colour: colour as any, dash: arm === "nothing" }] : []; });
      if (key === "it_power_kw" && measured.length) series.unshift({ label: "measured, as it was done", y: t.map((s) => at(measured, s)), colour: "expected" });
      if (!series.length || series.every((x) => x.y.every((v) => !v))) return null;
      return <section class="panel" aria-label={label}><header class="panel-head"><h3>{label}</h3></header><Chart t={t} series={series} unit={unit} label={label} height={170} clock="elapsed" /></section>;
    })}</div>
    <Limits policies={one.policies?.limits ?? []} nothing={one.nothing?.limits ?? []} />
    <Grid label="Figures of both" heads={["", "With the policies", "Nobody acts", "Difference"]} right={[1, 2, 3]}
      rows={[...differ, ...names.filter((k) => !differ.includes(k))].map((k) => [FIGURES[k] ?? title(words(k)), <b>{figure(k, one.policies[k])}</b>, figure(k, one.nothing?.[k]), known(one.policies[k]) && known(one.nothing?.[k]) ? figure(k, one.policies[k] - one.nothing[k]).replace("°C", "K") : "–"])} />
    {(one.policies?.faults ?? []).length > 0 && <><h3>Faults that the diagnosis reported</h3><ul class="plain">{one.policies.faults.slice(0, 12).map((f: any) => <li>{title(words(f.kind))} of {short(f.entity)} after {span(f.told_s)}{known(f.delay_s) && `, ${span(f.delay_s)} after it began`}</li>)}</ul></>}
  </Panel>;
}
