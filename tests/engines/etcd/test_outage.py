"""Failures between client and etcd: lost, late and repeated requests, silent servers, a full database."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import pytest

from harness.servers.process import free_ports
from leasehold import Client, Unavailable
from leasehold.engines.etcd import messages, queue
from leasehold.engines.etcd.client_state import claim_key
from leasehold.engines.etcd.release import EtcdRelease
from leasehold.engines.etcd.rpc import LeaseNotFound, RpcClient
from leasehold.model import Alive, Grant
from leasehold.runtime.base import run_sync
from tests.support import probe_etcd
from tests.support.timing import check_elapsed


def test_lost_answers_never_lead_to_two_grants(url, proxied_url, proxy, member, eventually) -> None:
    """etcd executes the requests and the answers are lost: the client gives up claims whose result it does not know."""
    leases_before = member.leases()
    with Client(url) as other, Client(proxied_url, call_timeout=0.3) as client:
        for wait in (0, 5, 0, 5):
            with client.lock("warm"):
                pass
            proxy.lose_answers()
            with pytest.raises(Unavailable):
                client.lock("job").acquire(wait=wait)
            proxy.restore()
            with other.lock("job", wait=20) as lease:
                assert [holding.token for holding in other.inspect("job")] == [lease.token]
        held = client.lock("job", ttl=20).acquire(wait=10)
        proxy.lose_answers()
        assert not held.release(), "an unconfirmed release reported success"
        proxy.restore()
        other.lock("job").acquire(wait=20).release()
        eventually(lambda: other.inspect() == [])
    eventually(lambda: member.leases() - leases_before == set(), 40)


def test_repeated_release_does_not_take_its_first_try_for_a_break(
    url, proxied_url, proxy, make_driver, eventually
) -> None:
    """The first request ends the grant, but its answer is lost; the second one finds no grant."""
    driver, other = make_driver(proxied_url), make_driver(url)
    held = driver.acquire(driver.claim())
    answers: list[bool | None] = []
    proxy.lose_answers()
    thread = threading.Thread(target=lambda: answers.append(driver.release(held, 60)))
    thread.start()
    eventually(lambda: isinstance(other.attempt(other.claim()), Grant), 30)
    eventually(lambda: proxy.has_lost_bytes, 30)  # only now is the answer lost: the proxy may lag behind the server
    proxy.restore()
    thread.join(60)
    assert answers == [None], "False would mean that the lease was broken"


def test_close_is_bounded_when_the_server_is_silent(proxied_url, proxy) -> None:
    """By `call_timeout` + 0.5 s, with half a second for a busy machine."""
    client = Client(proxied_url, call_timeout=0.5)
    lease = client.lock("job").acquire()
    client.lock("other").acquire().release()  # its etcd lease is pooled, and close() revokes it
    proxy.cut()
    began = time.monotonic()
    client.close()
    check_elapsed(began, 1.5)
    assert not lease.held
    proxy.restore()


@pytest.mark.parametrize("queue", [True, False])
@pytest.mark.parametrize("shape", [{}, {"mode": "shared"}, {"kind": "semaphore", "limit": 2}])
def test_attempt_executed_twice_is_one_grant(url, member, make_driver, monkeypatch, queue, shape, claims) -> None:
    """The first answer is lost, so the client repeats an attempt that etcd has already executed."""
    driver = make_driver(url)
    run_sync(driver.engine.ping(driver.deadline()))
    original, lost = getattr(*probe_etcd.TRY_ONCE), []

    async def try_once(self, method, body, deadline):
        answer = await original(self, method, body, deadline)
        if method is messages.TXN and not lost:
            lost.append(answer)
            return None, []
        return answer

    monkeypatch.setattr(*probe_etcd.TRY_ONCE, try_once)
    claim = driver.claim(queue=queue, **shape)
    grant = driver.attempt(claim)
    assert isinstance(grant, Grant), "the claim was queued behind itself"
    assert len(claims()) == 1
    assert driver.attempt(claim).token == grant.token
    assert driver.release(claim)
    assert claims() == {}


def test_attempt_that_arrives_after_its_release_is_refused(url, member, make_driver, monkeypatch, claims) -> None:
    """If the late key were attached to a pooled lease, the next claim on that lease would keep it alive for ever."""
    driver = make_driver(url)
    driver.release(driver.acquire(driver.claim()))
    original, late = RpcClient.call, []

    async def call(self, method, request, deadline, unconfirmed=None):
        if method is messages.TXN and not late:
            late.append(request)
            raise Unavailable("silence")
        return await original(self, method, request, deadline, unconfirmed)

    monkeypatch.setattr(RpcClient, "call", call)
    claim = driver.claim(queue=True)
    with pytest.raises(Unavailable):
        driver.attempt(claim)
    driver.release(claim)
    with pytest.raises(LeaseNotFound):
        run_sync(driver.engine.rpc.call(messages.TXN, late[0], driver.deadline()))
    assert claims() == {}
    held = driver.acquire(driver.claim())
    assert len(claims()) == 1
    driver.release(held)


def test_late_release_does_not_end_another_claim(url, member, make_driver) -> None:
    """Keys are reused: when the release arrives, its key may belong to another claim."""
    driver = make_driver(url)
    first = driver.claim()
    second = driver.claim()
    second = second._replace(id_hash=first.id_hash[:2] + second.id_hash[2:])  # the same tag
    driver.acquire(first)
    claim_state = probe_etcd.state(driver.engine).claim_states[claim_key(first)]
    late = queue.dequeue_txn(claim_state.queue_key, claim_state.create_revision)
    driver.release(first)
    second = driver.acquire(second)
    assert probe_etcd.state(driver.engine).claim_states[claim_key(second)].queue_key.key == claim_state.queue_key.key
    assert not run_sync(driver.engine.rpc.call(messages.TXN, late, driver.deadline())).succeeded
    assert isinstance(driver.renew(second), Alive)


def test_revoked_lease_in_the_pool_is_replaced(url, member, make_driver) -> None:
    """An operator revokes leases without keys, and this client does not know."""
    driver, leases_before = make_driver(url), member.leases()
    driver.release(driver.acquire(driver.claim(ttl=60.0)))
    driver.release(driver.acquire(driver.claim(ttl=10.0)))
    held = driver.acquire(driver.claim(ttl=20.0))
    for lease in member.leases() - leases_before:
        if lease != probe_etcd.state(driver.engine).claim_states[claim_key(held)].key_lease.id:
            member.revoke(lease)
    longer = driver.renew(held._replace(ttl=60.0))
    assert isinstance(longer, Alive)
    assert longer.ttl > 55
    assert driver.release(held)
    driver.release(driver.acquire(driver.claim(ttl=10.0, queue=True)))
    driver.release(driver.acquire(driver.claim(ttl=10.0)))


@pytest.mark.parametrize("how", ["break", "release"])
def test_cooling_key_stays_when_the_answer_to_its_write_is_lost(url, make_driver, monkeypatch, how) -> None:
    """The repeated write finds that the key has changed: by the first try. It must not undo that."""
    driver = make_driver(url)
    held = driver.acquire(driver.claim(delay=20.0) if how == "break" else driver.claim(min_hold=20.0))
    original, lost = getattr(*probe_etcd.TRY_ONCE), []

    async def try_once(self, method, body, deadline):
        answer = await original(self, method, body, deadline)
        if method is messages.TXN and not lost:
            lost.append(answer)
            return None, []
        return answer

    monkeypatch.setattr(*probe_etcd.TRY_ONCE, try_once)
    if how == "break":
        assert run_sync(driver.engine.break_("", "job", held.token, driver.deadline()))
    else:
        assert driver.release(held) is None
    run_sync(driver.engine.ping(driver.deadline()))  # requests without an answer, such as revokes, were sent before
    assert [holding.state for holding in run_sync(driver.engine.inspect("", "", False, driver.deadline()))] == [
        "cooling"
    ]


def test_lease_released_twice_at_once_is_pooled_once(url, make_driver) -> None:
    """The client's close() and its watchdog may both send a pending release. A lease carries one claim at a time."""
    driver = make_driver(url)
    held = driver.acquire(driver.claim())
    state = probe_etcd.state(driver.engine)
    releases = [EtcdRelease(state, driver.engine.rpc, driver.runtime, held, driver.deadline()) for _ in range(2)]
    claim_state = state.claim_states[claim_key(held)]
    for release in releases:
        probe_etcd.release_leases(release, claim_state)
    first, second = (run_sync(state.leases.get(driver.engine.rpc, 30, driver.deadline())) for _ in range(2))
    assert first.id != second.id


