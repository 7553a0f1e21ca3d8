"""The ZooKeeper engine on one real server: both faces, crowds, wake-ups, forks, and what is left behind."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError

from leasehold import AsyncClient, Client, ConfigError, LeaseLost, Mismatch, NotAcquired, Unavailable, Unsupported
from leasehold.core import timing
from leasehold.engines.zookeeper import engine as engine_module
from leasehold.engines.zookeeper import line as line_module
from leasehold.engines.zookeeper.engine import ZookeeperEngine
from leasehold.engines.zookeeper.line import Visit
from leasehold.engines.zookeeper.session import Session
from leasehold.model import Claim, Grant, Holder
from leasehold.runtime.base import step
from leasehold.runtime.threads import Threads
from leasehold.testing.rig import RUNTIMES
from leasehold.testing.servers.zookeeper import Zookeeper
from leasehold.testing.suite import all_cases, made, run_case
from leasehold.testing.trial import Trial
from leasehold.testing.zookeeper_rig import ZookeeperRig, alone


@pytest.fixture(scope="module")
def server() -> Zookeeper:
    made(ZookeeperRig)
    return alone()


@pytest.fixture
def root() -> str:
    return f"/test-{os.urandom(6).hex()}"


@pytest.fixture
def url(server, root) -> str:
    return f"zookeeper://127.0.0.1:{server.port}{root}"


@pytest.fixture
def raw(server):
    """A plain kazoo client, for looking at what is there."""
    client = KazooClient(f"127.0.0.1:{server.port}")
    client.start()
    yield client
    client.stop()
    client.close()


def tree(raw: KazooClient, path: str) -> dict[str, bytes]:
    """Every node below a path, and what it says; one may go while it is looked at."""
    try:
        found = {path: raw.get(path)[0]}
        for child in raw.get_children(path):
            found |= tree(raw, f"{path}/{child}")
    except NoNodeError:
        return {}
    return found


def engine_of(client) -> ZookeeperEngine:
    engine = client._desk._engine
    assert isinstance(engine, ZookeeperEngine)
    return engine


def waiting(client: Client, name: str) -> int:
    return sum(one.state == "waiting" for one in client.inspect(name, exact=True))


# ------------------------------------------------------------------- use


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


def test_an_idle_name_is_swept_by_the_server(url, root, raw, until) -> None:
    with Client(url) as client:
        for number in range(20):
            with client.lock(f"n{number}"), client.semaphore(f"s{number}", 3):
                pass
        until(lambda: set(tree(raw, root)) == {root, f"{root}/lh1"})
        with client.lock("n1"):  # the line it remembers is gone
            pass


def test_the_secret_is_nowhere_in_the_tree(url, root, raw) -> None:
    with Client(url, holder="web-3") as client, client.lock("a", purpose="why") as lease:
        found = tree(raw, root)
        assert len(found) == 4
        text = repr(found)
        assert "web-3" in text
        assert lease._claim.mark in text
        assert lease._claim.id not in text


def test_another_kind_of_a_live_name_is_refused(url) -> None:
    with Client(url) as one, Client(url) as two:
        with one.lock("a"), pytest.raises(Mismatch):
            two.semaphore("a", 2).acquire(wait=0)
        with two.semaphore("a", 2), pytest.raises(Mismatch):
            one.semaphore("a", 3).acquire(wait=1)
        with one.lock("a", wait=0):
            pass


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


@pytest.mark.parametrize("step_of_clock", [10.0, -10.0, 1e6])
def test_a_step_of_the_leaders_clock_ends_no_live_holder(url, monkeypatch, until, step_of_clock) -> None:
    """As the waiter sees it: what the leader writes for it is stamped by another clock than the holder's renewals."""
    true = Visit._wrote

    def wrote(self, mine, sent, life, waits, stat) -> None:
        true(self, mine, sent, life, waits, stat._replace(mtime=stat.mtime + int(step_of_clock * 1000)))

    with Client(url) as one, Client(url) as two:
        lease = one.lock("a", ttl=0.6).acquire()
        monkeypatch.setattr(Visit, "_wrote", wrote)
        with pytest.raises(NotAcquired):
            two.lock("a", wait=2.5).acquire()
        lease.check()
        assert lease.release()


