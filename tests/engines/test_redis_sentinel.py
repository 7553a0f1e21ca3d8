"""Redis behind sentinels: who is primary, what a fail-over keeps and loses, and who is told."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from leasehold import AsyncClient, Client, ConfigError, LeaseLost, Unavailable
from leasehold.testing.redis_rig import RedisRig
from leasehold.testing.servers.process import free_ports, poll
from leasehold.testing.servers.redis_several import SERVICE, Watched
from leasehold.testing.suite import made


@pytest.fixture
def watched():
    made(RedisRig)  # a skip where there is no Redis
    found = Watched(down_after=0.5)
    yield found
    found.close()


def fail_over(watched: Watched) -> None:
    """Asked for by an operator: the old primary becomes a replica of the new one."""
    before = watched.sentinels[0].primary()
    watched.sentinels[0].ask("SENTINEL", "FAILOVER", SERVICE)
    poll(lambda: watched.sentinels[0].primary() != before, 30, lambda: "another is primary")


def promoted(watched: Watched) -> None:
    poll(lambda: watched.replica.info("replication")["role"] == "master", 30, lambda: "the replica was promoted")


# ------------------------------------------------------------- fail-overs


def test_a_fail_over_keeps_what_was_replicated_and_tokens_rise(watched) -> None:
    with Client(watched.url(), call_timeout=15) as holder, Client(watched.url(), call_timeout=15) as other:
        lease = holder.lock("job", ttl=20).acquire()
        other.ping()
        poll(lambda: watched.replica.ask("DBSIZE") > 1, 10, lambda: "it was replicated")
        watched.primary.kill()
        assert other.lock("job").try_acquire() is None, "the call waits for the new primary, which has the grant"
        lease.verify()
        assert lease.release()
        with other.lock("job") as theirs:
            assert theirs.token > lease.token
            assert theirs.held


def test_a_fail_over_that_lost_the_write_is_told_and_the_token_rises(watched) -> None:
    with Client(watched.url(), call_timeout=15) as holder, Client(watched.url(), call_timeout=15) as other:
        with other.lock("job"):
            pass
        watched.detach()
        lease = holder.lock("job", ttl=60).acquire()
        watched.primary.kill()
        promoted(watched)
        with other.lock("job", ttl=60) as theirs:  # documented: two may believe they hold it
            assert theirs.token > lease.token, "the resource tells them apart"
            assert lease.wait_lost(10), "the new primary is asked about every lease at once"
            assert lease.lost_reason == "unknown"
            assert theirs.held


def test_with_min_replicas_a_grant_that_would_be_lost_is_refused(watched) -> None:
    url = watched.url("?min_replicas=1")
    with Client(url, call_timeout=1) as holder, Client(watched.url(), call_timeout=15) as other:
        with holder.lock("job"):
            pass
        watched.detach()
        with pytest.raises(Unavailable, match="1 of its replicas"):
            holder.lock("job", ttl=60).acquire()
        watched.primary.kill()
        promoted(watched)
        with other.lock("job", ttl=60) as theirs:
            assert theirs.held
            assert holder.lock("job").try_acquire() is None


@pytest.mark.faults
def test_min_replicas_counts_those_of_the_new_primary(watched) -> None:
    with Client(watched.url("?min_replicas=1"), call_timeout=2) as client:
        lease = client.lock("job", ttl=60).acquire()
        watched.primary.kill()
        promoted(watched)
        with pytest.raises(Unavailable):  # the new primary has to be found, and to learn the script
            lease.renew()
        with pytest.raises(Unavailable, match="1 of its replicas"):
            lease.renew()
        assert lease.state == "AT_RISK"
        watched.primary.start()  # and the sentinels make it a replica

        def renewed() -> bool:
            try:
                lease.renew()
            except Unavailable:
                return False
            return True

        poll(renewed, 40, lambda: "the old primary follows the new one, and confirms")
        assert lease.state == "HELD"


def test_an_operators_fail_over_disturbs_nobody(watched) -> None:
    with Client(watched.url(), call_timeout=15) as client, Client(watched.url(), call_timeout=15) as other:
        lease = client.lock("job", ttl=10).acquire()
        tokens = []
        over = threading.Event()

        def use() -> None:
            while not over.is_set():
                with other.lock("another", ttl=3) as mine:  # what a release that was not replicated costs
                    tokens.append(mine.token)

        user = threading.Thread(target=use)
        user.start()
        try:
            fail_over(watched)
            count = len(tokens)
            poll(lambda: len(tokens) > count + 20, 20, lambda: "it goes on at the new primary")
        finally:
            over.set()
            user.join(20)
        assert tokens == sorted(set(tokens))
        lease.verify()
        assert watched.replica.info("replication")["role"] == "master"


def test_tasks_go_on_at_the_new_primary(watched) -> None:
    async def main() -> None:
        tokens: list[int] = []
        inside = 0

        async def use(client: AsyncClient) -> None:
            nonlocal inside
            for _ in range(15):
                async with client.lock("job", ttl=3) as lease:  # what a release that was not replicated costs
                    inside += 1
                    assert inside == 1
                    tokens.append(lease.token)
                    await asyncio.sleep(0.002)
                    inside -= 1

        async with (
            AsyncClient(watched.url(), call_timeout=20) as one,
            AsyncClient(watched.url(), call_timeout=20) as two,
        ):
            users = [asyncio.create_task(use(client)) for client in (one, two) for _ in range(10)]
            await asyncio.to_thread(fail_over, watched)
            await asyncio.gather(*users)
        assert len(tokens) == 300
        assert tokens == sorted(tokens)

    asyncio.run(main())


@pytest.mark.faults
def test_a_call_to_a_primary_that_fell_silent_is_answered_by_the_next(watched) -> None:
    with Client(watched.url(), call_timeout=20) as client:
        lease = client.lock("job", ttl=60).acquire()
        poll(lambda: watched.replica.ask("DBSIZE") > 1, 10, lambda: "it was replicated")
        watched.primary.pause()
        began = time.monotonic()
        lease.verify()  # on a connection that hears nothing, until the sentinels say who is next
        assert time.monotonic() - began < 15
        watched.primary.resume()
        poll(lambda: watched.primary.info("replication")["role"] == "slave", 30, lambda: "it was told to follow")
        with client.lock("another") as other:
            assert other.token > lease.token


def test_a_waiter_is_woken_at_the_new_primary(watched) -> None:
    with Client(watched.url(), call_timeout=15) as holder, Client(watched.url(), call_timeout=15) as other:
        lease = holder.lock("job", ttl=60).acquire()
        turns = []
        waiter = threading.Thread(target=lambda: turns.append(other.lock("job", wait=60).acquire()))
        waiter.start()
        poll(lambda: len(holder.inspect()) == 2, 10, lambda: "it stands in line")
        fail_over(watched)
        assert lease.release()
        began = time.monotonic()
        waiter.join(30)
        assert turns[0].token > lease.token
        assert time.monotonic() - began < 6


# -------------------------------------------------------------- sentinels


def test_one_sentinel_is_enough_to_find_the_primary(watched) -> None:
    for sentinel in watched.sentinels[:2]:
        sentinel.kill()
    with Client(watched.url()) as client, client.lock("job") as lease:
        assert lease.held


def test_a_fail_over_is_heard_of_though_a_sentinel_is_gone(watched) -> None:
    with Client(watched.url(), call_timeout=15) as client:
        lease = client.lock("job", ttl=60).acquire()
        poll(lambda: watched.replica.ask("DBSIZE") > 1, 10, lambda: "it was replicated")
        door = client._desk.book.shelf["redis"].listener._watch._door
        watched.sentinels[door].kill()  # the one that it listens to
        watched.primary.pause()
        lease.verify()
        assert lease.release()


def test_sentinels_that_pause_cost_a_moment_only(watched) -> None:
    for sentinel in watched.sentinels[:2]:
        sentinel.pause()
    began = time.monotonic()
    with Client(watched.url(), call_timeout=6) as client, client.lock("job") as lease:
        assert lease.held
    assert time.monotonic() - began < 6


def test_without_a_sentinel_it_is_said_what_each_of_them_said() -> None:
    first, second = free_ports(2)
    url = f"redis+sentinel://:verysecret@127.0.0.1:{first},127.0.0.1:{second}/locks?sentinel_password=verysecret"
    with Client(url, call_timeout=0.5) as client:
        began = time.monotonic()
        with pytest.raises(Unavailable) as caught:
            client.lock("job").acquire()
        assert time.monotonic() - began < 1.0
    assert f"the sentinel at 127.0.0.1:{first} cannot be reached" in str(caught.value)
    assert f"the sentinel at 127.0.0.1:{second} cannot be reached" in str(caught.value)
    assert "verysecret" not in str(caught.value)


def test_a_primary_gone_for_good_is_named(watched) -> None:
    with Client(watched.url(), call_timeout=1) as client:
        with client.lock("job"):
            pass
        for sentinel in watched.sentinels[1:]:
            sentinel.kill()  # no majority, no fail-over
        watched.primary.kill()
        began = time.monotonic()
        with pytest.raises(Unavailable, match=f"127.0.0.1:{watched.primary.port} cannot be reached"):
            client.lock("job").acquire()
        assert time.monotonic() - began < 1.5


def test_an_unknown_service_is_a_mistake(watched) -> None:
    url = watched.url().replace(SERVICE, "lokcs")
    with Client(url) as client, pytest.raises(ConfigError, match="knows no service 'lokcs'"):
        client.lock("job").acquire()


def test_subscriptions_that_are_killed_are_made_anew(watched) -> None:
    with Client(watched.url()) as holder, Client(watched.url()) as other:
        lease = holder.lock("job", ttl=60).acquire()
        turns = []
        waiter = threading.Thread(target=lambda: turns.append(other.lock("job", wait=60).acquire()))
        waiter.start()
        poll(lambda: len(holder.inspect()) == 2, 10, lambda: "it stands in line")
        for server in (watched.primary, *watched.sentinels):
            server.ask("CLIENT", "KILL", "TYPE", "pubsub")
        assert lease.release()
        waiter.join(10)
        assert turns[0].release()
        fail_over(watched)
        lease = holder.lock("job", ttl=60).acquire()
        assert other.break_lock("job", token=lease.token)
        assert lease.wait_lost(10)
        with pytest.raises(LeaseLost):
            lease.check()
