// Building blocks of the pages.
import type { ComponentChildren } from "preact";
import { useEffect, useId, useLayoutEffect, useRef, useState } from "preact/hooks";
import { act, part } from "./api";
import { live, may, useLive } from "./live";
import { brief, control, hrefOf, instant, known, num, quantity, scaled, short, signal, span, table, tableOf, title, words } from "./words";

export const GLYPHS: Record<string, string> = {
  critical: "▲", warning: "◆", info: "●", ok: "✓", unknown: "?", maintenance: "⚒", healthy: "✓", watch: "●", degraded: "◆", failed: "▲",
};

export function Tag({ kind, children }: { kind: string; children?: ComponentChildren }) {
  return <span class={`tag t-${kind}`}><span aria-hidden="true">{GLYPHS[kind] ?? ""}</span> {children ?? kind}</span>;
}

export function Panel(p: { title: string; id?: string; mark?: ComponentChildren; more?: ComponentChildren; class?: string; children: ComponentChildren }) {
  const id = useId();
  return <section class={`panel ${p.class ?? ""}`} aria-labelledby={id}>
    <header class="panel-head">{p.mark ? <div class="row"><h2 id={id}>{p.title}</h2>{p.mark}</div> : <h2 id={id}>{p.title}</h2>}{p.more}</header>
    <div class="panel-body">{p.children}</div>
  </section>;
}

export function Entity({ name, table, text }: { name: string; table?: string; text?: string }) {
  const whole = name.split("#")[0], of = table ?? tableOf(whole);
  if (!of) return <span title={name}>{text ?? short(name)}</span>;
  return <a class="entity" href={hrefOf(of, whole)} title={name}>{text ?? short(name)}</a>;
}

export function Entities({ names, count, most = 4 }: { names: string[]; count?: number; most?: number }) {
  const shown = names.slice(0, most), more = Math.max(count ?? 0, names.length) - shown.length;
  return <>{shown.map((n, i) => <>{i > 0 && ", "}<Entity name={n} /></>)}{more > 0 && ` and ${num(more)} more`}</>;
}

// A value with its unit; an old one says its age, an unknown one that it is unknown.
export function Value(p: { v: unknown; unit: string; age?: number | null; class?: string }) {
  if (!known(p.v)) return <span class="unknown">unknown</span>;
  const { text, unit } = scaled(p.v, p.unit);
  const old = known(p.age) && p.age > 0;
  return <span class={`value ${old ? "stale" : ""} ${p.class ?? ""}`}>
    {text}{unit && <span class="unit"> {unit}</span>}{old && <span class="age"> {span(p.age)} old</span>}
  </span>;
}

// A share of a bound; the colour says how near it is, and so does the number beside it.
export function Bar({ share, label, plain }: { share: number | null; label: string; plain?: boolean }) {
  const ref = useRef<HTMLSpanElement>(null);
  useLayoutEffect(() => { if (ref.current) ref.current.style.width = `${Math.max(0, Math.min(1, share ?? 0)) * 100}%`; }, [share]);
  const kind = share === null ? "unknown" : plain ? "ok" : share >= 1 ? "critical" : share >= 0.9 ? "warning" : "ok";
  return <span class={`bar b-${kind}`} role="img" aria-label={label} title={label}><span ref={ref} /></span>;
}

export function Empty({ children }: { children: ComponentChildren }) {
  return <p class="empty">{children}</p>;
}

export function Failure({ text }: { text: string }) {
  return text ? <p class="failure" role="status">{GLYPHS.warning} {text}</p> : null;
}

export function Facts({ rows }: { rows: [string, ComponentChildren][] }) {
  return <dl class="facts">{rows.map(([k, v]) => <div><dt>{k}</dt><dd>{v}</dd></div>)}</dl>;
}

export function Grid(p: { heads: ComponentChildren[]; rows: ComponentChildren[][]; right?: number[]; label: string }) {
  return <div class="scroll" tabIndex={0} role="region" aria-label={p.label}>
    <table class="cards-narrow" role="table"><thead role="rowgroup"><tr role="row">{p.heads.map((h, i) => <th scope="col" role="columnheader" class={p.right?.includes(i) ? "right" : ""}>{h}</th>)}</tr></thead>
      <tbody role="rowgroup">{p.rows.map((r) => <tr role="row">{r.map((c, i) => <td role="cell" class={p.right?.includes(i) ? "right" : ""} data-head={typeof p.heads[i] === "string" ? p.heads[i] : undefined}>{c}</td>)}</tr>)}</tbody></table>
  </div>;
}

// Explanations: rendered from what they hold, whoever made them.

interface Told { columns: { name: string; unit: string; text: string; detail: boolean }[]; rows: any[][]; text: string; name: string; total: number | null }

