"""A lock server that refuses attempts because of its limits: callers that may wait retry until they are admitted."""

from __future__ import annotations

import asyncio
import threading
import time
from urllib.request import urlopen
from uuid import uuid4

import pytest

from harness.servers.process import poll
from leasehold import AsyncClient, Client, NotAcquired, Unavailable
from leasehold.core.timing import overload_pause
from leasehold.errors import NotSent, Overloaded
from leasehold.model import Grant
from tests.support import probe
from tests.support.scripted_server import SILENT, free_engine, problem
from tests.support.timing import check_elapsed

RETRY_AFTER = 0.05
REFUSED = problem("overloaded", done=False, retry_after=RETRY_AFTER)
BUSY = {"busy": [30.0, 0, 6, ["other", "host", 1, ""]], "heard": True}


def answering(*answers):
    """Answers the first attempts with these, the later ones with a grant."""
    left = list(answers)
    return lambda call: left.pop(0) if call["do"] == "attempt" and left else free_engine(call)


def url_of(*servers):
    return "http://" + ",".join(f"127.0.0.1:{server.port}" for server in servers)


def attempts(*servers):
    return [call["claim"]["id"] for server in servers for call in server.calls if call["do"] == "attempt"]


# ------------------------------------------------------------------ what an answer means


@pytest.mark.parametrize("kind", ["overloaded", "too-many", "slow"])
def test_refusal_by_all_servers_is_overloaded_after_one_round(driver, start_server, kind):
    pair = start_server(), start_server()
    driver.open(*pair)
    for server in pair:
        server.script = lambda call: problem(kind, done=False, retry_after=2.5)
    with pytest.raises(Overloaded) as error:
        driver.attempt(driver.claim())
    assert error.value.retry_in == 2.5
    assert [len(server.calls) for server in pair] == [1, 1]


def test_waiter_tries_other_servers_only_after_several_refusals(driver, start_server):
    """Another server can give it a position, but cannot wake it."""
    pair = start_server(lambda call: REFUSED), start_server()
    driver.open(*pair)
    waiter = driver.claim(queue=True)
    for _ in range(5):
        with pytest.raises(Overloaded):
            driver.attempt(waiter)
    assert [len(server.calls) for server in pair] == [5, 0]
    assert isinstance(driver.attempt(waiter), Grant)
    assert [len(server.calls) for server in pair] == [6, 1]


def test_overloaded_server_that_cannot_be_reached_next_is_overloaded(driver, start_server):
    pair = start_server(answering(REFUSED)), start_server()
    driver.open(*pair)
    pair[1].close()
    with pytest.raises(Overloaded):
        driver.attempt(driver.claim())


def test_overloaded_server_is_not_left_by_the_client(driver, start_server):
    """A move would take all its waiters to the other server."""
    pair = start_server(answering(REFUSED)), start_server()
    driver.open(*pair)
    assert isinstance(driver.attempt(driver.claim()), Grant)
    assert [len(server.calls) for server in pair] == [1, 1]
    assert driver.servers.current.index == 0


def test_overload_after_silence_may_have_been_sent(driver, start_server):
    """The first server may have carried the attempt out."""
    pair = start_server(lambda call: SILENT), start_server(lambda call: REFUSED)
    driver.open(*pair)
    with pytest.raises(Unavailable) as error:
        driver.attempt(driver.claim(), seconds=6.0)
    assert not isinstance(error.value, NotSent)


def test_overloaded_that_does_not_deny_the_call_is_unknown(driver, start_server):
    """Without `done: false` the engine may have been asked, whatever the type of the problem is."""
    driver.open(start_server(lambda call: problem("overloaded", retry_after=RETRY_AFTER)))
    with pytest.raises(Unavailable) as error:
        driver.attempt(driver.claim())
    assert not isinstance(error.value, NotSent)


