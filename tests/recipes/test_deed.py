"""A lease written down: it outlives its client, and its text renews and releases that one grant and no other."""

import json

import pytest

from leasehold.errors import ConfigError, LeaseLost, Unavailable
from leasehold.recipes import deed
from leasehold.runtime.base import step


def written(client, **options):
    lease = client.lock("j", **options).acquire()
    text = json.dumps(deed.write(lease))
    deed.let_go(lease)
    return lease, text


def test_it_outlives_its_client(bench):
    first, second = bench.client(), bench.client()
    lease, text = written(first)
    first.close()
    assert not lease.held
    assert not lease.release()
    (holding,) = second.inspect("j")
    assert (holding.state, holding.token) == ("held", lease.token)
    assert step(deed.release(second._desk, deed.read(text)))
    assert second.inspect("j") == []


def test_it_is_no_longer_renewed_here(bench):
    client = bench.client()
    _, text = written(client, ttl=9)
    bench.clock.turn(9.1)
    with pytest.raises(LeaseLost):
        step(deed.renew(client._desk, deed.read(text)))


def test_it_is_renewed_by_whoever_has_the_text(bench):
    client = bench.client()
    _, text = written(client, ttl=9)
    bench.clock.turn(5)
    assert 8.8 < step(deed.renew(bench.client()._desk, deed.read(text))) < 9
    assert 58 < step(deed.renew(client._desk, deed.read(text), 60)) < 60
    bench.clock.turn(50)
    assert client.inspect("j")[0].left == pytest.approx(10)


def test_a_late_release_frees_nobody_else(bench):
    client = bench.client()
    lease, text = written(client)
    assert client.break_lock("j", token=lease.token)
    with client.lock("j", wait=0) as second:
        assert not step(deed.release(client._desk, deed.read(text)))
        with pytest.raises(LeaseLost):
            step(deed.renew(client._desk, deed.read(text)))
        assert second.token > lease.token
        second.verify()


def test_silence_is_no_answer(bench):
    client = bench.client()
    _, text = written(client)
    bench.link.silent = True
    with pytest.raises(Unavailable):
        step(deed.renew(client._desk, deed.read(text)))
    with pytest.raises(Unavailable):
        step(deed.release(client._desk, deed.read(text)))


def test_what_is_over_is_not_written(bench):
    lease = bench.client().lock("j").acquire()
    lease.release()
    with pytest.raises(LeaseLost):
        deed.write(lease)


@pytest.mark.parametrize("field", ["id", "token", "name", "namespace", "ttl", "limit", "holder"])
@pytest.mark.parametrize("value", [None, True, [], {}])
def test_a_damaged_text_is_refused_without_showing_it(bench, field, value):
    _, text = written(bench.client())
    secret = json.loads(text)["id"]
    with pytest.raises(ConfigError, match=field) as refused:
        deed.read(json.dumps(json.loads(text) | {field: value}))
    assert secret not in str(refused.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "null"])
def test_what_is_no_deed_is_refused(text):
    with pytest.raises(ConfigError):
        deed.read(text)
