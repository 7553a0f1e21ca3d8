"""The health of engines as metrics: what is unknown is absent, and reading them waits for no server."""

from __future__ import annotations

import logging
import os
import re
import socket
import threading

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from leasehold import ConfigError
from leasehold.engines.probe import Health, MemberHealth, Storage, WeakSetting
from leasehold.errors import Unsupported
from leasehold.runtime.threads import Threads
from leasehold.telemetry import Collector, EngineHealth, engine_health, metrics_text
from tests.support import probe_telemetry
from tests.support.client_fixtures import poll_until
from tests.support.paths import ROOT

FULL = Health(
    "etcd",
    up=True,
    has_leader=True,
    voting=3,
    reachable=2,
    members=(
        MemberHealth(
            "a:2379",
            up=True,
            role="leader",
            version="3.4.23",
            storage=(Storage("quota", 40, 100), Storage("wal", 7)),
            replication_lag=1.5,
            clock_offset=-0.25,
            memory=1000,
            evictions=3,
            connections_ratio=0.1,
            cache_hit_ratio=0.9,
            findings=(WeakSetting("fsync", "off", "set it to on"),),
        ),
        MemberHealth("b:2379", up=False, error="connection refused"),
    ),
)


class Probes:
    """Results for a probe, in order; the last one stays."""

    def __init__(self, monkeypatch) -> None:
        self.results: list[object] = [FULL]
        self.probed = 0
        self.sources: list[EngineHealth] = []
        monkeypatch.setattr(engine_health, "probe_engine", self.probe)

    async def probe(self, _config, _runtime, _deadline) -> Health:
        result = self.results.pop(0) if len(self.results) > 1 else self.results[0]
        self.probed += 1
        if isinstance(result, Exception):
            raise result
        return result

    def source(self, url: str = "etcd://a:2379", count: int = 1) -> EngineHealth:
        """A source after this many probes."""
        source = EngineHealth(url, interval=0.001 if count > 1 else 3600)
        self.sources.append(source)
        poll_until(lambda: self.probed > count - 1 and not probe_telemetry.is_probing(source))
        return source


@pytest.fixture
def probes(monkeypatch):
    probes = Probes(monkeypatch)
    yield probes
    for source in probes.sources:
        source.close()


def values(source) -> dict[str, float]:
    return {
        f"{sample.name}{sorted(sample.labels.values())}": float(sample.value)
        for family in source.families()
        for sample in family.samples
    }


def test_health_is_shown_as_these_metrics(probes):
    assert values(probes.source()) == {
        "leasehold_engine_up['etcd']": 1,
        "leasehold_engine_members['etcd', 'voting']": 3,
        "leasehold_engine_members['etcd', 'reachable']": 2,
        "leasehold_engine_has_leader['etcd']": 1,
        "leasehold_engine_leader_changes_total['etcd']": 0,
        "leasehold_engine_replication_lag_seconds['a:2379', 'etcd']": 1.5,
        "leasehold_engine_clock_offset_seconds['a:2379', 'etcd']": -0.25,
        "leasehold_engine_memory_bytes['a:2379', 'etcd']": 1000,
        "leasehold_engine_connections_used_ratio['a:2379', 'etcd']": 0.1,
        "leasehold_engine_cache_hit_ratio['a:2379', 'etcd']": 0.9,
        "leasehold_engine_evictions_total['a:2379', 'etcd']": 3,
        "leasehold_engine_unsafe_settings['a:2379', 'etcd', 'fsync']": 1,
        "leasehold_engine_info['3.4.23', 'a:2379', 'etcd', 'leader']": 1,
        "leasehold_engine_storage_used_bytes['a:2379', 'etcd', 'quota']": 40,
        "leasehold_engine_storage_used_bytes['a:2379', 'etcd', 'wal']": 7,
        "leasehold_engine_storage_limit_bytes['a:2379', 'etcd', 'quota']": 100,
        "leasehold_engine_storage_used_ratio['a:2379', 'etcd', 'quota']": 0.4,
    }


def test_members_are_numbers_where_addresses_are_not_shown(probes):
    source = EngineHealth("etcd://a:2379", addresses=False)
    probes.sources.append(source)
    poll_until(lambda: values(source))
    assert "a:2379" not in metrics_text(source)
    assert values(source)["leasehold_engine_memory_bytes['1', 'etcd']"] == 1000


def test_page_explains_every_metric_of_engines(probes):
    page = (ROOT / "docs/operations/metrics.md").read_text()
    families = probes.source().families()
    names = {f"{family.name}_total" if family.kind == "counter" else family.name for family in families}
    assert set(re.findall(r"^\| `(leasehold_engine_\w+)` \|", page, re.MULTILINE)) == names | {
        "leasehold_engine_call_seconds"
    }


def test_text_of_health_is_read_by_prometheus_client(probes):
    source, registry = probes.source(), CollectorRegistry()
    Collector(source, registry)
    assert generate_latest(registry).decode() == metrics_text(source)
    assert len(list(text_string_to_metric_families(metrics_text(source)))) == len(list(source.families()))
    with pytest.raises(ConfigError, match="this registry already has these metrics"):
        Collector(source, registry)


