"""Statuses: atomic steps along drawn arrows."""

import asyncio
import threading

import pytest

import leasehold
from leasehold import Client, ConfigError, Conflict
from leasehold.runtime.threads import Threads
from leasehold.stores.memory import MemoryStore

MOVES = {"new": {"paid", "cancelled"}, "paid": {"shipped", "refunded"}, "shipped": {"refunded"}}


@pytest.fixture
def client():
    with Client("memory://") as client:
        yield client


def test_a_life(client):
    order = client.status("order-1", MOVES, "new")
    assert order.get() == "new"
    assert order.move("paid") == "new"
    assert order.move("shipped", expected={"paid"}) == "paid"
    assert client.status("order-1", MOVES, "new").get() == "shipped"
    assert client.status("order-2", MOVES, "new").get() == "new"


def test_a_step_from_another_state_is_refused_and_changes_nothing(client):
    order = client.status("order", MOVES, "new")
    order.move("cancelled")
    with pytest.raises(Conflict, match="order is cancelled, not new") as refused:
        order.move("paid", expected="new")
    assert refused.value.found == "cancelled"
    assert order.get() == "cancelled"


@pytest.mark.parametrize(("to", "expected"), [("new", None), ("shipped", "new"), ("nowhere", None), ("paid", [])])
def test_a_step_that_is_not_drawn_is_a_mistake(client, to, expected):
    with pytest.raises(ConfigError, match="cannot be moved"):
        client.status("order", MOVES, "new").move(to, expected=expected)


@pytest.mark.parametrize(("moves", "start"), [(MOVES, "nowhere"), ({"new": "paid"}, "new"), ({}, "new")])
def test_a_machine_that_cannot_be(client, moves, start):
    with pytest.raises(ConfigError):
        client.status("order", moves, start)


def test_of_many_with_the_same_step_one_succeeds(client):
    won, barrier = [], threading.Barrier(10)

    def one(number):
        order = client.status("order", MOVES, "new")
        barrier.wait(30)
        try:
            order.move("paid" if number % 2 else "cancelled", expected="new")
        except Conflict:
            return
        won.append(number)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(won) == 1


def test_a_step_that_was_overtaken_is_tried_again_from_the_new_state(client):
    class Contested(MemoryStore):
        def write(self, *args):
            if rivals:
                rivals.pop()()  # somebody else is faster
            return super().write(*args)

    store, rivals = Contested(Threads()), [lambda: order.move("shipped")]
    order = client.status("order", MOVES, "paid", store=store)
    assert order.move("refunded") == "shipped"
    assert order.get() == "refunded"


def test_under_asyncio():
    async def main():
        async with leasehold.AsyncClient("memory://") as client:
            order = client.status("order", MOVES, "new")
            assert await order.move("paid", expected="new") == "new"
            assert await order.get() == "paid"

    asyncio.run(main())


def test_who_is_always_overtaken_gives_up_after_a_while(client):
    class Contested(MemoryStore):
        def write(self, *args):
            return False

    order = client.status("order", MOVES, "new", store=Contested(Threads()))
    assert repr(order) == "<Status order of new, paid, shipped, cancelled, refunded>"
    with pytest.raises(Conflict) as over:
        order.move("paid")
    assert over.value.attempts == 20


def test_states_are_texts(client):
    with pytest.raises(ConfigError, match="states are texts"):
        client.status("order", {"new": {5}}, "new")
