// Set up: sources and silent entities, missing lines of the site file, unused readings with reasons, parts of the daemon.
import { useState } from "preact/hooks";
import { live, useLive, usePoll } from "../live";
import { Act, Bar, Empty, Facts, Failure, Grid, Panel, REASON, Tag, download } from "../parts";
import { brief, known, num, plural, span, table, title } from "../words";

// Lines for entities that report but are missing in the site file, for a person to approve.
function SiteFile() {
  const [profile, choose] = useState(""), got = usePoll<any>(`site/change${profile ? `?profile=${encodeURIComponent(profile)}` : ""}`, 600_000), c = got.data;
  const rows: string[] = c?.diff ? c.diff.split("\n").slice(2, -1) : [], added = rows.filter((r) => r[0] === "+").length;
  return <Panel title="Site file: equipment that reports but is not listed" class={added ? "w-panel" : ""} more={<button type="button" class="small" onClick={got.again}>Look again</button>}>
    <Failure text={got.error} />
    {c && !c.diff && !c.problems.length && <Empty>{c.points ? `The file lists everything that describes itself on the bus: ${plural(c.points, "point")} of the BMS and all agents were compared.` : "No BMS has described its points yet. The file lists all agents that report."}</Empty>}
    {c?.diff && <>
      <p>{plural(added, "new line")} for <code>{c.file}</code>. No existing line is removed. New racks without a profile have no limits and are not guarded.</p>
      <label>Profile of new racks <select value={c.profile} onChange={(e) => choose(e.currentTarget.value)}>{c.profiles.map((p: string) => <option value={p} selected={p === c.profile}>{p}</option>)}</select></label>
      <pre class="diff" tabIndex={0} aria-label="Difference to the site file">{rows.map((r) => (r[0] === "+" ? <ins>{r}{"\n"}</ins> : r[0] === "-" ? <del>{r}{"\n"}</del> : <span class="soft">{r}{"\n"}</span>))}</pre>
      {c.cut && <p class="w">The rest is not shown. <code>racktwin site diff</code> shows all lines.</p>}
    </>}
    {c?.notes.length > 0 && <><h3>To check</h3><ul class="plain">{c.notes.map((n: string) => <li>{n}</li>)}</ul></>}
    {c?.problems.map((p: string) => <p class="failure">{p}</p>)}
    {c?.diff && !c.problems.length && <div class="row wrap">
      {c.writable ? <Act label="Approve" role="admin" title="Write these lines into the site file" text={`${plural(added, "line")} for ${c.file}. The daemon reloads the file at once. If the daemon refuses it, the old file is restored.`} fields={[REASON]} send={(v) => ({ method: "POST", path: "site/change", body: { digest: c.digest, profile: c.profile, reason: v.reason } })} done={got.again} />
        : <p class="grow">The daemon's service has no write access to this file. On its host, as a user with write access: <code>racktwin site apply {c.digest} --profile {c.profile} --reason TEXT</code></p>}
      <button type="button" onClick={() => download("site.diff", "text/plain", c.diff)}>Download</button></div>}
  </Panel>;
}

// Sources with something to do first, then by name as people count.
const wanting = (x: any): number => Number(!known(x.age_s)) * 4 + Number(x.failures > 0) * 2 + Number(x.reasons.some((r: any) => r.remedy) || (known(x.clock_offset_s) && Math.abs(x.clock_offset_s) >= 2));
const ordered = (sources: any[]): any[] => [...sources].sort((a, b) => wanting(b) - wanting(a) || a.name.localeCompare(b.name, "en", { numeric: true }));

export function SetUp() {
  useLive("state");
  const s = live.state!, got = usePoll<any>("sources?limit=200", 6000), sources = ordered(got.data?.sources ?? []), site = usePoll<any>("site", 60_000).data;
  const heard = Object.entries<any>(s.heard), bare = site ? live.layout!.names.length - (site.profiles.length ? live.layout!.power_guard_w.filter((v) => v !== null).length : 0) : 0;
  const k = s.ticks;
  return <div class="page">
    <h1>Set up</h1>
    <Panel title="Reporting entities">
      <Grid label="Reporting entities" heads={["Kind", "Reporting", "", "Silent now", "Learning their period"]} right={[1, 3, 4]}
        rows={heard.map(([t, c]) => [title(table(t)), `${num(c.heard)} of ${num(c.of)}`, <Bar plain share={c.of ? c.heard / c.of : null} label={`${c.heard} of ${c.of} ${t} reporting`} />, c.silent ? <b class="w">{num(c.silent)}</b> : "0", num(c.learning)])} />
      {!heard.length && <Empty>The site file lists no entity that reports.</Empty>}
      {site && <Facts rows={[["Profiles", site.profiles.join(", ") || "none"], ["Racks without a power limit from a profile", num(bare)], ["Models", site.models.join(", ") || "none"], ["Site", `${site.site}, ${site.site_hash.slice(0, 12)}`]]} />}
    </Panel>
    <SiteFile />
    {s.unused.length > 0 && <Panel title="Readings not used, and remedies" class="w-panel"><ul class="plain">{s.unused.map((u: any) => <li><Tag kind="warning">{u.outcome === "failed" ? "failed" : "not used"}</Tag> {u.source}{u.sources > 1 && ` and ${num(u.sources - 1)} more`}: {num(u.count)}× {u.why}{u.example && !u.why.includes(u.example) && <>, such as <code>{u.example}</code></>}. <b>{u.remedy}</b></li>)}</ul></Panel>}
    <Panel title={`Sources${got.data ? `: ${num(got.data.total)}` : ""}`}>
      <Failure text={got.error} />
      {got.data && !sources.length && <Empty>No source has reported, and none is configured.</Empty>}
      {sources.length > 0 && <Grid label="Sources" heads={["Source", "Readings", "Last", "Failed", "Not used", "Clock", "Signals; readings not used and reasons"]} right={[1, 2, 3, 4]}
        rows={sources.map((x: any) => [<span title={x.name}>{x.name}</span>, known(x.every_s) ? `${num(x.readings_per_s, x.readings_per_s < 10 ? 1 : 0)} per s` : num(x.readings), known(x.age_s) ? `${span(x.age_s)} ago` : <b class="w">never</b>, num(x.failures), x.unused ? num(x.unused) : "0",
          !known(x.clock_offset_s) ? "–" : Math.abs(x.clock_offset_s) < 2 ? "✓" : <b class="w">{span(Math.abs(x.clock_offset_s))} {x.clock_offset_s < 0 ? "ahead" : "behind"}</b>,
          <>{Object.entries<any>(x.carries).map(([t, c]) => `${plural(c.signals, "signal")} of ${num(c.entities)} ${table(t, c.entities)}`).join(", ")}{x.reasons.map((r: any) => <p class={r.remedy ? "w" : "soft"}>{num(r.count)}× {r.why}{r.example && !r.why.includes(r.example) ? `, such as ${r.example}` : ""}{r.remedy && <b>. {r.remedy}</b>}</p>)}{Object.keys(x.also_by).length > 0 && <p class="w">{plural(Object.keys(x.also_by).length, "signal")} also come from another source</p>}</>])} />}
      {got.data && got.data.total > sources.length && <p class="soft">and {num(got.data.total - sources.length)} more: racktwin sources lists them</p>}
    </Panel>
    <Panel title="The daemon" more={<Act small label="Reload" role="admin" title="Read configuration, site and tokens again" text="A faulty file is refused, and the old one stays in force." fields={[]} send={() => ({ method: "POST", path: "reload" })} />}>
      <Facts rows={[["Version", `${s.version || "?"}, epoch ${s.epoch}, ${s.role}`], ["Ticks", `${num(k.count)}, each ${span(k.every_s)}; ${k.skipped ? `${num(k.skipped)} skipped` : "none skipped"}; ${known(k.took_s_p99) ? `99 % of them within ${num(k.took_s_p99 * 1000, 0)} ms` : ""}`], ["Token", `${live.who?.name}, ${live.who?.role}`],
        ...Object.entries<any>(s.counts).filter(([, v]) => v).map(([n, v]) => [title(n.replaceAll("_", " ")), num(v)] as [string, any])]} />
      <Grid label="Parts of the daemon" heads={["Part", "Kind", "State", "For"]} rows={s.parts.map((p: any) => [p.name, p.kind, p.state === "running" ? <Tag kind="ok">running</Tag> : <><Tag kind="critical">{p.state}</Tag> {brief(p.error)}</>, span(p.since_s)])} />
    </Panel>
  </div>;
}