def test_what_is_unknown_is_absent_and_never_zero(probes):
    probes.results = [Health("postgresql", up=True, members=(MemberHealth("db:5432", up=True),))]
    source = probes.source("postgresql://db/x")
    assert values(source) == {"leasehold_engine_up['postgresql']": 1}
    assert metrics_text(source).count("# TYPE") == 1


def test_engine_that_fails_is_down_and_logged_once(probes, caplog):
    caplog.set_level(logging.INFO, logger="leasehold.health")
    probes.results = [FULL, *[Health("etcd", up=False, error="a:2379: refused")] * 3, FULL]
    source = probes.source(count=6)
    assert values(source)["leasehold_engine_up['etcd']"] == 1
    texts = [record.getMessage() for record in caplog.records]
    assert texts == ["etcd is down: a:2379: refused", "etcd is up again"]


def test_probe_that_raises_means_down(probes):
    probes.results = [ConfigError("this user may not connect")]
    assert values(probes.source()) == {"leasehold_engine_up['etcd']": 0}


def test_engine_without_a_probe_has_no_metrics(probes, caplog):
    probes.results = [Unsupported("own:// has no health probe", engine="own")]
    assert values(probes.source()) == {}
    poll_until(lambda: "no metrics of the engine's health: own:// has no health probe" in caplog.text)


def test_bug_in_a_probe_does_not_end_the_thread(probes, caplog):
    probes.results = [RuntimeError("bug"), FULL]
    source = probes.source(count=2)
    poll_until(lambda: values(source).get("leasehold_engine_up['etcd']") == 1)
    assert "unexpected error in the health probe" in caplog.text


def test_leader_changes_are_counted_if_no_server_reports_them(probes):
    def led_by(member: str) -> Health:
        return Health("redis", up=True, members=(MemberHealth(member, up=True, role="primary"),))

    none = Health("redis", up=True, has_leader=False)
    probes.results = [led_by("a"), led_by("b"), none, led_by("b"), led_by("a")]
    assert values(probes.source("redis://a", 5))["leasehold_engine_leader_changes_total['redis']"] == 2


def test_leader_changes_that_a_server_reports_are_shown(probes):
    members = (MemberHealth("a", up=True, leader_changes=7), MemberHealth("b", up=True, leader_changes=9))
    probes.results = [Health("etcd", up=True, members=members)]
    assert values(probes.source())["leasehold_engine_leader_changes_total['etcd']"] == 9


def test_setting_that_was_corrected_becomes_zero_so_that_alerts_end(probes):
    corrected = Health("etcd", up=True, members=(MemberHealth("a:2379", up=True),))
    probes.results = [FULL, corrected]
    assert values(probes.source(count=2))["leasehold_engine_unsafe_settings['a:2379', 'etcd', 'fsync']"] == 0


def test_reading_waits_for_no_probe_and_a_hanging_one_means_down(probes):
    entered, release, now = threading.Event(), threading.Event(), Threads().now
    results = [FULL]

    async def probe(_config, _runtime, _deadline) -> Health:
        if results:
            return results.pop()
        entered.set()
        release.wait(60)
        return FULL

    engine_health.probe_engine = probe  # undone by the fixture
    source = EngineHealth("etcd://a", interval=0.001, timeout=2)
    try:
        assert entered.wait(60)
        assert values(source)["leasehold_engine_up['etcd']"] == 1  # the last result
        offset = 2 + 5 + 1
        probe_telemetry.runtime_of(source).now = lambda: now() + offset
        assert values(source) == {"leasehold_engine_up['etcd']": 0, "leasehold_engine_leader_changes_total['etcd']": 0}
    finally:
        release.set()
        source.close()


def test_closed_source_is_empty_and_its_thread_ends(probes):
    earlier_threads = set(threading.enumerate())
    source = probes.source()
    source.close()
    assert values(source) == {}
    poll_until(lambda: not [t for t in set(threading.enumerate()) - earlier_threads if t.name == "leasehold-health"])


def test_forked_child_probes_for_itself(probes):
    source = probes.source()
    child = os.fork()
    if child == 0:
        probes.probed = 0
        values(source)
        poll_until(lambda: values(source))
        os._exit(0 if probes.probed else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_sqlite_file_has_health_metrics(tmp_path):
    source = EngineHealth(f"sqlite:///{tmp_path}/locks.db", timeout=30)
    try:
        poll_until(lambda: values(source))
        found = values(source)
        assert found["leasehold_engine_up['sqlite']"] == 1
        assert [name for name in found if name.startswith("leasehold_engine_storage_used_ratio")]
    finally:
        source.close()


def test_server_that_refuses_connections_is_down_and_no_password_is_shown(caplog):
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        source = EngineHealth(f"redis://:verysecret@127.0.0.1:{bound.getsockname()[1]}")
        try:
            poll_until(lambda: values(source))
            assert values(source)["leasehold_engine_up['redis']"] == 0
            assert "verysecret" not in f"{caplog.text}{metrics_text(source)}{source!r}"
        finally:
            source.close()


def test_invalid_url_is_refused():
    with pytest.raises(ConfigError):
        EngineHealth("redis:/x")