def test_full_database_refuses_new_claims_and_keeps_held_leases(start_member, eventually, etcdctl) -> None:
    member = start_member("--quota-backend-bytes", str(2 * 1024 * 1024))
    with Client(f"etcd://127.0.0.1:{member.port}") as client:
        lease = client.lock("job", ttl=60).acquire()
        delayed = client.lock("delayed", ttl=60, delay=5).acquire()
        with suppress(OSError):
            for number in range(200):
                member.put(f"fill{number}", "x" * 100_000)
        began = time.monotonic()
        with pytest.raises(Unavailable, match="NOSPACE"):
            client.lock("other").acquire()
        check_elapsed(began, 2, "not refused at once")
        lease.verify()
        assert lease.release(), "a release needs no space"
        assert delayed.release(), "a release with a delay needs no space either"
        for number in range(200):
            member.delete(f"fill{number}")
        member.compact()
        etcdctl(member, "defrag")
        etcdctl(member, "alarm", "disarm")
        eventually(lambda: client.lock("other").acquire(wait=0).release())
        assert client.inspect() == []


def test_endless_name_lookup_is_unavailable_within_the_deadline(monkeypatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: never.wait(30) and [])
    began = time.monotonic()
    with Client("etcd://etcd.example:2379", call_timeout=0.5) as client, pytest.raises(Unavailable, match="address"):
        client.lock("job").acquire()
    check_elapsed(began, 0.5 + 0.5)
    never.set()


