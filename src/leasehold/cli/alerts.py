"""`leasehold alerts`: rules for Prometheus, a dashboard for Grafana, routing for Alertmanager."""

from __future__ import annotations

import click

from leasehold.cli.console import Console, pass_console
from leasehold.cli.help import command

EXAMPLES = """
leasehold alerts > /etc/prometheus/leasehold.yml       to name in rule_files of Prometheus
leasehold alerts --format grafana > leasehold.json     to import as a dashboard
leasehold alerts --format alertmanager                 an example: page, chat, mail
"""


@command("alerts", EXAMPLES, short_help="Print alerting rules and a dashboard.")
@click.option(
    "--format",
    "wanted",
    type=click.Choice(["prometheus", "grafana", "alertmanager"]),
    default="prometheus",
    show_default=True,
    help="prometheus: recording and alerting rules; grafana: a dashboard; alertmanager: an example of routing.",
)
@pass_console
def alerts(console: Console, wanted: str) -> None:
    """Print alerting rules for Prometheus, a dashboard for Grafana, or routing for Alertmanager.

    The files are for the metrics of `leasehold.telemetry.Prometheus`, of `leasehold run` and of lock servers. Each
    alert has a severity, critical, warning or info, and says what to do; `leasehold docs operations/runbook` has the
    same texts on one page. This command connects to nothing.
    """
    if wanted == "prometheus":
        from leasehold.telemetry.alerts.prometheus import rules_file

        text = rules_file()
    elif wanted == "grafana":
        from leasehold.telemetry.alerts.grafana import dashboard

        text = dashboard()
    else:
        from leasehold.telemetry.alerts.alertmanager import ROUTING as text
    console.put(text.rstrip("\n"))
