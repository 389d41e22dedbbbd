// One-line diagrams: places and what flows between them, laid out by dagre.
import dagre from "@dagrejs/dagre";
import { useMemo } from "preact/hooks";
import { GLYPHS } from "./parts";
import { hrefOf } from "./words";

export interface Place { id: string; table: string; name: string; head: string; lines: string[]; share: number | null; state: string; side?: string; said: string }
export interface Flow { from: string; to: string; dead?: boolean }

const WIDTH = 142, LINE = 16, HEAD = 24;

export function Diagram({ places, flows, label }: { places: Place[]; flows: Flow[]; label: string }) {
  const shape = JSON.stringify([places.map((p) => [p.id, p.lines.length, p.side]), flows.map((f) => [f.from, f.to])]);
  const layout = useMemo(() => {
    const g = new dagre.graphlib.Graph();
    g.setGraph({ rankdir: "TB", nodesep: 12, ranksep: 36, marginx: 6, marginy: 6 });
    g.setDefaultEdgeLabel(() => ({}));
    for (const p of [...places].reverse()) g.setNode(p.id, { width: WIDTH, height: HEAD + 12 + LINE * p.lines.length });
    // Side B stands below the racks, side A above them, so that no line crosses another.
    const below = new Set(places.filter((p) => p.side === "B").map((p) => p.id)), turned = (f: Flow) => below.has(f.from);
    for (const f of [...flows].reverse()) if (turned(f)) g.setEdge(f.to, f.from); else g.setEdge(f.from, f.to);
    dagre.layout(g);
    return {
      size: g.graph() as { width: number; height: number },
      at: new Map(places.map((p) => [p.id, g.node(p.id) as { x: number; y: number; width: number; height: number }])),
      lines: flows.map((f) => ((turned(f) ? g.edge(f.to, f.from) : g.edge(f.from, f.to)) as { points: { x: number; y: number }[] }).points),
    };
  }, [shape]);
  return <div class="scroll diagram" tabIndex={0} role="region" aria-label={label}>
    <svg style={{ width: "100%", maxWidth: `${layout.size.width}px`, minWidth: `${layout.size.width * 0.6}px` }} viewBox={`0 0 ${layout.size.width} ${layout.size.height}`} role="group" aria-label={label}>
      {flows.map((f, i) => <polyline class={`flow ${f.dead ? "dead" : ""}`} points={layout.lines[i].map((q) => `${q.x},${q.y}`).join(" ")} />)}
      {places.map((p) => {
        const n = layout.at.get(p.id);
        if (!n) return null;
        const x = n.x - n.width / 2, y = n.y - n.height / 2;
        const body = <g class={`place p-${p.state} ${p.side ? `side-${p.side}` : ""}`}>
          <title>{p.said}</title>
          <rect x={x} y={y} width={n.width} height={n.height} rx="4" />
          {p.share !== null && <rect class="fill" x={x} y={y + n.height - 4} width={n.width * Math.max(0, Math.min(1, p.share))} height="4" />}
          <text x={x + 8} y={y + 16} class="head">{p.state !== "ok" && p.state !== "unknown" ? `${GLYPHS[p.state] ?? ""} ` : ""}{p.head}</text>
          {p.lines.map((t, k) => <text x={x + 8} y={y + HEAD + 10 + LINE * k}>{t}</text>)}
        </g>;
        return p.name ? <a href={hrefOf(p.table, p.name)}>{body}</a> : body;
      })}
    </svg>
  </div>;
}
