"""`Election.serve`: when exactly the start and stop callbacks run."""

from __future__ import annotations

import asyncio
import signal
import threading
import time

import pytest

from leasehold import AsyncClient, Client, ConfigError
from tests.support import probe
from tests.support.timing import check_elapsed


class CallbackLog:
    """The calls of the callbacks, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, bool]] = []

    def start(self, term) -> None:
        self.calls.append(("start", term.token, term.held))

    def stop(self, term) -> None:
        self.calls.append(("stop", term.token, term.held))

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _, _ in self.calls]


def start_serving(election, log) -> threading.Thread:
    thread = threading.Thread(target=election.serve, args=(log.start, log.stop), daemon=True)
    thread.start()
    return thread


def join_thread(thread: threading.Thread) -> None:
    thread.join(30)
    assert not thread.is_alive()


def test_resign_runs_stop_callback_while_still_leading(url, wait_until) -> None:
    with Client(url) as client:
        election, log = client.election("boss"), CallbackLog()
        thread = start_serving(election, log)
        wait_until(lambda: log.calls)
        assert election.resign()
        join_thread(thread)
        assert log.kinds == ["start", "stop"]
        assert log.calls[1][2], "the stop callback must run while the term is held"
        assert election.leader() is None
        assert not election.resign()


def test_leader_that_lost_its_term_stops_and_campaigns_again(url, wait_until) -> None:
    with Client(url) as client:
        election, log = client.election("boss"), CallbackLog()
        thread = start_serving(election, log)
        wait_until(lambda: log.calls)
        client.break_lock("boss", token=log.calls[0][1])
        wait_until(lambda: len(log.calls) == 3)
        election.resign()
        join_thread(thread)
        assert log.kinds == ["start", "stop", "start", "stop"]
        first, stopped, second, _ = log.calls
        assert (stopped[1], stopped[2]) == (first[1], False), "the stop callback must get the lost term"
        assert second[1] > first[1]


def test_max_hold_hands_leadership_over(url, wait_until) -> None:
    with Client(url) as first_client, Client(url) as second_client:
        logs = CallbackLog(), CallbackLog()
        elections = [client.election("boss", max_hold=0.3) for client in (first_client, second_client)]
        threads = [start_serving(*pair) for pair in zip(elections, logs, strict=True)]
        wait_until(lambda: all("stop" in log.kinds for log in logs), 30)
        for election, thread in zip(elections, threads, strict=True):
            election.resign()
            join_thread(thread)


def test_waiting_candidate_can_resign(url, wait_until) -> None:
    with Client(url) as client:
        with client.election("boss").lead():
            election, log = client.election("boss"), CallbackLog()
            thread = start_serving(election, log)
            wait_until(lambda: any(holding.state == "waiting" for holding in client.inspect()))
            began = time.monotonic()
            assert not election.resign()
            join_thread(thread)
            check_elapsed(began, 3)
            assert [holding.state for holding in client.inspect()] == ["held"]
        assert log.calls == []


def test_signal_handler_can_resign(url) -> None:
    with Client(url) as client:
        election, log = client.election("boss"), CallbackLog()
        before = signal.signal(signal.SIGALRM, lambda *_: election.resign())
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            election.serve(log.start, log.stop)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert log.kinds == ["start", "stop"]


def test_start_callback_that_raises_ends_term_without_stop(url) -> None:
    with Client(url) as client:
        election, log = client.election("boss"), CallbackLog()

        def fails(term) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            election.serve(fails, log.stop)
        assert log.calls == []
        assert election.leader() is None
        with pytest.raises(ZeroDivisionError):
            election.serve(lambda _: election.resign(), fails)
        assert election.leader() is None
        with pytest.raises(ConfigError, match="two functions"):
            election.serve(None, None)

        async def wrong(term) -> None: ...

        with pytest.raises(ConfigError, match="two functions"):
            election.serve(wrong, wrong)


def test_callbacks_whose_bodies_would_never_run_are_refused(url) -> None:
    """A candidate would lead without having started anything."""

    async def later(term) -> None: ...

    def pages(term):
        yield term

    with Client(url) as client:
        election, log = client.election("boss"), CallbackLog()
        with pytest.raises(ConfigError, match="returned a coroutine"):
            election.serve(lambda term: (election.resign(), later(term))[1], log.stop)
        assert log.kinds == ["stop"]
        with pytest.raises(ConfigError, match="returned a coroutine"):
            election.serve(lambda _: election.resign(), lambda term: later(term))
        assert election.leader() is None
        with pytest.raises(ConfigError, match="generator"):
            election.serve(lambda _: election.resign(), pages)


def test_second_serve_or_campaign_of_election_is_refused(url) -> None:
    with Client(url) as client:
        election = client.election("boss")
        refused: list[BaseException] = []

        def start(term) -> None:
            for again in (election.campaign, lambda: election.serve(start, start)):
                try:
                    again()
                except ConfigError as error:
                    refused.append(error)
            election.resign()

        election.serve(start, lambda _: None)
        assert len(refused) == 2


@pytest.mark.parametrize("clients", [1, 2])
def test_terms_in_one_process_never_overlap(url, wait_until, clients) -> None:
    # The first election loses its term and is slow to stop. The second, in the same process, is elected meanwhile and
    # must wait before it starts.
    opened = [Client(url) for _ in range(clients)]
    calls: list[str] = []
    may_stop = threading.Event()

    def slow_stop(term) -> None:
        calls.append("stop 1")
        assert may_stop.wait(30)
        calls.append("stopped 1")

    first, second = opened[0].election("boss"), opened[-1].election("boss")
    first_thread = threading.Thread(
        target=first.serve, args=(lambda _: calls.append("start 1"), slow_stop), daemon=True
    )
    first_thread.start()
    wait_until(lambda: calls)
    second_thread = threading.Thread(
        target=second.serve, args=(lambda _: calls.append("start 2"), lambda _: calls.append("stop 2")), daemon=True
    )
    second_thread.start()
    wait_until(lambda: any(holding.state == "waiting" for holding in opened[0].inspect()))
    opened[0].break_lock("boss", token=opened[0].inspect()[0].token)
    wait_until(lambda: "stop 1" in calls and probe.term(second) is not None)
    assert probe.term(second).held
    time.sleep(0.1)  # pause: the second could wrongly start meanwhile
    assert calls == ["start 1", "stop 1"]
    first.resign()
    may_stop.set()
    wait_until(lambda: "start 2" in calls)
    assert calls == ["start 1", "stop 1", "stopped 1", "start 2"]
    second.resign()
    join_thread(first_thread)
    join_thread(second_thread)
    for client in opened:
        client.close()


def test_elections_of_private_memory_engines_are_independent(wait_until) -> None:
    # `memory://` is private to its client, so these are two elections. A term renewed after the other was granted is
    # not an earlier term of the same election, and `serve` must not wait for it.
    with Client("memory://") as first_client, Client("memory://") as second_client:
        logs, elections = (
            (CallbackLog(), CallbackLog()),
            [client.election("boss", ttl=1) for client in (first_client, second_client)],
        )
        threads = [start_serving(*pair) for pair in zip(elections, logs, strict=True)]
        wait_until(lambda: all(log.calls for log in logs))
        for election, thread in zip(elections, threads, strict=True):
            election.resign()
            join_thread(thread)


def test_serve_survives_engine_outage(bench, wait_until) -> None:
    client = bench.client()
    election, log = client.election("boss"), CallbackLog()
    bench.transport.silent = True
    calls_before = bench.transport.calls
    thread = start_serving(election, log)
    wait_until(lambda: bench.transport.calls > calls_before)
    bench.transport.silent = False
    wait_until(lambda: bench.clock.advance(0.2) or log.calls)
    election.resign()
    join_thread(thread)
    assert log.kinds == ["start", "stop"]


def test_resign_during_engine_outage_ends_serve(bench, wait_until) -> None:
    election, log = bench.client().election("boss"), CallbackLog()
    bench.transport.silent = True
    calls_before = bench.transport.calls
    thread = start_serving(election, log)
    wait_until(lambda: bench.transport.calls > calls_before)
    assert not election.resign()
    join_thread(thread)
    assert log.calls == []


def test_async_election_campaigns_serves_and_observes(url) -> None:
    async def main() -> None:
        async with AsyncClient(url) as client, AsyncClient(url) as other:
            election, log = client.election("boss", ttl=5), CallbackLog()
            term = await election.campaign()
            assert (await other.election("boss").leader()).token == term.token
            assert await election.resign()
            async with election.lead() as led:
                assert led.token > term.token
            seen = []

            async def observe_terms() -> None:
                async for observed in other.election("boss", ttl=5).observe():
                    seen.append(observed.token)

            observing = asyncio.create_task(observe_terms())

            async def stop(term) -> None:
                await asyncio.sleep(0.01)  # pause: it takes longer than a step of the loop
                log.stop(term)

            async def observed_is(token: int) -> None:
                while token not in seen:
                    await asyncio.sleep(0.01)

            serve = asyncio.create_task(election.serve(log.start, stop))
            while not log.calls:
                await asyncio.sleep(0.01)
            await observed_is(log.calls[0][1])
            serve.cancel()
            with pytest.raises(asyncio.CancelledError):
                await serve
            assert log.kinds == ["start", "stop"]
            assert log.calls[1][2]
            serve = asyncio.create_task(election.serve(log.start, stop))
            while len(log.calls) < 3:
                await asyncio.sleep(0.01)
            await observed_is(log.calls[2][1])
            assert await election.resign()
            await serve
            assert log.kinds == ["start", "stop"] * 2
            observing.cancel()
            assert seen[-2:] == [log.calls[0][1], log.calls[2][1]]

    asyncio.run(main())
