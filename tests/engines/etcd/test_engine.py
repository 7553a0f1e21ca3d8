"""What the etcd engine grants and what ends a claim: on one real member, without faults."""

from __future__ import annotations

import asyncio
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from leasehold import AsyncClient, Client, LeaseLost, Mismatch, NotAcquired, Unavailable
from leasehold.engines.etcd.leases import WAITER_LEASE_TTL, LeasePool
from leasehold.engines.etcd.queue import Entry, EntryValue
from leasehold.engines.etcd.release import ReleaseAction, choose_action
from leasehold.model import Alive, Busy, Claim, Gone, Grant, Holder
from leasehold.runtime.base import run_sync


@pytest.mark.parametrize("shape", ["lock", "read", "semaphore", "delayed"])
def test_cancelled_acquire_leaves_no_claim_and_no_lease(url, member, shape, claims) -> None:
    rng = random.Random(5)
    leases_before = member.leases()

    async def main() -> None:
        async with AsyncClient(url, ttl=5) as client, AsyncClient(url) as other:
            locks = {
                "lock": client.lock("job"),
                "read": client.rwlock("job").read(),
                "semaphore": client.semaphore("job", 2),
                "delayed": client.lock("job", delay=20),
            }
            held = None
            for round_number in range(100):
                if round_number % 10 == 5 and held is None and shape != "semaphore":
                    held = await other.lock("job").acquire()
                if round_number % 10 == 9 and held is not None:
                    held = await held.release() and None
                task = asyncio.create_task(locks[shape].acquire())
                await asyncio.sleep(rng.random() * 0.004)  # pause: cancelled at any moment
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await (await task).release()
            end = time.monotonic() + 20
            while await client.inspect():
                assert time.monotonic() < end
                await asyncio.sleep(0.01)

    asyncio.run(main())
    assert claims() == {}
    # Of a hundred. Leases are revoked when a claim is given up; where that is not confirmed, because the client was
    # closed before, they expire. On a busy machine that happens more often.
    assert len(member.leases() - leases_before) <= 25


def test_semaphore_serves_waiters_in_order_and_fills_all_permits(url) -> None:
    inside, max_inside, finished = [0], [0], [0]

    async def main() -> None:
        async with AsyncClient(url) as one, AsyncClient(url) as two:
            held = [await one.semaphore("pool", 3).acquire() for _ in range(3)]

            async def work(number: int, client: AsyncClient) -> None:
                async with client.semaphore("pool", 3):
                    assert number < finished[0] + 3, "a waiter further back was served first"
                    inside[0] += 1
                    max_inside[0] = max(max_inside[0], inside[0])
                    end = time.monotonic() + 20
                    while max_inside[0] < 3 and time.monotonic() < end:  # gives the others time to acquire
                        await asyncio.sleep(0.001)
                    inside[0], finished[0] = inside[0] - 1, finished[0] + 1

            tasks = []
            for number in range(30):
                tasks.append(asyncio.create_task(work(number, (one, two)[number % 2])))
                while len(await two.inspect("pool")) < number + 4:
                    await asyncio.sleep(0.001)
            for lease in held:
                await lease.release()
            await asyncio.wait_for(asyncio.gather(*tasks), 60)

    asyncio.run(main())
    assert max_inside[0] == 3


def test_client_can_queue_behind_its_own_cooling_key(url) -> None:
    """The cooling key is in use, so the next claim needs another key."""
    with Client(url) as client:
        with client.lock("job", min_hold=2):
            pass
        assert [holding.state for holding in client.inspect()] == ["cooling"]
        with pytest.raises(NotAcquired):
            client.lock("job").acquire(wait=0)
        with client.lock("job", wait=10), client.semaphore("other", 2):
            pass


def test_cooling_key_stays_when_its_client_gives_up_waiting(url, eventually) -> None:
    with Client(url) as client:
        with client.lock("job", min_hold=5):
            pass
        with pytest.raises(NotAcquired):
            client.lock("job").acquire(wait=0.2)
        eventually(lambda: len(client.inspect()) == 1)
        assert [holding.state for holding in client.inspect()] == ["cooling"]


