"""The rules as a file for Prometheus. A text in JSON is also one in YAML."""

from __future__ import annotations

import json
from collections.abc import Iterator

from leasehold import __version__
from leasehold.telemetry.alerts.rules import ALERTS, RECORDED, Alert

_HEAD = f"""\
# Recording and alerting rules of Leasehold {__version__}, printed by `leasehold alerts`.
# Name the file in `rule_files` of prometheus.yml, and check it with `promtool check rules`. Name the job that scrapes
# lock servers `leasehold`. To change a threshold, change your copy.
groups:
"""


def rules_file() -> str:
    lines = ["  - name: leasehold-recorded", "    interval: 15s", "    rules:"]
    for recorded in RECORDED:
        lines += [f"      - record: {recorded.name}", f"        expr: {_quoted(recorded.expression)}"]
    lines += ["  - name: leasehold-alerts", "    interval: 15s", "    rules:"]
    for alert in ALERTS:
        lines += _lines(alert)
    return _HEAD + "\n".join(lines) + "\n"


def _lines(alert: Alert) -> Iterator[str]:
    yield f"      - alert: {alert.name}"
    yield f"        expr: {_quoted(alert.expression)}"
    yield f"        for: {alert.after}"
    yield f"        labels: {{severity: {alert.severity}}}"
    yield "        annotations:"
    yield f"          summary: {_quoted(alert.summary)}"
    yield f"          runbook: {_quoted(alert.runbook)}"
    yield f"          runbook_url: {_quoted(alert.runbook_url)}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
