"""Alerts of Prometheus on the daemon: each fires after its time for its own fault, and alone."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "rules.yaml"
LONG = 1000  # samples, 15 s apart: longer than the slowest alert takes
AT = 'job="racktwin",instance="a"'
FIRING = 'count by (alertname) (ALERTS{alertstate="firing"})'

HEALTHY = {
    f"up{{{AT}}}": "1",
    f'racktwin_info{{{AT},site="lab"}}': "1",
    f"racktwin_leads{{{AT}}}": "1",
    f"racktwin_tick_age_seconds{{{AT}}}": "0.5",
    f"racktwin_tick_every_seconds{{{AT}}}": "1",
    f"racktwin_ticks_skipped_total{{{AT}}}": "0",
    f'racktwin_tick_late_seconds{{{AT},percentile="99"}}': "0.01",
    f"racktwin_start_time_seconds{{{AT}}}": "1000",
    f'racktwin_counted_total{{{AT},what="notes_dropped"}}': "0",
    f'racktwin_part_running{{{AT},kind="source",part="mqtt"}}': "1",
    f'racktwin_part_running{{{AT},kind="sink",part="to-agents"}}': "1",
    f'racktwin_part_running{{{AT},kind="service",part="notify"}}': "1",
    f'racktwin_policy_suspended{{{AT},policy="power_cap"}}': "0",
    f'racktwin_refused_total{{{AT},what="no such token"}}': "0",
    f'racktwin_mode{{{AT},mode="normal"}}': "1",
    f"racktwin_health_age_seconds{{{AT}}}": "1",
    f'racktwin_health_parts{{{AT},part="gpu",level="healthy"}}': "10",
    f'racktwin_health_parts{{{AT},part="gpu",level="unknown"}}': "0",
    f'racktwin_health_faults_total{{{AT},what="unknown_entities"}}': "0",
    f"racktwin_forecasts_left_out{{{AT}}}": "0",
    f"racktwin_explained_left_out{{{AT}}}": "0",
}
SECOND = AT.replace('"a"', '"b"')
# (alert, series that differ, an instant at which it does not fire yet, one at which it does)
CASES: list[tuple[str, dict[str, str], str, str]] = [
    ("RacktwinGone", {f"up{{{AT}}}": "0"}, "45s", "75s"),
    ("RacktwinNobodyLeads", {f"racktwin_leads{{{AT}}}": "0"}, "45s", "75s"),
    ("RacktwinTwoLead", {f"racktwin_leads{{{SECOND}}}": "1", f'racktwin_info{{{SECOND},site="lab"}}': "1"},
     "45s", "75s"),
    ("RacktwinDoesNotTick", {f"racktwin_tick_age_seconds{{{AT}}}": "60"}, "15s", "45s"),
    ("RacktwinSkipsTicks", {f"racktwin_ticks_skipped_total{{{AT}}}": f"0+3x{LONG}"}, "5m", "8m"),
    ("RacktwinTicksLate", {f'racktwin_tick_late_seconds{{{AT},percentile="99"}}': "2"}, "9m", "11m"),
    ("RacktwinRestarts", {f"racktwin_start_time_seconds{{{AT}}}": f"1000 1000 2000 3000 4000+0x{LONG}"},
     "45s", "60s"),
    ("RacktwinLosesRecords", {f'racktwin_counted_total{{{AT},what="notes_dropped"}}': f"0 0 1+0x{LONG}"},
     "15s", "45s"),
    ("RacktwinCannotNotify", {f'racktwin_part_running{{{AT},kind="service",part="notify"}}': "0"},
     "105s", "135s"),
    ("RacktwinLeavesOutSeries", {f'racktwin_series_left_out{{{AT},table="gpu"}}': "144"}, "14m", "16m"),
    ("RacktwinSourceDown", {f'racktwin_part_running{{{AT},kind="source",part="mqtt"}}': "0"}, "105s", "135s"),
    ("RacktwinSinkDown", {f'racktwin_part_running{{{AT},kind="sink",part="to-agents"}}': "0"}, "45s", "75s"),
    ("RacktwinPolicySuspended", {f'racktwin_policy_suspended{{{AT},policy="power_cap"}}': f"0 0 1+0x{LONG}"},
     "15s", "30s"),
    ("RacktwinRefusesManyRequests",
     {f'racktwin_refused_total{{{AT},what="no such token"}}': f"0+30x{LONG}"}, "5m", "8m"),
    ("RacktwinSiteHeld", {f'racktwin_mode{{{AT},mode="hold"}}': "1"}, "239m", "241m"),
    ("RacktwinHealthIsOld", {f"racktwin_health_age_seconds{{{AT}}}": "600"}, "105s", "135s"),
    ("RacktwinKnowsTooLittle", {f'racktwin_health_parts{{{AT},part="gpu",level="unknown"}}': "11"},
     "59m", "61m"),
    ("RacktwinDropsFaults",
     {f'racktwin_health_faults_total{{{AT},what="unknown_entities"}}': f"0+3x{LONG}"}, "15m", "24m"),
]  # fmt: skip


def case(alert: str, differing: dict[str, str], before: str, after: str) -> dict[str, Any]:
    """A case as promtool reads it."""
    series = {name: f"{v}+0x{LONG}" if "x" not in v else v for name, v in (HEALTHY | differing).items()}
    return {
        "interval": "15s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": FIRING, "eval_time": before, "exp_samples": []},
            {
                "expr": FIRING,
                "eval_time": after,
                "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1}],
            },
        ],
    }


@pytest.mark.long
def test_each_alert_fires_for_its_own_fault_and_alone(server: Callable[..., Path], tmp_path: Path) -> None:
    promtool = str(server("promtool", "prometheus"))
    tree = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    alerts = [rule["alert"] for group in tree["groups"] for rule in group["rules"] if "alert" in rule]
    assert sorted(alerts) == sorted(alert for alert, *_ in CASES)
    calm = case("none", {}, "15s", "240m")
    calm["promql_expr_test"][1]["exp_samples"] = []
    path = tmp_path / "cases.yaml"
    path.write_text(yaml.safe_dump({
        "rule_files": [str(RULES)], "evaluation_interval": "15s", "tests": [calm, *(case(*c) for c in CASES)],
    }))  # fmt: skip
    for words in (("check", "rules", str(RULES)), ("test", "rules", str(path))):
        answer = subprocess.run([promtool, *words], capture_output=True, text=True, check=False)
        assert answer.returncode == 0, answer.stdout + answer.stderr
