// Alarms with evidence and remedies; acknowledges and shelves them and opens maintenance windows.
import { useState } from "preact/hooks";
import { part } from "../api";
import { live, useLive, usePoll, type Alarm } from "../live";
import { Acknowledge, Act, DURATION, Empty, Entities, Facts, Failure, GLYPHS, Panel, REASON, Said, Tabs, Tag } from "../parts";
import { AttentionSwitches } from "../attention";
import { concerned } from "./overview";
import { brief, instant, known, num, plural, short, since, span, tableOf } from "../words";

function State({ a }: { a: Alarm }) {
  if (a.state === "shelved") return <>shelved by {a.shelf_author} until {instant(a.shelved_until_ns!)}: {a.shelf_reason}</>;
  if (a.state === "suppressed") return <>suppressed: caused by {a.cause}</>;
  if (a.state === "cleared") return <>cleared at {instant(a.cleared_ns!)}; {a.ack_author ? <>acknowledged by {a.ack_author} {instant(a.ack_ns!)}{a.ack_note && `: ${a.ack_note}`}</> : "never acknowledged"}</>;
  return <>{a.ack_author ? <>acknowledged by {a.ack_author} {instant(a.ack_ns!)}{a.ack_note && `: ${a.ack_note}`}</> : "not acknowledged"}{a.flapping && `; flapping, raised ${a.times} times`}</>;
}

function One({ a, open }: { a: Alarm; open: boolean }) {
  const [shown, show] = useState(open);
  const path = `alarms/${part(a.id)}`;
  return <li class={`alarm w-${a.severity} ${a.state === "shelved" || a.state === "suppressed" || a.ack_author ? "aside" : ""}`} id={a.id}>
    <div class="alarm-head">
      <span class="mark" aria-hidden="true">{GLYPHS[a.severity]}</span>
      <div class="grow">
        <h3><button type="button" class="link" aria-expanded={shown} onClick={() => show(!shown)}><span class="sr">{a.severity}: </span>{brief(a.title)}</button></h3>
        <p class="where"><Entities names={a.entities} count={concerned(a)} /> {a.raised_ns ? <span class="soft">· {a.state === "cleared" ? <>from {instant(a.raised_ns)} to {instant(a.cleared_ns!)} ({span((a.cleared_ns! - a.raised_ns) / 1e9)})</> : <>since {instant(a.raised_ns)} ({since(a.raised_ns)})</>}</span> : null}</p>
        {a.evidence.length > 0 && <p>{a.evidence.slice(0, 4).map(brief).join(" · ")}</p>}
        {(a.doing ?? []).map((d) => <p class="doing"><b>racktwin:</b> {brief(d)}</p>)}
        {a.action && a.state !== "cleared" && <p class="do"><b>You:</b> <Said text={a.action} /></p>}
        <p class="soft"><State a={a} /></p>
      </div>
      <div class="row">
        {!a.ack_author && <Acknowledge a={a} />}
        {a.state !== "cleared" && a.state !== "shelved" && <Act small label="Shelve" title={`Shelve: ${a.title}`} text="The alarm is silenced for this time." fields={[DURATION, REASON]}
          send={(v) => ({ method: "POST", path: `${path}/shelve`, body: { for_s: Number(v.for_s), reason: v.reason } })} />}
        {a.state === "shelved" && <Act small label="Unshelve" title={`Unshelve: ${a.title}`} fields={[]} send={() => ({ method: "POST", path: `${path}/unshelve` })} />}
        {a.entities[0] && tableOf(a.entities[0]) && a.state !== "cleared" && <Maintenance names={a.entities.slice(0, 50)} table={tableOf(a.entities[0])} />}
      </div>
    </div>
    {shown && <div class="alarm-more">
      <Facts rows={[
        ["All evidence", a.evidence.length ? <ul>{a.evidence.map((e) => <li>{brief(e)}</li>)}</ul> : "none"],
        ["Confidence", known(a.confidence_pu) ? `${num(100 * a.confidence_pu!)} %` : "unknown"],
        ["Affects", plural(a.count, "entity", "entities")],
      ]} />
      <Children id={a.id} />
    </div>}
  </li>;
}