def test_saved_lease_is_renewed_and_released_by_another_process(url, make_driver) -> None:
    one, other = make_driver(url), make_driver(url)
    claim = one.claim(ttl=10.0, delay=1.0)
    held = one.acquire(claim)
    renewed = other.renew(held)
    assert isinstance(renewed, Alive)
    assert 9 < renewed.ttl <= 10
    assert isinstance(other.renew(held._replace(token=held.token + 1)), Gone)
    assert not other.release(held._replace(token=held.token + 1))
    assert other.release(held)
    assert not other.release(held)
    assert isinstance(other.renew(held), Gone)


def test_release_without_id_ends_a_queued_claim_but_never_a_grant(url, make_driver) -> None:
    one, other = make_driver(url), make_driver(url)
    held, waiting = one.acquire(one.claim()), one.claim(queue=True)
    assert isinstance(one.attempt(waiting), Busy)
    assert not other.release(held._replace(id="", token=0))
    assert isinstance(one.renew(held), Alive)
    assert not other.release(waiting._replace(id=""))
    assert isinstance(one.renew(waiting), Gone)


def test_repeated_attempt_after_key_deletion_is_a_new_grant(url, member, make_driver, claims) -> None:
    driver = make_driver(url)
    claim = driver.claim()
    first = driver.acquire(claim)
    (key,) = claims()
    member.delete(key)
    second = driver.acquire(claim)
    assert second.token > first.token
    assert isinstance(driver.renew(first), Gone)
    assert isinstance(driver.renew(second), Alive), "the end of the first grant ended the second"
    assert driver.release(claim)


def test_foreign_keys_below_the_prefix_are_harmless(url, member, prefix) -> None:
    with Client(url) as client:
        with client.lock("a"):
            pass
        for key in ("q/x", "q/:a", "q/:d/l/x", "q/:c/l/x/y/z", "q/%zz:b/l/x/1", "q/:a/s-1/s/1"):
            member.put(f"{prefix}lh1/{key}", "\xff{")
        assert client.inspect() == []
        member.put(f"{prefix}lh1/q/:z/l/x/1", "[" * 100_000)
        with pytest.raises(NotAcquired) as busy:
            client.lock("z").acquire(wait=0)
        assert busy.value.holder == "?"
        with pytest.raises(NotAcquired) as busy:
            client.lock("d").acquire(wait=0)
        assert busy.value.holder is None
        with client.lock("b", wait=0):
            pass


@pytest.mark.parametrize("edit", ['"delay":Infinity', '"delay":NaN', '"min_hold":-1e999', f'"token_base":{10**400}'])
def test_key_with_numbers_that_no_client_writes_counts_as_unknown(url, member, prefix, edit) -> None:
    """A waiter waited for an infinite delay, and `leasehold ls` could show no claim at all."""
    value = '{"id_hash":"ab","state":"held","token_base":5,"delay":0,"holder":["l","h",1,"p"],"written_at":1,%s}'
    member.put(f"{prefix}lh1/q/:job/l/x/ab0", value % edit)
    member.put(f"{prefix}lh1/q/:old/l/x/ab0", value % '"written_at":-1e300')
    with Client(url) as client:
        job, old = client.inspect()
        assert (job.holder.label, job.left, job.token) == ("?", 0, job.token and job.token % 2**53)
        assert (old.holder.label, old.age) == ("l", 100 * 365 * 86_400)
        with pytest.raises(NotAcquired):
            client.lock("job").acquire(wait=0)


def test_mismatched_kind_is_refused_before_it_is_queued(url, member, make_driver, claims) -> None:
    holder, other, behind = make_driver(url), make_driver(url), make_driver(url)
    held, waiting = holder.acquire(holder.claim()), behind.claim(queue=True)
    for _ in range(2):
        with pytest.raises(Mismatch):
            other.attempt(other.claim(queue=True, kind="semaphore", limit=2))
        assert isinstance(behind.attempt(waiting), Busy)
    assert len(claims()) == 2
    holder.release(held)
    assert isinstance(behind.attempt(waiting), Grant)


