"""Lease documents: a detached lease outlives its client, and its document renews and releases that grant only."""

import json

import pytest

from leasehold.client import lease_document
from leasehold.errors import ConfigError, LeaseLost, Unavailable
from leasehold.runtime.base import run_sync
from tests.support import probe


def acquire_detached(client, **options):
    lease = client.lock("j", **options).acquire()
    text = json.dumps(lease_document.dump(lease))
    lease_document.detach(lease)
    return lease, text


def test_detached_lease_outlives_its_client(bench):
    first, second = bench.client(), bench.client()
    lease, text = acquire_detached(first)
    first.close()
    assert not lease.held
    assert not lease.release()
    (holding,) = second.inspect("j")
    assert (holding.state, holding.token) == ("held", lease.token)
    assert run_sync(lease_document.release(probe.core(second), lease_document.load(text)))
    assert second.inspect("j") == []


def test_detached_lease_is_not_renewed_by_watchdog(bench):
    client = bench.client()
    _, text = acquire_detached(client, ttl=9)
    bench.clock.advance(9.1)
    with pytest.raises(LeaseLost):
        run_sync(lease_document.renew(probe.core(client), lease_document.load(text)))


def test_detached_lease_is_renewed_from_its_document(bench):
    client = bench.client()
    _, text = acquire_detached(client, ttl=9)
    bench.clock.advance(5)
    assert 8.8 < run_sync(lease_document.renew(probe.core(bench.client()), lease_document.load(text))) < 9
    assert 58 < run_sync(lease_document.renew(probe.core(client), lease_document.load(text), 60)) < 60
    bench.clock.advance(50)
    assert client.inspect("j")[0].left == pytest.approx(10)


def test_late_release_from_document_keeps_successor_lease(bench):
    client = bench.client()
    lease, text = acquire_detached(client)
    assert client.break_lock("j", token=lease.token)
    with client.lock("j", wait=0) as second:
        assert not run_sync(lease_document.release(probe.core(client), lease_document.load(text)))
        with pytest.raises(LeaseLost):
            run_sync(lease_document.renew(probe.core(client), lease_document.load(text)))
        assert second.token > lease.token
        second.verify()


def test_document_renew_and_release_raise_unavailable_on_outage(bench):
    client = bench.client()
    _, text = acquire_detached(client)
    bench.transport.silent = True
    with pytest.raises(Unavailable):
        run_sync(lease_document.renew(probe.core(client), lease_document.load(text)))
    with pytest.raises(Unavailable):
        run_sync(lease_document.release(probe.core(client), lease_document.load(text)))


def test_released_lease_cannot_be_dumped(bench):
    lease = bench.client().lock("j").acquire()
    lease.release()
    with pytest.raises(LeaseLost):
        lease_document.dump(lease)


@pytest.mark.parametrize("field", ["id", "token", "name", "namespace", "ttl", "limit", "holder"])
@pytest.mark.parametrize("value", [None, True, [], {}])
def test_damaged_document_is_refused_without_revealing_the_id(bench, field, value):
    _, text = acquire_detached(bench.client())
    secret = json.loads(text)["id"]
    with pytest.raises(ConfigError, match=field) as refused:
        lease_document.load(json.dumps(json.loads(text) | {field: value}))
    assert secret not in str(refused.value)


@pytest.mark.parametrize(
    "changed",
    [
        {"format": "other"},
        {"ttl": -1.0},
        {"ttl": 1e-9},
        {"slot": True},
        {"slot": "0"},
        {"ticket": {"name": "a", "id": ""}},
        {"ticket": {"name": "a", "id": "with a space"}},
    ],
)
def test_load_refuses_a_document_whose_field_has_an_impossible_value(bench, changed):
    _, text = acquire_detached(bench.client())
    with pytest.raises(ConfigError):
        lease_document.load(json.dumps(json.loads(text) | changed))


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "null"])
def test_load_refuses_text_that_is_not_a_lease_document(text):
    with pytest.raises(ConfigError):
        lease_document.load(text)
