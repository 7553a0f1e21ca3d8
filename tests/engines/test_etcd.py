"""The etcd engine against one real member: both faces, many at once, what it costs, what is told, what is left."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import pickle
import random
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress

import pytest

from leasehold import AsyncClient, Client, ConfigError, LeaseLost, Mismatch, NotAcquired, Unavailable, Unsupported
from leasehold.config import EngineConfig
from leasehold.core.timing import BEAT_EVERY, look_after
from leasehold.engines.etcd import line, wire
from leasehold.engines.etcd.address import address
from leasehold.engines.etcd.calls import Calls, LeaseGone
from leasehold.engines.etcd.leases import POOL
from leasehold.model import Alive, Busy, Gone, Grant
from leasehold.runtime.base import step
from leasehold.testing.etcd_rig import EtcdRig
from leasehold.testing.servers.etcd import Counters
from leasehold.testing.servers.process import free_ports
from leasehold.testing.servers.proxy import Proxy
from leasehold.testing.suite import made


@pytest.fixture
def member():
    return made(EtcdRig).cluster.members[0]


@pytest.fixture
def url(member) -> str:
    """Below a prefix of its own."""
    return f"etcd://127.0.0.1:{member.port}/test-{os.urandom(5).hex()}"


def prefix(url: str) -> str:
    return url.rpartition("/")[2] + "/"


def claims(member, url: str) -> dict[str, int]:
    """The keys of all claims, and the lease of each."""
    return {key: lease for key, lease in member.keys(prefix(url)).items() if "/q/" in key}


def eventually(true, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.01)


# ----------------------------------------------------------------- what it costs


def test_a_pair_is_two_calls_and_leases_are_used_again(url, member) -> None:
    with Client(url) as client:
        with client.lock("warm"):
            pass
        there, counted = member.leases(), Counters(member)
        for number in range(1000):
            with client.lock(f"n{number % 7}"):
                pass
        per_pair = counted.calls() / 1000
        assert per_pair <= 2.01, counted.since()
        assert len(member.leases() - there) <= POOL
        with client.semaphore("s", 3), client.rwlock("r").read():
            pass
    assert member.leases() - there == set(), "close() leaves none behind"
    assert claims(member, url) == {}


@pytest.mark.parametrize("waiters", [2, 50, 200])
def test_a_hand_off_costs_the_same_however_many_wait(url, member, waiters) -> None:
    async def main() -> dict[str, float]:
        async with AsyncClient(url) as one, AsyncClient(url) as two:
            order: list[int] = []
            held = await one.lock("job").acquire()

            async def work(number: int, client: AsyncClient) -> None:
                async with client.lock("job"):
                    order.append(number)

            tasks = []
            for number in range(waiters):
                tasks.append(asyncio.create_task(work(number, (one, two)[number % 2])))
                while len(claims(member, url)) < number + 2:
                    await asyncio.sleep(0.001)
            await quiet(member)
            counted, began = Counters(member), time.monotonic()
            await held.release()
            await asyncio.gather(*tasks)
            assert order == list(range(waiters))
            print(f"among {waiters}: {counted.since()}")
            lasted = time.monotonic() - began
            return {
                "calls": counted.calls() / waiters,
                # On a machine so slow that it takes seconds, waiters are kept in line and look around meanwhile.
                "looks": sum(lasted // look_after(place) for place in range(waiters)) / waiters + lasted // BEAT_EVERY,
                "keep-alives": counted.keep_alives() / waiters,
                "events": counted.events() / waiters,
            }

    per = asyncio.run(main())
    # The first release is counted too, and each client makes one lease, for the first of its grants.
    assert per["calls"] <= 2.1 + 3 / waiters + per["looks"]
    assert per["keep-alives"] <= 1.1
    assert per["events"] <= 1.1 + 3 / waiters  # among two, one event more is a half


async def quiet(member) -> None:
    """Until nobody asks for anything any more."""
    end = time.monotonic() + 30
    while True:
        counted = Counters(member)
        await asyncio.sleep(0.15)
        if not counted.calls():
            return
        assert time.monotonic() < end


def test_old_claims_do_not_make_new_ones_slow(url, member) -> None:
    """Keys of its own for each would: etcd reads through all that ever were, until it compacts."""
    with Client(url) as client:
        for _ in range(300):
            with client.lock("job"):
                pass
        with client.lock("job"):
            (key,) = claims(member, url)
        assert claims(member, url) == {}
        with client.lock("job"):
            (again,) = claims(member, url)
        assert again == key


# ------------------------------------------------------------------ many at once


def test_fifty_threads_on_one_client(url, member) -> None:
    tokens: list[int] = []
    inside: list[int] = []

    def work(client: Client, number: int) -> None:
        for _ in range(3):
            with client.lock("job") as lease:
                inside.append(number)
                assert inside == [number]
                tokens.append(lease.token)
                lease.check()
                inside.remove(number)

    with Client(url) as client:
        threads = [threading.Thread(target=work, args=(client, number)) for number in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert len(tokens) == 150
        assert tokens == sorted(set(tokens))
        assert client.inspect() == []


def test_two_hundred_tasks_on_one_client(url) -> None:
    async def main() -> None:
        tokens: list[int] = []
        inside: list[int] = []
        async with AsyncClient(url) as client:

            async def work(number: int) -> None:
                async with client.lock("job") as lease:
                    inside.append(number)
                    assert inside == [number]
                    tokens.append(lease.token)
                    await asyncio.sleep(0)
                    inside.remove(number)

            await asyncio.gather(*(work(number) for number in range(200)))
            assert len(tokens) == 200
            assert tokens == sorted(set(tokens))
            assert await client.inspect() == []

    asyncio.run(main())


@pytest.mark.parametrize("shape", ["lock", "read", "semaphore"])
def test_cancelled_at_any_moment_nothing_stays(url, member, shape) -> None:
    dice = random.Random(5)
    there = member.leases()

    async def main() -> None:
        async with AsyncClient(url, ttl=5) as client, AsyncClient(url) as other:
            locks = {
                "lock": client.lock("job"),
                "read": client.rwlock("job").read(),
                "semaphore": client.semaphore("job", 2),
            }
            held = None
            for turn in range(100):
                if turn % 10 == 5 and held is None and shape != "semaphore":
                    held = await other.lock("job").acquire()
                if turn % 10 == 9 and held is not None:
                    held = await held.release() and None
                task = asyncio.create_task(locks[shape].acquire())
                await asyncio.sleep(dice.random() * 0.004)
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await (await task).release()
            end = time.monotonic() + 20
            while await client.inspect():
                assert time.monotonic() < end
                await asyncio.sleep(0.01)

    asyncio.run(main())
    assert claims(member, url) == {}
    assert len(member.leases() - there) <= 5  # what was in doubt is revoked; where that was not heard, it lapses


def test_both_faces_stand_in_one_line(url) -> None:
    async def main(blocking: Client) -> None:
        async with AsyncClient(url) as client:
            order: list[int] = []
            held = blocking.lock("job").acquire()

            async def one(number: int) -> None:
                async with client.lock("job"):
                    order.append(number)

            tasks = []
            for number in range(10):
                tasks.append(asyncio.create_task(one(number)))
                while len(await client.inspect("job")) < number + 2:
                    await asyncio.sleep(0.001)
            held.release()
            await asyncio.gather(*tasks)
            assert order == list(range(10))

    with Client(url) as blocking:
        asyncio.run(main(blocking))


def test_a_client_goes_with_its_last_loop(url) -> None:
    client = AsyncClient(url)

    async def use() -> int:
        async with client.lock("a") as lease:
            return lease.token

    tokens = [asyncio.run(use()) for _ in range(3)]
    assert tokens == sorted(set(tokens))
    asyncio.run(client.close())


def test_a_semaphore_is_fair_and_full(url) -> None:
    inside, most, order = [0], [0], []

    async def main() -> None:
        async with AsyncClient(url) as one, AsyncClient(url) as two:
            held = [await one.semaphore("pool", 3).acquire() for _ in range(3)]

            async def work(number: int, client: AsyncClient) -> None:
                async with client.semaphore("pool", 3):
                    order.append(number)
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                    end = time.monotonic() + 20
                    while most[0] < 3 and time.monotonic() < end:  # the others have time to come in
                        await asyncio.sleep(0.001)
                    inside[0] -= 1

            tasks = []
            for number in range(30):
                tasks.append(asyncio.create_task(work(number, (one, two)[number % 2])))
                while len(await two.inspect("pool")) < number + 4:
                    await asyncio.sleep(0.001)
            for lease in held:
                await lease.release()
            await asyncio.wait_for(asyncio.gather(*tasks), 60)

    asyncio.run(main())
    assert most[0] == 3
    assert all(abs(place - number) < 3 for place, number in enumerate(order)), order


# ------------------------------------------------------------------------- told


@pytest.mark.parametrize("how", ["revoke", "delete", "break"])
def test_a_holder_is_told_within_a_second(url, member, how) -> None:
    with Client(url) as client, Client(url) as operator:
        lease = client.lock("job", ttl=60).acquire()
        told = threading.Event()
        lease.on_lost(lambda _: told.set())
        (key,) = claims(member, url)
        began = time.monotonic()
        if how == "break":
            assert operator.break_lock("job", token=lease.token)
        elif how == "delete":
            member.delete(key)
        else:
            member.revoke(claims(member, url)[key])
        assert told.wait(10)
        assert time.monotonic() - began < 1.0
        assert lease.lost_reason == "broken"
        with pytest.raises(LeaseLost):
            lease.check()
        operator.lock("job").acquire(wait=5).release()


def test_a_ttl_is_whole_seconds_and_the_lease_says_so(url) -> None:
    with Client(url) as client:
        assert (client.traits.min_ttl, client.traits.ttl_step) == (2.0, 1.0)
        with client.lock("job", ttl=0.5) as lease:
            assert 1.5 < lease.ttl <= 2.0
            lease.renew()
            assert 1.9 < lease.ttl <= 2.0
            lease.renew(7.2)
            assert 7.5 < lease.ttl <= 8.0
            assert lease.remaining > 7
            lease.renew(3)
            assert 2.9 < lease.ttl <= 3.0
            assert client.inspect()[0].left > 5, "a life once promised is not shortened at the engine"


@pytest.mark.faults
def test_waiters_left_by_a_dead_client_lapse(url, bare) -> None:
    dead, holder, other = bare(url), bare(url), bare(url)
    held = holder.takes(holder.claim())
    assert isinstance(dead.attempt(dead.claim(queue=True)), Busy)
    waiting = other.claim(queue=True)
    assert other.attempt(waiting).place == 1
    holder.release(held)
    assert isinstance(other.attempt(waiting), Busy), "one that stands ahead is alive for all etcd knows"
    began = time.monotonic()
    eventually(lambda: isinstance(other.attempt(waiting), Grant), 25)
    assert time.monotonic() - began < 15 + 3


# ------------------------------------------------------- what ends and what does not


def test_a_delay_is_kept_by_those_in_line_when_a_key_is_taken_away(url, member) -> None:
    """A revoked lease leaves no time to tell its holder: the next in line waits the holder's delay."""
    with Client(url) as client, Client(url) as other:
        lease = client.lock("job", ttl=60, delay=2).acquire()
        (hangs_on,) = claims(member, url).values()
        granted: list[float] = []

        def wait() -> None:
            with other.lock("job"):
                granted.append(time.monotonic())

        waiting = threading.Thread(target=wait)
        waiting.start()
        eventually(lambda: len(other.inspect()) == 2)
        began = time.monotonic()
        member.revoke(hangs_on)
        eventually(lambda: not lease.held, 1.0)
        waiting.join(20)
        assert 2.0 <= granted[0] - began < 4.0


