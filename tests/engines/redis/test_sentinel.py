"""Redis behind sentinels: finding the primary, what a failover keeps and loses, and the wake-ups after it."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from harness.rigs.redis import RedisRig
from harness.servers.process import free_ports, poll
from harness.servers.redis_ha import SERVICE, SentinelSetup
from leasehold import AsyncClient, AsyncLease, Client, ConfigError, LeaseLost, Unavailable
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support import probe_redis
from tests.support.timing import check_elapsed


@pytest.fixture
def sentinel_setup():
    rig_or_skip(RedisRig)  # skips if Redis is not installed
    setup = SentinelSetup(down_after=0.5)
    yield setup
    setup.close()


def fail_over(sentinel_setup: SentinelSetup) -> None:
    """A manual failover: the old primary becomes a replica of the new one."""
    before = sentinel_setup.sentinels[0].primary()
    sentinel_setup.sentinels[0].ask("SENTINEL", "FAILOVER", SERVICE)
    poll(lambda: sentinel_setup.sentinels[0].primary() != before, 60, lambda: "the sentinel reports another primary")


def wait_until_promoted(sentinel_setup: SentinelSetup) -> None:
    poll(lambda: sentinel_setup.replica.info("replication")["role"] == "master", 60, lambda: "the replica is promoted")


# ------------------------------------------------------------- failovers


def test_failover_keeps_replicated_lease_and_tokens_rise(sentinel_setup) -> None:
    with (
        Client(sentinel_setup.url(), call_timeout=60) as holder,
        Client(sentinel_setup.url(), call_timeout=60) as other,
    ):
        lease = holder.lock("job", ttl=20).acquire()
        other.ping()
        poll(lambda: sentinel_setup.replica.ask("DBSIZE") > 1, 60, lambda: "the replica has the keys")
        sentinel_setup.primary.kill()
        assert other.lock("job").try_acquire() is None, "the call waits for the new primary, which has the grant"
        lease.verify()
        assert lease.release()
        with other.lock("job") as theirs:
            assert theirs.token > lease.token
            assert theirs.held


def test_failover_without_the_write_loses_lease_and_token_rises(sentinel_setup) -> None:
    with (
        Client(sentinel_setup.url(), call_timeout=60) as holder,
        Client(sentinel_setup.url(), call_timeout=60) as other,
    ):
        with other.lock("job"):
            pass
        sentinel_setup.detach_replica()
        lease = holder.lock("job", ttl=600).acquire()
        sentinel_setup.primary.kill()
        wait_until_promoted(sentinel_setup)
        with other.lock("job", ttl=60) as theirs:  # documented: both clients may believe they hold it
            assert theirs.token > lease.token, "a fence can reject the older token"
            assert lease.wait_lost(60), "the watchdog renews every lease at the new primary at once"
            assert lease.lost_reason == "unknown"
            assert theirs.held


def test_min_replicas_refuses_a_grant_no_replica_confirmed(sentinel_setup) -> None:
    url = sentinel_setup.url("?min_replicas=1")
    with Client(url, call_timeout=1) as holder, Client(sentinel_setup.url(), call_timeout=60) as other:
        with holder.lock("job"):
            pass
        sentinel_setup.detach_replica()
        with pytest.raises(Unavailable, match="1 of its replicas"):
            holder.lock("job", ttl=60).acquire()
        sentinel_setup.primary.kill()
        wait_until_promoted(sentinel_setup)
        with other.lock("job", ttl=60) as theirs:
            assert theirs.held
            assert holder.lock("job").try_acquire() is None


@pytest.mark.faults
def test_min_replicas_counts_replicas_of_the_new_primary(sentinel_setup) -> None:
    with Client(sentinel_setup.url("?min_replicas=1"), call_timeout=2) as client:
        lease = client.lock("job", ttl=60).acquire()
        sentinel_setup.primary.kill()
        wait_until_promoted(sentinel_setup)
        with pytest.raises(Unavailable):  # the client must find the new primary and load the script there
            lease.renew()
        with pytest.raises(Unavailable, match="1 of its replicas"):
            lease.renew()
        assert lease.state == "AT_RISK"
        sentinel_setup.primary.start()  # the sentinels make it a replica

        def renewed() -> bool:
            try:
                lease.renew()
            except Unavailable:
                return False
            return True

        poll(renewed, 40, lambda: "the old primary confirms as a replica")
        assert lease.state == "HELD"


def test_manual_failover_keeps_leases_and_tokens_rising(sentinel_setup) -> None:
    with (
        Client(sentinel_setup.url(), call_timeout=60) as client,
        Client(sentinel_setup.url(), call_timeout=60) as other,
    ):
        lease = client.lock("job", ttl=60).acquire()
        tokens = []
        stopped = threading.Event()

        def work() -> None:
            while not stopped.is_set():
                other_lease = other.lock("another", ttl=3).acquire()  # an unreplicated release costs the ttl
                tokens.append(other_lease.token)
                other_lease.release()  # a busy machine may have lost the lease, which leaving a `with` would raise

        worker = threading.Thread(target=work)
        worker.start()
        try:
            fail_over(sentinel_setup)
            count = len(tokens)
            poll(lambda: len(tokens) > count + 20, 60, lambda: "the worker continues at the new primary")
        finally:
            stopped.set()
            worker.join(60)
        assert tokens == sorted(set(tokens))
        lease.verify()
        assert sentinel_setup.replica.info("replication")["role"] == "master"


def test_asyncio_tasks_continue_at_the_new_primary(sentinel_setup) -> None:
    async def main() -> None:
        tokens: list[int] = []
        inside: list[AsyncLease] = []

        async def work(client: AsyncClient) -> None:
            for _ in range(15):
                lease = await client.lock("job", ttl=3).acquire()  # an unreplicated release costs the ttl
                assert not any(other.held for other in inside)  # a busy machine may lose a lease
                inside.append(lease)
                tokens.append(lease.token)
                await asyncio.sleep(0.002)  # pause: others may come in
                inside.remove(lease)
                await lease.release()

        async with (
            AsyncClient(sentinel_setup.url(), call_timeout=60) as one,
            AsyncClient(sentinel_setup.url(), call_timeout=60) as two,
        ):
            workers = [asyncio.create_task(work(client)) for client in (one, two) for _ in range(10)]
            await asyncio.to_thread(fail_over, sentinel_setup)
            await asyncio.gather(*workers)
        assert len(tokens) == 300
        assert tokens == sorted(tokens)

    asyncio.run(main())


@pytest.mark.faults
def test_call_to_paused_primary_is_answered_by_the_new_primary(sentinel_setup) -> None:
    with Client(sentinel_setup.url(), call_timeout=60) as client:
        lease = client.lock("job", ttl=60).acquire()
        poll(lambda: sentinel_setup.replica.ask("DBSIZE") > 1, 60, lambda: "the replica has the keys")
        sentinel_setup.primary.pause()
        began = time.monotonic()
        lease.verify()  # gets no reply until the sentinels report the new primary
        check_elapsed(began, 15)
        sentinel_setup.primary.resume()
        poll(
            lambda: sentinel_setup.primary.info("replication")["role"] == "slave",
            30,
            lambda: "the old primary is demoted",
        )
        with client.lock("another") as other:
            assert other.token > lease.token


def test_waiter_is_woken_at_the_new_primary(sentinel_setup) -> None:
    with (
        Client(sentinel_setup.url(), call_timeout=60) as holder,
        Client(sentinel_setup.url(), call_timeout=60) as other,
    ):
        lease = holder.lock("job", ttl=40).acquire()  # another failover, on a busy machine, costs the ttl
        grants = []
        waiter = threading.Thread(target=lambda: grants.append(other.lock("job", wait=120).acquire()))
        waiter.start()
        poll(lambda: len(holder.inspect()) == 2, 60, lambda: "the claim is queued")
        fail_over(sentinel_setup)
        roles = {"master", "slave"}  # until then the old primary may take the release, which nobody would ever see
        poll(
            lambda: roles == {each.info("replication")["role"] for each in sentinel_setup.all[:2]},
            60,
            lambda: "the old primary is demoted",
        )
        assert lease.release()
        began = time.monotonic()
        waiter.join(120)
        assert grants[0].token > lease.token
        check_elapsed(began, 6)


# -------------------------------------------------------------- sentinels


def test_one_sentinel_is_enough_to_find_the_primary(sentinel_setup) -> None:
    for sentinel in sentinel_setup.sentinels[:2]:
        sentinel.kill()
    with Client(sentinel_setup.url()) as client, client.lock("job") as lease:
        assert lease.held


def test_client_learns_of_failover_when_its_sentinel_is_down(sentinel_setup) -> None:
    with Client(sentinel_setup.url(), call_timeout=60) as client:
        lease = client.lock("job", ttl=60).acquire()
        poll(lambda: sentinel_setup.replica.ask("DBSIZE") > 1, 60, lambda: "the replica has the keys")
        node_index = probe_redis.watched_sentinel(client)
        sentinel_setup.sentinels[node_index].kill()  # the one that the client subscribed to
        sentinel_setup.primary.pause()
        lease.verify()
        assert lease.release()


def test_paused_sentinels_delay_a_call_only_briefly(sentinel_setup) -> None:
    for sentinel in sentinel_setup.sentinels[:2]:
        sentinel.pause()
    began = time.monotonic()
    with Client(sentinel_setup.url(), call_timeout=6) as client, client.lock("job") as lease:
        assert lease.held
    check_elapsed(began, 6)


def test_unavailable_lists_the_error_of_each_sentinel() -> None:
    first, second = free_ports(2)
    url = f"redis+sentinel://:verysecret@127.0.0.1:{first},127.0.0.1:{second}/locks?sentinel_password=verysecret"
    with Client(url, call_timeout=0.5) as client:
        began = time.monotonic()
        with pytest.raises(Unavailable) as caught:
            client.lock("job").acquire()
        check_elapsed(began, 1.0)
    assert f"the sentinel at 127.0.0.1:{first} cannot be reached" in str(caught.value)
    assert f"the sentinel at 127.0.0.1:{second} cannot be reached" in str(caught.value)
    assert "verysecret" not in str(caught.value)


def test_unavailable_names_the_primary_that_is_down(sentinel_setup) -> None:
    with Client(sentinel_setup.url(), call_timeout=1) as client:
        with client.lock("job"):
            pass
        for sentinel in sentinel_setup.sentinels[1:]:
            sentinel.kill()  # no majority, no failover
        sentinel_setup.primary.kill()
        began = time.monotonic()
        with pytest.raises(Unavailable, match=f"127.0.0.1:{sentinel_setup.primary.port} cannot be reached"):
            client.lock("job").acquire()
        check_elapsed(began, 1.5)


def test_unknown_service_name_raises_config_error(sentinel_setup) -> None:
    url = sentinel_setup.url().replace(SERVICE, "lokcs")
    with Client(url) as client, pytest.raises(ConfigError, match="does not know the service 'lokcs'"):
        client.lock("job").acquire()


def test_killed_subscriptions_are_replaced(sentinel_setup) -> None:
    with (
        Client(sentinel_setup.url(), call_timeout=60) as holder,
        Client(sentinel_setup.url(), call_timeout=60) as other,
    ):
        lease = holder.lock("job", ttl=60).acquire()
        grants = []
        waiter = threading.Thread(target=lambda: grants.append(other.lock("job", wait=120).acquire()))
        waiter.start()
        poll(lambda: len(holder.inspect()) == 2, 60, lambda: "the claim is queued")
        for server in (sentinel_setup.primary, *sentinel_setup.sentinels):
            server.ask("CLIENT", "KILL", "TYPE", "pubsub")
        assert lease.release()
        waiter.join(60)
        assert grants[0].release()
        fail_over(sentinel_setup)
        lease = holder.lock("job", ttl=60).acquire()
        assert other.break_lock("job", token=lease.token)
        assert lease.wait_lost(60)
        with pytest.raises(LeaseLost):
            lease.check()
