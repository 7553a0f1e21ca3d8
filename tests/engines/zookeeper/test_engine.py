"""The ZooKeeper engine on one real server: traits, refusals, inspection, and what remains after use."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from harness.rigs.zookeeper import ZookeeperRig
from leasehold import Client, ConfigError, LeaseLost, NotAcquired, Unsupported
from leasehold.engines.zookeeper import session
from leasehold.engines.zookeeper.kazoo_adapter import KazooAdapter
from leasehold.engines.zookeeper.url import ZookeeperUrl
from leasehold.model import Alive, Busy, Grant
from leasehold.runtime.base import run_sync
from leasehold.testing.conformance.context import CaseContext
from leasehold.testing.conformance.rig import RUNTIMES
from leasehold.testing.conformance.suite import all_cases, rig_or_skip, run_case
from tests.support import probe, probe_zookeeper
from tests.support.paths import child_environment
from tests.support.timing import check_elapsed


def test_zk_scheme_is_an_alias_of_zookeeper(url) -> None:
    with Client(url) as client, Client(url.replace("zookeeper://", "zk://")) as other:
        with client.lock("a", ttl=9.0) as lease:
            assert lease.ttl == 9.0
            assert other.lock("a").try_acquire() is None
            assert [(holding.state, holding.token) for holding in other.inspect()] == [("held", lease.token)]
        with other.lock("a") as second:
            assert second.token > lease.token


def test_min_hold_and_delay_are_refused_when_a_lock_is_built(url) -> None:
    with Client(url) as client:
        for options in ({"min_hold": 1.0}, {"delay": 1.0}, {"require": {"outlives"}}, {"require": {"break-notice"}}):
            with pytest.raises(Unsupported):
                client.lock("a", **options)


def test_single_server_survives_a_restart_but_no_minority_loss(url) -> None:
    with Client(url) as client:
        lock = client.lock("a", require={"survives-minority"})  # not known from the URL, only from the server
        with pytest.raises(Unsupported):
            lock.acquire()
        with client.lock("a", require={"survives-restart", "fencing", "fair", "slots"}):
            pass


def test_lease_ttl_is_capped_by_the_session(url) -> None:
    """The ttl counts from before the call, but the session from its last confirmed heartbeat, which may be later."""
    began = time.monotonic()
    with Client(f"{url}?session=6", ttl=30) as client, client.lock("a") as lease:
        assert 0 < lease.ttl < 6 + time.monotonic() - began
        began = time.monotonic()
        lease.renew()
        assert 0 < lease.ttl < 6 + time.monotonic() - began


def test_rwlock_and_semaphore_admit_the_right_claims(url) -> None:
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


def test_break_is_detected_at_the_next_renewal(url, wait_until) -> None:
    with Client(f"{url}?session=9") as client, Client(url) as operator:
        lease = client.lock("a", ttl=600).acquire()
        assert not operator.break_lock("a", token=lease.token + 1)
        assert operator.break_lock("a", token=lease.token)
        assert lease.wait_lost(60)
        assert lease.lost_reason == "broken"
        with pytest.raises(LeaseLost):
            lease.check()


TTL_CASES = [
    "unrenewed_grant_lives_for_its_ttl_and_no_longer",
    "release_after_expiry_is_harmless",
    "renewed_grant_stays_alive",
    "waiter_retries_when_holder_expires",
    "cut_off_holder_expires_and_is_gone_when_reconnected",
]


@pytest.mark.parametrize("mode", RUNTIMES)
@pytest.mark.parametrize("name", TTL_CASES)
def test_lease_also_expires_by_its_ttl(name, mode) -> None:
    """The session frees a dead holder. If another client waits, an unrenewed lease also expires by its ttl."""
    (case,) = [case for case in all_cases() if case.name == name]
    run_case(replace(case, needs=frozenset()), CaseContext(rig_or_skip(ZookeeperRig), mode))


# -------------------------------------------------------------------------------------------------------------- cleanup
def test_idle_name_is_removed_by_the_server(url, root, read_tree, wait_until) -> None:
    with Client(url) as client:
        for number in range(20):
            with client.lock(f"n{number}"), client.semaphore(f"s{number}", 3):
                pass
        wait_until(lambda: set(read_tree()) == {root, f"{root}/lh1"})
        with client.lock("n1"):  # the client remembers a queue that is gone
            pass


def test_claim_id_is_nowhere_in_the_tree(url, read_tree) -> None:
    with Client(url, holder="web-3") as client, client.lock("a", purpose="why") as lease:
        found = read_tree()
        assert len(found) == 4
        text = repr(found)
        assert "web-3" in text
        assert probe.claim(lease).id_hash in text
        assert probe.claim(lease).id not in text


def test_collected_client_leaves_no_thread_and_no_session(url, server, session_threads, wait_until) -> None:
    client = Client(url)
    with client.lock("a"):
        pass
    assert session_threads()
    session_count = server.counter("global_sessions")
    del client
    wait_until(lambda: gc.collect() >= 0 and server.counter("global_sessions") < session_count)
    wait_until(lambda: not session_threads())


@pytest.fixture
def session_threads(monkeypatch, root) -> Callable[[], list[threading.Thread]]:
    """Returns the running threads of the sessions of this test. A client that an earlier test has left may open
    sessions at any time."""
    adapters: list[KazooAdapter] = []

    def open_adapter(url: ZookeeperUrl, *args: Any, **kwargs: Any) -> KazooAdapter:
        adapter = KazooAdapter(url, *args, **kwargs)
        if url.chroot == root:
            adapters.append(adapter)
        return adapter

    monkeypatch.setattr(session, "KazooAdapter", open_adapter)

    def running() -> list[threading.Thread]:
        threads = [probe_zookeeper.connection_thread(adapter) for adapter in adapters]
        return [thread for thread in threads if thread is not None and thread.is_alive()]

    return running


def test_close_ends_the_session_at_once(url, server, session_threads, wait_until) -> None:
    client = Client(url)
    client.ping()
    assert session_threads()
    session_count = server.counter("global_sessions")
    client.close()
    wait_until(lambda: server.counter("global_sessions") < session_count)
    wait_until(lambda: not session_threads())


def test_client_closed_under_load_is_not_reopened(url, session_threads, wait_until) -> None:
    """A call in flight that finds its connection closed must not open a new session, which nothing would close."""
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
        wait_until(lambda client=client, number=number: len(client.inspect("a")) > number % 6)
        client.close()
        for thread in threads:
            thread.join(30)
        closed.append(client)
    assert failed == []
    wait_until(lambda: not session_threads())


def test_silent_server_delays_close_by_at_most_one_call(url_of, proxy) -> None:
    client = Client(url_of(proxy), call_timeout=1)
    leases = [client.lock(name, ttl=60).acquire() for name in "ab"]
    proxy.cut()
    began = time.monotonic()
    client.close()
    check_elapsed(began, 1 + 0.5 + 1)
    assert not any(lease.held for lease in leases)


def test_many_threads_leave_nothing_in_the_session(url, session_of) -> None:
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
        assert not session.own_nodes
        assert not session.watches
        assert not session.unconfirmed
        assert not probe_zookeeper.watches_by_claim(session)


def test_forked_child_has_its_own_session(url, run_in_fork, session_of) -> None:
    with Client(url) as client:
        lease = client.lock("a", ttl=60).acquire()
        keeper = probe_zookeeper.adapter(session_of(client))
        fd = probe_zookeeper.connection_socket(keeper).fileno()
        own_session_id = keeper.session_id

        def child() -> None:
            assert os.readlink(f"/proc/self/fd/{fd}") == os.devnull, "the child can write to its parent's socket"
            assert not lease.held
            assert client.lock("a").try_acquire() is None
            with client.lock("b"):
                assert {holding.name for holding in client.inspect()} == {"a", "b"}
            assert session_of(client).session_id != own_session_id
            client.close()

        for _ in range(3):
            run_in_fork(child)
        assert session_of(client).session_id == own_session_id
        lease.renew()
        assert lease.release()


@pytest.mark.parametrize("kept", [False, True], ids=["released", "held"])
def test_exiting_process_without_leases_closes_its_session(url, root, kazoo, kept) -> None:
    """A session that holds a lease stays: a thread may have worked under it until the very end."""
    code = f"""