@pytest.mark.faults  # once the waiter was not let in within 20 s, for a reason not yet found
def test_a_clean_release_of_a_delay_wakes_the_next_at_once(url) -> None:
    with Client(url) as client, Client(url) as other:
        lease = client.lock("job", delay=30).acquire()
        granted: list[float] = []

        def wait() -> None:
            with other.lock("job"):
                granted.append(time.monotonic())

        waiting = threading.Thread(target=wait)
        waiting.start()
        eventually(lambda: len(other.inspect()) == 2)
        began = time.monotonic()
        lease.release()
        waiting.join(20)
        assert granted[0] - began < 2


def test_a_cooling_key_does_not_stand_in_its_own_clients_way(url) -> None:
    """Its chair is taken, and the next claim needs another."""
    with Client(url) as client:
        with client.lock("job", min_hold=2):
            pass
        assert [holding.state for holding in client.inspect()] == ["cooling"]
        with pytest.raises(NotAcquired):
            client.lock("job").acquire(wait=0)
        with client.lock("job", wait=10), client.semaphore("other", 2):
            pass


def test_a_lease_written_down_is_renewed_and_released_by_another_process(url, bare) -> None:
    one, other = bare(url), bare(url)
    claim = one.claim(ttl=10.0, delay=1.0)
    held = one.takes(claim)
    renewed = other.renew(held)
    assert isinstance(renewed, Alive)
    assert 9 < renewed.ttl <= 10
    assert isinstance(other.renew(held._replace(token=held.token + 1)), Gone)
    assert not other.release(held._replace(token=held.token + 1))
    assert other.release(held)
    assert not other.release(held)
    assert isinstance(other.renew(held), Gone)


