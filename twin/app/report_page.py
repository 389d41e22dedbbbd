"""The page around the plots: its style, its one small script, and the frame that holds them.

Everything is inside the file: no address is named, and the page's own policy forbids loading anything. The
style knows light, dark, narrow and paper. Constants, and one function that joins them.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence

from twin.app.report_text import safe

# Blue, vermilion, green, purple, ochre: apart for the common kinds of colour blindness and in lightness;
# lines are named at their ends as well, so that colour is never the only sign.
_LIGHT = """--paper:#fbfbf9;--card:#fff;--ink:#1c2126;--soft:#59636d;--rule:#e3e5e6;--grid:#eceeef;
--zero:#b9bfc4;
--c0:#8b949c;--c1:#1b66ad;--c2:#c2500a;--c3:#0b7d5c;--c4:#8c4391;--c5:#846a00;--warn:#b3430a;
--bad:#b0182b;--wash:.16"""
_DARK = """--paper:#14181c;--card:#1b2026;--ink:#e8ebed;--soft:#a3adb6;--rule:#2f363d;--grid:#272d34;
--zero:#59636d;
--c0:#8b949c;--c1:#6db3f2;--c2:#ff9552;--c3:#41c9a2;--c4:#d69bd9;--c5:#d9bb45;--warn:#ff9552;
--bad:#ff7b86;--wash:.22"""

STYLE = (
    f":root{{color-scheme:light dark;{_LIGHT}}}"
    f"@media (prefers-color-scheme:dark){{:root{{{_DARK}}}}}"
    """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,"Segoe UI","DejaVu Sans",sans-serif}
main{max-width:1140px;margin:0 auto;padding:28px 24px 60px}
h1{font-size:27px;line-height:1.2;margin:0 0 6px;letter-spacing:-.01em}
h2{font-size:19px;margin:44px 0 4px;padding-top:14px;border-top:1px solid var(--rule)}
h3{font-size:15px;margin:22px 0 6px}
p{margin:4px 0 12px;max-width:76ch}.soft,figcaption span{color:var(--soft)}
.tag{display:inline-block;padding:1px 9px;border:1px solid currentColor;border-radius:9px;font-size:12.5px;
 margin:0 8px 0 0;white-space:nowrap}.tag.sim{color:var(--c4)}.tag.real{color:var(--c3)}
nav{margin:14px 0 0;font-size:14px;display:flex;flex-wrap:wrap;gap:2px 0}nav a{color:var(--c1);
margin-right:16px;text-decoration:none;white-space:nowrap}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(205px,1fr));gap:12px;margin:20px 0 0}
.card{background:var(--card);border:1px solid var(--rule);border-radius:6px;padding:11px 14px 12px}
.card b{display:block;font-size:23px;font-weight:600;line-height:1.25;font-variant-numeric:tabular-nums}
.card i{font-style:normal;font-size:13px;color:var(--soft)}
.card p{font-size:12.8px;line-height:1.4;margin:5px 0 0;color:var(--soft)}
.two{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,500px),1fr));gap:16px;
margin:14px 0}
.many{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,235px),1fr));gap:6px 12px}
figure{margin:0;background:var(--card);border:1px solid var(--rule);border-radius:6px;
padding:12px 14px 8px;min-width:0}
figure.lead{margin:14px 0}
figcaption{font-size:13.2px;line-height:1.4;margin-bottom:8px}figcaption b{display:block;font-size:14.5px}
svg.plot{display:block;width:100%;height:auto;font-family:inherit;touch-action:pan-y}
svg text{fill:var(--ink);font-size:11.5px;font-variant-numeric:tabular-nums}
svg .tick,svg .unit{fill:var(--soft)}svg .name{font-weight:600}svg .label,svg .end{font-weight:500}
svg .grid{stroke:var(--grid)}svg .zero{stroke:var(--zero)}svg .level{stroke:var(--warn);
stroke-dasharray:2 4}
svg path{fill:none;stroke-width:1.5;stroke-linejoin:round}svg .dash{stroke-dasharray:5 4}
svg .sigma{fill:var(--c0);opacity:var(--wash)}svg .cursor{stroke:var(--soft);stroke-width:1}
.narrow{display:none}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:13.5px;width:100%;margin:8px 0 14px}
th{text-align:left;font-weight:600;color:var(--soft);font-size:12.5px;border-bottom:1px solid var(--zero)}
th,td{padding:5px 14px 5px 0;vertical-align:top}td{border-bottom:1px solid var(--rule);
overflow-wrap:break-word}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}td.w{white-space:nowrap}
.critical{color:var(--bad);font-weight:600}.warning{color:var(--warn);font-weight:600}
.info{color:var(--soft)}
.bar{margin-top:4px;display:flex;height:12px;border-radius:3px;overflow:hidden;background:var(--grid);
min-width:120px}
.bar i{display:block}.g{background:var(--c3)}.st{background:var(--c5)}.un{background:var(--c4)}
.ou{background:var(--c2)}.mi{background:var(--c0)}
.key span{margin-right:16px;white-space:nowrap}.key i{display:inline-block;width:11px;height:11px;
border-radius:2px;
 margin-right:5px;vertical-align:-1px}
.note{border-left:3px solid var(--c1);padding:2px 0 2px 14px;margin:14px 0}
dl{display:grid;grid-template-columns:max-content 1fr;gap:3px 16px;font-size:13.5px}dt{font-weight:600}
dd{margin:0}
code{font:12.5px ui-monospace,"DejaVu Sans Mono",monospace;overflow-wrap:anywhere}
details{font-size:13.5px;margin:6px 0 12px}summary{cursor:pointer;color:var(--c1)}
#read{position:fixed;pointer-events:none;display:none;background:var(--card);color:var(--ink);z-index:9;
 border:1px solid var(--zero);border-radius:5px;padding:6px 9px;font-size:12.5px;line-height:1.45;
max-width:300px;
 box-shadow:0 2px 10px rgba(0,0,0,.18);font-variant-numeric:tabular-nums}
@media (max-width:640px){main{padding:18px 12px 40px}h1{font-size:22px}.wide{display:none}
.narrow{display:block}
 .cards{grid-template-columns:repeat(2,1fr);gap:8px}.card{padding:9px 10px}.card b{font-size:19px}
 figure{padding:9px 8px 6px}svg text{font-size:13px}.many svg text{font-size:10px}
 .many{grid-template-columns:repeat(2,1fr)}dl{grid-template-columns:1fr}dd{margin-bottom:6px}}
"""
    + "".join(
        f"svg .s{i}{{stroke:var(--c{i})}}svg .b{i}{{fill:var(--c{i});stroke:none;opacity:var(--wash)}}"
        f"svg .f{i}{{fill:var(--c{i})}}svg text.c{i}{{fill:var(--c{i})}}#read .c{i}{{color:var(--c{i})}}"
        for i in range(6)
    )
    + f"@media print{{:root{{{_LIGHT}}}body{{font-size:10.5pt;background:#fff}}"
    "nav,#read{display:none!important}"
    "main{max-width:none;padding:0}figure,.card,tr{break-inside:avoid}h2,h3{break-after:avoid}"
    ".scroll{overflow:visible}.bar i,.key i{print-color-adjust:exact;-webkit-print-color-adjust:exact}}"
)