import leasehold, threading
from tests.support import probe_zookeeper
client = leasehold.Client({url!r})
lease = client.lock("a").acquire()
if not {kept}: lease.release()
print(probe_zookeeper.session(client).session_id)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    dumped = kazoo.command(b"dump")
    assert (f"{int(done.stdout):#x}" in dumped) == kept, dumped


def test_release_of_a_broken_lease_says_that_it_was_over(url, make_driver) -> None:
    """Even if another client has held the name meanwhile, and released it."""
    one, other = make_driver(url), make_driver(url)
    held = one.acquire(one.claim())
    assert run_sync(other.engine.break_("", "job", held.token, other.deadline()))
    successor = other.acquire(other.claim())
    assert not one.release(held)
    assert isinstance(other.renew(successor), Alive), "the late release ended the successor"
    assert other.release(successor)
    assert not other.release(successor)
    assert one.release(one.acquire(one.claim()))


def expect_not_acquired(lock) -> None:
    with pytest.raises(NotAcquired):
        lock.acquire()


def test_release_without_id_ends_a_queued_claim_but_never_a_grant(url, wait_until, count_waiters, session_of) -> None:
    with Client(url) as one, Client(url) as two:
        lease = one.lock("a", ttl=60).acquire()
        claim_without_id = probe.claim(lease)._replace(id="")
        deadline = probe.core(one).deadline()
        assert not run_sync(probe.engine(one).release(claim_without_id, deadline))
        lease.renew()
        thread = threading.Thread(target=expect_not_acquired, args=(two.lock("a", wait=5),))
        thread.start()
        wait_until(lambda: count_waiters(one) == 1 and session_of(two).own_nodes)
        id_hash = next(iter(session_of(two).own_nodes))
        run_sync(probe.engine(one).release(claim_without_id._replace(id_hash=id_hash), deadline))
        assert two.inspect("a")[0].state == "held"
        thread.join(60)
        lease.release()