def test_a_stray_ends_a_place_and_never_a_grant(url, bare) -> None:
    one, other = bare(url), bare(url)
    held, waiting = one.takes(one.claim()), one.claim(queue=True)
    assert isinstance(one.attempt(waiting), Busy)
    assert not other.release(held._replace(id="", token=0))
    assert isinstance(one.renew(held), Alive)
    assert not other.release(waiting._replace(id=""))
    assert isinstance(one.renew(waiting), Gone)


def test_a_repeated_attempt_after_a_lapse_is_a_new_grant(url, member, bare) -> None:
    seat = bare(url)
    claim = seat.claim()
    first = seat.takes(claim)
    (key,) = claims(member, url)
    member.delete(key)
    second = seat.takes(claim)
    assert second.token > first.token
    assert isinstance(seat.renew(first), Gone)
    assert isinstance(seat.renew(second), Alive), "the older token's end is not its own"
    assert seat.release(claim)


def test_keys_of_strangers_below_the_prefix_harm_nobody(url, member) -> None:
    with Client(url) as client:
        with client.lock("a"):
            pass
        for key in ("q/x", "q/:a", "q/:d/l/x", "q/:c/l/x/y/z", "q/%zz:b/l/x/1", "q/:a/s-1/s/1"):
            member.put(f"{prefix(url)}lh1/{key}", "\xff{")
        assert client.inspect() == []
        member.put(f"{prefix(url)}lh1/q/:z/l/x/1", "[" * 100_000)
        with pytest.raises(NotAcquired) as busy:
            client.lock("z").acquire(wait=0)
        assert busy.value.holder == "?"
        with pytest.raises(NotAcquired) as busy:
            client.lock("d").acquire(wait=0)
        assert busy.value.holder is None
        with client.lock("b", wait=0):
            pass


