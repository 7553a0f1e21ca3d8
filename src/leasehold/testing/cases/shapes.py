"""E1 beyond the plain lock: readers beside readers, permits with slots, many names at once."""

from __future__ import annotations

from leasehold.core.timing import BEAT
from leasehold.errors import Unavailable
from leasehold.model import Busy
from leasehold.testing.choosing import case
from leasehold.testing.seat import Seat
from leasehold.testing.trial import Trial


@case(needs={"shared"}, shows=("E1",))
async def readers_stand_beside_readers_and_never_beside_a_writer(t: Trial) -> None:
    first, second, writer = t.seat(), t.seat(), t.seat()
    one, two = await first.takes(first.claim(mode="shared")), await second.takes(second.claim(mode="shared"))
    await writer.busy(writer.claim())
    await first.release(one)
    await writer.busy(writer.claim())
    await second.release(two)
    held = await writer.takes(writer.claim())
    await first.busy(first.claim(mode="shared"))
    await writer.release(held)
    await first.granted(first.claim(mode="shared"))


@case(needs={"shared", "fair"}, shows=("E1", "E4"))
async def a_writer_in_line_is_not_starved_by_readers(t: Trial) -> None:
    reader, writer, late = t.seat(), t.seat(), t.seat()
    reading, wants = await reader.takes(reader.claim(mode="shared")), writer.waiter()
    await writer.busy(wants)
    await late.busy(late.claim(mode="shared"))
    behind = late.waiter(mode="shared")
    assert (await late.busy(behind)).place == 1
    await reader.release(reading)
    assert isinstance(await late.attempt(behind), Busy), "the writer came first"
    await writer.granted(wants)
    await writer.release(wants)
    await late.granted(behind)


@case(needs={"shared", "fair"}, shows=("E1",))
async def readers_in_line_go_together(t: Trial) -> None:
    writer, seats = t.seat(), [t.seat() for _ in range(3)]
    held = await writer.takes(writer.claim())
    readers = [seat.waiter(mode="shared") for seat in seats]
    for seat, reader in zip(seats, readers, strict=True):
        await seat.busy(reader)
    await writer.release(held)
    for seat, reader in zip(seats, readers, strict=True):
        await seat.granted(reader)
    await writer.busy(writer.claim())


@case(needs={"semaphore"}, shows=("E1",))
async def a_semaphore_admits_its_limit(t: Trial) -> None:
    traits = await t.traits()
    limit = min(3, traits.max_limit or 3)
    seats = [t.seat() for _ in range(limit)]
    permits = [await seat.takes(seat.claim(kind="semaphore", limit=limit)) for seat in seats]
    other = t.seat()
    waiter = other.waiter(kind="semaphore", limit=limit)
    await other.busy(waiter)
    await other.busy(other.claim(kind="semaphore", limit=limit))
    assert len([holding for holding in await other.inspect() if holding.state == "held"]) == limit
    await seats[1].release(permits[1])
    await other.granted(waiter)
    await seats[1].busy(seats[1].claim(kind="semaphore", limit=limit))


@case(needs={"semaphore", "slots"}, shows=("E1", "E2"))
async def permits_are_numbered_and_a_number_has_one_holder(t: Trial) -> None:
    limit = min(3, (await t.traits()).max_limit or 3)
    seats = [t.seat() for _ in range(limit)]
    claims = [seat.claim(kind="semaphore", limit=limit) for seat in seats]
    slots = [(await seat.granted(claim)).slot for seat, claim in zip(seats, claims, strict=True)]
    assert sorted(slot for slot in slots if slot is not None) == list(range(limit))
    assert (await seats[0].granted(claims[0])).slot == slots[0], "asked again, it keeps its slot"
    await seats[1].release(claims[1])
    assert (await seats[1].granted(seats[1].claim(kind="semaphore", limit=limit))).slot == slots[1]


@case(needs={"semaphore", "fencing", "slots"}, shows=("E3",))
async def tokens_rise_per_slot(t: Trial) -> None:
    seats = [t.seat(), t.seat()]
    last: dict[int | None, int] = {}
    for _ in range(3):
        claims = [seat.claim(kind="semaphore", limit=2) for seat in seats]
        for seat, claim in zip(seats, claims, strict=True):
            grant = await seat.granted(claim)
            assert grant.token > last.get(grant.slot, 0)
            last[grant.slot] = grant.token
        for seat, claim in zip(seats, claims, strict=True):
            await seat.release(claim)


