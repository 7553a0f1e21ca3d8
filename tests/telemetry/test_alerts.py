"""The alerting rules on made-up metrics, by promtool: each alert fires on its cause, and a healthy hour fires none."""

from __future__ import annotations

import json
import os
import re
import threading

import pytest

from harness.servers.prometheus import run_tool
from leasehold import Client
from leasehold.telemetry.alerts import alertmanager, grafana, prometheus, rules
from leasehold.telemetry.metrics import ACQUIRE_BUCKETS, MARGIN_BUCKETS
from leasehold.testing import Absent
from tests.support.paths import ROOT
from tests.support.running_server import RunningServer, poll, running

SERVER = 'engine="etcd",instance="s1:7420",job="leasehold"'
GROUP = f'{SERVER},namespace="shop",group="orders/*"'
ACQUIRE_BOUNDS = [f"{bound:g}" for bound in ACQUIRE_BUCKETS] + ["+Inf"]
MARGIN_BOUNDS = [f"{bound:g}" for bound in MARGIN_BUCKETS] + ["+Inf"]
STEPS = 240  # of 15 seconds: an hour

Series = dict[str, str]


def tool(name: str, package: str, *arguments: object):
    try:
        return run_tool(name, package, *map(str, arguments))
    except Absent as absent:
        if os.environ.get("CI"):
            pytest.fail(str(absent))
        pytest.skip(str(absent))


def gauge(name: str, value: float, labels: str = SERVER) -> Series:
    return {f"{name}{{{labels}}}": f"{value}x{STEPS}"}


def counter(name: str, each: float, labels: str) -> Series:
    """Rises by `each` in 15 seconds."""
    return {f"{name}{{{labels}}}": f"0+{each}x{STEPS}"}


def once(name: str, labels: str) -> Series:
    """Rises by one, once."""
    return {f"{name}{{{labels}}}": f"0x40 1x{STEPS - 40}"}


def histogram(name: str, labels: str, bounds: list[str], bound: str, each: int = 30) -> Series:
    """All observations are in the bucket that ends at `bound`."""
    return {
        f'{name}_bucket{{{labels},le="{each_bound}"}}': f"0+{each if index >= bounds.index(bound) else 0}x{STEPS}"
        for index, each_bound in enumerate(bounds)
    }


def acquire_seconds(path: str, bound: str, each: int = 30) -> Series:
    return histogram("leasehold_acquire_seconds", f'{GROUP},path="{path}"', ACQUIRE_BOUNDS, bound, each)


def acquires(outcome: str, each: float, path: str = "direct") -> Series:
    return counter("leasehold_acquires_total", each, f'{GROUP},outcome="{outcome}",path="{path}"')


def margin(bound: str) -> Series:
    return histogram("leasehold_renew_margin_ratio", GROUP, MARGIN_BOUNDS, bound)


def renewals(ok: float, failed: float) -> Series:
    name = "leasehold_renewals_total"
    return counter(name, ok, f'{GROUP},outcome="ok"') | counter(name, failed, f'{GROUP},outcome="failed"')


def members(voting: int, reachable: int) -> Series:
    name = "leasehold_engine_members"
    return gauge(name, voting, f'{SERVER},state="voting"') | gauge(name, reachable, f'{SERVER},state="reachable"')


def cache(hits: float, misses: float) -> Series:
    name = "leasehold_server_cache_requests_total"
    return counter(name, hits, f'{SERVER},result="hit"') | counter(name, misses, f'{SERVER},result="miss"')


def lost(each: float, reason: str) -> Series:
    return counter("leasehold_leases_lost_total", each, f'{GROUP},reason="{reason}"')


def storage(ratio: float, store: str = "quota") -> Series:
    return gauge("leasehold_engine_storage_used_ratio", ratio, f'{SERVER},member="e1",store="{store}"')