def test_rebase_lets_tokens_rise_and_keeps_what_is_held(url) -> None:
    with Client(url) as client, Client(url) as other:
        before = client.lock("kept").acquire()
        with client.lock("a") as lease:
            old = lease.token
        floor = old + 10**12
        assert step(other._rebase(floor)) == floor
        with client.lock("a") as lease:
            assert lease.token > floor, "also of a client that knew the old base"
        before.renew()
        assert client.inspect("kept")[0].token == before.token, "a token once given stays"
        assert other.break_lock("kept", token=before.token)
        assert step(other._rebase(0)) > floor
        with pytest.raises(ConfigError):
            step(other._rebase(2**53 - 1))
    with Client("memory://") as client, pytest.raises(Unsupported):
        step(client._rebase(0))


def test_a_base_that_is_no_number_is_a_config_error(url, member) -> None:
    member.put(f"{prefix(url)}lh1/base", "x")
    with Client(url) as client:
        with pytest.raises(ConfigError, match="rebase"):
            client.lock("a").acquire()
        step(client._rebase(0))
    with Client(url) as client, client.lock("a"):
        pass


# ------------------------------------------------- what is sent twice, or late


@pytest.mark.parametrize("queue", [True, False])
@pytest.mark.parametrize("shape", [{}, {"mode": "shared"}, {"kind": "semaphore", "limit": 2}])
def test_an_attempt_carried_out_twice_is_one_grant(url, member, bare, monkeypatch, queue, shape) -> None:
    """The answer of the first try is lost on the way, and it is repeated before anybody knows."""
    seat = bare(url)
    step(seat.engine.ping(seat.by()))
    true, lost = Calls._once, []

    async def once(self, method, body, deadline):
        answer = await true(self, method, body, deadline)
        if method is wire.TXN and not lost:
            lost.append(answer)
            return None, []
        return answer

    monkeypatch.setattr(Calls, "_once", once)
    claim = seat.claim(queue=queue, **shape)
    grant = seat.attempt(claim)
    assert isinstance(grant, Grant), "it stood in its own way"
    assert len(claims(member, url)) == 1
    assert seat.attempt(claim).token == grant.token
    assert seat.release(claim)
    assert claims(member, url) == {}