// Text between backticks is shown as code: the reader types it.
export function Said({ text }: { text: string }) {
  return <>{title(brief(text)).split("`").map((t, i) => (i % 2 ? <code>{t}</code> : t))}</>;
}

const PLACE = /^[^\s/]+(\/[^\s/]+)+$/;

export function cell(v: unknown, unit: string): ComponentChildren {
  if (v === null || v === undefined || v === "") return <span class="soft">–</span>;
  if (typeof v === "boolean") return v ? "yes" : "no";
  if (known(v)) {
    if (unit === "ns") return v > 1e17 ? instant(v) : span(v / 1e9);
    return quantity(v, unit);
  }
  const text = String(v);
  if (CONTROL.test(text)) return title(control(text));
  if (text === "cdu" || text === "gpu") return table(text, 1);
  if (/^[a-z]+(_[a-z]+)+$/.test(text) && !live.state?.policies.some((p: any) => p.name === text)) return text.replaceAll("_", " ");
  return PLACE.test(text) && tableOf(text) && (live.state?.site ? text.startsWith(live.state.site) : false) ? <Entity name={text} /> : brief(text);
}

const CONTROL = /^(gpu|node|job|rack|cdu)\.[a-z_]+$/;

export function ExplainedTable({ table, whole = false }: { table: Told; whole?: boolean }) {
  // Numbers of a row may have the unit that another of its cells names.
  const own = table.columns.findIndex((c) => c.name === "unit");
  const shown = table.columns.map((c, i) => ({ ...c, i })).filter((c) => c.i !== own).filter((c) => whole || (!c.detail && table.rows.some((r) => r[c.i] !== null && r[c.i] !== "")));
  if (!table.rows.length || !shown.length) return null;
  // A unit that a name bears is that of its numbers where none is given.
  const unitOf = (c: { name: string; unit: string }) => c.unit || (/_w$/.test(c.name) ? "W" : /_s$/.test(c.name) ? "s" : /_ns$/.test(c.name) ? "ns" : /_pu$|ettr|^fixed_/.test(c.name) ? "1" : /_k?wh$/.test(c.name) ? "kWh" : "");
  const head = title(table.text || words(table.name));
  return <div class="told-table">
    <h3>{head}</h3>
    <Grid label={head} heads={shown.map((c) => title(c.text || words(c.name)))}
      right={shown.flatMap((c, k) => (table.rows.some((r) => known(r[c.i])) ? [k] : []))}
      rows={table.rows.map((r) => shown.map((c) => cell(r[c.i], own >= 0 && !c.unit && c.name !== "count" ? String(r[own] ?? "") : unitOf(c))))} />
    {table.total !== null && table.total > table.rows.length && <p class="soft">and {num(table.total - table.rows.length)} more</p>}
  </div>;
}

// A figure with its text. A figure that is 1 while a condition holds is shown as yes or no.
function fact(f: any): [string, ComponentChildren] {
  const while_ = /^1 (?:while|where|if) (.*)/.exec(f.text);
  return while_ && (f.value === 0 || f.value === 1) ? [title(while_[1]), f.value ? "yes" : "no"] : [title(f.text), cell(f.value, f.unit)];
}

export function Explained({ e, tables = true, figures = true }: { e: Record<string, any>; tables?: boolean; figures?: boolean }) {
  const order: Record<string, number> = { warning: 0, summary: 1, note: 2 };
  const said = [...e.sentences].sort((a: any, b: any) => order[a.kind] - order[b.kind]);
  const told = e.figures.filter((f: any) => f.text && f.value !== null && !(f.metric && Object.keys(f.metric.labels ?? {}).length));
  return <div class="explained">
    {said.map((s: any) => <p class={`said s-${s.kind}`}>{s.kind === "warning" && <span aria-hidden="true">{GLYPHS.warning} </span>}<Said text={s.text} /></p>)}
    {figures && told.length > 0 && <Facts rows={told.map((f: any) => fact(f))} />}
    {tables && e.tables.map((t: Told) => <ExplainedTable table={t} />)}
  </div>;
}

// Actions: each is carried out through the API in the name of the token, with its reason in the journal.

export interface Field { name: string; label: string; kind?: "text" | "choice" | "number"; choices?: [string, string][]; value?: string; needed?: boolean; hint?: string }