ODD_NAMES = (
    "a", "a/b", "a/b/", "/", "//", ".", "..", "a.b", "a:b", "{a}", "a%2Fb", "%", "%41", "A", " ", " a", "a ", "a\nb",
    "\t", "*", "a*", "?", "[a]", "_", "a_b", "'", '"', "\\", "--", "$HOME", "0", "-1", "null", "held", "lh1",
    "ß", "SS", "é", "e\N{COMBINING ACUTE ACCENT}", "名前", "🔒", "\N{RIGHT-TO-LEFT OVERRIDE}x",
    "x" * 255, "x" * 254, "é" * 127,
)  # fmt: skip


@case(shows=("E1",))
async def every_name_is_a_name_of_its_own(t: Trial) -> None:
    holder, other = t.seat(), t.seat()
    held = [await holder.takes(holder.claim(name, ttl=60.0)) for name in ODD_NAMES]  # however slow the machine
    for claim in held:
        assert (await other.busy(other.claim(claim.name))).token == claim.token
    assert sorted(holding.name for holding in await other.inspect()) == sorted(ODD_NAMES)
    for prefix in ("a/", "x", "%", "é", "*", "_"):
        found = sorted(holding.name for holding in await other.inspect(prefix))
        assert found == sorted(name for name in ODD_NAMES if name.startswith(prefix)), f"by the prefix {prefix!r}"
    for claim in held[::7]:
        assert [holding.name for holding in await other.inspect(claim.name, exact=True)] == [claim.name]
    for claim in held:
        assert await holder.release(claim)
    assert not await other.inspect()


@case(shows=("E1",))
async def namespaces_are_apart(t: Trial) -> None:
    seat = t.seat()
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
    held = [await seat.takes(seat.claim(name, namespace=namespace)) for namespace, name in pairs]
    assert sorted(holding.name for holding in await seat.inspect()) == sorted(n for space, n in pairs if space == own)
    assert not await seat.break_(held[0]._replace(namespace=f"{own}:a"))
    for claim in held:
        await seat.alive(claim)
        await seat.release(claim)


@case(shows=("E5",))
async def inspect_shows_holders_and_line_and_no_secret(t: Trial) -> None:
    holder, first, second = t.seat(), t.seat(), t.seat()
    held, one, two = await holder.takes(holder.claim()), first.waiter(), second.waiter()
    await first.busy(one)
    await second.busy(two)
    await holder.granted(holder.claim("job-two"))
    found = await second.inspect("job", exact=True)
    assert [(h.state, h.token, h.place) for h in found] == [
        ("held", held.token, None),
        ("waiting", None, 0),
        ("waiting", None, 1),
    ]
    for holding, claim in zip(found, (held, one, two), strict=True):
        assert (holding.namespace, holding.name, holding.holder) == (t.namespace, "job", claim.holder)
        assert (holding.mode, holding.kind, holding.limit) == ("exclusive", "lock", 1)
        assert holding.fingerprint == claim.fingerprint
        assert holding.age >= 0
        assert 0 < holding.left <= max(BEAT, t.rig.ttl + 1)
        for secret in (claim.id, claim.mark):
            assert secret not in repr(holding)
    assert len(await second.inspect("job")) == 4
    assert not await second.inspect("jo", exact=True)


@case(needs={"survives-restart"}, rig={"restart"}, shows=("E1", "E3"))
async def grants_survive_a_restart_of_the_engine(t: Trial) -> None:
    holder, other = t.seat(), t.seat()
    held = await holder.takes(holder.claim(ttl=60.0))
    t.rig.restart()
    await t.until(lambda: _answers(other), "the engine is back, and the name is still held")
    assert await holder.release(held)
    assert (await other.granted(other.claim())).token > held.token


@case(needs={"survives-minority"}, rig={"lose_minority"}, shows=("E1", "E3"))
async def grants_survive_the_loss_of_a_minority(t: Trial) -> None:
    holder, other = t.seat(), t.seat()
    held = await holder.takes(holder.claim(ttl=60.0))
    t.rig.lose_minority()
    try:
        await t.until(lambda: _answers(other), "the engine goes on, and the name is still held")
        assert await holder.release(held)
        assert (await other.granted(other.claim())).token > held.token
    finally:
        t.rig.regain()


async def _answers(seat: Seat) -> bool:
    """Whether the engine can be asked again; if so, it must not grant."""
    try:
        await seat.busy(seat.claim())
    except Unavailable:
        return False
    return True