def test_waiter_uses_a_queue_lease_and_not_one_of_its_ttl(url, member, make_driver, claims) -> None:
    """A ttl may be shorter than two heartbeats or an hour long, so it must not decide when a waiter expires (E7)."""
    holder, other = make_driver(url), make_driver(url)
    held, waiting = holder.acquire(holder.claim(ttl=60.0)), other.claim(ttl=60.0, queue=True)
    other.attempt(waiting)
    assert {member.granted_ttl(lease) for lease in claims().values()} == {60, WAITER_LEASE_TTL}
    holder.release(held)
    assert isinstance(other.attempt(waiting), Grant)
    (lease,) = claims().values()
    assert member.granted_ttl(lease) == 60


@pytest.mark.parametrize("delay", [0.0, 2.0])
def test_release_of_a_broken_lease_says_that_it_was_over(url, make_driver, eventually, delay) -> None:
    """Even if another client has held the name meanwhile, and released it."""
    one, other = make_driver(url), make_driver(url)
    claim = other.claim()
    held = one.acquire(one.claim(delay=delay))
    assert run_sync(other.engine.break_("", "job", held.token, other.deadline()))
    eventually(lambda: isinstance(other.attempt(claim), Grant))
    successor = other.acquire(claim)
    assert not one.release(held)
    assert isinstance(other.renew(successor), Alive), "the late release ended the successor"
    assert other.release(successor)
    assert not other.release(successor)
    assert one.release(one.acquire(one.claim(delay=delay)))


@pytest.mark.parametrize("end", ["release", "break"])
def test_renewal_with_longer_ttl_restores_no_ended_grant(url, end, monkeypatch) -> None:
    with Client(url) as client, Client(url) as operator:
        lease = client.lock("job", ttl=5, **{"release": {"min_hold": 20}, "break": {"delay": 20}}[end]).acquire()
        end_grant = {"release": lease.release, "break": lambda: operator.break_lock("job", token=lease.token)}[end]
        get_lease, ended = LeasePool.get, []

        async def get_lease_after_the_end(pool, rpc, seconds, deadline):
            if not ended:  # the renewal has read the key, and attaches it to this lease next
                ended.append(True)
                with ThreadPoolExecutor() as other_thread:
                    ended.append(other_thread.submit(end_grant).result(60))
            return await get_lease(pool, rpc, seconds, deadline)

        monkeypatch.setattr(LeasePool, "get", get_lease_after_the_end)
        with pytest.raises((LeaseLost, Unavailable)):
            lease.renew(ttl=600)
        assert ended == [True, True]
        (left_over,) = operator.inspect("job")
        assert left_over.state == "cooling"
        assert left_over.left <= 21
        lease.release()


@pytest.mark.parametrize(
    ("state", "granted", "changes", "min_hold_left", "action"),
    [
        ("cooling", True, {}, 9.0, ReleaseAction.NOTHING),
        ("held", True, {"token": 8}, 0.0, ReleaseAction.NOTHING),
        ("held", True, {"id": ""}, 0.0, ReleaseAction.NOTHING),
        ("waiting", False, {"id": ""}, 0.0, ReleaseAction.DELETE),
        ("held", True, {"delay": 5.0}, 9.0, ReleaseAction.COOL),
        ("held", False, {"delay": 5.0}, 9.0, ReleaseAction.RECORD),
        ("held", True, {"delay": 5.0}, 0.0, ReleaseAction.RECORD),
        ("released", True, {"delay": 5.0}, 0.0, ReleaseAction.DELETE),
        ("waiting", False, {"delay": 5.0}, 0.0, ReleaseAction.DELETE),
        ("held", True, {"token": 7}, 0.0, ReleaseAction.DELETE),
    ],
)
def test_release_action_follows_the_table(state, granted, changes, min_hold_left, action) -> None:
    value = EntryValue("hash", state, 3, changes.get("delay", 0.0), Holder("x"), 0.0)
    entry = Entry(b"key", "", "job", "lock", 1, "exclusive", 4, 1, value)
    claim = Claim("", "job", "id", "hash", Holder("x"), 30.0)._replace(**changes)
    assert choose_action(entry, claim, granted, min_hold_left) is action


