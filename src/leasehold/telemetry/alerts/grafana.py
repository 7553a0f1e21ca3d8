"""The dashboard for Grafana: one page, no plug-ins, variables for the data source, engine and group of locks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from leasehold.telemetry.alerts import rules

Json: TypeAlias = dict[str, Any]

_SOURCE: Final = {"type": "prometheus", "uid": "${source}"}
_ENGINE: Final = 'engine=~"$engine"'
_GROUP: Final = 'engine=~"$engine",group=~"$group"'
_WIDTH: Final = 24  # of the grid


class Query(NamedTuple):
    expression: str
    legend: str = ""


class Panel(NamedTuple):
    """`thresholds`: colours, each with the value from which it applies; the values are those of the alerts."""

    kind: Literal["stat", "timeseries", "table", "heatmap"]
    title: str
    queries: Sequence[Query]
    unit: str = "short"
    thresholds: Sequence[tuple[str, float | None]] = (("green", None),)
    text: str = ""


class PanelRow(NamedTuple):
    title: str
    height: int
    across: int  # panels side by side
    panels: Sequence[Panel]


def _below(*thresholds: tuple[str, float]) -> Sequence[tuple[str, float | None]]:
    """Green below the first of these."""
    return (("green", None), *thresholds)


def _rate(labels: str, metric: str, selector: str) -> str:
    return f"sum by ({labels}) (rate({metric}{{{selector}}}[$__rate_interval]))"


def _increase(metric: str, selector: str, window: str = "$__rate_interval") -> str:
    return f"increase({metric}{{{selector}}}[{window}])"


_UNEXPECTED: Final = f'{_ENGINE},reason!~"max_hold|forked"'
_LOST, _STALE = "leasehold_leases_lost_total", "leasehold_stale_tokens_total"
_CALLS = _rate("engine, call, le", "leasehold_engine_call_seconds_bucket", _ENGINE)

ROWS: Final = (
    PanelRow(
        "Now",
        4,
        8,
        (
            Panel("stat", "Held", [Query(f'sum(leasehold_locks{{state="held",{_ENGINE}}})')]),
            Panel("stat", "Waiting", [Query(f'sum(leasehold_locks{{state="waiting",{_ENGINE}}})')]),
            Panel("stat", "Acquires", [Query(f"sum(leasehold:acquires:rate5m{{{_ENGINE}}})")], "ops"),
            Panel(
                "stat",
                "Acquire p95",
                [Query(f"max(leasehold:acquire_seconds:p95{{{_ENGINE}}})")],
                "s",
                _below(("orange", rules.ACQUIRE_P95 / 2), ("red", rules.ACQUIRE_P95)),
            ),
            Panel(
                "stat",
                "Errors",
                [Query(f"max(leasehold:errors:ratio5m{{{_ENGINE}}})")],
                "percentunit",
                _below(("orange", rules.ERRORS_WARNING), ("red", rules.ERRORS_CRITICAL)),
            ),
            Panel(
                "stat",
                "Lost, 24 h",
                [Query(f"sum({_increase(_LOST, _UNEXPECTED, '24h')}) or vector(0)")],
                thresholds=_below(("orange", 1)),
            ),
            Panel(
                "stat",
                "Tokens refused, 24 h",
                [Query(f"sum({_increase(_STALE, _ENGINE, '24h')}) or vector(0)")],
                thresholds=_below(("orange", 1)),
            ),
            Panel(
                "stat",
                "Engines up",
                [Query(f"min(leasehold_engine_up{{{_ENGINE}}})")],
                thresholds=(("red", None), ("green", 1)),
            ),
        ),
    ),
    PanelRow(
        "Acquiring",
        8,
        2,
        (
            Panel(
                "timeseries",
                "Acquire latency, uncontended",
                [
                    Query(f"leasehold:acquire_seconds:{share}{{{_ENGINE}}}", f"{share} {{{{engine}}}}")
                    for share in ("p50", "p95", "p99")
                ],
                "s",
                _below(("red", rules.ACQUIRE_P95)),
                "What the engine and the network cost. Waiting for a holder is not included.",
            ),
            Panel(
                "timeseries",
                "Waits in the queue, p99 by group",
                [Query(f"leasehold:wait_seconds:p99{{{_GROUP}}}", "{{group}}")],
                "s",
                _below(("orange", rules.WAIT_P99)),
            ),
        ),
    ),
    PanelRow(
        "",
        8,
        3,
        (
            Panel(
                "timeseries",
                "How acquires ended",
                [Query(_rate("outcome", "leasehold_acquires_total", _GROUP), "{{outcome}}")],
                "ops",
            ),
            Panel(
                "timeseries",
                "Contention by group",
                [Query(f"leasehold:contention:ratio5m{{{_GROUP}}}", "{{group}}")],
                "percentunit",
            ),
            Panel(
                "heatmap",
                "How long locks are held",
                [Query(_rate("le", "leasehold_hold_seconds_bucket", _GROUP), "{{le}}")],
                "s",
            ),
        ),
    ),
    PanelRow(
        "Leases",
        8,
        3,
        (
            Panel(
                "timeseries",
                "Share of the ttl left at renewal, p05",
                [Query(f"leasehold:renew_margin:p05{{{_ENGINE}}}", "{{engine}}")],
                "percentunit",
                (("red", None), ("green", rules.RENEW_MARGIN)),
                "Two thirds are healthy.",
            ),
            Panel(
                "timeseries",
                "Renewals that failed",
                [Query(f"leasehold:renew_failures:ratio5m{{{_ENGINE}}}", "{{engine}}")],
                "percentunit",
                _below(("red", rules.RENEW_FAILURES)),
            ),
            Panel(
                "timeseries",
                "Lost, refused, broken",
                [
                    Query(f"sum by (reason) ({_increase(_LOST, _GROUP)})", "lost: {{reason}}"),
                    Query(f"sum by (fence) ({_increase(_STALE, _GROUP)})", "refused by {{fence}}"),
                    Query(f"sum({_increase('leasehold_breaks_total', _ENGINE)})", "broken"),
                ],
            ),
        ),
    ),
    PanelRow(
        "",
        8,
        2,
        (
            Panel(
                "table",
                "Held longest, by group",
                [Query(f"topk(15, max by (namespace, group) (leasehold_oldest_hold_seconds{{{_GROUP}}}))")],
                "s",
            ),
            Panel(
                "table",
                "Longest queues, by group",
                [Query(f"topk(15, max by (namespace, group) (leasehold_line_longest{{{_GROUP}}}))")],
            ),
        ),
    ),
    PanelRow(
        "Engine",
        8,
        3,
        (
            Panel(
                "timeseries",
                "Calls to the engine, p99",
                [Query(f"histogram_quantile(0.99, {_CALLS})", "{{engine}} {{call}}")],
                "s",
            ),
            Panel(
                "timeseries",
                "Storage used",
                [Query(f"leasehold_engine_storage_used_ratio{{{_ENGINE}}}", "{{member}} {{store}}")],
                "percentunit",
                _below(("orange", rules.STORAGE_WARNING), ("red", rules.STORAGE_CRITICAL)),
            ),
            Panel(
                "timeseries",
                "Members",
                [
                    Query(f"leasehold_engine_members{{{_ENGINE}}}", "{{engine}} {{state}}"),
                    Query(f"leasehold_engine_has_leader{{{_ENGINE}}}", "{{engine}} has leader"),
                ],
            ),
            Panel(
                "timeseries",
                "Replication lag",
                [Query(f"leasehold_engine_replication_lag_seconds{{{_ENGINE}}}", "{{member}}")],
                "s",
                _below(("orange", rules.REPLICATION_LAG)),
            ),
            Panel(
                "timeseries",
                "Clock offset",
                [Query(f"leasehold_engine_clock_offset_seconds{{{_ENGINE}}}", "{{member}}")],
                "s",
                _below(("orange", rules.CLOCK_OFFSET)),
            ),
            Panel(
                "timeseries",
                "Leader changes and evictions in 15 min",
                [
                    Query(_increase("leasehold_engine_leader_changes_total", _ENGINE, "15m"), "leader {{engine}}"),
                    Query(_increase("leasehold_engine_evictions_total", _ENGINE, "15m"), "evictions {{member}}"),
                ],
            ),
        ),
    ),
    PanelRow(
        "Server",
        8,
        3,
        (
            Panel(
                "timeseries",
                "Requests",
                [Query(_rate("route, code", "leasehold_server_requests_total", ""), "{{route}} {{code}}")],
                "ops",
            ),
            Panel("timeseries", "Under way", [Query("sum by (kind) (leasehold_server_in_flight)", "{{kind}}")]),
            Panel(
                "timeseries",
                "Status queries answered from the cache",
                [Query("leasehold:cache_hits:ratio5m", "{{instance}}")],
                "percentunit",
                (("orange", None), ("green", rules.CACHE_HITS)),
            ),
        ),
    ),
)

_LEGEND: Final = {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"]}
_OPTIONS: Final[dict[str, Json]] = {
    "stat": {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"},
    "timeseries": {"legend": _LEGEND, "tooltip": {"mode": "multi", "sort": "desc"}},
    "heatmap": {"calculate": False, "color": {"scheme": "Oranges", "mode": "scheme"}, "yAxis": {"unit": "s"}},
    "table": {},
}
_LINES: Final = {"lineWidth": 1, "fillOpacity": 8, "showPoints": "never", "spanNulls": True}
_FORMATS: Final[dict[str, Json]] = {"table": {"instant": True, "format": "table"}, "heatmap": {"format": "heatmap"}}


def dashboard() -> str:
    """The dashboard as JSON, for Grafana's import."""
    board: Json = {
        "uid": "leasehold",
        "title": "Leasehold",
        "tags": ["leasehold", "locks"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "timezone": "browser",
        "refresh": "15s",
        "time": {"from": "now-3h", "to": "now"},
        "graphTooltip": 1,
        "templating": {
            "list": [
                {"name": "source", "label": "Source", "type": "datasource", "query": "prometheus", "current": {}},
                _variable("engine", 'label_values({__name__=~"leasehold_acquires_total|leasehold_engine_up"}, engine)'),
                _variable("group", f"label_values(leasehold_acquires_total{{{_ENGINE}}}, group)"),
            ]
        },
        "annotations": {
            "list": [
                {
                    "name": "Alerts",
                    "datasource": _SOURCE,
                    "enable": True,
                    "expr": 'ALERTS{alertname=~"Leasehold.*",alertstate="firing"}',
                    "titleFormat": "{{alertname}}",
                    "iconColor": "red",
                }
            ]
        },
        "panels": _panels(),
    }
    return json.dumps(board, indent=1) + "\n"


def _variable(name: str, query: str) -> Json:
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
        "sort": 1,
    }


