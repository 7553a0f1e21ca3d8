"""`on_deadlock="raise"`: one caller of a cycle gives up while it waits, and nothing is searched before."""

from __future__ import annotations

import pickle
import threading

import pytest

from leasehold import Client, ConfigError, Deadlocked, NotAcquired, Unavailable, Unsupported
from leasehold.client import deadlock_search
from leasehold.client.deadlock_search import FIRST_SEARCH, MIN_INTERVAL, DeadlockSearches, WaitSearch
from leasehold.core.deadlocks import Deadlock, deadlocks
from leasehold.errors import AccessDenied, ListingTooLong
from leasehold.model import Busy, Claim
from leasehold.runtime.base import run_sync
from tests.support import probe


def nested(client: Client, first: str, second: str, both: threading.Barrier, errors: list, **options) -> None:
    try:
        with client.lock(first):
            both.wait(30)
            with client.lock(second, on_deadlock="raise", **options):
                pass
    except NotAcquired as error:
        errors.append(error)


def test_one_of_two_threads_gets_the_error_and_the_other_the_lock(url) -> None:
    with Client(url, holder="left") as left, Client(url, holder="right") as right:
        both, errors = threading.Barrier(2), []
        threads = [
            threading.Thread(target=nested, args=(left, "a", "b", both, errors)),
            threading.Thread(target=nested, args=(right, "b", "a", both, errors)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        (error,) = errors
        assert isinstance(error, Deadlocked)
        assert left.inspect() == []
    again = pickle.loads(pickle.dumps(error))
    assert again.names == error.names
    assert set(error.names) == {"a", "b"}
    assert str(again) == str(error)
    for part in ("left [", "right [", "waits for a, held by", "waits for b, held by", "token", "multilock"):
        assert part in str(error)


def test_multilock_that_is_deadlocked_releases_what_it_has(url) -> None:
    with Client(url) as client, Client(url) as other:
        both, errors = threading.Barrier(2), []

        def all_names() -> None:
            try:
                with other.lock("c"):
                    both.wait(30)
                    with other.multilock(["a", "b"], on_deadlock="raise"):
                        pass
            except Deadlocked as error:
                errors.append(error)

        threads = [
            threading.Thread(target=nested, args=(client, "b", "c", both, errors)),
            threading.Thread(target=all_names),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [type(error) for error in errors] == [Deadlocked]
        assert client.inspect() == []


def test_pool_that_is_deadlocked_in_all_queues_raises_and_leaves_them(url, monkeypatch) -> None:
    monkeypatch.setattr(deadlock_search, "GIVE_UP_INTERVAL", 0.0)  # the other thread waits on: this one gives up
    with Client(url) as client, Client(url) as other:
        pool_is_held = threading.Barrier(2)

        def wait_for_own() -> None:
            with other.lock("gpu0"), other.lock("gpu1"):
                pool_is_held.wait(30)
                with other.lock("own", wait=60):
                    pass

        thread = threading.Thread(target=wait_for_own)
        thread.start()
        with client.lock("own"):
            pool_is_held.wait(30)
            with pytest.raises(Deadlocked):
                client.any_of(["gpu0", "gpu1"], on_deadlock="raise", wait=60).acquire()
        thread.join(60)
        assert not thread.is_alive()
        assert client.inspect() == []


def test_engine_without_a_queue_and_bad_value_are_refused_when_built() -> None:
    with Client("redlock://h1:1,h2:1,h3:1") as client, pytest.raises(Unsupported, match="keeps no queue"):
        client.lock("a", on_deadlock="raise")
    with Client("memory://") as client, pytest.raises(ConfigError, match="on_deadlock must be one of wait, raise"):
        client.lock("a", on_deadlock="break")


def test_search_comes_after_a_second_of_waiting_and_not_near_the_deadline(bench) -> None:
    client = bench.client()
    lock = client.lock("a", on_deadlock="raise")
    held = bench.client().lock("a").acquire()
    core, verbs = probe.core(client), []
    call = bench.transport.call
    bench.transport.call = lambda verb, args, deadline: verbs.append(verb) or call(verb, args, deadline)
    claim = probe.new_claim(lock)._replace(queue=True, wait_deadline=bench.clock.at + 10)
    probe.registry(client).add_waiter(claim, core.runtime)
    search = WaitSearch(core, bench.clock.at)
    assert search.seconds_left(bench.clock.at) == FIRST_SEARCH
    run_sync(search.search_if_due(claim))
    assert verbs == []
    bench.clock.at += FIRST_SEARCH
    run_sync(search.search_if_due(claim))
    assert verbs == ["inspect"]
    assert search.seconds_left(bench.clock.at) >= 2 * FIRST_SEARCH
    bench.clock.at += 8.9
    run_sync(search.search_if_due(claim))
    assert verbs == ["inspect"], "the wait ends before a search would"
    waiter = probe.registry(client).waiting[claim.id_hash]
    waiter.woken = True
    run_sync(search.search_if_due(claim._replace(wait_deadline=float("inf"))))
    assert verbs == ["inspect"], "a waiter that is notified attempts at once"
    probe.registry(client).remove_waiter(claim.id_hash)
    held.release()


def test_search_goes_on_until_the_caller_stops_waiting(bench) -> None:
    # Only a cycle that was seen for some time makes the second caller give up, and wake-ups come in between.
    request = probe.acquire_request(bench.client().lock("a", on_deadlock="raise"))
    request.join_queue()
    request.add_waiter(request.claim).woken = True  # so that each wait ends at once
    run_sync(request.after_busy(Busy(position=2)))
    search = request.search
    run_sync(request.after_busy(Busy(position=1)))
    assert request.search is search
    assert request.position == 2


def test_waiter_notified_when_its_search_is_due_attempts_at_once(bench) -> None:
    # Far from the head of the queue, too, where a waiter is otherwise kept without attempts.
    request = probe.acquire_request(bench.client().lock("a", on_deadlock="raise"))
    request.join_queue()
    waiter, waits = request.add_waiter(request.claim), []

    class NotifyingEngine:
        async def wait(self, _claim: Claim, _busy: Busy, seconds: float) -> None:
            waits.append(seconds)
            assert waits == [FIRST_SEARCH]
            bench.clock.at += seconds
            waiter.woken = True

    request.engine = NotifyingEngine()
    request.get_engine = lambda: request.engine
    run_sync(request.after_busy(Busy(position=1000)))
    assert waits


def test_waits_of_one_client_share_their_searches(bench) -> None:
    client = bench.client()
    core, verbs = probe.core(client), []
    call = bench.transport.call
    bench.transport.call = lambda verb, args, deadline: verbs.append(verb) or call(verb, args, deadline)
    searches, queued_since = core.deadlock_searches, bench.clock.at
    for _ in range(50):
        assert run_sync(searches.search(queued_since, float("inf"))) == []
    assert verbs == ["inspect"]
    bench.clock.at += MIN_INTERVAL / 2
    assert run_sync(searches.search(bench.clock.at, float("inf"))) is None, "it was not queued when that search began"
    bench.clock.at += MIN_INTERVAL
    assert run_sync(searches.search(bench.clock.at, float("inf"))) == []
    assert verbs == ["inspect"] * 2


def test_search_that_got_no_answer_is_made_again_soon(bench) -> None:
    client = bench.client()
    core, held = probe.core(client), client.lock("a").acquire()
    claim = probe.new_claim(client.lock("a", on_deadlock="raise"))._replace(queue=True, wait_deadline=float("inf"))
    probe.registry(client).add_waiter(claim, core.runtime)
    search = WaitSearch(core, bench.clock.at)
    bench.clock.at += FIRST_SEARCH
    bench.transport.silent = True
    run_sync(search.search_if_due(claim))
    assert 0 < search.seconds_left(bench.clock.at) <= 1.5 * MIN_INTERVAL
    bench.transport.silent = False
    probe.registry(client).remove_waiter(claim.id_hash)
    held.release()


@pytest.mark.parametrize(
    ("error", "warnings"),
    [
        (Unavailable("silence"), 0),
        (AccessDenied("this key may not list names"), 1),
        (ListingTooLong("more than 46,000 claims are live"), 1),
    ],
)
def test_failed_search_changes_nothing_for_the_wait(bench, caplog, error, warnings) -> None:
    client = bench.client()
    searches: DeadlockSearches = probe.core(client).deadlock_searches
    bench.transport.call = lambda *_: (_ for _ in ()).throw(error)
    for _ in range(3):
        assert run_sync(searches.search(bench.clock.at, float("inf"))) is None
        bench.clock.at += 5
    assert caplog.text.count("cannot search for deadlocks") == warnings


def test_cycle_in_only_one_of_two_inspections_is_not_raised(bench, monkeypatch) -> None:
    client = bench.client()
    results = []
    monkeypatch.setattr(
        "leasehold.client.deadlock_search.deadlocks", lambda holdings: results.pop() if results else deadlocks(holdings)
    )
    results.append([Deadlock(())])  # the second inspection shows none
    assert run_sync(probe.core(client).deadlock_searches.search(0.0, float("inf"))) == []