def test_an_attempt_that_lands_after_its_release_is_refused(url, member, bare, monkeypatch) -> None:
    """A lease in the pool would carry it, and the next claim on that lease would keep it alive for ever."""
    seat = bare(url)
    seat.release(seat.takes(seat.claim()))
    true, late = Calls.ask, []

    async def ask(self, method, request, deadline, doubts=None):
        if method is wire.TXN and not late:
            late.append(request)
            raise Unavailable("silence")
        return await true(self, method, request, deadline, doubts)

    monkeypatch.setattr(Calls, "ask", ask)
    claim = seat.claim(queue=True)
    with pytest.raises(Unavailable):
        seat.attempt(claim)
    seat.release(claim)
    with pytest.raises(LeaseGone):
        step(seat.engine._calls.ask(wire.TXN, late[0], seat.by()))
    assert claims(member, url) == {}
    held = seat.takes(seat.claim())
    assert len(claims(member, url)) == 1
    seat.release(held)


def test_a_release_that_lands_late_hits_nobody(url, member, bare) -> None:
    """Chairs are used again: the key it names may be another claim's by then."""
    seat = bare(url)
    first = seat.claim()
    seat.takes(first)
    party = seat.engine._shared.parties[first.mark]
    late = line.leave(party.spot, party.created)
    seat.release(first)
    second = seat.takes(seat.claim())
    assert seat.engine._shared.parties[second.mark].spot.key == party.spot.key
    assert not step(seat.engine._calls.ask(wire.TXN, late, seat.by())).succeeded
    assert isinstance(seat.renew(second), Alive)


def test_another_kind_is_refused_before_it_stands_in_line(url, member, bare) -> None:
    holder, other, behind = bare(url), bare(url), bare(url)
    held, waiting = holder.takes(holder.claim()), behind.claim(queue=True)
    for _ in range(2):
        with pytest.raises(Mismatch):
            other.attempt(other.claim(queue=True, kind="semaphore", limit=2))
        assert isinstance(behind.attempt(waiting), Busy)
    assert len(claims(member, url)) == 2
    holder.release(held)
    assert isinstance(behind.attempt(waiting), Grant)


def test_a_turn_after_a_rebase_has_a_token_above_it(url, bare) -> None:
    """The base that counts is the one of the grant, not the one of the day it joined the line."""
    holder, other = bare(url), bare(url)
    held, waiting = holder.takes(holder.claim()), other.claim(queue=True)
    assert isinstance(other.attempt(waiting), Busy)
    floor = held.token + 10**9
    step(holder.engine.rebase(floor, holder.by()))
    holder.release(held)
    assert other.attempt(waiting).token > floor


def test_giving_up_behind_ones_own_cooling_key_leaves_it_there(url) -> None:
    with Client(url) as client:
        with client.lock("job", min_hold=5):
            pass
        with pytest.raises(NotAcquired):
            client.lock("job").acquire(wait=0.2)
        eventually(lambda: len(client.inspect()) == 1)
        assert [holding.state for holding in client.inspect()] == ["cooling"]


def test_a_waiter_hangs_on_a_lease_of_its_own_kind(url, member, bare) -> None:
    """Not on one of its ttl: that may be shorter than two heart-beats, or an hour long (E7)."""
    holder, other = bare(url), bare(url)
    held, waiting = holder.takes(holder.claim(ttl=60.0)), other.claim(ttl=60.0, queue=True)
    other.attempt(waiting)
    lives = {int(member.ask("lease/timetolive", ID=lease)["grantedTTL"]) for lease in claims(member, url).values()}
    assert lives == {60, 15}
    holder.release(held)
    assert isinstance(other.attempt(waiting), Grant)
    (lease,) = claims(member, url).values()
    assert member.ask("lease/timetolive", ID=lease)["grantedTTL"] == "60"


# ------------------------------------------------------------------------- forks


