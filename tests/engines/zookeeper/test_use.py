"""The ZooKeeper engine on one real server: what it promises, refuses and shows, and what it leaves behind."""

from __future__ import annotations

import gc
import os
import threading
import time
from dataclasses import replace

import pytest

from leasehold import Client, ConfigError, LeaseLost, NotAcquired, Unsupported
from leasehold.testing.rig import RUNTIMES
from leasehold.testing.suite import all_cases, made, run_case
from leasehold.testing.trial import Trial
from leasehold.testing.zookeeper_rig import ZookeeperRig


def test_a_lock_and_its_alias(url) -> None:
    with Client(url) as client, Client(url.replace("zookeeper://", "zk://")) as other:
        with client.lock("a", ttl=3.0) as lease:
            assert lease.ttl == 3.0
            assert other.lock("a").try_acquire() is None
            assert [(seen.state, seen.token) for seen in other.inspect()] == [("held", lease.token)]
        with other.lock("a") as second:
            assert second.token > lease.token


def test_min_hold_and_delay_are_refused_when_a_lock_is_built(url) -> None:
    with Client(url) as client:
        for options in ({"min_hold": 1.0}, {"delay": 1.0}, {"require": {"outlives"}}, {"require": {"told"}}):
            with pytest.raises(Unsupported):
                client.lock("a", **options)


def test_one_server_survives_a_restart_and_no_more(url) -> None:
    with Client(url) as client:
        lock = client.lock("a", require={"survives-minority"})  # the URL does not say: the server will
        with pytest.raises(Unsupported):
            lock.acquire()
        with client.lock("a", require={"survives-restart", "fencing", "fair", "slots"}):
            pass


def test_a_lease_shows_the_life_that_the_session_allows(url) -> None:
    with Client(f"{url}?session=6", ttl=30) as client, client.lock("a") as lease:
        assert 0 < lease.ttl < 6
        lease.renew()
        assert 0 < lease.ttl < 6


def test_readers_and_writers_and_permits_in_one_line(url) -> None:
    with Client(url) as one, Client(url) as two:
        doc = one.rwlock("doc")
        with doc.read() as first, two.rwlock("doc").read(wait=0) as second:
            assert first.token < second.token
            with pytest.raises(NotAcquired):
                two.rwlock("doc").write(wait=0).acquire()
        permits = [two.semaphore("pool", 3).acquire(wait=0) for _ in range(3)]
        assert [permit.slot for permit in permits] == [0, 1, 2]
        permits[1].release()
        with one.semaphore("pool", 3, wait=0) as again:
            assert again.slot == 1
        assert permits[0].release()
        assert permits[2].release()


def test_a_break_is_found_out_at_the_next_renewal(url, until) -> None:
    with Client(f"{url}?session=3") as client, Client(url) as operator:
        lease = client.lock("a", ttl=600).acquire()
        assert not operator.break_lock("a", token=lease.token + 1)
        assert operator.break_lock("a", token=lease.token)
        assert lease.wait_lost(10)
        assert lease.lost_reason == "broken"
        with pytest.raises(LeaseLost):
            lease.check()


CASES_OF_A_TTL = [
    "a_grant_lives_as_long_as_it_was_told_and_no_longer",
    "a_late_release_is_harmless",
    "a_renewed_grant_lives_on",
    "a_waiter_looks_again_when_the_holder_lapses",
    "a_holder_cut_off_lapses_and_finds_itself_gone",
]


@pytest.mark.parametrize("mode", RUNTIMES)
@pytest.mark.parametrize("name", CASES_OF_A_TTL)
def test_a_lease_also_ends_by_its_ttl(name, mode) -> None:
    """Its session frees a dead holder; but where somebody else asks, a lease that nobody renews ends as elsewhere."""
    (case,) = [case for case in all_cases() if case.name == name]
    run_case(replace(case, needs=frozenset()), Trial(made(ZookeeperRig), mode))