def test_claims_with_the_same_tag_have_keys_of_their_own(url, make_driver, claims) -> None:
    """Claims whose id hashes begin with the same two digits: each is found by its whole id hash, at any client."""
    drivers = [make_driver(url) for _ in range(3)]
    waiters = [drivers[0].claim(queue=True) for _ in range(4)]
    waiters = [waiter._replace(id_hash="ab" + waiter.id_hash[2:]) for waiter in waiters]
    tokens = {}
    for turn in range(4):
        for number, waiter in enumerate(waiters):
            reply = drivers[(number + turn) % 3].attempt(waiter)
            assert reply.token == tokens.setdefault(0, reply.token) if not number else reply.position == number - 1
    assert len(claims()) == 4
    assert drivers[1].release(waiters[0])
    assert isinstance(drivers[2].attempt(waiters[1]), Grant), "its key has another number, and the first one is free"
    assert isinstance(drivers[0].attempt(waiters[1]), Grant)
    assert len(claims()) == 3
    for waiter in waiters:
        drivers[2].release(waiter)
    assert claims() == {}


def test_lease_of_a_claim_that_moved_is_not_ended_by_its_first_client(url, make_driver, member) -> None:
    """The second client attaches the key to a lease of its own. What the first one does with its lease, and the second
    one with that of the first, ends no other claim."""
    first, second = make_driver(url), make_driver(url)
    moving = first.acquire(first.claim("moving"))
    assert second.acquire(moving._replace(token=0)) == moving
    assert second.release(moving)
    assert not first.release(moving), "now its lease carries the next claim of the first client"
    kept = first.acquire(first.claim("kept"))
    assert isinstance(second.attempt(moving._replace(token=0)), Grant)
    assert second.release(moving._replace(token=0))
    assert isinstance(first.renew(kept), Alive)
    assert first.release(kept)


@pytest.mark.parametrize("moves", [1, 2, 3])
def test_client_that_a_waiter_has_left_cannot_decline_for_it(url, make_driver, moves) -> None:
    """Otherwise a waiter that moved to another server would join the queue again, at its end, when its turn comes."""
    holder, clients, other = make_driver(url), [make_driver(url), make_driver(url)], make_driver(url)
    held = holder.acquire(holder.claim(ttl=60.0))
    waiter, last = clients[0].claim(queue=True), other.claim(queue=True)
    assert isinstance(clients[0].attempt(waiter), Busy)
    assert isinstance(other.attempt(last), Busy)
    for move in range(1, moves + 1):
        assert clients[move % 2].attempt(waiter).position == 0
    serving, left = clients[moves % 2], clients[(moves + 1) % 2]
    assert holder.release(held)
    assert not run_sync(left.engine.decline(waiter, left.deadline()))
    assert isinstance(other.attempt(last), Busy)
    assert isinstance(serving.attempt(waiter), Grant)
    assert serving.release(waiter)
    assert isinstance(other.attempt(last), Grant)


@pytest.mark.parametrize("readers", [1, 3])
def test_second_waiter_of_a_client_is_told_its_position_at_once(url, make_driver, readers) -> None:
    """It joins the queue as a waiter, with one transaction. A lock server is one client for all its callers."""
    driver = make_driver(url)
    for _ in range(readers):
        driver.acquire(driver.claim(mode="shared"))
    writer, reader, last = driver.claim(queue=True), driver.claim(queue=True, mode="shared"), driver.claim(queue=True)
    assert [driver.attempt(waiter).position for waiter in (writer, reader, last)] == [0, 1, 2]
