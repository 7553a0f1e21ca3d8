"""Metrics, traces and logs. Most are adapters on the event hook, and hooks themselves: pass one as `on_event`.

    client = leasehold.Client(url, on_event=leasehold.telemetry.Prometheus())

metrics.py        counts events; prometheus.py shows the same to prometheus-client
groups.py         the label `group`: names without their ids, with a cap
families.py       counters, histograms and their text for Prometheus
text_file.py      metrics of short-lived processes, for the textfile collector of node_exporter
engine_health.py  metrics of the engine's servers
otel.py           spans and metrics for OpenTelemetry
logs.py           log lines as JSON
audit/            the audit log; alerts/: rules for Prometheus, a dashboard
event_queue.py    calls a slow hook on a thread of its own

`fan` passes events to several hooks. Modules are loaded on first use, because some need packages of their own.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from leasehold.errors import ConfigError
from leasehold.events import Event, Hook, call_hook

if TYPE_CHECKING:
    from leasehold.telemetry import otel
    from leasehold.telemetry.audit import AuditFile
    from leasehold.telemetry.engine_health import EngineHealth
    from leasehold.telemetry.event_queue import background
    from leasehold.telemetry.families import metrics_text
    from leasehold.telemetry.logs import JSONFormatter
    from leasehold.telemetry.metrics import Metrics
    from leasehold.telemetry.prometheus import Collector, Prometheus

_MODULES = {
    "AuditFile": "audit",
    "Collector": "prometheus",
    "EngineHealth": "engine_health",
    "JSONFormatter": "logs",
    "Metrics": "metrics",
    "Prometheus": "prometheus",
    "background": "event_queue",
    "metrics_text": "families",
}

__all__ = [
    "AuditFile",
    "Collector",
    "EngineHealth",
    "JSONFormatter",
    "Metrics",
    "Prometheus",
    "background",
    "fan",
    "metrics_text",
    "otel",
]


def fan(*hooks: Hook) -> Hook:
    """A hook that passes every event to all of these, in order. If one raises, the exception is logged, and the others
    get the event nevertheless."""
    if not all(map(callable, hooks)):
        raise ConfigError("fan takes hooks: functions that take one event")

    def pass_on(event: Event) -> None:
        for hook in hooks:
            call_hook(hook, event)

    return pass_on


def __getattr__(name: str) -> object:
    if name == "otel":
        return import_module(f"{__name__}.otel")
    if module := _MODULES.get(name):
        return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
