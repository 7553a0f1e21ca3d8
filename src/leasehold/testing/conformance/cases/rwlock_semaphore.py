"""E1 beyond the plain lock: readers together with readers, permits with slots, many names at once."""

from __future__ import annotations

from functools import partial
from typing import Final

import pytest

from leasehold.core.timing import WAITER_TTL
from leasehold.errors import Mismatch, Unavailable
from leasehold.model import Busy, Grant
from leasehold.testing.conformance.case import case
from leasehold.testing.conformance.context import CaseContext
from leasehold.testing.conformance.engine_driver import EngineDriver

_LONG: Final = 30.0


@case(needs={"shared"}, shows=("E1",))
async def shared_grants_coexist_but_exclude_exclusive_ones(t: CaseContext) -> None:
    first, second, writer = t.driver(), t.driver(), t.driver()
    first_claim, second_claim = (
        await first.acquire(first.claim(mode="shared")),
        await second.acquire(second.claim(mode="shared")),
    )
    await writer.busy(writer.claim())
    await first.release(first_claim)
    await writer.busy(writer.claim())
    await second.release(second_claim)
    held = await writer.acquire(writer.claim())
    await first.busy(first.claim(mode="shared"))
    await writer.release(held)
    await first.granted(first.claim(mode="shared"))


@case(needs={"shared", "fair"}, shows=("E1", "E4"))
async def queued_writer_is_not_starved_by_readers(t: CaseContext) -> None:
    reader, writer, late = t.driver(), t.driver(), t.driver()
    reading, wants = await reader.acquire(reader.claim(mode="shared")), writer.waiter()
    await writer.busy(wants)
    await late.busy(late.claim(mode="shared"))
    behind = late.waiter(mode="shared")
    assert (await late.busy(behind)).position == 1
    await reader.release(reading)
    assert isinstance(await late.attempt(behind), Busy), "the writer is ahead in the queue"
    await writer.granted(wants)
    await writer.release(wants)
    await late.granted(behind)


@case(needs={"shared", "fair"}, shows=("E1",))
async def queued_readers_are_granted_together(t: CaseContext) -> None:
    writer, drivers = t.driver(), [t.driver() for _ in range(3)]
    held = await writer.acquire(writer.claim())
    readers = [driver.waiter(mode="shared") for driver in drivers]
    for driver, reader in zip(drivers, readers, strict=True):
        await driver.busy(reader)
    await writer.release(held)
    for driver, reader in zip(drivers, readers, strict=True):
        await driver.granted(reader)
    await writer.busy(writer.claim())


@case(needs={"semaphore"}, shows=("E1",))
async def semaphore_grants_up_to_its_limit(t: CaseContext) -> None:
    traits = await t.traits()
    limit = min(3, traits.max_limit or 3)
    drivers = [t.driver() for _ in range(limit)]
    permits = [await driver.acquire(driver.claim(kind="semaphore", limit=limit)) for driver in drivers]
    other = t.driver()
    waiter = other.waiter(kind="semaphore", limit=limit)
    await other.busy(waiter)
    await other.busy(other.claim(kind="semaphore", limit=limit))
    assert len([holding for holding in await other.inspect() if holding.state == "held"]) == limit
    await drivers[1].release(permits[1])
    await other.granted(waiter)
    await drivers[1].busy(drivers[1].claim(kind="semaphore", limit=limit))


@case(needs={"semaphore", "slots"}, shows=("E1", "E2"))
async def semaphore_slot_has_one_holder_at_a_time(t: CaseContext) -> None:
    limit = min(3, (await t.traits()).max_limit or 3)
    drivers = [t.driver() for _ in range(limit)]
    claims = [driver.claim(kind="semaphore", limit=limit) for driver in drivers]
    slots = [(await driver.granted(claim)).slot for driver, claim in zip(drivers, claims, strict=True)]
    assert sorted(slot for slot in slots if slot is not None) == list(range(limit))
    assert (await drivers[0].granted(claims[0])).slot == slots[0], "a repeated attempt keeps its slot"
    await drivers[1].release(claims[1])
    assert (await drivers[1].granted(drivers[1].claim(kind="semaphore", limit=limit))).slot == slots[1]