# -------------------------------------------------------------------------------------------------- what is left behind


def test_an_idle_name_is_swept_by_the_server(url, root, tree, until) -> None:
    with Client(url) as client:
        for number in range(20):
            with client.lock(f"n{number}"), client.semaphore(f"s{number}", 3):
                pass
        until(lambda: set(tree()) == {root, f"{root}/lh1"})
        with client.lock("n1"):  # the line it remembers is gone
            pass


def test_the_secret_is_nowhere_in_the_tree(url, tree) -> None:
    with Client(url, holder="web-3") as client, client.lock("a", purpose="why") as lease:
        found = tree()
        assert len(found) == 4
        text = repr(found)
        assert "web-3" in text
        assert lease._claim.mark in text
        assert lease._claim.id not in text


def test_a_dropped_client_leaves_no_thread_and_no_session(url, server, until) -> None:
    before = threading.active_count()
    client = Client(url)
    with client.lock("a"):
        pass
    alive = server.counted("global_sessions")
    del client
    until(lambda: gc.collect() >= 0 and server.counted("global_sessions") < alive)
    until(lambda: threading.active_count() <= before)


def test_closing_ends_the_session_at_once(url, server, until) -> None:
    client = Client(url)
    client.ping()
    alive = server.counted("global_sessions")
    client.close()
    until(lambda: server.counted("global_sessions") < alive, 5)
    assert not [thread for thread in threading.enumerate() if "zk_loop" in thread.name]


def test_a_client_closed_under_a_crowd_is_not_opened_again(url, until) -> None:
    """By a call that was under way, and finds its connection gone: that session would never be ended."""
    failed: list[BaseException] = []

    def work(client: Client) -> None:
        try:
            while True:
                client.lock("a", ttl=5).call(lambda: None)
        except ConfigError:
            pass
        except BaseException as error:
            failed.append(error)

    closed = []
    for number in range(15):
        client = Client(url)
        threads = [threading.Thread(target=work, args=(client,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        until(lambda client=client, number=number: len(client.inspect("a")) > number % 6)
        client.close()
        for thread in threads:
            thread.join(30)
        closed.append(client)
    assert failed == []
    until(lambda: not [thread for thread in threading.enumerate() if "zk_loop" in thread.name])


def test_a_silent_server_holds_up_close_no_longer_than_a_call(url_of, proxy) -> None:
    client = Client(url_of(proxy), call_timeout=1)
    leases = [client.lock(name, ttl=60).acquire() for name in "ab"]
    proxy.cut()
    began = time.monotonic()
    client.close()
    assert time.monotonic() - began < 1 + 0.5 + 1
    assert not any(lease.held for lease in leases)


def test_a_crowd_leaves_nothing_in_its_session(url, session_of) -> None:
    with Client(url, call_timeout=30) as client:

        def work() -> None:
            for _ in range(5):
                with client.semaphore("s", 3), client.lock("l", ttl=60):
                    pass

        threads = [threading.Thread(target=work) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        session = session_of(client)
        assert not session.mine
        assert not session.watches
        assert not session.doubts
        assert not session._watching


def test_a_forked_child_has_a_session_of_its_own(url, in_fork, session_of) -> None:
    with Client(url) as client:
        lease = client.lock("a", ttl=60).acquire()
        keeper = session_of(client)._keeper
        fd = keeper._connection._socket.fileno()
        mine = keeper.owner

        def child() -> None:
            assert os.readlink(f"/proc/self/fd/{fd}") == os.devnull, "the parent's socket is not ours to speak by"
            assert not lease.held
            assert client.lock("a").try_acquire() is None
            with client.lock("b"):
                assert {seen.name for seen in client.inspect()} == {"a", "b"}
            assert session_of(client).owner != mine
            client.close()

        for _ in range(3):
            in_fork(child)
        assert session_of(client).owner == mine
        lease.renew()
        assert lease.release()