MEMBER = f'{SERVER},member="e1"'
# Just below every threshold.
HEALTHY = (
    acquire_seconds("direct", "0.05")
    | acquire_seconds("queued", "30", 3)
    | acquires("granted", 200)
    | acquires("granted", 100, "queued")
    | acquires("unavailable", 3)
    | acquires("busy", 45)
    | margin("0.4")
    | renewals(96, 4)
    | cache(71, 29)
    | lost(1, "max_hold")
    | gauge("leasehold_stale_tokens_total", 3, f'{GROUP},fence="sql"')
    | gauge("leasehold_engine_up", 1)
    | gauge("up", 1)
    | gauge("leasehold_engine_has_leader", 1)
    | members(3, 3)
    | storage(0.79)
    | gauge("leasehold_engine_replication_lag_seconds", 9, MEMBER)
    | gauge("leasehold_engine_clock_offset_seconds", -0.4, MEMBER)
    | gauge("leasehold_engine_evictions_total", 5, MEMBER)
    | gauge("leasehold_engine_leader_changes_total", 1)
    | gauge("leasehold_engine_unsafe_settings", 0, f'{MEMBER},setting="fsync"')
    | gauge("leasehold_server_breaker_state", 1)
    | counter("leasehold_server_shed_total", 4, f'{SERVER},reason="draining"')
    | gauge("leasehold_audit_errors_total", 7)
    | gauge("leasehold_breaks_total", 2, f'{SERVER},namespace="shop"')
    | gauge("leasehold_server_picture_age_seconds", 14)
    | gauge("leasehold_token_age_seconds", 3500, GROUP)
    | gauge("leasehold_oldest_hold_seconds", 3500, GROUP)
    | gauge("leasehold_deadlocks", 0)
)
# Just above it.
CAUSES: dict[str, Series] = {
    "LeaseholdAcquireSlow": acquire_seconds("direct", "0.1") | acquires("granted", 30),
    "LeaseholdEngineDown": gauge("leasehold_engine_up", 0),
    "LeaseholdServerDown": gauge("up", 0),
    "LeaseholdNoLeader": gauge("leasehold_engine_has_leader", 0),
    "LeaseholdErrorsHigh": acquires("granted", 94) | acquires("unavailable", 3) | acquires("error", 3),
    "LeaseholdErrors": acquires("granted", 98) | acquires("error", 2),
    "LeaseholdLeaseLost": once("leasehold_leases_lost_total", f'{GROUP},reason="stalled"'),
    "LeaseholdLeasesLostMany": lost(0.6, "unreachable"),
    "LeaseholdStaleTokenRejected": once("leasehold_stale_tokens_total", f'{GROUP},fence="sql"'),
    "LeaseholdRenewMarginLow": margin("0.33"),
    "LeaseholdRenewalsFailing": renewals(94, 6),
    "LeaseholdWaitP99High": acquire_seconds("queued", "60"),
    "LeaseholdContention": acquires("granted", 48) | acquires("granted", 26, "queued") | acquires("busy", 26),
    "LeaseholdLockHeldTooLong": gauge("leasehold_oldest_hold_seconds", 3700, GROUP),
    "LeaseholdDeadlock": gauge("leasehold_deadlocks", 1),
    "LeaseholdStorageFilling": storage(0.81),
    "LeaseholdStorageFull": storage(0.96, "filesystem"),
    "LeaseholdCacheHitsLow": cache(69, 31),
    "LeaseholdQuorumAtRisk": members(3, 2),
    "LeaseholdLeaderFlapping": counter("leasehold_engine_leader_changes_total", 0.1, SERVER),
    "LeaseholdReplicationLag": gauge("leasehold_engine_replication_lag_seconds", 11, MEMBER),
    "LeaseholdClockOffset": gauge("leasehold_engine_clock_offset_seconds", -0.6, MEMBER),
    "LeaseholdEvictions": once("leasehold_engine_evictions_total", MEMBER),
    "LeaseholdUnsafeSetting": gauge("leasehold_engine_unsafe_settings", 1, f'{MEMBER},setting="fsync"'),
    "LeaseholdBreakerOpen": gauge("leasehold_server_breaker_state", 2),
    "LeaseholdShedding": counter("leasehold_server_shed_total", 5, f'{SERVER},reason="queue_full"'),
    "LeaseholdAuditFailing": once("leasehold_audit_errors_total", SERVER),
    "LeaseholdLockBroken": once("leasehold_breaks_total", f'{SERVER},namespace="shop"'),
    "LeaseholdPictureOld": gauge("leasehold_server_picture_age_seconds", 16),
}


def case(name: str, series: Series, expression: str, value: float, at: str) -> dict[str, object]:
    """Whether an expression has a value some time into an hour of metrics."""
    check = {"expr": expression, "eval_time": at, "exp_samples": [{"labels": "{}", "value": value}]}
    inputs = [{"series": each, "values": values} for each, values in series.items()]
    return {"name": name, "interval": "15s", "input_series": inputs, "promql_expr_test": [check]}