def in_fork(body) -> None:
    """Run `body` in a forked child; what it raises fails the test."""
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            body()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    end = time.monotonic() + 60
    while not (done := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > end:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            raise AssertionError("the child hangs")
        time.sleep(0.005)
    assert done[1] == 0


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_child_and_parent_go_on_by_themselves(url, member) -> None:
    """With a watch open, a waiter in line, and threads in the midst of calls; again and again, also from the child."""
    with Client(url) as client:
        held = client.lock("held", ttl=20).acquire()
        stop = threading.Event()
        rounds: list[int] = []

        def busy() -> None:
            while not stop.is_set():
                with client.lock("busy") as lease:
                    rounds.append(lease.token)

        threads = [threading.Thread(target=busy) for _ in range(4)]
        for thread in threads:
            thread.start()

        def child() -> None:
            assert held.lost_reason == "forked"
            assert not held.release()
            assert client.lock("held").try_acquire() is None, "the parent still holds it"
            with client.lock("child", wait=20) as lease:
                lease.renew()
                assert {holding.name for holding in client.inspect("child")} == {"child"}
            in_fork(grandchild)
            client.close()

        def grandchild() -> None:
            with client.lock("grandchild", wait=20), client.lock("busy", wait=20):
                pass

        for _ in range(15):
            in_fork(child)
            held.verify()
            with client.lock("parent", wait=20):
                pass
        stop.set()
        for thread in threads:
            thread.join(30)
        assert rounds == sorted(set(rounds))
        assert held.held
        assert held.release()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_under_asyncio(url) -> None:
    async def main() -> None:
        async with AsyncClient(url) as client, client.lock("job") as lease:

            def child() -> None:
                assert lease.lost_reason == "forked"
                asyncio.run(use())

            async def use() -> None:
                assert await client.lock("job").try_acquire() is None
                async with client.lock("other"):
                    pass

            # A child that leaves its parent's loop behind, as a server's worker does.
            thread = threading.Thread(target=in_fork, args=(child,))
            thread.start()
            while thread.is_alive():
                await asyncio.sleep(0.01)
            await lease.renew()

    asyncio.run(main())


def test_a_process_that_never_closes_ends_at_once(url) -> None:
    code = f"""
import leasehold, threading
client = leasehold.Client({url!r})
held = client.lock("job").acquire()
threading.Thread(target=lambda: client.lock("job").acquire(), daemon=True).start()
import time
while len(client.inspect()) < 2: time.sleep(0.01)
"""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - began < 30


def test_a_client_that_nobody_has_any_more_leaves_no_thread(url) -> None:
    def names() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("leasehold")]

    before = len(names())
    client = Client(url)
    lease = client.lock("job").acquire()
    time.sleep(0.2)
    assert len(names()) > before
    lease.release()
    del client, lease
    eventually(lambda: gc.collect() is not None and len(names()) <= before)


# ------------------------------------------------------------- URLs and secrets


@pytest.mark.parametrize(
    ("text", "hosts", "root"),
    [
        ("etcd://", ["localhost:2379"], "lh1/"),
        ("etcd://a", ["a:2379"], "lh1/"),
        ("etcd://a:1,b:2,c/", ["a:1", "b:2", "c:2379"], "lh1/"),
        ("etcd://u:p@a/my/app/", ["a:2379"], "my/app/lh1/"),
        ("etcd://u%40x:p%3A%2F%3F@[::1]:9,[fe80::1]/x%20y", ["[::1]:9", "[fe80::1]:2379"], "x y/lh1/"),
    ],
)
def test_urls(text, hosts, root) -> None:
    found = address(EngineConfig.parse(text, 5.0))
    assert ([str(each) for each in found.endpoints], found.root) == (hosts, root)
    if "%3A" in text:
        assert (found.user, found.password) == ("u@x", "p:/?")


@pytest.mark.parametrize(
    "text",
    [
        "etcd://a:0",
        "etcd://a:99999",
        "etcd://a:x",
        "etcd://a,,b",
        "etcd://a,a",
        "etcd://:2379",
        "etcd://[::1",
        "etcd://user@a",
        "etcd://a?timeout=3",
        "etcd://a?ca=/etc/passwd",
        "etcds://a?ca=/no/such/file",
        "etcds://a?ca=/etc/hostname",
        "etcds://a?key=/etc/hostname",
        "etcd://a/" + "x" * 256,
        "etcd://a/%00",
    ],
)
def test_bad_urls_are_refused_when_the_client_is_made(text) -> None:
    with pytest.raises(ConfigError):
        Client(text)


