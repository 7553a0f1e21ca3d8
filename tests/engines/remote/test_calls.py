"""Calls of one client: batches, cancellation, deadlines and forks."""

import asyncio
import os
import threading
import time

import pytest

from leasehold import AsyncClient, Client, Unavailable
from leasehold.model import Alive, Gone, Grant
from tests.support import probe
from tests.support.scripted_server import SILENT, free_engine
from tests.support.timing import check_elapsed


def url_of(server):
    return f"http://127.0.0.1:{server.port}"


def test_tasks_that_call_at_once_share_requests(start_server):
    """Each gets its own answer, over a few connections."""
    gate = threading.Event()

    def script(call):
        if call["do"] != "attempt":
            return free_engine(call)
        gate.wait(30)
        return {"grant": [int(call["claim"]["name"]), 60.0, None]}

    server = start_server(script)

    async def run():
        async with AsyncClient(url_of(server), call_timeout=60) as client:
            tasks = [
                asyncio.create_task(client.lock(str(number), ttl=3600).acquire(wait=0)) for number in range(1, 301)
            ]
            while len(server.calls) < 8:
                await asyncio.sleep(0.01)
            gate.set()
            leases = await asyncio.gather(*tasks)
            assert [lease.token for lease in leases] == list(range(1, 301))
            assert max(server.batches) > 1
            assert server.accepted <= 8 + 1, "eight for calls, one for the stream"

    asyncio.run(run())


@pytest.mark.parametrize("wait", [0, 0.5])
def test_grant_without_a_token_is_no_grant(start_server, wait):
    """With token 0 the lease was held, and its renewals were those of a claim in the queue."""

    def script(call):
        return {"grant": [0, 60.0, None]} if call["do"] == "attempt" else free_engine(call)

    server = start_server(script)
    with Client(url_of(server), call_timeout=60) as client, pytest.raises(Unavailable, match="no token"):
        client.lock("job").acquire(wait=wait)
    assert "release" in server.verbs()


def test_threads_have_a_connection_each(start_server):
    barrier = threading.Barrier(9)

    def script(call):
        if call["do"] == "attempt":
            barrier.wait(30)
        return free_engine(call)

    server = start_server(script)
    with Client(url_of(server), call_timeout=60) as client:
        leases = []
        threads = [
            threading.Thread(target=lambda n=n: leases.append(client.lock(f"job-{n}").acquire())) for n in range(8)
        ]
        for thread in threads:
            thread.start()
        barrier.wait(30)  # all eight calls are under way
        for thread in threads:
            thread.join(30)
        assert len(leases) == 8


def test_cancelled_call_is_released_and_disturbs_no_other(start_server, wait_until):
    held_back = threading.Event()

    def script(call):
        if call["do"] == "attempt" and call["claim"]["name"] == "slow":
            held_back.wait(30)
        return free_engine(call)

    server = start_server(script)

    async def run():
        async with AsyncClient(url_of(server), call_timeout=60) as client:
            task = asyncio.create_task(client.lock("slow", ttl=60).acquire(wait=0))
            while not server.calls:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            held_back.set()
            leases = [await client.lock(f"job-{number}", ttl=60).acquire(wait=0) for number in range(20)]
            assert all(lease.held for lease in leases)
            slow = server.calls[0]["claim"]["id"]
            while not any(call["do"] == "release" and call["claim"].get("id") == slow for call in server.calls):
                await asyncio.sleep(0.01)

    asyncio.run(run())


def test_calls_end_at_their_deadline_however_slowly_bytes_arrive(driver, start_server):
    server = start_server(lambda call: SILENT)
    driver.open(server)
    began = time.monotonic()
    with pytest.raises(Unavailable):
        driver.attempt(driver.claim(), seconds=0.5)
    check_elapsed(began, 1.0)


def test_calls_queued_behind_silent_ones_end_at_their_deadline(start_server):
    server = start_server(lambda call: SILENT)

    async def run():
        async with AsyncClient(url_of(server), call_timeout=1.0) as client:
            began = time.monotonic()
            tasks = [client.lock(str(number)).acquire(wait=0) for number in range(50)]
            errors = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(error, Unavailable) for error in errors)
            check_elapsed(began, 2.0)

    asyncio.run(run())


def test_queued_calls_go_on_when_all_connections_break(start_server):
    gate = threading.Event()

    def script(call):
        gate.wait(30)
        return free_engine(call)

    server = start_server(script)

    async def run():
        async with AsyncClient(url_of(server), call_timeout=60) as client:
            tasks = [asyncio.create_task(client.lock(str(n), ttl=60, wait=60).acquire()) for n in range(40)]
            while len(server.calls) < 8:
                await asyncio.sleep(0.01)
            server.hang_up()
            gate.set()
            assert all(lease.held for lease in await asyncio.gather(*tasks))

    asyncio.run(run())


def test_forked_child_has_connections_of_its_own(start_server, run_in_fork):
    server = start_server()
    with Client(url_of(server), ttl=60) as client:
        lease = client.lock("job").acquire()
        parent = probe.client_id(client)

        def in_child():
            assert lease.lost_reason == "forked"
            assert probe.client_id(client) != parent
            client.lock("own").acquire(wait=0).release()
            os._exit(0)

        run_in_fork(in_child)
        lease.verify()
    assert len({head.partition("Leasehold-Client: ")[2].partition("\r")[0] for head in server.heads}) == 2


def test_client_moves_to_another_event_loop(start_server):
    server = start_server()
    client = AsyncClient(url_of(server))

    async def use():
        lease = await client.lock("job").acquire(wait=0)
        await lease.release()

    asyncio.run(use())
    asyncio.run(use())
    asyncio.run(client.close())


def test_renewal_of_the_largest_batch_is_one_request(driver, start_server):
    server = start_server()
    driver.open(server)
    claims = [driver.claim("ä" * 100 + str(number), token=1) for number in range(500)]
    assert driver.renew(*claims) == [Alive(30.0, None)] * 500
    assert server.batches == [1]


def test_waiter_is_granted_after_its_wakeup(start_server, wait_until):
    busy = {"busy": [20.0, 0, 3, None], "heard": True}
    server = start_server(lambda call: busy if call["do"] == "attempt" else free_engine(call))
    with Client(url_of(server)) as client:
        found = []
        thread = threading.Thread(target=lambda: found.append(client.lock("job", ttl=60, wait=60).acquire()))
        thread.start()
        wait_until(lambda: any(call["do"] == "attempt" and call["claim"].get("queue") for call in server.calls))
        server.script = free_engine
        ((id_hash, waiter),) = probe.registry(client).waiting.items()
        server.push({"wakeup": id_hash, "namespace": "", "name": "job"})
        thread.join(30)
        assert found[0].held
        assert {call["claim"]["id"] for call in server.calls if call["do"] == "attempt"} == {waiter.claim.id}
        found[0].release()


def test_renewal_of_more_claims_than_a_request_may_have_is_answered(driver, start_lock_server):
    """A client with 600 waiters sends that many heartbeats. If they were refused, all would lose their positions."""
    driver.open(start_lock_server())
    holder, waiters = driver.claim(), [driver.claim(queue=True) for _ in range(600)]
    assert isinstance(driver.attempt(holder), Grant)
    for waiter in (waiters[0], waiters[-1]):
        driver.attempt(waiter)
    replies = driver.renew(*waiters)
    assert len(replies) == len(waiters)
    assert [type(reply) for reply in (replies[0], replies[1], replies[-1])] == [Alive, Gone, Alive]
    assert not any(isinstance(reply, Unavailable) for reply in replies)
