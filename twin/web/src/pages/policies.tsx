// Policies with authority, commands and previews; approves, holds and releases; settings with their source.
import { useState } from "preact/hooks";
import { part } from "../api";
import { live, useLive, usePoll } from "../live";
import { Act, DURATION, Empty, Explained, Failure, Grid, Panel, REASON, Tag, cell } from "../parts";
import { holding, wouldHold } from "./overview";
import { brief, control, counted, instant, isInstant, short, plural, quantity, title, words } from "../words";

const LEVELS: Record<string, string> = { off: "does not run", advise: "shows what it would do", approve: "waits for approval", act: "commands" };

export function Policies({ name }: { name: string }) {
  useLive("state");
  const got = usePoll<any>("policies", 4000), s = live.state!, list = got.data?.policies ?? [];
  const one = list.find((p: any) => p.name === name);
  return <div class="page">
    <h1>Policies</h1>
    <Mode />
    <Failure text={got.error} />
    <Waiting again={got.again} />
    <div class="cards">{list.filter((p: any) => !one || p === one).map((p: any) => {
      const acts = s.commanded.filter((c: any) => c.policy === p.name), would = s.preview.filter((c: any) => c.policy === p.name);
      return <Panel key={p.name} title={title(p.name.replaceAll("_", " "))} class="policy" mark={<span class={`chip a-${p.authority}`} title={LEVELS[p.authority]}>{p.authority}</span>} more={<>
        <Act small label="Authority" title={`Authority of ${p.name}`} role="admin" danger done={got.again}
          text={`To set the authority act, type this sentence: ${p.acknowledge}`}
          fields={[{ name: "authority", label: "Authority", kind: "choice", value: p.authority, choices: Object.entries(LEVELS).map(([k, t]) => [k, `${k}: ${t}`]) }, REASON, { name: "acknowledge", label: "Acknowledgement, for act only", hint: p.acknowledge }]}
          send={(v) => ({ method: "POST", path: "authority", body: { policy: p.name, authority: v.authority, reason: v.reason, acknowledge: v.acknowledge } })} /></>}>
        <p class="soft">{p.text}</p>
        {p.suspended && <p><Tag kind="critical">suspended</Tag> The policy failed; see <a href="#/alarms">Alarms</a> for the cause.</p>}
        {p.declared !== null && p.declared !== p.authority && <p class="w">The site file sets {p.declared}; the authority was changed while the daemon ran.</p>}
        <h3>Now</h3>
        {acts.map((c: any) => <p>{title(holding(c))} <span class="soft">until {instant(c.expires_ns)} unless renewed{c.reasons.length > 0 && `: ${c.reasons.map(brief).join("; ")}`}</span></p>)}
        {would.map((c: any) => <p><span class="chip">preview</span> {title(wouldHold(c))} <span class="soft">{c.reasons.map(brief).join("; ")}</span></p>)}
        {!acts.length && !would.length && <Empty>{p.authority === "off" ? "The policy does not run." : s.mode === "normal" ? p.authority === "act" ? "No command is in force." : "The policy would command nothing now." : "Commands are released: racktwin does not send the proposals of this policy."}</Empty>}
        {one ? <><Topics policy={p.name} /><Settings p={p} /></> : <p><a href={`#/policies/${p.name}`}>Explanation, {plural(p.settings.length, "setting")}</a> · controls {[...new Set(p.controls.map((c: string) => control(c)))].join(", ")}</p>}
      </Panel>;
    })}</div>
    {one && <p><a href="#/policies">All policies</a></p>}
    <Requests />
  </div>;
}

function Mode() {
  const s = live.state!, normal = s.mode === "normal";
  return <Panel title={normal ? "Policies send commands within their authority" : title(s.mode)} class={normal ? "" : "w-panel"} more={<div class="row">
    {normal && <Act small label="Hold" title="Hold the site" text="racktwin sends no new values and renews running leases. Protective commands still pass." fields={[REASON]} send={(v) => ({ method: "POST", path: "hold", body: { reason: v.reason } })} />}
    {!normal && <Act small label="Resume" title="End the hold or release" fields={[{ ...REASON, needed: false }]} send={(v) => ({ method: "POST", path: "resume", body: { reason: v.reason } })} />}
    <Act small danger label="Release" role="admin" title="Release all commands" text="All leases lapse. racktwin sends no command until somebody resumes." fields={[REASON]} send={(v) => ({ method: "POST", path: "release", body: { reason: v.reason } })} />
  </div>}>
    <p class="soft">{normal ? `${s.policies.filter((p: any) => p.authority === "act").length} act, ${s.policies.filter((p: any) => p.authority === "approve").length} wait for approval, ${s.policies.filter((p: any) => p.authority === "advise").length} advise.` : s.mode === "held" || s.mode === "hold" ? "racktwin renews running leases. Protective commands still pass." : "racktwin sends no command until somebody resumes."}</p>
  </Panel>;
}