@case(needs={"resizable"}, shows=("E1",))
async def smaller_limit_ends_no_grant_and_grants_none_until_drained(t: CaseContext) -> None:
    holder, other = t.driver(), t.driver()
    permits = [await holder.acquire(holder.claim(kind="semaphore", limit=3, ttl=_LONG)) for _ in range(3)]
    waiter = other.waiter(kind="semaphore", limit=3, ttl=_LONG)
    await other.busy(waiter)
    await holder.set_limit(2)
    assert {holding.limit for holding in await other.inspect()} == {2}
    for permit in permits:
        await holder.alive(permit)
    await holder.release(permits[0])
    await other.busy(waiter)
    await holder.release(permits[1])
    await other.granted(waiter)
    await other.busy(other.claim(kind="semaphore", limit=3))
    await holder.set_limit(None)


@case(needs={"resizable"}, shows=("E1",))
async def smaller_limit_withdraws_reservations(t: CaseContext) -> None:
    holder, other = t.driver(), t.driver()
    permits = [await holder.acquire(holder.claim(kind="semaphore", limit=2, ttl=_LONG)) for _ in range(2)]
    waiter = other.waiter(kind="semaphore", limit=2, ttl=_LONG)
    await other.busy(waiter)
    await holder.release(permits[0])  # reserves a permit for the waiter
    await holder.set_limit(1)
    assert isinstance(await other.attempt(waiter), Busy), "a reservation from before would be a second grant"
    await holder.alive(permits[1])
    await holder.release(permits[1])
    await other.granted(waiter)
    await holder.set_limit(None)


@case(needs={"resizable", "push"}, shows=("E1", "E4"))
async def larger_limit_wakes_the_waiters_that_fit(t: CaseContext) -> None:
    holder, other = t.driver(), t.driver()
    await holder.granted(holder.claim(kind="semaphore", limit=1, ttl=_LONG))
    waiters = [other.waiter(kind="semaphore", limit=1, ttl=_LONG) for _ in range(3)]
    busy = [await other.busy(waiter) for waiter in waiters]
    waiting = [
        t.spawn(other.engine.wait(waiter, reply, _LONG)) for waiter, reply in zip(waiters[:2], busy[:2], strict=True)
    ]
    await holder.set_limit(3)
    for waiter, woken in zip(waiters[:2], waiting, strict=True):
        await woken.result()
        await other.granted(waiter)
    assert isinstance(await other.attempt(waiters[2]), Busy), "the third does not fit"
    await holder.set_limit(None)


@case(needs={"resizable"}, shows=("E1",))
async def limit_that_was_set_counts_for_every_claim_until_removed(t: CaseContext) -> None:
    one, two = t.driver(), t.driver()
    await one.set_limit(2)
    for _ in range(2):  # the second time the name was idle
        permits = [await driver.acquire(driver.claim(kind="semaphore", limit=4, ttl=_LONG)) for driver in (one, two)]
        await one.busy(one.claim(kind="semaphore", limit=3))
        with pytest.raises(Mismatch):
            await two.attempt(two.claim())
        for driver, permit in zip((one, two), permits, strict=True):
            await driver.release(permit)
    with pytest.raises(Mismatch):
        await two.attempt(two.claim())
    await one.set_limit(None)
    held = await two.acquire(two.claim(ttl=_LONG))
    with pytest.raises(Mismatch):
        await one.set_limit(3)
    await two.release(held)


@case(needs={"semaphore", "fencing", "slots"}, shows=("E3",))
async def tokens_rise_per_semaphore_slot(t: CaseContext) -> None:
    drivers = [t.driver(), t.driver()]
    last: dict[int | None, int] = {}
    for _ in range(3):
        claims = [driver.claim(kind="semaphore", limit=2) for driver in drivers]
        for driver, claim in zip(drivers, claims, strict=True):
            grant = await driver.granted(claim)
            assert grant.token > last.get(grant.slot, 0)
            last[grant.slot] = grant.token
        for driver, claim in zip(drivers, claims, strict=True):
            await driver.release(claim)


ODD_NAMES = (
    "a", "a/b", "a/b/", "/", "//", ".", "..", "a.b", "a:b", "{a}", "a%2Fb", "%", "%41", "A", " ", " a", "a ", "a\nb",
    "\t", "*", "a*", "?", "[a]", "_", "a_b", "'", '"', "\\", "--", "$HOME", "0", "-1", "null", "held", "lh1",
    "ß", "SS", "é", "e\N{COMBINING ACUTE ACCENT}", "名前", "🔒", "\N{RIGHT-TO-LEFT OVERRIDE}x",
    "x" * 255, "x" * 254, "é" * 127,
)  # fmt: skip


