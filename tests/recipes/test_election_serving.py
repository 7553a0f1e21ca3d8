"""Serving as a leader: callbacks whose contract is exact."""

from __future__ import annotations

import asyncio
import signal
import threading
import time

import pytest

from leasehold import AsyncClient, Client, ConfigError


class Journal:
    """What the callbacks did, in order."""

    def __init__(self) -> None:
        self.said: list[tuple[str, int, bool]] = []

    def start(self, term) -> None:
        self.said.append(("start", term.token, term.held))

    def stop(self, term) -> None:
        self.said.append(("stop", term.token, term.held))

    @property
    def words(self) -> list[str]:
        return [word for word, _, _ in self.said]


def serving(election, journal) -> threading.Thread:
    thread = threading.Thread(target=election.serve, args=(journal.start, journal.stop), daemon=True)
    thread.start()
    return thread


def ended(thread: threading.Thread) -> None:
    thread.join(30)
    assert not thread.is_alive()


def test_it_drains_before_it_resigns(url, wait_until) -> None:
    with Client(url) as client:
        election, journal = client.election("boss"), Journal()
        thread = serving(election, journal)
        wait_until(lambda: journal.said)
        assert election.resign()
        ended(thread)
        assert journal.words == ["start", "stop"]
        assert journal.said[1][2], "stop ran while it still led"
        assert election.leader() is None
        assert not election.resign()


def test_after_a_loss_it_stops_and_campaigns_again(url, wait_until) -> None:
    with Client(url) as client:
        election, journal = client.election("boss"), Journal()
        thread = serving(election, journal)
        wait_until(lambda: journal.said)
        client.break_lock("boss", token=journal.said[0][1])
        wait_until(lambda: len(journal.said) == 3)
        election.resign()
        ended(thread)
        assert journal.words == ["start", "stop", "start", "stop"]
        first, stopped, second, _ = journal.said
        assert (stopped[1], stopped[2]) == (first[1], False), "it was told as lost"
        assert second[1] > first[1]


def test_a_longest_term_hands_over(url, wait_until) -> None:
    with Client(url) as one, Client(url) as two:
        journals = Journal(), Journal()
        elections = [client.election("boss", max_hold=0.3) for client in (one, two)]
        threads = [serving(*pair) for pair in zip(elections, journals, strict=True)]
        wait_until(lambda: all("stop" in journal.words for journal in journals), 30)
        for election, thread in zip(elections, threads, strict=True):
            election.resign()
            ended(thread)


def test_whoever_stands_in_line_may_resign_too(url, wait_until) -> None:
    with Client(url) as client:
        with client.election("boss").lead():
            election, journal = client.election("boss"), Journal()
            thread = serving(election, journal)
            wait_until(lambda: any(one.state == "waiting" for one in client.inspect()))
            began = time.monotonic()
            assert not election.resign()
            ended(thread)
            assert time.monotonic() - began < 3
            assert [one.state for one in client.inspect()] == ["held"]
        assert journal.said == []


def test_resigning_may_be_left_to_a_signal_handler(url) -> None:
    with Client(url) as client:
        election, journal = client.election("boss"), Journal()
        before = signal.signal(signal.SIGALRM, lambda *_: election.resign())
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            election.serve(journal.start, journal.stop)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert journal.words == ["start", "stop"]


def test_a_start_that_raises_is_no_start(url) -> None:
    with Client(url) as client:
        election, journal = client.election("boss"), Journal()

        def fails(term) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            election.serve(fails, journal.stop)
        assert journal.said == []
        assert election.leader() is None
        with pytest.raises(ZeroDivisionError):
            election.serve(lambda _: election.resign(), fails)
        assert election.leader() is None
        with pytest.raises(ConfigError, match="two functions"):
            election.serve(None, None)

        async def wrong(term) -> None: ...

        with pytest.raises(ConfigError, match="two functions"):
            election.serve(wrong, wrong)