def _panels() -> list[Json]:
    panels: list[Json] = []
    y = 0
    for row in ROWS:
        if row.title:
            place = {"x": 0, "y": y, "w": _WIDTH, "h": 1}
            panels.append({"type": "row", "title": row.title, "collapsed": False, "gridPos": place, "panels": []})
            y += 1
        width = _WIDTH // row.across
        for index, panel in enumerate(row.panels):
            line, column = divmod(index, row.across)
            place = {"x": column * width, "y": y + line * row.height, "w": width, "h": row.height}
            panels.append({**_panel(panel), "gridPos": place})
        y += -(-len(row.panels) // row.across) * row.height
    return [{"id": number, **panel} for number, panel in enumerate(panels, 1)]


def _panel(panel: Panel) -> Json:
    lines = panel.kind == "timeseries"
    has_limit = len(panel.thresholds) > 1
    steps = [{"color": colour, "value": value} for colour, value in panel.thresholds]
    custom: Json = {**_LINES, **({"thresholdsStyle": {"mode": "line"}} if has_limit else {})} if lines else {}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": _SOURCE,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "expr": query.expression,
                "legendFormat": query.legend,
                **_FORMATS.get(panel.kind, {}),
            }
            for index, query in enumerate(panel.queries)
        ],
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "custom": custom,
                "thresholds": {"mode": "absolute", "steps": steps},
            },
            "overrides": [],
        },
        "options": _OPTIONS[panel.kind],
    }