function Children({ id }: { id: string }) {
  const got = usePoll<any>(`alarms/${part(id)}/children?limit=100`, 10_000);
  if (!got.data || (!got.data.alarms.length && !got.data.total)) return <Failure text={got.error} />;
  return <>
    {got.data.alarms.length > 0 && <><h4>{plural(got.data.alarms.length, "alarm")} caused by this one</h4>
      <ul>{got.data.alarms.map((c: Alarm) => <li><Tag kind={c.severity} /> {brief(c.title)} <Entities names={c.entities} most={2} /></li>)}</ul></>}
    {got.data.total > 0 && <><h4>{plural(got.data.total, "entity", "entities")} without data</h4>
      <p><Entities names={got.data.silent.map((x: any) => x.name)} count={got.data.total} most={20} /></p></>}
  </>;
}

export function Maintenance({ names, table }: { names: string[]; table: string }) {
  return <Act small label="Maintenance" title={`Open a maintenance window for ${names.length === 1 ? short(names[0]) : plural(names.length, table)}`}
    text="Until the window ends, racktwin raises no alarms, sends no commands and learns nothing for these entities and those below them." fields={[DURATION, REASON]}
    send={(v) => ({ method: "POST", path: "maintenance", body: { table, names, for_s: Number(v.for_s), reason: v.reason } })} />;
}

export function Alarms({ id }: { id: string }) {
  useLive("alarms", "state");
  const [which, pick] = useState("standing"), [severity, setSeverity] = useState("");
  const query = which === "standing" ? null : `alarms?limit=200&state=${which}`;
  const got = usePoll<any>(query, 5000);
  // The page of a link shows its alarm in any state.
  const away = id && which === "standing" && !live.alarms.some((a) => a.id === id && a.state !== "shelved"), asked = usePoll<any>(away ? "alarms?limit=500&state=cleared,shelved,suppressed" : null, 10_000);
  const linked = (asked.data?.alarms ?? []).filter((a: Alarm) => a.id === id) as Alarm[];
  const every: Alarm[] = query === null ? [...linked, ...live.alarms.filter((a) => a.state !== "shelved")] : got.data?.alarms ?? [];
  const shown = every.filter((a) => !severity || a.severity === severity).sort((a, b) => Number(b.id === id) - Number(a.id === id));
  const c = live.alarmCounts, windows = live.state?.windows ?? [];
  return <div class="page">
    <h1>Alarms</h1>
    <div class="row wrap">
      <Tabs label="Which" now={which} pick={pick} of={[["standing", "Standing"], ["shelved", `Shelved${c.shelved ? ` ${c.shelved}` : ""}`], ["suppressed", `Suppressed${c.suppressed ? ` ${c.suppressed}` : ""}`], ["cleared", "Cleared"]]} />
      <Tabs label="Severity" now={severity} pick={setSeverity} of={[["", "All"], ["critical", `Critical ${c.critical ?? 0}`], ["warning", `Warning ${c.warning ?? 0}`], ["info", `Notice ${c.info ?? 0}`]]} />
      <span class="grow" />
      <AttentionSwitches />
    </div>
    <Failure text={got.error} />
    <ul class="alarms">{shown.map((a) => <One key={a.id} a={a} open={a.id === id} />)}</ul>
    {!shown.length && <Empty>{which === "standing" ? "✓ No alarms stand." : "No alarm in this list."}</Empty>}
    <Panel title="Maintenance windows" more={<MaintenanceOf />}>
      {!windows.length && <Empty>No maintenance window is open.</Empty>}
      <ul class="plain">{windows.map((w: any) => <li class="row wrap"><span class="grow"><Tag kind="maintenance">until {instant(w.until_ns)}</Tag> <Entities names={w.names} count={w.count} /> <span class="soft">{w.author}: {w.reason}</span></span>
        <Act small label="End" title="End this maintenance window now" fields={[]} send={() => ({ method: "DELETE", path: `maintenance/${part(w.id)}` })} /></li>)}</ul>
    </Panel>
  </div>;
}

function MaintenanceOf() {
  return <Act small label="Open a window" title="Open a maintenance window" text="Until the window ends, racktwin raises no alarms, sends no commands and learns nothing for these entities and those below them."
    fields={[{ name: "table", label: "Kind", kind: "choice", value: "rack", choices: ["rack", "node", "gpu", "cdu", "feeder", "loop", "hall"].map((t) => [t, t]) }, { name: "name", label: "Name", needed: true, hint: "Such as r01 or r01/node3; commas between several" }, DURATION, REASON]}
    send={(v) => ({ method: "POST", path: "maintenance", body: { table: v.table, names: v.name.split(",").map((n) => n.trim()).filter(Boolean), for_s: Number(v.for_s), reason: v.reason } })} />;
}
