"""Tokens rise across a rebase and after a restore from a snapshot."""

from __future__ import annotations

import os

import pytest

from leasehold import Client, ConfigError, LeaseLost, Unsupported
from leasehold.engines.etcd.leases import LeasePool
from leasehold.model import Busy
from leasehold.runtime.base import run_sync
from tests.support import probe


def test_rebase_raises_tokens_and_keeps_held_leases(url) -> None:
    with Client(url) as client, Client(url) as other:
        before = client.lock("kept").acquire()
        with client.lock("a") as lease:
            old = lease.token
        floor = old + 10**12
        assert probe.rebase(other, floor) == floor
        with client.lock("a") as lease:
            assert lease.token > floor, "a client that knew the old base used it"
        before.renew()
        assert client.inspect("kept")[0].token == before.token, "the token of a held lease changed"
        assert other.break_lock("kept", token=before.token)
        assert probe.rebase(other, 0) > floor
        with pytest.raises(ConfigError):
            probe.rebase(other, 2**53 - 1)
    with Client("memory://") as client, pytest.raises(Unsupported):
        probe.rebase(client, 0)


@pytest.mark.parametrize("base", ["x", "9" * 5000])
def test_base_that_is_not_a_number_is_a_config_error(url, member, prefix, base) -> None:
    member.put(f"{prefix}lh1/base", base)
    with Client(url) as client:
        with pytest.raises(ConfigError, match="rebase"):
            client.lock("a").acquire()
        probe.rebase(client, 0)
    with Client(url) as client, client.lock("a"):
        pass


def test_waiter_granted_after_a_rebase_has_a_token_above_it(url, make_driver) -> None:
    """The token uses the base at the time of the grant, not the base when the claim was queued."""
    holder, other = make_driver(url), make_driver(url)
    held, waiting = holder.acquire(holder.claim()), other.claim(queue=True)
    assert isinstance(other.attempt(waiting), Busy)
    floor = held.token + 10**9
    run_sync(holder.engine.rebase(floor, holder.deadline()))
    holder.release(held)
    assert other.attempt(waiting).token > floor


def test_restore_from_a_snapshot_is_detected_and_fixed_by_rebase(start_member, tmp_path, etcdctl) -> None:
    member = start_member()
    url = f"etcd://127.0.0.1:{member.port}"
    with Client(url, call_timeout=5) as live:
        with live.lock("job"):
            pass
        etcdctl(member, "snapshot", "save", str(tmp_path / "snapshot"))
        tokens = []
        for _ in range(20):
            with live.lock("job") as lease:
                tokens.append(lease.token)
        held = live.lock("held", ttl=30).acquire()
        member.stop()
        os.rename(member.data, f"{member.data}.old")
        peer = f"http://127.0.0.1:{member.peers[0]}"
        etcdctl(
            member,
            *("snapshot", "restore", str(tmp_path / "snapshot"), "--name", "e0", "--data-dir", member.data),
            *("--initial-cluster", f"e0={peer}", "--initial-advertise-peer-urls", peer),
            *("--initial-cluster-token", f"t{member.peers[0]}"),
        )
        member.start()
        with pytest.raises(ConfigError, match="rebase"):
            live.lock("job").acquire()
        with pytest.raises(ConfigError, match="rebase"):
            live.lock("other").acquire()
        with pytest.raises(LeaseLost):
            held.verify()
    with Client(url) as new:
        with new.lock("job") as lease:
            assert lease.token <= tokens[-1], "without a rebase, tokens repeat"
        probe.rebase(new, 0)
        with new.lock("job") as lease:
            assert lease.token > tokens[-1]


@pytest.mark.parametrize("queued", [False, True], ids=["try", "enqueue"])
def test_rebase_noticed_by_another_thread_does_not_lower_a_token(url, make_driver, monkeypatch, queued) -> None:
    """The claim gets its lease from etcd when another attempt of the same client learns of a new token base: the grant
    must compare the base that its token is made of."""
    driver, operator = make_driver(url), make_driver(url)
    driver.release(driver.acquire(driver.claim("warm-up")))
    get, floors = LeasePool.get, list[int]()

    async def get_after_rebase(pool: LeasePool, *arguments):
        if not floors:
            floors.append(await operator.engine.rebase(5 * 10**15, operator.deadline()))
            driver.acquire(driver.claim("other", ttl=31.0))
        return await get(pool, *arguments)

    monkeypatch.setattr(LeasePool, "get", get_after_rebase)
    assert driver.acquire(driver.claim(queue=queued)).token > floors[0]
