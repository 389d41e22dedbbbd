// The hall map: every rack as a tile with its state by colour and sign; large tiles where there is room.
import { Component } from "preact";
import { live, useLive } from "./live";
import { useState } from "preact/hooks";
import { GLYPHS, Tabs } from "./parts";
import { hrefOf, known, quantity, short, span } from "./words";

const SHOWN_LARGE = 40, SHOWN_MIDDLE = 220;

// Quantity that the map shows: states, or a value of each rack between the least and the most of all.
type Metric = "state" | "power_w" | "gpu_temp_c" | "margin_k" | "capped";
const METRICS: [Metric, string, string][] = [["state", "State", ""], ["power_w", "Power", "W"], ["gpu_temp_c", "Hottest GPU", "degC"], ["margin_k", "Cooling margin", "K"], ["capped", "Capped GPUs", "count"]];

function said(i: number): string {
  const c = live.columns, state = live.layout!.states[c.state[i] ?? 0];
  const out = [live.layout!.names[i], state, `power ${quantity(c.power_w[i], "W")}`];
  if (known(c.gpu_temp_c[i])) out.push(`hottest GPU ${c.gpu_temp_c[i]} °C`);
  if (known(c.flow_lpm[i])) out.push(`coolant ${quantity(c.supply_temp_c[i], "degC")} to ${quantity(c.return_temp_c[i], "degC")}, ${quantity(c.flow_lpm[i], "l/min")}`);
  if (c.capped[i]) out.push(`${c.capped[i]} of ${live.layout!.gpus[i]} GPUs capped`);
  if (c.out[i]) out.push(`${c.out[i]} GPUs out of service`);
  if (c.repair?.[i]) out.push(`${c.repair[i]} GPUs need repair`);
  if (known(c.age_s[i])) out.push(`readings ${span(c.age_s[i])} old`);
  return out.join(", ");
}

// Key of a small tile's content; its full text is made when a pointer reaches it.
const brief = (i: number): string => `${live.columns.state[i]} ${known(live.columns.age_s[i])} ${live.layout!.spare[i]}`;

// A tile is drawn again only if its content has changed: a site may have a thousand tiles.
interface TileProps { i: number; size: string; text: string; share: number | null; shown: string }

class Tile extends Component<TileProps> {
  override shouldComponentUpdate(next: TileProps): boolean {
    const was = this.props;
    return next.text !== was.text || next.size !== was.size || next.i !== was.i || next.share !== was.share || next.shown !== was.shown;
  }

  override render() {
    const { i, size, text, share, shown } = this.props, l = live.layout!, c = live.columns, state = l.states[c.state[i] ?? 0], name = l.names[i];
    const old = known(c.age_s[i]), capped = c.capped[i] ?? 0, repair = c.repair?.[i] ?? 0, out = Math.max(c.out[i] ?? 0, repair), outs = `${out} out${repair ? `, ${repair === out ? "" : `${repair} `}need repair` : ""}`;
    const tell = (e: { currentTarget: HTMLElement }) => { if (size === "small") e.currentTarget.title = said(i); };
    return <a class={`tile r-${state} ${old ? "old" : ""} ${l.spare[i] ? "spare" : ""}`} href={hrefOf("rack", name)} title={size === "small" ? name : text} onMouseEnter={tell} onFocus={tell}
      style={share === null ? {} : { background: `color-mix(in srgb, var(--accent) ${Math.round(12 + share * 68)}%, var(--card))`, opacity: "1" }}>
      {size === "small" ? <><span class="sign" aria-hidden="true">{state === "ok" ? "" : GLYPHS[state]}</span><span class="sr">{short(name)} {state}</span></> : <>
        <span class="tile-head"><b>{short(name).split("/").pop()}</b><span class="sign" aria-hidden="true">{GLYPHS[state]}</span><span class="sr">{state}</span></span>
        <span class="tile-power">{shown || quantity(c.power_w[i], "W")}</span>
        {size === "large" && <span class="tile-rows">
          {known(c.gpu_temp_c[i]) && <span>GPU {c.gpu_temp_c[i]} °C</span>}
          {known(c.flow_lpm[i]) ? <span>{quantity(c.flow_lpm[i], "l/min")}</span> : known(c.inlet_temp_c[i]) && <span>air {quantity(c.inlet_temp_c[i], "degC")}</span>}
          {capped > 0 && <span class="w">{capped} capped</span>}
          {out > 0 && <span class="w">{outs}</span>}
          {old && <span class="w">{span(c.age_s[i])} old</span>}
          {l.spare[i] && <span class="soft">spare</span>}
        </span>}
        {size === "middle" && <span class="tile-marks">{capped > 0 && <span title="capped">⤓<span class="sr">{capped} capped</span></span>}{out > 0 && <span title="out of service">⊘<span class="sr">{outs}</span></span>}</span>}
      </>}
    </a>;
  }
}

export function HallMap({ only }: { only?: number[] }) {
  useLive("racks");
  const [metric, pick] = useState<Metric>("state"), l = live.layout;
  if (!l || !live.columns.state) return <p class="soft">No racks are known yet.</p>;
  const rows = only ?? l.names.map((_, i) => i);
  if (!rows.length) return <p class="soft">This site has no racks.</p>;
  const size = rows.length <= SHOWN_LARGE ? "large" : rows.length <= SHOWN_MIDDLE ? "middle" : "small";
  const halls = l.halls.map((h, k) => [h, rows.filter((i) => l.hall[i] === k)] as const).filter(([, r]) => r.length);
  const counts = new Map<string, number>();
  for (const i of rows) { const s = l.states[live.columns.state[i] ?? 0]; counts.set(s, (counts.get(s) ?? 0) + 1); }
  const unit = METRICS.find(([m]) => m === metric)![2], values = metric === "state" ? [] : rows.map((i) => live.columns[metric][i]).filter(known) as number[];
  const low = Math.min(...values), high = Math.max(...values);
  const share = (i: number) => { const v = metric === "state" ? null : live.columns[metric][i]; return known(v) ? Math.round(20 * (high > low ? (v - low) / (high - low) : 0)) / 20 : null; };
  return <div class="halls">
    <div class="row wrap"><Tabs label="The map shows" now={metric} pick={(m) => pick(m as Metric)} of={METRICS.map(([m, t]) => [m, t])} />
      {values.length > 0 && <span class="soft">light {quantity(low, unit)}, dark {quantity(high, unit)}</span>}</div>
    <p class="map-key">{["critical", "warning", "info", "maintenance", "unknown", "ok"].filter((s) => counts.get(s)).map((s) =>
      <span class={`mk r-${s}`}><span aria-hidden="true">{GLYPHS[s]}</span> {counts.get(s)} {s}</span>)}</p>
    {halls.map(([h, of]) => <div class="hall">
      {halls.length > 1 && <h3>{short(h)} <span class="soft">{of.length} racks</span></h3>}
      <div class={`tiles z-${size}`}>{of.map((i) => <Tile key={i} i={i} size={size} text={size === "small" ? brief(i) : said(i)} share={share(i)} shown={metric === "state" || metric === "power_w" ? "" : quantity(live.columns[metric][i], unit)} />)}</div>
    </div>)}
  </div>;
}