# A line and a box follow the pointer: the nearest point of every series of that plot. Text
# only, never markup.
SCRIPT = """(function(){'use strict';
var T=JSON.parse(document.getElementById('times').textContent),box=document.getElementById('read'),
last=null;
function hide(){box.style.display='none';if(last){last.remove();last=null}}
function show(svg,e){var d=svg._d||(svg._d=JSON.parse(svg.dataset.p)),r=svg.getBoundingClientRect(),
w=svg.viewBox.baseVal.width,x=(e.clientX-r.left)*w/r.width,f=(x-d.l)/(d.r-d.l),n=T.at.length,i=0,j;
if(!n||f<-.03||f>1.06){hide();return}
for(j=1;j<n;j++)if(Math.abs(T.at[j]-f)<Math.abs(T.at[i]-f))i=j;
hide();last=svg.querySelector('line').cloneNode(false);
var px=d.l+T.at[i]*(d.r-d.l);[['x1',px],['x2',px],['y1',d.t],['y2',d.b],['class','cursor']].forEach(
function(a){last.setAttribute(a[0],a[1])});svg.appendChild(last);box.textContent='';
function row(text,kind){var p=document.createElement('div');p.textContent=text;if(kind)p.className=kind;
box.appendChild(p)}
row(T.say[i]);d.s.forEach(function(s){var v=s[2][i];
row((s[0]?s[0]+'  ':'')+(v===null?'–':v.toLocaleString('en')+(d.u?' '+d.u:'')),'c'+s[1])});
box.style.display='block';var bw=box.offsetWidth,bh=box.offsetHeight,X=e.clientX+14,Y=e.clientY+14;
if(X+bw>innerWidth-4)X=Math.max(4,e.clientX-bw-14);if(Y+bh>innerHeight-4)Y=Math.max(4,e.clientY-bh-14);
box.style.left=X+'px';box.style.top=Y+'px'}
document.querySelectorAll('svg[data-p]').forEach(function(svg){
svg.addEventListener('pointermove',function(e){show(svg,e)});
svg.addEventListener('pointerdown',function(e){show(svg,e)});
svg.addEventListener('pointerleave',hide)});addEventListener('scroll',hide,{passive:true})})();"""


def page(title: str, body: str, times: Sequence[str], places: Sequence[float]) -> str:
    """The whole file; `times` and `places` [points] serve the read-outs of all plots."""
    told = json.dumps({"at": [round(p, 5) for p in places], "say": list(times)}, separators=(",", ":"))
    told = told.replace("<", "\\u003c")
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{safe(title)}</title><style>{STYLE}</style></head>\n<body><main>\n{body}\n</main>"
        f'<div id="read"></div><script type="application/json" id="times">{told}</script>'
        f"<script>{SCRIPT}</script></body></html>\n"
    )
