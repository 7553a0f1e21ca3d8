"""Statuses: atomic moves along the declared transitions."""

import asyncio
import threading

import pytest

import leasehold
from leasehold import Client, ConfigError, Conflict, Unavailable
from leasehold.records.stores.memory import MemoryStore
from leasehold.runtime.threads import Threads

MOVES = {"new": {"paid", "cancelled"}, "paid": {"shipped", "refunded"}, "shipped": {"refunded"}}


@pytest.fixture
def client():
    with Client("memory://") as client:
        yield client


def test_status_moves_through_allowed_states(client):
    order = client.status("order-1", MOVES, "new")
    assert order.get() == "new"
    assert order.move("paid") == "new"
    assert order.move("shipped", expected={"paid"}) == "paid"
    assert client.status("order-1", MOVES, "new").get() == "shipped"
    assert client.status("order-2", MOVES, "new").get() == "new"


def test_move_from_unexpected_state_raises_conflict_and_changes_nothing(client):
    order = client.status("order", MOVES, "new")
    order.move("cancelled")
    with pytest.raises(Conflict, match="order is cancelled, not new") as refused:
        order.move("paid", expected="new")
    assert refused.value.found == "cancelled"
    assert order.get() == "cancelled"


@pytest.mark.parametrize(
    ("to", "expected", "why"),
    [
        ("new", None, "cannot be moved to 'new': no transition in `moves` leads there"),
        ("nowhere", None, "cannot be moved to 'nowhere': no transition"),
        ("shipped", "new", "cannot be moved to 'shipped' from 'new', only from 'paid'"),
        ("paid", [], "cannot be moved to 'paid' from no state at all, only from 'new'"),
    ],
)
def test_move_not_in_the_moves_raises_config_error(client, to, expected, why):
    with pytest.raises(ConfigError, match=why):
        client.status("order", MOVES, "new").move(to, expected=expected)


@pytest.mark.parametrize(("moves", "start"), [(MOVES, "nowhere"), ({"new": "paid"}, "new"), ({}, "new")])
def test_invalid_state_machine_is_refused(client, moves, start):
    with pytest.raises(ConfigError):
        client.status("order", moves, start)


def test_only_one_of_many_concurrent_moves_succeeds(client):
    winners, barrier = [], threading.Barrier(10)

    def move_order(number):
        order = client.status("order", MOVES, "new")
        barrier.wait(30)
        try:
            order.move("paid" if number % 2 else "cancelled", expected="new")
        except Conflict:
            return
        winners.append(number)

    threads = [threading.Thread(target=move_order, args=(number,)) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(winners) == 1


def test_overtaken_move_is_retried_from_the_new_state(client):
    class Contested(MemoryStore):
        def write(self, *args):
            if rivals:
                rivals.pop()()  # another client is faster
            return super().write(*args)

    store, rivals = Contested(Threads()), [lambda: order.move("shipped")]
    order = client.status("order", MOVES, "paid", store=store)
    assert order.move("refunded") == "shipped"
    assert order.get() == "refunded"


def test_async_status_moves():
    async def main():
        async with leasehold.AsyncClient("memory://") as client:
            order = client.status("order", MOVES, "new")
            assert await order.move("paid", expected="new") == "new"
            assert await order.get() == "paid"

    asyncio.run(main())


def test_move_raises_conflict_after_twenty_lost_races(client):
    class Contested(MemoryStore):
        def write(self, *args):
            return False

    order = client.status("order", MOVES, "new", store=Contested(Threads()))
    assert repr(order) == "<Status order of new, paid, shipped, cancelled, refunded>"
    with pytest.raises(Conflict) as exhausted:
        order.move("paid")
    assert exhausted.value.attempts == 20


def test_states_must_be_text(client):
    with pytest.raises(ConfigError, match="states must be non-empty strings"):
        client.status("order", {"new": {5}}, "new")


# ------------------------------------------------------------------ lost answers


class OvertakenStore(MemoryStore):
    """Loses the answer to the first write, and another client writes before the retry."""

    def __init__(self, interfere) -> None:
        super().__init__(Threads())
        self.interfere = interfere

    def write(self, *args):
        written = super().write(*args)
        if self.interfere is not None:
            interfere, self.interfere = self.interfere, None
            interfere()
            raise Unavailable("the answer was lost")
        return written


def test_status_move_with_lost_answer_then_overtaken_raises_unavailable(client):
    """Our move was applied and its answer lost; then another client moved on. It can no longer be known whose move
    it was."""
    store = OvertakenStore(lambda: client.status("order", MOVES, "new", store=store).move("shipped"))
    with pytest.raises(Unavailable, match="order"):
        client.status("order", MOVES, "new", store=store).move("paid")
    assert client.status("order", MOVES, "new", store=store).get() == "shipped"


def test_status_move_with_lost_answer_is_resolved_if_not_overtaken(client):
    store = OvertakenStore(lambda: None)
    status = client.status("order", MOVES, "new", store=store)
    assert status.move("paid") == "new"
    with pytest.raises(Conflict):
        status.move("paid")