def test_a_waiters_fast_clock_ends_no_live_holder(url) -> None:
    """It takes both: here the waiter's own clock runs a hundred times too fast, and the leader's does not."""
    began = time.monotonic()
    hasty = Threads(lambda: 100 * (time.monotonic() - began))
    with Client(url) as one, Client(url, runtime=hasty, call_timeout=500) as two:
        lease = one.lock("a", ttl=2.0).acquire()
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            assert two.lock("a", ttl=200).try_acquire() is None
        lease.check()
        assert lease.release()


# ---------------------------------------------------------------- crowds


def test_forty_threads_on_one_client(url) -> None:
    inside, most, tokens, failed = [0], [0], [], []

    def work(client: Client) -> None:
        try:
            for _ in range(5):
                with client.semaphore("s", 3):
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                    inside[0] -= 1
                with client.lock("l", ttl=60) as lease:
                    tokens.append(lease.token)
                    assert tokens[-1] == lease.token
        except BaseException as error:
            failed.append(error)

    with Client(url, call_timeout=30) as client:
        threads = [threading.Thread(target=work, args=(client,)) for _ in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert failed == []
        assert tokens == sorted(set(tokens))
        assert len(tokens) == 200
        assert most[0] <= 3
        assert client.inspect() == []
        assert not engine_of(client)._session.mine
        assert not engine_of(client)._session.watches


def test_two_hundred_tasks_on_one_client(url) -> None:
    tokens: list[int] = []

    async def main() -> None:
        async with AsyncClient(url, call_timeout=30) as client:
            inside = 0

            async def work() -> None:
                nonlocal inside
                async with client.lock("a", ttl=60) as lease:
                    inside += 1
                    assert inside == 1
                    tokens.append(lease.token)
                    await asyncio.sleep(0)
                    inside -= 1

            await asyncio.gather(*(work() for _ in range(200)))
            assert await client.inspect() == []

    asyncio.run(main())
    assert tokens == sorted(set(tokens))
    assert len(tokens) == 200


def test_both_faces_stand_in_one_line(url) -> None:
    async def asyncio_side(blocking: Client) -> None:
        async with AsyncClient(url) as client:
            order = []
            held = blocking.lock("a", ttl=60).acquire()

            async def one(number: int) -> None:
                async with client.lock("a"):
                    order.append(number)

            tasks = []
            for number in range(10):
                tasks.append(asyncio.create_task(one(number)))
                while len(await client.inspect("a")) < number + 2:
                    await asyncio.sleep(0.001)
            held.release()
            await asyncio.gather(*tasks)
            assert order == list(range(10))

    with Client(url) as blocking:
        asyncio.run(asyncio_side(blocking))


def test_cancelled_a_hundred_times_nothing_stays_in_line(url, root, raw) -> None:
    chance = random.Random(5)

    async def main() -> None:
        async with AsyncClient(url) as client, AsyncClient(url) as other:
            held = await other.lock("a", ttl=60).acquire()
            for number in range(100):
                name = chance.choice(["a", "b"])
                task = asyncio.create_task(client.lock(name).acquire())
                for _ in range(number % 8):
                    await asyncio.sleep(0)
                if number >= 8:
                    await asyncio.sleep(chance.random() * 0.006)
                task.cancel()
                try:
                    lease = await task
                except asyncio.CancelledError:
                    continue
                await lease.release()
            end = time.monotonic() + 20
            while [seen for seen in await client.inspect() if seen.token != held.token]:
                assert time.monotonic() < end
                await asyncio.sleep(0.01)
            assert not engine_of(client)._session.mine
            assert not engine_of(client)._session.watches
            await held.release()

    asyncio.run(main())
    assert [path for path in tree(raw, root) if path.count("/") > 3] == []


def test_a_client_goes_with_its_last_loop(url) -> None:
    client = AsyncClient(url)

    async def use() -> int:
        async with client.lock("a") as lease:
            return lease.token

    tokens = [asyncio.run(use()) for _ in range(3)]
    assert tokens == sorted(set(tokens))
    asyncio.run(client.close())
    assert engine_of(client)._session._keeper is None


# --------------------------------------------------------------- wake-ups


def test_a_hand_off_is_pushed(url, until) -> None:
    with Client(url) as one, Client(url) as two:
        lease = one.lock("a", ttl=60).acquire()
        taken = []
        thread = threading.Thread(target=lambda: taken.append((two.lock("a").acquire(), time.monotonic())))
        thread.start()
        until(lambda: waiting(one, "a") == 1)
        released = time.monotonic()
        lease.release()
        thread.join(30)
        assert taken[0][1] - released < 2  # looking unprompted would take up to five
        taken[0][0].release()


def test_a_break_is_found_out_at_the_next_renewal(url, until) -> None:
    with Client(f"{url}?session=3") as client, Client(url) as operator:
        lease = client.lock("a", ttl=600).acquire()
        assert not operator.break_lock("a", token=lease.token + 1)
        assert operator.break_lock("a", token=lease.token)
        assert lease.wait_lost(10)
        assert lease.lost_reason == "broken"
        with pytest.raises(LeaseLost):
            lease.check()


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


# ------------------------------------------------------------------- fork


def test_a_forked_child_has_a_session_of_its_own(url, in_fork) -> None:
    with Client(url) as client:
        lease = client.lock("a", ttl=60).acquire()
        keeper = engine_of(client)._session._keeper
        fd = keeper._connection._socket.fileno()
        mine = keeper.owner

        def child() -> None:
            assert os.readlink(f"/proc/self/fd/{fd}") == os.devnull, "the parent's socket is not ours to speak by"
            assert not lease.held
            assert client.lock("a").try_acquire() is None
            with client.lock("b"):
                assert {seen.name for seen in client.inspect()} == {"a", "b"}
            assert engine_of(client)._session.owner != mine
            client.close()

        for _ in range(3):
            in_fork(child)
        assert engine_of(client)._session.owner == mine
        lease.renew()
        assert lease.release()


def test_a_child_that_exits_says_no_goodbye(url, in_fork) -> None:
    with Client(url) as client, client.lock("a", ttl=60) as lease:
        in_fork(lambda: None)
        in_fork(gc.collect)
        lease.renew()


# ---------------------------------------------------------------- tokens


def test_rebase_lifts_every_token_and_never_lowers_one(url) -> None:
    with Client(url) as client:
        engine = engine_of(client)

        def rebase(floor: int) -> int:
            return step(engine.rebase(floor, client._desk.deadline()))

        with client.lock("a") as lease:
            first = lease.token
        floor = 10**15
        assert rebase(floor) == floor
        with client.lock("a", ttl=60) as lease:
            assert lease.token > floor > first
            assert client.inspect()[0].token == lease.token
            assert rebase(floor // 2) == floor
            lifted = rebase(2 * floor)
            lease.renew()  # a grant keeps the token it was given
            assert not client.break_lock("a", token=lease.token + 1)
        with client.lock("a") as lease:
            assert lifted < lease.token < 2**53
        for bad in (-1, 2**53 - 2**40, 2**53):
            with pytest.raises(ConfigError):
                rebase(bad)


def test_rebase_without_a_token_begins_far_above_the_clock(url) -> None:
    with Client(url) as client:
        base = step(client._rebase(0))
        assert base > time.time() * 1e6 + 2000 * 2**32
        with client.lock("a") as lease:
            assert base < lease.token < 2**53
        assert step(client._rebase(5)) == base


def test_tokens_that_would_not_stay_below_two_to_the_53_are_not_given(url, root, raw, until) -> None:
    with Client(url) as client:
        client.lock("a").acquire().release()
        raw.create(f"{root}/lh1/base", str(2**53 - 1).encode())
        with pytest.raises(ConfigError, match="too high"):
            client.lock("a").acquire(wait=0)
        until(lambda: not client.inspect())


def test_the_command_that_rebases(url) -> None:
    command = [sys.executable, "-m", "leasehold", "-u", url, "-o", "json", "rebase", "--above", str(10**15)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"base": 10**15}
    with Client(url) as client, client.lock("a") as lease:
        assert lease.token > 10**15


def test_rebase_by_many_at_once(url) -> None:
    with Client(url) as client:
        engine = engine_of(client)
        threads = [
            threading.Thread(target=lambda n=n: step(engine.rebase(10**12 + n, client._desk.deadline())))
            for n in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert step(engine.rebase(1, client._desk.deadline())) == 10**12 + 7


# ----------------------------------------------------------- out of numbers


def test_a_line_out_of_numbers_drains_and_begins_anew(url, root, raw, monkeypatch) -> None:
    monkeypatch.setattr(line_module, "LAST", 40)
    tokens, failed, over = [], [], threading.Event()

    def work() -> None:
        try:
            with Client(url, call_timeout=30) as client:
                while not over.is_set():
                    with client.lock("a", ttl=60, wait=60) as lease:
                        tokens.append(lease.token)
                        assert tokens[-1] == lease.token
                        if len(tokens) >= 150:
                            over.set()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert failed == []
    assert over.is_set()
    assert tokens == sorted(set(tokens))
    assert raw.get_children(f"{root}/lh1/:a") == []


# ------------------------------------------------------------------ counts


@pytest.fixture
def flights(monkeypatch) -> list[int]:
    """Every flight of this process from now on, by how many requests it carried."""
    found: list[int] = []
    true = Session.flight

    async def counted(self, runtime, requests, deadline, **more):
        found.append(len(requests))
        return await true(self, runtime, requests, deadline, **more)

    monkeypatch.setattr(Session, "flight", counted)
    return found


def test_a_pair_costs_four_requests_in_two_flights(url, root, raw, server, flights) -> None:
    with Client(url) as client:
        lock = client.lock("a", wait=0)
        with lock:
            raw.create(f"{root}/lh1/:a/kept")  # the server of these tests sweeps an empty line at any moment
        flights.clear()
        before = server.counted("packets_received")
        for _ in range(200):
            with lock:
                pass
        spent = server.counted("packets_received") - before
        assert flights == [3, 1] * 200
        print(f"a pair: {spent / 200:.2f} requests by the server's count, heart-beats among them")
        assert spent / 200 < 4.1


def test_a_hand_off_costs_the_same_for_two_waiters_and_for_two_hundred(
    url, server, flights, monkeypatch, until
) -> None:
    """Heart-beats apart: nobody looks unprompted while this is measured."""
    monkeypatch.setattr(engine_module, "BEAT_EVERY", 60.0)
    monkeypatch.setattr(timing, "BEAT_EVERY", 60.0)

    async def measure(size: int) -> tuple[float, float]:
        async with AsyncClient(url) as holder, AsyncClient(url) as one, AsyncClient(url) as two:
            held = await holder.lock(f"of-{size}", ttl=60).acquire()

            async def wait(client: AsyncClient) -> None:
                async with client.lock(f"of-{size}", ttl=60):
                    pass

            tasks = [asyncio.create_task(wait((one, two)[n % 2])) for n in range(size)]
            end = time.monotonic() + 60
            while sum(len(each.mine) for each in sessions(one, two)) < size or not all(map(settled, (one, two))):
                assert time.monotonic() < end
                await asyncio.sleep(0.01)
            flights.clear()
            before = server.counted("packets_received")
            await held.release()
            await asyncio.gather(*tasks)
            return (server.counted("packets_received") - before) / size, len(flights) / size

    def sessions(*clients):
        return [engine_of(client)._session for client in clients]

    def settled(client) -> bool:
        """All its claims say that they wait, and nothing is on its way: the last watch is set."""
        session = engine_of(client)._session
        quiet = not session._keeper._queue and not session._keeper._pending
        return quiet and all(mine.waits for mine in session.mine.values())

    for size in (2, 20, 200):
        requests, count = asyncio.run(measure(size))
        print(f"{size} waiters: {requests:.2f} requests and {count:.2f} flights for each hand-off")
        assert count <= 4
        assert requests <= 4 + 12 / size + 0.5, "flat, but for the heart-beats and the first release"


# ----------------------------------------------------------------- answers


def test_a_claim_recovered_by_its_mark_is_the_same_grant(url) -> None:
    """The answer to its create never came: the node is found again, not made again (E2)."""
    with Client(url) as client:
        engine, deadline = engine_of(client), client._desk.deadline()
        claim = Claim("", "a", "secret", os.urandom(16).hex(), Holder("h"), 60.0)
        first = step(engine.attempt(claim, deadline))
        assert isinstance(first, Grant)
        mine = engine._session.mine.pop(claim.mark)
        engine._session.doubts.add(claim.mark)
        again = step(engine.attempt(claim, deadline))
        assert isinstance(again, Grant)
        assert again.token == first.token
        assert engine._session.mine[claim.mark].path == mine.path
        engine._session.mine.clear()
        assert step(engine.release(claim, deadline)), "also by its mark alone"
        assert client.inspect() == []


def gives_up(lock) -> None:
    with pytest.raises(NotAcquired):
        lock.acquire()


def test_a_stray_gives_up_a_place_and_never_a_grant(url, until) -> None:
    with Client(url) as one, Client(url) as two:
        lease = one.lock("a", ttl=60).acquire()
        stray = lease._claim._replace(id="")
        deadline = one._desk.deadline()
        assert not step(engine_of(one).release(stray, deadline))
        lease.renew()
        thread = threading.Thread(target=gives_up, args=(two.lock("a", wait=2),))
        thread.start()
        until(lambda: waiting(one, "a") == 1)
        mark = next(iter(engine_of(two)._session.mine))
        step(engine_of(one).release(stray._replace(mark=mark), deadline))
        assert two.inspect("a")[0].state == "held"
        thread.join(10)
        lease.release()


def test_foreign_nodes_in_a_line_are_not_seen(url, root, raw) -> None:
    with Client(url) as client:
        with client.lock("a"):
            for junk in ("junk", "l-x-zz-0000000000", "l-x--"):
                raw.create(f"{root}/lh1/:a/{junk}")
            raw.create(f"{root}/lh1/junk")
        with client.lock("a", wait=0):
            assert [seen.name for seen in client.inspect()] == ["a"]


def test_what_the_server_sends_instead_of_an_answer(monkeypatch) -> None:
    """Not ZooKeeper at all: Unavailable by the deadline, never an exception of the driver (E9)."""
    import socket

    for said in (b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0\0\0\4junk", b"\xff" * 64, b"\0\0\0\x24" + b"\0" * 36):
        with socket.create_server(("127.0.0.1", 0)) as door:

            def answer(door=door, said=said) -> None:
                while True:
                    try:
                        near, _ = door.accept()
                        with near:
                            near.recv(1000)
                            near.sendall(said)
                    except OSError:
                        return

            thread = threading.Thread(target=answer, daemon=True)
            thread.start()
            client = Client(f"zookeeper://127.0.0.1:{door.getsockname()[1]}", call_timeout=0.3)
            began = time.monotonic()
            with pytest.raises(Unavailable):
                client.lock("a").acquire(wait=0)
            assert time.monotonic() - began < 0.8 + 2
            client.close()
            door.shutdown(socket.SHUT_RDWR)
        thread.join(5)