def healthy_case() -> dict[str, object]:
    return case("healthy", HEALTHY, 'count(ALERTS{alertstate="firing"}) or vector(0)', 0, "55m")


def cause_case(alert: rules.Alert) -> dict[str, object]:
    firing = f'count(ALERTS{{alertname="{alert.name}",alertstate="firing"}}) or vector(0)'
    at = "12m" if alert.after == "0s" else "30m"
    return case(alert.name, CAUSES[alert.name], firing, 1, at)


def run_cases(folder, cases: list[dict[str, object]], text: str | None = None):
    """`promtool test rules` on these cases; JSON is YAML."""
    (folder / "rules.yml").write_text(text or prometheus.rules_file())
    tests = {"rule_files": ["rules.yml"], "evaluation_interval": "15s", "tests": cases}
    (folder / "tests.yml").write_text(json.dumps(tests))
    return tool("promtool", "prometheus", "test", "rules", folder / "tests.yml")


@pytest.mark.extended
def test_every_alert_fires_on_its_cause_and_none_in_a_healthy_hour(tmp_path):
    done = run_cases(tmp_path, [healthy_case(), *map(cause_case, rules.ALERTS)])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.faults
def test_thresholds_set_out_of_reach_are_noticed_for_every_alert(tmp_path):
    """The test above would be green for alerts that always fire, or never: so plant such mistakes."""
    never = re.sub(r"(expr: .* (?:>|==) )[\d.]+\"", r'\g<1>1e9"', prometheus.rules_file())
    never = re.sub(r"(expr: .* < )[\d.]+", r"\g<1>-1", never)
    done = run_cases(tmp_path, list(map(cause_case, rules.ALERTS)), never)
    assert done.returncode != 0
    silent = set(re.findall(r'alertname=\\?"(\w+)\\?"', done.stdout + done.stderr))
    # The threshold of these is in the middle of the expression.
    inner = {"LeaseholdAcquireSlow", "LeaseholdErrorsHigh", "LeaseholdErrors", "LeaseholdQuorumAtRisk"}
    assert silent | inner == {alert.name for alert in rules.ALERTS}
    always = prometheus.rules_file().replace("> 0.8", "> 0.7").replace("> 0.05", "> 0.04").replace("< 0.7", "< 0.8")
    assert run_cases(tmp_path, [healthy_case()], always).returncode != 0


@pytest.mark.parametrize(
    ("name", "severity", "threshold"),
    [
        ("LeaseholdAcquireSlow", "critical", "p95 > 0.05 "),
        ("LeaseholdEngineDown", "critical", "leasehold_engine_up == 0"),
        ("LeaseholdStorageFilling", "warning", "used_ratio > 0.8"),
        ("LeaseholdCacheHitsLow", "warning", "ratio5m < 0.7 "),
    ],
)
def test_alert_that_was_asked_for_has_its_threshold(name, severity, threshold):
    (alert,) = [each for each in rules.ALERTS if each.name == name]
    assert alert.severity == severity
    assert threshold in alert.expression


def test_every_alert_has_a_test_and_says_what_to_do():
    assert {alert.name for alert in rules.ALERTS} == set(CAUSES)
    for alert in rules.ALERTS:
        assert len(alert.runbook) > 30, alert.name
        assert alert.summary[-1] != ".", alert.name
        for named in re.findall(r"Leasehold\w+", alert.runbook):
            assert named in CAUSES, f"{alert.name} refers to {named}"


def test_rules_file_passes_promtool(tmp_path):
    (tmp_path / "rules.yml").write_text(prometheus.rules_file())
    done = tool("promtool", "prometheus", "check", "rules", tmp_path / "rules.yml")
    assert done.returncode == 0, done.stderr
    assert f"{len(rules.RECORDED) + len(rules.ALERTS)} rules found" in done.stdout


def test_routing_example_passes_amtool_and_pages_for_critical_only(tmp_path):
    path = tmp_path / "alertmanager.yml"
    path.write_text(alertmanager.ROUTING)
    done = tool("amtool", "prometheus-alertmanager", "check-config", path)
    assert done.returncode == 0, done.stderr
    for severity, receiver in (("critical", "page"), ("warning", "chat"), ("info", "mail")):
        for name in ("LeaseholdEngineDown", "LeaseholdStorageFilling"):
            labels = (f"alertname={name}", f"severity={severity}")
            route = ("config", "routes", "test", f"--config.file={path}", *labels)
            assert tool("amtool", "prometheus-alertmanager", *route).stdout.strip() == receiver
    for named in re.findall(r"Leasehold[A-Z]\w+", alertmanager.ROUTING):
        assert any(alert.name.startswith(named) for alert in rules.ALERTS), named


