"""`alerts`: what the wheel holds for Prometheus, Grafana and Alertmanager."""

import json

import pytest

from leasehold.telemetry.alerts import alertmanager, grafana, prometheus


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], prometheus.rules_file()),
        (["--format", "prometheus"], prometheus.rules_file()),
        (["--format", "grafana"], grafana.dashboard()),
        (["--format", "alertmanager"], alertmanager.ROUTING),
    ],
)
def test_alerts_prints_the_file_of_its_format(shell, arguments, expected):
    done = shell("alerts", *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


def test_alerts_of_unknown_format_is_64(shell):
    done = shell("alerts", "--format", "nagios")
    assert done.returncode == 64
    assert "grafana" in done.stderr


def test_dashboard_is_one_json_document(shell):
    assert json.loads(shell("alerts", "--format", "grafana").stdout)["title"] == "Leasehold"
