"""Cells of the tables on the screen: signs, names, values with units, each as (text, style).

Text from outside is made safe. Each colour has a sign, the same as on the page; a style names colours of the
terminal's own palette.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from twin.catalogue import NS, clean, duration, number, percent, quantity, utc
from twin.cli.top.mirror import SiteMirror

Cell = tuple[str, str]  # text, style


class ColumnHead(NamedTuple):
    """The head of a column; one of width 0 takes what the others leave, numbers stand at the right."""

    name: str
    width: int = 0
    right: bool = False


GLYPHS = {"critical": "▲", "warning": "◆", "info": "●", "ok": "✓", "unknown": "?", "maintenance": "#",
          "healthy": "✓", "watch": "●", "degraded": "◆", "failed": "▲"}  # fmt: skip
TONES = {"critical": "bold red", "warning": "yellow", "info": "cyan", "ok": "green", "unknown": "magenta",
         "maintenance": "blue", "healthy": "green", "watch": "cyan", "degraded": "yellow",
         "failed": "bold red"}  # fmt: skip
SHOWN = {"info": "notice", "ok": "well"}  # severities and states, as they are written out
GRAVEST = ("critical", "warning", "info", "maintenance", "unknown", "ok")
_NUMBERS = re.compile(r"[\d.,:]+")
NEAR_PU, WARM_K, HOT_K = 0.9, 5.0, 2.0  # of a bound, as on the page


class ShortNames:
    """Names without what all names of the site have in common, and sentences with names so shortened."""

    def __init__(self, site: str = "", halls: Sequence[str] = ()) -> None:
        self.head = f"{halls[0]}/" if len(halls) == 1 else f"{site}/" if site else ""

    def short(self, name: str) -> str:
        """A name on one line."""
        text = clean(name, 120)
        return text[len(self.head) :] if self.head and text.startswith(self.head) else text

    def brief(self, text: str, now_ns: int = 0) -> str:
        """A sentence on one line; instants of today lose their date."""
        out = clean(text, 1000)
        if now_ns:
            out = out.replace(f"{utc(now_ns, '%Y-%m-%d')} ", "")
        return (out.replace(self.head, "") if self.head else out).replace(" degC", " °C")


def sign(kind: str) -> Cell:
    """The sign of a severity, state or level."""
    return GLYPHS.get(kind, ""), TONES.get(kind, "")


def clock(t_ns: int) -> str:
    """An instant of today; UTC."""
    return utc(t_ns, "%H:%M:%S") if t_ns > 0 else "-"


def brief_span(seconds: float | None) -> str:
    """A duration in one unit: 45 s, 12 min, 3 h, 4 d."""
    if seconds is None:
        return "-"
    for least_s, unit_s, unit in ((172_800, 86_400, "d"), (7200, 3600, "h"), (120, 60, "min")):
        if seconds >= least_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


# -- racks

_NUMERIC = {"power": 8, "guard": 8, "used": 5, "margin": 7, "GPUs": 4, "capped": 6, "out": 4, "hottest": 7,
            "age": 6}  # fmt: skip
RACK_HEADS = (
    ColumnHead("", 1), ColumnHead("name", 12), *(ColumnHead(n, w, True) for n, w in _NUMERIC.items()),
)  # fmt: skip


def state_of(mirror: SiteMirror, row: int) -> str:
    """The state of a rack."""
    state = mirror.columns["state"][row]
    return str(mirror.layout["states"][state or 0])


def rack_cells(mirror: SiteMirror, names: ShortNames, row: int) -> list[Cell]:
    """A rack: state, power beside its guard, margin of temperatures, GPUs, age of old readings."""
    columns, layout = mirror.columns, mirror.layout
    power_w, guard_w = columns["power_w"][row], layout["power_guard_w"][row]
    share = power_w / guard_w if power_w is not None and guard_w else None
    age_s, margin_k = columns["age_s"][row], columns["margin_k"][row]
    out, failed, capped = columns["out"][row], columns["failed"][row], columns["capped"][row]
    state, stale = state_of(mirror, row), "dim" if age_s is not None else ""
    hottest_c = columns["gpu_temp_c"][row]
    return [
        sign(state),
        (names.short(layout["names"][row]), TONES[state] if state in ("critical", "warning") else ""),
        ("unknown", TONES["unknown"]) if power_w is None else (quantity(power_w, "W"), stale),
        (quantity(guard_w, "W"), "dim"),
        ("" if share is None else f"{share:.0%}", _near(share)),
        ("-", "dim") if margin_k is None else (f"{number(margin_k)} K", _margin(margin_k) or stale),
        (f"{layout['gpus'][row] - (out or 0)}", ""),
        (f"{capped}" if capped else "-", "yellow" if capped else "dim"),
        (f"{out}" if out else "-", TONES["critical"] if failed else "yellow" if out else "dim"),
        ("-", "dim") if hottest_c is None else (f"{hottest_c:.0f} °C", stale),
        ("", "") if age_s is None else (brief_span(age_s), "yellow"),
    ]


def _near(share: float | None) -> str:
    if share is None or share < NEAR_PU:
        return ""
    return TONES["critical"] if share >= 1 else TONES["warning"]


def _margin(margin_k: float) -> str:
    return TONES["critical"] if margin_k < HOT_K else TONES["warning"] if margin_k < WARM_K else ""


# -- alarms and decisions

ALARM_HEADS = (ColumnHead("", 1), ColumnHead("for", 6, True), ColumnHead("alarm"))
LINE_HEADS = (ColumnHead("UTC", 8), ColumnHead("decision"))
FOLDED_NS = 60 * NS  # between two decisions that say the same but for numbers
FOLDED_NEAR = 4  # lines that may stand between them


def alarm_cells(alarm: dict[str, Any], names: ShortNames, now_ns: int, whole: bool = False) -> list[Cell]:
    """An alarm: severity, since when, title; dim if somebody has it. `whole`: with what is done and to do."""
    since_ns, severity = alarm.get("raised_ns") or 0, str(alarm.get("severity"))
    aside = "dim" if alarm.get("ack_author") or alarm.get("state") == "shelved" else ""
    title = names.brief(str(alarm.get("title", "")), now_ns)
    has = f" ({clean(alarm['ack_author'], 40)} has it)" if alarm.get("ack_author") else ""
    style = aside or (TONES["critical"] if severity == "critical" else "")
    age = brief_span((now_ns - since_ns) / NS) if since_ns else "-"
    text = title + has
    if whole:
        doing = alarm.get("doing") or ["nothing"]
        text += f"\n  racktwin: {names.brief('; '.join(map(str, doing)), now_ns)}"
        text += f"\n  you: {clean(alarm.get('action') or 'nothing to do', 300)}"
    return [sign(severity), (age, "dim"), (text, style)]


def folded(lines: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Decisions, the newest first; those that say the same but for numbers within a minute are together."""
    out: list[list[dict[str, Any]]] = []
    shapes: list[str] = []
    for line in lines:
        shape = _NUMBERS.sub("#", f"{line['kind']} {line['text']}")[:70]
        for group, known in list(zip(out, shapes, strict=True))[-FOLDED_NEAR:]:
            if known == shape and group[-1]["now_ns"] - line["now_ns"] < FOLDED_NS:
                group.append(line)
                break
        else:
            out.append([line])
            shapes.append(shape)
    return out