def test_refusal_that_does_not_say_when_to_retry_is_an_outage(driver, start_server):
    driver.open(start_server(lambda call: problem("overloaded", done=False)))
    with pytest.raises(NotSent) as error:
        driver.attempt(driver.claim())
    assert not isinstance(error.value, Overloaded)


def test_pauses_grow_and_are_never_shorter_than_the_server_says():
    assert [overload_pause(tries, 1.0, 0.0) for tries in (1, 2, 3, 9)] == [1.0, 2.0, 4.0, 4.0]
    assert [overload_pause(tries, 1.0, 1.0) for tries in (1, 2, 3, 9)] == [2.0, 4.0, 8.0, 8.0]
    assert overload_pause(1, 60.0, 0.0) == 60.0
    assert [overload_pause(tries, 0.0, 0.0) for tries in (1, 2, 9)] == [0.05, 0.1, 4.0], "no flood of calls"


# ------------------------------------------------------------------ what a caller gets


def test_caller_that_may_wait_is_granted_when_it_is_admitted(start_server):
    server = start_server(answering(*[REFUSED] * 4))
    with Client(url_of(server)) as client, client.lock("job", wait=60) as lease:
        assert lease.guaranteed
        assert len(attempts(server)) == 5
    assert len(set(attempts(server))) == 1, "nothing was done, so the claim keeps its id"


def test_asyncio_caller_is_granted_when_it_is_admitted(start_server):
    server = start_server(answering(*[REFUSED] * 4))

    async def main():
        async with AsyncClient(url_of(server)) as client, client.lock("job", wait=60) as lease:
            assert lease.guaranteed

    asyncio.run(main())
    assert len(attempts(server)) == 5


def test_caller_that_may_not_wait_is_refused_at_once(start_server):
    server = start_server(lambda call: REFUSED)
    with Client(url_of(server)) as client:
        for refuse in (client.lock("job", wait=0).acquire, client.lock("job").try_acquire):
            with pytest.raises(Unavailable, match="it is overloaded") as error:
                refuse()
            assert error.value.retry_in == RETRY_AFTER
        assert len(attempts(server)) == 2
        assert not probe.pending_releases(client)


def test_refused_caller_gives_up_when_its_wait_is_over(start_server):
    server, began = start_server(lambda call: REFUSED), time.monotonic()
    with Client(url_of(server)) as client:
        with pytest.raises(Unavailable, match="it is overloaded"):
            client.lock("job", wait=0.4).acquire()
        assert time.monotonic() - began >= 0.4
        check_elapsed(began, 0.4 + 0.5)
        assert len(attempts(server)) > 2
        assert not probe.waiters(client)
        assert not probe.pending_releases(client)
    assert "release" not in server.verbs(), "nothing was done, so nothing must be undone"


def test_waiter_refused_after_it_queued_keeps_its_claim(start_server):
    """It has a position, which its next attempt must find: the id stays, and no release is sent."""
    server = start_server(answering(BUSY, BUSY, REFUSED, REFUSED))
    with Client(url_of(server)) as client, client.lock("job", wait=60):
        assert len(set(attempts(server))) == 1
        assert "release" not in server.verbs()


def test_waiter_that_gives_up_after_a_refusal_leaves_the_queue(start_server):
    left = [BUSY, BUSY]
    server = start_server(
        lambda call: free_engine(call) if call["do"] != "attempt" else left.pop(0) if left else REFUSED
    )
    with Client(url_of(server)) as client, pytest.raises(Unavailable, match="it is overloaded"):
        client.lock("job", wait=0.4).acquire()
    assert "release" in server.verbs()


def refused_for_long(start_server):
    """A server that refuses, and a client of it, one of whose threads pauses because of that."""
    server, errors = start_server(lambda call: problem("overloaded", done=False, retry_after=600.0)), []
    client = Client(url_of(server))

    def acquire():
        try:
            client.lock("job").acquire()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=acquire, daemon=True)
    thread.start()
    poll(lambda: any(waiter.refused for waiter in probe.waiters(client)), 60, str)
    return server, client, thread, errors