def queries() -> list[str]:
    board = json.loads(grafana.dashboard())
    found = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    return [query.replace("$__rate_interval", "1m").replace("$engine", ".*").replace("$group", ".*") for query in found]


def test_every_query_of_the_dashboard_passes_promtool(tmp_path):
    assert len(queries()) > 30
    recorded = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries())]
    (tmp_path / "queries.yml").write_text(json.dumps({"groups": [{"name": "dashboard", "rules": recorded}]}))
    done = tool("promtool", "prometheus", "check", "rules", tmp_path / "queries.yml")
    assert done.returncode == 0, done.stderr


def test_dashboard_panels_do_not_overlap_and_have_ids():
    panels = json.loads(grafana.dashboard())["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def test_checklist_has_its_rows_and_names_known_series():
    text = (ROOT / "docs/operations/checklist.md").read_text()
    sections = text.split("\n## ")[1:]
    assert [len(re.findall(r"^\| \d \|", section, re.M)) for section in sections] == [8, 6, 6]
    page = (ROOT / "docs/operations/metrics.md").read_text()
    for name in re.findall(r"\bleasehold_\w+", text):
        assert f"`{name}`" in page, name
    for name in re.findall(r"leasehold:[\w:]+", text):
        assert name in {each.name for each in rules.RECORDED}, name
    for name in re.findall(r"\bLeasehold[A-Z]\w+", text):
        assert name in CAUSES, name


def test_series_of_rules_and_dashboard_are_known():
    """Metrics that no page describes, and recorded series that no rule records, would stay empty for ever."""
    expressions = [*(each.expression for each in (*rules.RECORDED, *rules.ALERTS)), *queries()]
    recorded = {name for text in expressions for name in re.findall(r"leasehold:[\w:]+", text)}
    assert recorded <= {each.name for each in rules.RECORDED}
    page = "".join((ROOT / f"docs/operations/{name}.md").read_text() for name in ("metrics", "audit"))
    used = {name for text in expressions for name in re.findall(r"\bleasehold_\w+", text)}
    assert {name for name in used if f"`{name.removesuffix('_bucket')}`" not in page} == set()


@pytest.mark.extended
def test_series_of_servers_are_shown_by_a_real_server(tmp_path):
    """What rules and dashboard read of a lock server and its picture, and of no client, and what the page explains."""
    expressions = [*(each.expression for each in (*rules.RECORDED, *rules.ALERTS)), *queries()]
    prefixes = ("leasehold_server_", "leasehold_locks", "leasehold_oldest_", "leasehold_line_", "leasehold_deadlocks")
    used = {name for text in expressions for name in re.findall(r"\bleasehold_\w+", text) if name.startswith(prefixes)}
    assert len(used) >= 10
    page = (
        (ROOT / "docs/operations/metrics.md").read_text().partition("\n## The lock server\n")[2].partition("\n## ")[0]
    )
    explained = set(re.findall(r"^\| `(leasehold_\w+)` \|", page, re.MULTILINE))
    assert len(explained) >= 10
    with running("--audit-file", str(tmp_path / "audit.jsonl")) as server, connect(server) as client:
        waiting = threading.Thread(target=lambda: client.lock("orders/42", wait=60).acquire().release())
        with client.lock("orders/42"):
            waiting.start()
            poll(lambda: 'leasehold_locks{engine="memory",namespace="",state="waiting"} 1.0' in metrics_of(server))
            found = metrics_of(server)
        waiting.join(60)
    missing = {name for name in used | explained if f"\n# TYPE {name.removesuffix('_bucket')} " not in found}
    assert missing == set()
    for name in ("leasehold_oldest_hold_seconds", "leasehold_oldest_wait_seconds", "leasehold_line_longest"):
        assert f'\n{name}{{engine="memory",group="orders/*",namespace=""}} ' in found
    assert re.search(r'\nleasehold_server_picture_age_seconds\{namespace=""\} [0-9.]+\n', found)


def connect(server: RunningServer) -> Client:
    return Client(f"http://127.0.0.1:{server.port}")


def metrics_of(server: RunningServer) -> str:
    assert server.get("/v1/locks").status == 200
    return server.get("/metrics").body.decode()
