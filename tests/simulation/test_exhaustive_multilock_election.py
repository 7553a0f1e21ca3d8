"""Multilocks and elections, with every await cancelled and every message lost: all or nothing, no claim left behind."""

from __future__ import annotations

import pytest

from leasehold import AsyncClient, AsyncLease, LeaseholdError
from leasehold.runtime.simulated import Process
from leasehold.testing.exhaustive import (
    Make,
    Scenario,
    awaits_with_messages,
    every_await_cancelled,
    every_message_lost,
)

TTL = 4.0


class Several(Scenario):
    """Three workers acquire overlapping sets of names, by `with` and by `acquire`."""

    def __init__(self, lose: int | None = None, cancel: tuple[int, int] | None = None) -> None:
        self.inside: dict[str, str] = {}
        self.served = 0
        super().__init__(lose, cancel)

    async def work(self, number: int, client: AsyncClient, process: Process) -> None:
        names = list(["abc", "bca", "cab"][number])
        two_names = client.multilock(names[:2], ttl=TTL, min_hold=0.1)
        all_names = client.multilock(names, ttl=TTL, wait=15)
        short_wait = client.multilock(names, ttl=TTL, wait=0.2)
        for multilock in (two_names, all_names, short_wait):
            try:
                async with multilock as leases:
                    await self._body(process, leases)
            except LeaseholdError:
                continue
            self.served += 1
        try:
            leases = await all_names.acquire()
        except LeaseholdError:
            return
        try:
            await self._body(process, leases)
        finally:
            await leases.release()
        self.served += 1

    async def _body(self, process: Process, leases) -> None:
        for name in leases:
            assert name not in self.inside, "two holders"
            self.inside[name] = process.name
        try:
            await process.sleep(0.3)
            if leases.held:
                assert all(self.inside[name] == process.name for name in leases)
        finally:
            for name in leases:
                del self.inside[name]


class Terms(Scenario):
    """Two candidates serve until they resign and then lead once more; a third client observes."""

    def __init__(self, lose: int | None = None, cancel: tuple[int, int] | None = None) -> None:
        self.calls: list[tuple[str, str, int]] = []
        self.leading: list[str] = []
        self.began: dict[int, float] = {}
        self.missed, self.observed_until = False, 0.0
        self.seen: list[int] = []
        super().__init__(lose, cancel)

    async def work(self, number: int, client: AsyncClient, process: Process) -> None:
        election = client.election("boss", ttl=TTL)
        if number == 2:
            async for term in election.observe(seconds=20):
                self.seen.append(term.token)
                self.missed |= term.missed
            self.observed_until = self.world.time
            return
        await process.sleep(number * 0.05)

        async def start(term: AsyncLease) -> None:
            self.calls.append((process.name, "start", term.token))
            await process.sleep(0.1)
            self.leading.append(process.name)
            self.began[term.token] = self.world.time
            self.calls.append((process.name, "started", term.token))

        async def stop(term: AsyncLease) -> None:
            self.calls.append((process.name, "stop", term.token))
            if term.held:
                assert self.leading == [process.name], "two leaders"
            self.leading.remove(process.name)
            await process.sleep(0.1)  # drains while it still leads, unless the term was lost

        def resign() -> None:
            process.spawn(election.resign(), "resign")

        process.call_later(2.0 + number * 3, resign)
        await election.serve(start, stop)
        try:
            async with election.lead() as term:
                self.calls.append((process.name, "led", term.token))
                await process.sleep(0.2)
        except LeaseholdError:
            return

    def run(self) -> None:
        super().run()
        assert not self.leading
        assert self.seen == sorted(set(self.seen)), "the observer must see each term once and in order"
        if not self.missed:  # else the observer has reported that it missed a term
            in_time = {token for token, at in self.began.items() if at < self.observed_until - 1.0}
            assert in_time <= set(self.seen), "the observer missed a term and did not report it"
        for process in ("p0", "p1"):
            own_calls = [(what, token) for who, what, token in self.calls if who == process and what != "led"]
            while own_calls:
                terms, own_calls = own_calls[:3], own_calls[3:]
                assert len({token for _, token in terms}) == 1
                complete = [what for what, _ in terms] == ["start", "started", "stop"]
                assert complete or ([what for what, _ in terms] == ["start"] and not own_calls), (
                    "only the last start may be interrupted"
                )


def test_scenarios_without_faults_serve_all_workers() -> None:
    several = Several()
    several.run()
    assert several.served >= 9
    terms = Terms()
    terms.run()
    led = [token for _, what, token in terms.calls if what in ("started", "led")]
    assert terms.seen == led
    assert len(led) >= 4


for_both_scenarios = pytest.mark.parametrize("make", [Several, Terms], ids=lambda each: each.__name__.lower())


@for_both_scenarios
def test_scenario_survives_every_cancelled_await(make: Make) -> None:
    assert every_await_cancelled(make) > 50


@for_both_scenarios
def test_scenario_survives_every_lost_message(make: Make) -> None:
    assert every_message_lost(make) > 50


@pytest.mark.extended
@for_both_scenarios
@pytest.mark.parametrize("who", range(2))
@pytest.mark.usefixtures("untraced")
def test_scenario_survives_sampled_cancel_and_loss_pairs(make: Make, who: int) -> None:
    awaits_with_messages(make, who, stride=25)


@pytest.mark.faults
@for_both_scenarios
@pytest.mark.parametrize("who", range(2))
def test_scenario_survives_all_cancel_and_loss_pairs(make: Make, who: int) -> None:
    awaits_with_messages(make, who, stride=1)