def test_client_connects_when_one_address_of_a_host_is_silent(monkeypatch, member) -> None:
    """A listener with a full backlog acts as the address that does not answer."""
    silent = socket.create_server(("127.0.0.2", member.port), backlog=0)
    waiting = [socket.socket() for _ in range(3)]
    for each in waiting:
        each.setblocking(False)
        each.connect_ex(silent.getsockname())
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 0)) for host in ("127.0.0.2", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", partial(fake_getaddrinfo, socket.getaddrinfo, found))
    with Client(f"etcd://etcd.example:{member.port}", call_timeout=2) as client:
        client.ping()
    for each in (silent, *waiting):
        each.close()


def fake_getaddrinfo(original, found, host, *args, **kwargs):
    return found if host == "etcd.example" else original(host, *args, **kwargs)


def test_refused_connection_is_unavailable_at_once() -> None:
    (port,) = free_ports(1)
    began = time.monotonic()
    with Client(f"etcd://user:hunter2@127.0.0.1:{port}", call_timeout=5) as client:
        with pytest.raises(Unavailable) as caught:
            client.lock("a").acquire()
        assert "hunter2" not in str(caught.value) + repr(client) + repr(caught.value.__cause__)
        assert str(port) in str(caught.value)
    check_elapsed(began, 2, "the client waited although nothing was sent")


@pytest.mark.parametrize("reply", [None, b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["silent", "closed", "http"])
def test_server_that_does_not_answer_is_named_in_the_error(reply: bytes | None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as threads:
        port, accepted = listener.getsockname()[1], []

        def answer() -> None:
            with suppress(OSError):  # closed
                while True:
                    accepted.append(listener.accept()[0])
                    if reply is not None:
                        accepted[-1].sendall(reply)
                        accepted[-1].close()

        threads.submit(answer)
        with Client(f"etcd://127.0.0.1:{port}", call_timeout=0.2) as client, pytest.raises(Unavailable) as caught:
            client.lock("a").acquire()
        listener.shutdown(socket.SHUT_RDWR)
    for connection in accepted:
        connection.close()
    assert f"etcd at 127.0.0.1:{port} did not answer" in str(caught.value)