function Waiting({ again }: { again: () => void }) {
  const got = usePoll<any>("approvals", 3000), wanting = live.state!.wanting as any[], standing = got.data?.approvals ?? [];
  if (!wanting.length && !standing.length) return null;
  return <Panel title={`Approvals${wanting.length ? `: ${plural(wanting.length, "proposal")} wait${wanting.length === 1 ? "s" : ""}` : ""}`} class={wanting.length ? "w-panel" : ""}>
    <ul class="plain">{wanting.map((w) => <li class="row wrap"><span class="grow"><b>{w.policy}</b> would set the {control(w.control)} of {counted(w.control, w.count)}{w.control.startsWith("job.") ? "" : `${isInstant(w.control) ? "" : ` (${w.means ?? [...new Set([quantity(w.low, w.unit), quantity(w.high, w.unit)])].join(" to ")})`}, first ${short(w.first)}`}: {brief(w.reason)}</span>
      <Act label="Approve" title={`Let ${w.policy} set ${control(w.control)}`} done={again} fields={[DURATION, REASON]}
        send={(v) => ({ method: "POST", path: "approvals", body: { policy: w.policy, control: w.control, for_s: Number(v.for_s), reason: v.reason } })} /></li>)}
      {standing.map((a: any) => <li class="row wrap"><span class="grow">{a.author} lets {a.policy} set {control(a.control)} until {instant(a.expires_ns)}</span>
        <Act small label="Withdraw" title="Withdraw this approval" done={got.again} fields={[]} send={() => ({ method: "DELETE", path: `approvals/${part(a.id)}` })} /></li>)}</ul>
  </Panel>;
}

function Settings({ p }: { p: any }) {
  if (!p.settings.length) return <><h3>Settings</h3><Empty>This policy has no settings.</Empty></>;
  return <><h3>Settings</h3><Grid label="Settings" heads={["Setting", "Value", "Source", "Default"]}
    rows={p.settings.map((x: any) => [<code>{x.name}</code>, <b>{String(x.value ?? "–")}</b>, x.source === "site file" ? <Tag kind="info">site file</Tag> : "default", x.source === "site file" ? String(x.default ?? "–") : ""])} /></>;
}

export function Topics({ policy }: { policy: string }) {
  const got = usePoll<any>("explain", 60_000), mine = got.data?.policies.find((x: any) => x.policy === policy), [topic, pick] = useState(""), [options, set] = useState<Record<string, string>>({}), [asked, ask] = useState("");
  const t = mine?.topics.find((x: any) => x.name === topic), waits = t?.options.some((o: any) => o.text.endsWith("needed")) && !asked;
  const now = usePoll<any>(waits ? null : `explain/${policy}${topic ? `?topic=${topic}${asked}` : ""}`, 5000);
  const topics = (mine?.topics ?? []).filter((x: any) => x.name !== "page" && x.name !== "metrics");
  return <>
    <h3>Explanation</h3>
    {topics.length > 0 && <div class="tabs" role="group" aria-label="Topic">{[{ name: "", text: "Its main explanation" }, ...topics].map((x: any) => <button type="button" class="small" aria-pressed={x.name === topic} title={x.text} onClick={() => { pick(x.name); set({}); ask(""); }}>{x.name ? words(x.name) : "now"}</button>)}</div>}
    {t && <p class="soft">{t.text}</p>}
    {t?.options.length > 0 && <form class="row wrap" onSubmit={(e) => { e.preventDefault(); ask(Object.entries(options).filter(([, v]) => v !== "").map(([k, v]) => `&${k}=${encodeURIComponent(v)}`).join("")); }}>
      {t.options.filter((o: any) => o.name !== "offset").map((o: any) => <label class="inline">{words(o.name)} <input title={o.text} placeholder={o.default === null ? "" : String(o.default)} value={options[o.name] ?? ""} onInput={(e) => set({ ...options, [o.name]: e.currentTarget.value })} /></label>)}
      <button type="submit" class="small">Ask</button></form>}
    {waits ? <Empty>Fill in the required fields, then press Ask.</Empty> : <><Failure text={now.error} />{now.data && <Explained e={now.data} />}</>}
  </>;
}

function Requests() {
  const got = usePoll<any>("requests", 5000), rows = got.data?.requests ?? [];
  return <Panel title="Requests in force">{!rows.length && <Empty>No request is in force.</Empty>}
    <ul class="plain">{rows.map((r: any) => <li class="row wrap"><span class="grow">{r.author}: {control(r.control)} of {counted(r.control, r.names_total)} {r.lo !== null && r.lo > -1e300 ? `at least ${cell(r.lo, "")}` : ""} {r.hi !== null && r.hi < 1e300 ? `at most ${r.hi}` : ""} {r.want !== null && r.want !== undefined ? `wanted ${r.want}` : ""} until {r.expires_ns ? instant(r.expires_ns) : "withdrawn"}: {r.reason}</span>
      <Act small label="Withdraw" title="Withdraw this request" done={got.again} fields={[]} send={() => ({ method: "DELETE", path: `requests/${part(r.id)}` })} /></li>)}</ul></Panel>;
}

// Policies with most of their controls in a table: the page about this table explains them.
export function policiesOf(table: string): string[] {
  return (live.state?.policies ?? []).filter((p: any) => p.controls.length && p.controls.filter((c: string) => c.startsWith(`${table}.`)).length * 2 > p.controls.length && p.authority !== "off").map((p: any) => p.name);
}