def test_nobody_there_is_unavailable_at_once() -> None:
    (port,) = free_ports(1)
    with Client(f"etcd://user:hunter2@127.0.0.1:{port}", call_timeout=5) as client:
        began = time.monotonic()
        with pytest.raises(Unavailable) as caught:
            client.lock("a").acquire()
        assert time.monotonic() - began < 2
        assert "hunter2" not in str(caught.value) + repr(client) + repr(caught.value.__cause__)
        assert str(port) in str(caught.value)


def test_no_secret_reaches_etcd_the_logs_or_errors(url, member, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    heard: list[bytes] = []
    proxy = Proxy(member.port)
    proxy.watch = lambda outward, data: heard.append(data)
    with Client(url.replace(f":{member.port}", f":{proxy.port}")) as client:
        lease = client.lock("job").acquire()
        lease.renew()
        secret, shown = lease._claim.id, f"{client.inspect()} {lease!r} {client!r}"
        assert not any(secret.encode() in data for data in heard)
        assert secret not in shown + caplog.text
        assert lease._claim.mark not in shown
        pickle.loads(pickle.dumps(client)).close()
        lease.release()
    proxy.close()


# -------------------------------------------------------------- the way to etcd


def test_every_answer_may_be_lost_and_nobody_is_granted_twice(url, member) -> None:
    """The requests arrive, and nothing comes back: what was asked for is given up, whatever became of it."""
    proxy = Proxy(member.port)
    there = member.leases()
    with Client(url) as other, Client(url.replace(f":{member.port}", f":{proxy.port}"), call_timeout=0.3) as client:
        for wait in (0, 5, 0, 5):
            with client.lock("warm"):
                pass
            proxy.lose_answers()
            with pytest.raises(Unavailable):
                client.lock("job").acquire(wait=wait)
            proxy.mend()
            with other.lock("job", wait=20) as lease:
                assert [holding.token for holding in other.inspect("job")] == [lease.token]
        held = client.lock("job", ttl=20).acquire(wait=10)
        proxy.lose_answers()
        assert not held.release(), "not confirmed"
        proxy.mend()
        other.lock("job").acquire(wait=20).release()
        eventually(lambda: other.inspect() == [])
    proxy.close()
    eventually(lambda: member.leases() - there == set(), 40)


def test_a_waiter_outlasts_a_lost_stream(url, member) -> None:
    proxy = Proxy(member.port)
    with Client(url) as holder, Client(url.replace(f":{member.port}", f":{proxy.port}")) as client:
        lease = holder.lock("job").acquire()
        granted: list[float] = []

        def wait() -> None:
            with client.lock("job"):
                granted.append(time.monotonic())

        waiting = threading.Thread(target=wait)
        waiting.start()
        eventually(lambda: len(holder.inspect()) == 2)
        for _ in range(3):
            proxy.reset()
            time.sleep(0.05)
        began = time.monotonic()
        lease.release()
        waiting.join(30)
        assert granted[0] - began < 3, "sooner than it would have looked by itself"
    proxy.close()


def test_a_waiter_outlasts_a_compaction(url, member) -> None:
    """The watch begins again where it began, and that is history no more: look for yourself."""
    proxy = Proxy(member.port)
    with Client(url) as holder, Client(url.replace(f":{member.port}", f":{proxy.port}")) as client:
        lease = holder.lock("job").acquire()
        granted: list[float] = []

        def wait() -> None:
            with client.lock("job"):
                granted.append(time.monotonic())

        waiting = threading.Thread(target=wait)
        waiting.start()
        eventually(lambda: len(holder.inspect()) == 2)
        mine = client.lock("mine").acquire()
        time.sleep(0.3)  # its own key is watched by now
        proxy.cut()
        lease.release()
        for number in range(5):
            member.put(f"{prefix(url)}noise", str(number))
        member.compact()
        began = time.monotonic()
        proxy.mend()
        waiting.join(30)
        assert granted[0] - began < 4
        assert holder.break_lock("mine", token=mine.token)
        eventually(lambda: not mine.held, 3)
    proxy.close()