def test_refused_caller_sends_no_heartbeat(start_server):
    """It would be load without use: the claim has no position."""
    server, client, thread, _ = refused_for_long(start_server)
    probe.make_heartbeat_due(client)
    probe.wake_watchdog(client)
    poll(lambda: probe.next_heartbeat(client) is None, 60, str)
    client.close()
    thread.join(60)
    assert server.verbs() == ["attempt"]


def test_closed_client_ends_the_pause_of_a_refused_caller(start_server):
    _, client, thread, errors = refused_for_long(start_server)
    client.close()
    thread.join(60)
    assert len(errors) == 1


def test_run_is_chosen_only_after_call_timeout_of_refusals(start_server):
    server, began = start_server(lambda call: REFUSED), time.monotonic()
    with (
        Client(url_of(server), call_timeout=0.5) as client,
        client.lock("job", wait=60, on_unavailable="run") as lease,
    ):
        assert not lease.guaranteed
        assert time.monotonic() - began >= 0.5
    assert len(attempts(server)) > 1


def test_breaker_does_not_open_for_refusals(start_server):
    server = start_server(answering(*[problem("overloaded", done=False, retry_after=0.01)] * 7))
    with Client(url_of(server), breaker=True) as client, client.lock("job", wait=60) as lease:
        assert lease.guaranteed


# ------------------------------------------------------------------ a real server


def test_more_callers_than_server_admits_are_all_served(start_lock_server):
    """Without retries, callers beyond the limit raise."""
    server, served = start_lock_server("memory://", "--limits-waiters", "2", "--limits-calls", "2"), []

    async def use(client, number):
        async with client.lock("job", wait=120):
            served.append(number)

    async def main():
        async with AsyncClient(url_of(server)) as client, asyncio.TaskGroup() as group:
            for number in range(12):
                group.create_task(use(client, number))

    asyncio.run(main())
    assert sorted(served) == list(range(12))


def test_server_without_room_for_waiters_answers_callers_that_do_not_wait(start_lock_server):
    server = start_lock_server("memory://", "--limits-waiters", "0")
    with Client(url_of(server)) as holder, Client(url_of(server)) as client, holder.lock("job"):
        with pytest.raises(NotAcquired):
            client.lock("job", wait=0).acquire()
        with pytest.raises(Unavailable, match="0 waiters are queued at this server") as error:
            client.lock("job", wait=1.2).acquire()
        assert error.value.retry_in == 1.0


@pytest.mark.extended
def test_waiter_keeps_its_position_while_the_other_server_is_overloaded(start_lock_server, client_at, redis_url):
    """Its server dies, and the other one has no room for it until the first is back. Its heartbeats are answered."""
    first, full = start_lock_server(redis_url), start_lock_server(redis_url, "--limits-waiters", "0")
    elsewhere, namespace = start_lock_server(redis_url), uuid4().hex
    holder = client_at([elsewhere], namespace=namespace)
    clients = [client_at([first, full], namespace=namespace), client_at([elsewhere], namespace=namespace)]

    def use(client):
        client.lock("job", wait=120).acquire().release()

    def queue():
        return [holding.fingerprint for holding in holder.inspect("job") if holding.state != "held"]

    def refusals():
        found = urlopen(f"http://127.0.0.1:{full.port}/metrics", timeout=30).read().decode()
        return sum(float(line.split()[1]) for line in found.splitlines() if 'shed_total{reason="waiters"}' in line)

    lease = holder.lock("job").acquire()
    threads = [threading.Thread(target=use, args=(client,)) for client in clients]
    for number, thread in enumerate(threads, start=1):
        thread.start()
        poll(lambda number=number: len(queue()) == number, 60, str)
    before = queue()
    first.kill()
    poll(lambda: refusals() > 1, 60, str)
    assert queue() == before
    first.start()
    lease.release()
    for thread in threads:
        thread.join(100)
    assert not any(thread.is_alive() for thread in threads)