def test_lease_lost_at_max_hold_leaves_no_node(url, wait_until) -> None:
    """New clients that try once each cannot see how long an unrenewed node has existed, so it must not stay."""
    with Client(url) as client:
        lease = client.lock("a", ttl=0.5, max_hold=0.5).acquire()
        assert lease.wait_lost(5)

        def is_free() -> bool:
            with Client(url) as newcomer:
                found = newcomer.lock("a").try_acquire()
                return found is not None and found.release()

        wait_until(is_free, 10, every=0.2)


@pytest.mark.parametrize("shape", [{}, {"kind": "semaphore", "limit": 1}], ids=["lock", "permit"])
def test_ttl_of_a_waiter_starts_when_it_is_granted(url, make_driver, shape) -> None:
    """The grant rewrites the waiter's node: until then the node's ttl counts from when the claim was queued, and other
    clients see a reservation."""
    one, other = make_driver(url), make_driver(url)
    held, waiting = one.acquire(one.claim(**shape)), other.claim(queue=True, ttl=5.0, **shape)
    assert isinstance(other.attempt(waiting), Busy)
    one.release(held)
    grant = other.attempt(waiting)
    assert isinstance(grant, Grant)
    assert grant.ttl == 5.0
    (found,) = run_sync(one.engine.inspect("", "", False, one.deadline()))
    assert (found.state, found.token) == ("held", grant.token)
