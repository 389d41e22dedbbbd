"""Board `cooling`: how far the hottest parts are from their limits, and whether coolant arrives."""

from __future__ import annotations

from racktwin_boards.boards import Board
from racktwin_boards.panels import AT_LEAST_0, BAD, DAEMON, GOOD, RACK, Panel, Query, each

_HALL = f'{DAEMON},hall=~"$hall"'
_LIMITS = "`limits` of the racks' profiles"
_MARGIN = Panel(
    "Least distance to the greatest temperature",
    "bars",
    (
        Query(
            f'min by (signal) (racktwin_limit_margin{{{DAEMON},limit="max",unit=~"degC|K"}})',
            "{{signal}}",
        ),
    ),
    good="above 0 for every signal.",
    otherwise="parts throttle or are damaged: find the rack below, then its flow and supply temperature.",
    unit="kelvin",
    source=_LIMITS,
    steps=AT_LEAST_0,
    width=6,
)
_FLOW_MARGIN = Panel(
    "Least distance to the least flow",
    "bars",
    (Query(f'min by (limit) (racktwin_limit_margin{{{DAEMON},signal="rack.flow_lpm"}})', "to {{limit}}"),),
    good="above 0.",
    otherwise="a pump, a valve or a filter: see the flow of racks and CDUs below.",
    unit="flowlpm",
    source=_LIMITS,
    steps=AT_LEAST_0,
    width=6,
)
_LEAKS = Panel(
    "Leaks reported",
    "stat",
    (
        Query(f"sum({each('racktwin_rack_leak_state', 'name', where=RACK)})", "racks"),
        Query(f"sum({each('racktwin_cdu_leak_state', 'name', where=_HALL)})", "CDUs"),
    ),
    good="0. No data: no leak sensor is connected.",
    otherwise="`racktwin alarm list` names the place and what the leak guard did.",
    source="one leak is one too many",
    steps=((None, GOOD), (1.0, BAD)),
    width=6,
)
_HEAT = Panel(
    "Heat that CDUs may still take",
    "bars",
    (Query(f'min by (name) (racktwin_power_headroom_watts{{{DAEMON},kind="cdu"}})', "{{name}}"),),
    good="above 0.",
    otherwise="the CDU binds before the feeder: caps are due. `racktwin power show --kind cdu`.",
    unit="watt",
    source="the capacity of the CDU's profile, or of the racks that it serves",
    steps=AT_LEAST_0,
    width=6,
)
_HOTTEST = Panel(
    "Hottest GPU of each rack",
    "lines",
    (Query(f"topk(20, {each('racktwin_rack_gpu_temp_c_max', 'name', where=RACK)})", "{{name}}"),),
    good="alike in racks of one profile under the same load; the 20 hottest are shown.",
    otherwise="one rack leaves the others: compare its flow and supply temperature on this board.",
    unit="celsius",
    board="cooling",
)
_RACK_TEMPS = Panel(
    "Coolant of racks: supply and return",
    "lines",
    (
        Query(f"topk(10, {each('racktwin_rack_supply_temp_c', 'name', where=RACK)})", "{{name}} supply"),
        Query(f"topk(10, {each('racktwin_rack_return_temp_c', 'name', where=RACK)})", "{{name}} return"),
    ),
    good="supply flat, return above it by what the load asks for.",
    otherwise="supply rises: CDU or facility water. Return alone rises: too little flow.",
    unit="celsius",
    board="power",
)
_RACK_FLOW = Panel(
    "Coolant flow of racks",
    "lines",
    (Query(f"bottomk(20, min by (name) (racktwin_rack_flow_lpm{{{RACK}}}))", "{{name}}"),),
    good="flat; the 20 lowest are shown.",
    otherwise="all fall: pump of the CDU. One falls: its valve, hose or filter.",
    unit="flowlpm",
    board="cooling",
)
_CDU_TEMPS = Panel(
    "CDUs: supply temperature and its setpoint",
    "lines",
    (
        Query(each("racktwin_cdu_supply_temp_c", "name", where=_HALL), "{{name}}"),
        Query(each("racktwin_cdu_supply_temp_setpoint_c", "name", where=_HALL), "{{name}} setpoint"),
    ),
    good="supply within a kelvin of its setpoint.",
    otherwise="supply above it: facility water too warm or too little of it.",
    unit="celsius",
)
_CDU_FLOW = Panel(
    "CDUs: flow",
    "lines",
    (Query(f"min by (name) (racktwin_cdu_flow_lpm{{{_HALL}}})", "{{name}}"),),
    good="flat at a constant load.",
    otherwise="falls at the same speed of the pumps: filter or air; with their speed: a pump.",
    unit="flowlpm",
)
_PUMPS = Panel(
    "CDUs: speed of pumps",
    "lines",
    (
        Query(each("racktwin_cdu_pump1_speed_pu", "name", where=_HALL), "{{name}} pump 1"),
        Query(each("racktwin_cdu_pump2_speed_pu", "name", where=_HALL), "{{name}} pump 2"),
    ),
    good="both alike, or one at rest as standby.",
    otherwise="near 100 % there is no reserve left: a filter clogs, or too many racks.",
    unit="percentunit",
)
_OUTSIDE = Panel(
    "Heat sink: facility water and wet bulb",
    "lines",
    (
        Query(each("racktwin_cdu_facility_supply_temp_c", "name", where=_HALL), "{{name}} facility supply"),
        Query(f"max(racktwin_site_outdoor_wet_bulb_c{{{DAEMON}}})", "wet bulb"),
    ),
    good="facility water follows the wet bulb at a constant distance.",
    otherwise="the distance grows: towers, chillers or their pumps.",
    unit="celsius",
)
_AISLES = Panel(
    "Aisles",
    "lines",
    (
        Query(
            each("racktwin_hall_cold_aisle_temp_c", "name", where=f'{DAEMON},name=~"$hall"'), "{{name}} cold"
        ),
        Query(
            each("racktwin_hall_hot_aisle_temp_c", "name", where=f'{DAEMON},name=~"$hall"'), "{{name}} hot"
        ),
    ),
    good="cold aisle flat.",
    otherwise="air conditioning, or a door. Parts with fans follow within minutes.",
    unit="celsius",
)

COOLING = Board(
    "cooling",
    "How far are the hottest parts from their limits, and does coolant arrive?",
    (
        _MARGIN, _FLOW_MARGIN, _LEAKS, _HEAT, _HOTTEST, _RACK_TEMPS, _RACK_FLOW, _CDU_TEMPS, _CDU_FLOW,
        _PUMPS, _OUTSIDE, _AISLES,
    ),
)  # fmt: skip