@case(shows=("E1",))
async def unusual_names_never_collide(t: CaseContext) -> None:
    holder, other = t.driver(), t.driver()
    held = [await holder.acquire(holder.claim(name, ttl=60.0)) for name in ODD_NAMES]  # long enough for a slow machine
    for claim in held:
        assert (await other.busy(other.claim(claim.name))).token == claim.token
    assert sorted(holding.name for holding in await other.inspect()) == sorted(ODD_NAMES)
    for prefix in ("a/", "x", "%", "é", "*", "_"):
        found = sorted(holding.name for holding in await other.inspect(prefix))
        assert found == sorted(name for name in ODD_NAMES if name.startswith(prefix)), f"with the prefix {prefix!r}"
    for claim in held[::7]:
        assert [holding.name for holding in await other.inspect(claim.name, exact=True)] == [claim.name]
    for claim in held:
        assert await holder.release(claim)
    assert not await other.inspect()


@case(shows=("E1",))
async def namespaces_are_isolated_from_each_other(t: CaseContext) -> None:
    driver = t.driver()
    own = t.namespace
    pairs = [
        (own, "a:b"),
        (f"{own}:a", "b"),
        (f"{own}/a", "b"),
        (own, "a/b"),
        (f"{own}.", "a"),
        (own, ".a"),
        (own, "b"),
    ]
    held = [await driver.acquire(driver.claim(name, namespace=namespace)) for namespace, name in pairs]
    assert sorted(holding.name for holding in await driver.inspect()) == sorted(n for space, n in pairs if space == own)
    assert not await driver.break_(held[0]._replace(namespace=f"{own}:a"))
    for claim in held:
        await driver.alive(claim)
        await driver.release(claim)


@case(shows=("E5",))
async def inspect_shows_holders_and_queue_but_no_secrets(t: CaseContext) -> None:
    holder, first, second = t.driver(), t.driver(), t.driver()
    # Nothing renews these claims: they must not expire on a busy machine.
    held, first_claim, second_claim = await holder.acquire(holder.claim(ttl=60.0)), first.waiter(), second.waiter()
    await first.busy(first_claim)
    await second.busy(second_claim)
    await holder.granted(holder.claim("job-two", ttl=60.0))
    found = await second.inspect("job", exact=True)
    assert [(h.state, h.token, h.position) for h in found] == [
        ("held", held.token, None),
        ("waiting", None, 0),
        ("waiting", None, 1),
    ]
    for holding, claim in zip(found, (held, first_claim, second_claim), strict=True):
        assert (holding.namespace, holding.name, holding.holder) == (t.namespace, "job", claim.holder)
        assert (holding.mode, holding.kind, holding.limit) == ("exclusive", "lock", 1)
        assert holding.fingerprint == claim.fingerprint
        assert holding.age >= 0
        assert 0 < holding.left <= max(WAITER_TTL, 61.0)
        for secret in (claim.id, claim.id_hash):
            assert secret not in repr(holding)
    assert len(await second.inspect("job")) == 4
    assert not await second.inspect("jo", exact=True)


@case(needs={"survives-restart"}, rig={"restart"}, shows=("E1", "E3"))
async def grants_survive_a_restart_of_the_engine(t: CaseContext) -> None:
    holder, other = t.driver(), t.driver()
    held = await holder.acquire(holder.claim(ttl=60.0))
    t.rig.restart()
    for driver in (other, holder):  # each has its own connection to make again
        await t.until(partial(_answers_busy, driver), "the engine answers, and the name is still held")
    assert await holder.release(held)
    assert (await other.granted(other.claim())).token > held.token


@case(needs={"survives-minority"}, rig={"lose_minority"}, shows=("E1", "E3"))
async def grants_survive_the_loss_of_a_minority(t: CaseContext) -> None:
    holder, other = t.driver(), t.driver()
    held = await holder.acquire(holder.claim(ttl=60.0))
    t.rig.lose_minority()
    try:
        for driver in (other, holder):  # each has its own connection to make again
            await t.until(partial(_answers_busy, driver), "the engine answers, and the name is still held")
        assert await holder.release(held)
        granted: list[Grant] = []

        async def is_granted() -> bool:
            reply = await other.attempt(other.claim())
            granted.extend([reply] if isinstance(reply, Grant) else [])
            return bool(granted)

        await t.until(is_granted, "the release has reached the member that the other client asks")
        assert granted[0].token > held.token
    finally:
        t.rig.restart_lost_members()


async def _answers_busy(driver: EngineDriver) -> bool:
    """Whether the engine answers again; if so, it must answer busy."""
    try:
        await driver.busy(driver.claim())
    except Unavailable:
        return False
    return True