def line_cells(group: Sequence[dict[str, Any]], names: ShortNames, now_ns: int) -> list[Cell]:
    """A decision, or several alike: when, how many, and the sentence of the newest."""
    many = f"{len(group)} × " if len(group) > 1 else ""
    return [(clock(group[0]["now_ns"]), "dim"), (many + names.brief(group[0]["text"], now_ns), "")]


def line_key(group: Sequence[dict[str, Any]]) -> str:
    """The key of decisions alike: that of the oldest, which stays while others join."""
    return f"{group[-1]['tick']} {group[-1]['kind']} {group[-1]['text']}"


# -- the head of the screen


def head_cells(mirror: SiteMirror, age_s: float | None) -> list[Cell]:
    """Site, role, mode, age of the tick, and a mark of a simulated site."""
    state = mirror.state
    role, mode, ticks = clean(state["role"]), clean(state["mode"]), state["ticks"]
    late = age_s is not None and age_s > max(5.0, 3 * ticks["every_s"])
    out = [(clean(state["site"]), "bold"), (role, "green" if role == "leader" else "yellow"),
           (mode, "" if mode == "normal" else TONES["critical"]),
           (f"tick {ticks['tick']}, {brief_span(age_s)} ago", TONES["critical"] if late else "")]  # fmt: skip
    if state["simulated"]:
        out.append(("simulated", "cyan"))
    if not state["ready"]:
        out.append(("not ready", "red"))
    if state["windows"]:
        out.append((f"{len(state['windows'])} under maintenance", TONES["maintenance"]))
    return out


def figure_cells(mirror: SiteMirror, names: ShortNames) -> list[Cell]:
    """Power beside what the site may draw, the least margin, GPUs, alarms by severity."""
    out: list[Cell] = []
    power_w, (budget_w, one_side) = mirror.power_w(), mirror.budget_w()
    if power_w is None:
        out.append(("power unknown", TONES["unknown"]))
    else:
        text, share = quantity(power_w, "W"), power_w / budget_w if budget_w else None
        if share is not None:
            text += f" of {quantity(budget_w, 'W')}{' (one side)' if one_side else ''}, {percent(share, 2)}"
        out.append((text, _near(share)))
    least = mirror.least_margin()
    if least is not None:
        out.append((f"margin {number(least[1])} K {names.short(least[0])}", _margin(least[1])))
    capped, gone = mirror.sum_of("capped"), mirror.sum_of("out")
    gpus = mirror.state["sizes"].get("gpu", 0)
    text = f"GPUs {gpus - gone:,.0f} of {gpus:,}"
    text += f", {capped:,.0f} capped" if capped else ""
    out.append((text + (f", {gone:,.0f} out" if gone else ""), "yellow" if gone else ""))
    return out


def severity_cells(counts: dict[str, int]) -> list[Cell]:
    """Counts of alarms that ring by severity, and of those put aside."""
    out = [(f"{GLYPHS[s]} {counts[s]:,} {SHOWN.get(s, s)}", TONES[s])
           for s in ("critical", "warning", "info") if counts.get(s)]  # fmt: skip
    if counts.get("shelved"):
        out.append((f"{counts['shelved']:,} shelved", "dim"))
    return out or [("✓ none", TONES["ok"])]


def state_cells(mirror: SiteMirror) -> list[Cell]:
    """Counts of racks by state, the gravest first."""
    states = mirror.layout["states"]
    found = [states[s or 0] for s in mirror.columns["state"]]
    return [(f"{GLYPHS[s]} {found.count(s):,} {SHOWN.get(s, s)}", TONES[s]) for s in GRAVEST if s in found]


def since(t_ns: int | None, now_ns: int) -> str:
    """Since when something is so, and how long that is."""
    return f"since {clock(t_ns)} UTC ({duration((now_ns - t_ns) / NS)})" if t_ns else ""
