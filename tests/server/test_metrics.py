"""What `/metrics` of a lock server shows beside its requests."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta

import pytest
from prometheus_client.parser import text_string_to_metric_families

import leasehold
from leasehold.server import keys
from leasehold.server.keys import Right
from tests.support.running_server import SECONDS, poll, running


def test_metrics_show_the_health_of_the_engine(server):
    """On every engine, without waiting for a probe."""

    def families():
        found = {family.name: family for family in text_string_to_metric_families(server.get("/metrics").body.decode())}
        return found if "leasehold_engine_up" in found else None

    found = poll(families)
    scheme = server.url.partition(":")[0]
    (up,) = found["leasehold_engine_up"].samples
    assert (up.labels, up.value) == ({"engine": scheme}, 1)
    assert "leasehold_server_requests" in found
    if scheme == "redis":
        assert {sample.labels["version"] for sample in found["leasehold_engine_info"].samples} != {""}


def _samples(server, **named):
    page = server.get("/metrics", **named).body.decode()
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def test_metrics_count_acquires_by_outcome_and_path(memory_server, new_id):
    """By both ways in: the HTTP API, and a Python client, whose waiters have a stream."""
    labels = {"engine": "memory", "namespace": "metrics", "group": "orders/*"}

    def acquires(outcome, path):
        found = _samples(memory_server)
        key = ("leasehold_acquires_total", *sorted({**labels, "outcome": outcome, "path": path}.items()))
        if outcome == "granted":
            timed = ("leasehold_acquire_seconds_count", *sorted({**labels, "path": path}.items()))
            assert found.get(timed) == found.get(key)
        return found.get(key, 0)

    body = {"namespace": "metrics", "name": "orders/1"}
    memory_server.post("/v1/acquire", {**body, "id": new_id(), "ttl": 600})  # it is not renewed
    assert memory_server.post("/v1/acquire", {**body, "id": new_id()}).kind == "busy"
    assert memory_server.post("/v1/acquire", {**body, "id": new_id(), "wait": 2}).kind == "busy"
    assert memory_server.post("/v1/acquire", {**body, "id": new_id(), "limit": 3}).kind == "mismatch"
    assert acquires("granted", "direct") == acquires("busy", "direct") == acquires("error", "direct") == 1
    assert acquires("timeout", "queued") == 1

    with leasehold.Client(f"http://127.0.0.1:{memory_server.port}", namespace="metrics") as client:
        with client.lock("orders/2"):
            assert acquires("granted", "direct") == 2
        with pytest.raises(leasehold.NotAcquired):
            client.lock("orders/1").acquire(wait=3)  # long enough to join the queue, also on a busy machine
        poll(lambda: acquires("timeout", "queued") == 2)
        # Another name: a request that waited keeps its position in the queue of the first one for a while.
        body["name"] = "orders/3"
        held = memory_server.post("/v1/acquire", {**body, "id": new_id(), "ttl": 600}).json
        waiting = threading.Thread(target=lambda: client.lock("orders/3").acquire(wait=60).release())
        waiting.start()
        poll(lambda: [each for each in client.inspect("orders/3") if each.state == "waiting"])
        memory_server.post("/v1/release", {**body, "id": held["id"]})
        waiting.join()
    poll(lambda: acquires("granted", "queued") == 1)
    assert acquires("granted", "direct") == 3


def test_metrics_show_all_locks_of_the_engine(tmp_path):
    """Also those that went around the server, once the server knows their namespace."""
    url = f"sqlite://{tmp_path}/locks.db"
    labels = {"engine": "sqlite", "namespace": "shop"}
    with running("--picture-max-age", "0.05", url=url) as server, leasehold.Client(url, namespace="shop") as direct:
        with direct.lock("stock/1"), direct.lock("stock/2"):
            server.post("/v1/acquire", {"namespace": "shop", "name": "orders/1"})
            waiting = threading.Thread(target=lambda: direct.lock("stock/1").acquire(wait=60).release())
            waiting.start()

            def value(name, **more):
                return _samples(server).get((name, *sorted({**labels, **more}.items())))

            poll(lambda: value("leasehold_locks", state="waiting") == 1)
            assert value("leasehold_locks", state="held") == 3
            assert value("leasehold_locks", state="passed_over") == 0
            assert value("leasehold_line_longest", group="stock/*") == 1
            assert value("leasehold_line_longest", group="orders/*") == 0
            assert value("leasehold_oldest_wait_seconds", group="stock/*") > 0
            assert 0 < value("leasehold_oldest_hold_seconds", group="stock/*") < SECONDS
        waiting.join()
        found = _samples(server)
        assert found["leasehold_deadlocks", ("engine", "sqlite")] == 0
        assert 0 <= found["leasehold_server_picture_age_seconds", ("namespace", "shop")] < SECONDS
        assert found["leasehold_server_cache_requests_total", ("result", "miss")] > 0


def test_metrics_show_namespaces_only_to_callers_that_may_read_all(tmp_path):
    path = tmp_path / "keys.toml"
    now = datetime.now(UTC)
    tenant = keys.create(path, "tenant", [Right.parse("lock,read:shop:")], now=now)
    monitor = keys.create(path, "monitor", [Right.parse("read:*:")], now=now)
    with running("--keys", str(path)) as server:
        server.post("/v1/acquire", {"namespace": "shop", "name": "payroll/1"}, key=tenant)
        assert b"payroll" in server.get("/metrics", key=monitor).body
        seen = server.get("/metrics", key=tenant).body
        assert b"leasehold_server_requests" in seen
        assert b"payroll" not in seen
        assert b"shop" not in seen


def test_metrics_count_refused_keys_and_rights_by_reason(tmp_path):
    path = tmp_path / "keys.toml"
    now = datetime.now(UTC)
    tenant = keys.create(path, "tenant", [Right.parse("lock:shop:orders/")], now=now)
    expired = keys.create(path, "old", [Right.parse("lock:shop:")], now=now, expires=now - timedelta(days=1))
    with running("--keys", str(path)) as server:
        for key in (None, expired, tenant[:-1] + "x", "no key of ours"):
            assert server.get("/v1/traits", key=key).status == 401
        for namespace, name in (("shop", "invoices/1"), ("other", "orders/1"), ("", "orders/1")):
            assert server.post("/v1/acquire", {"namespace": namespace, "name": name}, key=tenant).status == 403
        assert server.get("/v1/locks?namespace=shop", key=tenant).status == 403
        found = _samples(server, key=tenant)
    counted = {
        reason: found["leasehold_server_auth_failures_total", ("reason", reason)]
        for reason in ("missing", "unknown", "expired", "scope", "namespace")
    }
    assert counted == {"missing": 1, "unknown": 2, "expired": 1, "scope": 2, "namespace": 2}


def test_metrics_show_records_of_the_audit_log(tmp_path):
    """The alert on records that could not be written needs them."""
    with running("--audit-file", str(tmp_path / "audit.jsonl")) as server:
        server.post("/v1/acquire", {"name": "orders/1"})
        found = _samples(server)
        assert found["leasehold_audit_records_total",] == 2  # open, grant
        assert found["leasehold_audit_errors_total",] == 0