def test_serving_twice_is_refused(url) -> None:
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
def test_two_leaders_of_one_process_never_overlap(url, wait_until, clients) -> None:
    # The first is lost and slow to stop; the second, in the same process, leads meanwhile and has to wait to start.
    opened = [Client(url) for _ in range(clients)]
    said: list[str] = []
    may_stop = threading.Event()

    def slow_stop(term) -> None:
        said.append("stop 1")
        assert may_stop.wait(30)
        said.append("stopped 1")

    first, second = opened[0].election("boss"), opened[-1].election("boss")
    one = threading.Thread(target=first.serve, args=(lambda _: said.append("start 1"), slow_stop), daemon=True)
    one.start()
    wait_until(lambda: said)
    two = threading.Thread(
        target=second.serve, args=(lambda _: said.append("start 2"), lambda _: said.append("stop 2")), daemon=True
    )
    two.start()
    wait_until(lambda: any(held.state == "waiting" for held in opened[0].inspect()))
    opened[0].break_lock("boss", token=opened[0].inspect()[0].token)
    wait_until(lambda: "stop 1" in said and second._term is not None)
    assert second._term.held
    time.sleep(0.1)  # as long as it likes
    assert said == ["start 1", "stop 1"]
    first.resign()
    may_stop.set()
    wait_until(lambda: "start 2" in said)
    assert said == ["start 1", "stop 1", "stopped 1", "start 2"]
    second.resign()
    ended(one)
    ended(two)
    for client in opened:
        client.close()


def test_elections_of_two_engines_behind_one_url_do_not_wait_for_each_other(wait_until) -> None:
    # `memory://` is private to its client: one term has been renewed since the other began, so it is no earlier one.
    with Client("memory://") as one, Client("memory://") as two:
        journals, elections = (Journal(), Journal()), [client.election("boss", ttl=1) for client in (one, two)]
        threads = [serving(*pair) for pair in zip(elections, journals, strict=True)]
        wait_until(lambda: all(journal.said for journal in journals))
        for election, thread in zip(elections, threads, strict=True):
            election.resign()
            ended(thread)


def test_an_engine_that_does_not_answer_ends_no_service(bench, wait_until) -> None:
    client = bench.client()
    election, journal = client.election("boss"), Journal()
    bench.link.silent = True
    calls = bench.link.calls
    thread = serving(election, journal)
    wait_until(lambda: bench.link.calls > calls)
    bench.link.silent = False
    wait_until(lambda: bench.clock.turn(0.2) or journal.said)
    election.resign()
    ended(thread)
    assert journal.words == ["start", "stop"]


def test_resigned_while_the_engine_is_silent(bench, wait_until) -> None:
    election, journal = bench.client().election("boss"), Journal()
    bench.link.silent = True
    calls = bench.link.calls
    thread = serving(election, journal)
    wait_until(lambda: bench.link.calls > calls)
    assert not election.resign()
    ended(thread)
    assert journal.said == []


def test_async_elections(url) -> None:
    async def main() -> None:
        async with AsyncClient(url) as client, AsyncClient(url) as other:
            election, journal = client.election("boss", ttl=5), Journal()
            term = await election.campaign()
            assert (await other.election("boss").leader()).token == term.token
            assert await election.resign()
            async with election.lead() as led:
                assert led.token > term.token
            seen = []

            async def look() -> None:
                async for each in other.election("boss", ttl=5).observe(seconds=3):
                    seen.append(each.token)

            looking = asyncio.create_task(look())

            async def stop(term) -> None:
                await asyncio.sleep(0.01)
                journal.stop(term)

            serve = asyncio.create_task(election.serve(journal.start, stop))
            while not journal.said:
                await asyncio.sleep(0.01)
            serve.cancel()
            with pytest.raises(asyncio.CancelledError):
                await serve
            assert journal.words == ["start", "stop"]
            assert journal.said[1][2]
            serve = asyncio.create_task(election.serve(journal.start, stop))
            while len(journal.said) < 3:
                await asyncio.sleep(0.01)
            assert await election.resign()
            await serve
            assert journal.words == ["start", "stop"] * 2
            await looking
            assert seen[-2:] == [journal.said[0][1], journal.said[2][1]]

    asyncio.run(main())