export function Act(p: {
  label: string; title: string; text?: string; role?: "operator" | "admin"; fields: Field[]; danger?: boolean; small?: boolean;
  send: (values: Record<string, string>) => { method: "POST" | "DELETE"; path: string; body?: unknown }; done?: (said: any) => void;
}) {
  const dialog = useRef<HTMLDialogElement>(null), [error, setError] = useState(""), [busy, setBusy] = useState(false), id = useId();
  useLive("who");
  const allowed = may(p.role ?? "operator");
  const submit = async (e: SubmitEvent & { currentTarget: HTMLFormElement }) => {
    e.preventDefault();
    const values = Object.fromEntries([...new FormData(e.currentTarget).entries()].map(([k, v]) => [k, String(v)]));
    const { method, path, body } = p.send(values);
    setBusy(true);
    try {
      const said = await act(method, path, body);
      dialog.current?.close();
      announce(`${p.title}: done`);
      p.done?.(said);
    } catch (why) {
      setError((why as Error).message);
    }
    setBusy(false);
  };
  return <>
    <button type="button" class={`${p.danger ? "danger" : ""} ${p.small ? "small" : ""}`} aria-disabled={!allowed}
      title={allowed ? p.title : `needs the role ${p.role ?? "operator"}; this token has ${live.who?.role ?? "none"}`}
      onClick={() => { if (allowed) { setError(""); dialog.current?.showModal(); } }}>{p.label}</button>
    <dialog ref={dialog} aria-labelledby={id}>
      <form onSubmit={submit}>
        <h2 id={id}>{p.title}</h2>
        {p.text && <p>{p.text}</p>}
        {p.fields.map((f) => <label>{f.label}
          {f.kind === "choice"
            ? <select name={f.name} defaultValue={f.value}>{f.choices!.map(([v, t]) => <option value={v} selected={v === f.value}>{t}</option>)}</select>
            : <input name={f.name} type="text" inputMode={f.kind === "number" ? "decimal" : undefined} defaultValue={f.value} required={f.needed} autocomplete="off" maxLength={500} />}
          {f.hint && <small>{f.hint}</small>}
        </label>)}
        {error && <p class="failure" role="alert">{error}</p>}
        <p class="soft">The journal records this action under the name {live.who?.name ?? "?"}.</p>
        <div class="row end"><button type="button" onClick={() => dialog.current?.close()}>Cancel</button>
          <button type="submit" class={p.danger ? "danger main" : "main"} disabled={busy}>{p.label}</button></div>
      </form>
    </dialog>
  </>;
}

export const REASON: Field = { name: "reason", label: "Reason", needed: true, hint: "A few words for the next person" };
export const DURATION: Field = {
  name: "for_s", label: "For", kind: "choice", value: "3600",
  choices: [["900", "15 min"], ["3600", "1 hour"], ["14400", "4 hours"], ["28800", "8 hours"], ["86400", "1 day"], ["604800", "1 week"]],
};

export function Acknowledge({ a }: { a: { id: string; title: string } }) {
  return <Act small label="Acknowledge" title={`Acknowledge: ${a.title}`} fields={[{ name: "note", label: "Note", hint: "For the next person: who handles the alarm, what was found" }]}
    send={(v) => ({ method: "POST", path: `alarms/${part(a.id)}/ack`, body: { note: v.note } })} />;
}

// The announcement for screen readers, shown briefly at the foot of the page.
let saying = "", tell: (text: string) => void = () => {};
export function announce(text: string): void { saying = text; tell(text); }

export function Announcer() {
  const [text, set] = useState(saying), critical = useRef<Set<string>>(new Set()), [urgent, setUrgent] = useState("");
  useLive("alarms");
  useEffect(() => { tell = set; return () => { tell = () => {}; }; }, []);
  useEffect(() => { const t = setTimeout(() => set(""), 6000); return () => clearTimeout(t); }, [text]);
  const now = live.alarms.filter((a) => a.severity === "critical" && a.state === "raised");
  const fresh = now.filter((a) => !critical.current.has(a.id));
  const first = critical.current.size === 0 && now.length > 0;
  useEffect(() => {
    if (fresh.length || now.length !== critical.current.size) {
      critical.current = new Set(now.map((a) => a.id));
      if (fresh.length) setUrgent(`${first && now.length > 1 ? `${now.length} critical alarms: ` : "Critical: "}${fresh.slice(0, 3).map((a) => a.title).join("; ")}`);
    }
  });
  return <><div class="sr" role="alert">{urgent}</div><div class={`toast ${text ? "shown" : ""}`} role="status">{text}</div></>;
}

export function Tabs({ of, now, pick, label }: { of: [string, string][]; now: string; pick: (v: string) => void; label: string }) {
  return <div class="tabs" role="group" aria-label={label}>{of.map(([v, t]) =>
    <button type="button" class="small" aria-pressed={v === now} onClick={() => pick(v)}>{t}</button>)}</div>;
}

export function download(name: string, type: string, text: string): void {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const a = document.createElement("a");
  a.href = url;
  a.download = name;
  a.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

export { signal };
