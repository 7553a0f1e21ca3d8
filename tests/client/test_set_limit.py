"""`set_limit`: the limit of a semaphore, changed in use."""

import asyncio

import pytest

from leasehold import AsyncClient, Client, ConfigError, Mismatch, Unsupported
from leasehold.events import Event


def test_set_limit_counts_for_every_client_and_is_an_event() -> None:
    events: list[Event] = []
    with (
        Client("memory://set-limit", on_event=events.append, holder="mira") as client,
        Client("memory://set-limit") as other,
    ):
        semaphore = other.semaphore("pool", 4, wait=0)
        first = semaphore.acquire()
        client.set_limit("pool", 2, why="a slow disk")
        assert not semaphore.locked()
        second = semaphore.acquire()
        assert semaphore.locked()
        assert semaphore.try_acquire() is None
        client.set_limit("pool", None)
        first.release()
        second.release()
    chosen = [(event.name, event.limit, event.actor, event.why) for event in events if event.kind == "resized"]
    assert chosen == [("pool", 2, "mira", "a slow disk"), ("pool", None, "mira", None)]


def test_waiter_acquires_when_the_limit_is_raised_under_asyncio() -> None:
    async def main() -> None:
        async with AsyncClient("memory://") as client:
            semaphore = client.semaphore("pool", 1)
            held = await semaphore.acquire()
            waiting = asyncio.create_task(semaphore.acquire(wait=60))
            while len(await client.inspect("pool")) < 2:
                await asyncio.sleep(0.01)
            await client.set_limit("pool", 2)
            lease = await waiting
            assert lease.slot == 1
            await lease.release()
            await held.release()

    asyncio.run(main())


@pytest.mark.parametrize("limit", [0, -1, 2**31, 1.5, True, "2"])
def test_set_limit_refuses_a_bad_limit(limit: object) -> None:
    with Client("memory://") as client, pytest.raises(ConfigError, match="limit must be a whole number"):
        client.set_limit("pool", limit)  # type: ignore[arg-type]


def test_set_limit_of_a_lock_in_use_is_a_mismatch() -> None:
    with Client("memory://") as client, client.lock("pool"), pytest.raises(Mismatch, match="pool is in use as a lock"):
        client.set_limit("pool", 2)


@pytest.mark.parametrize("url", ["etcd://127.0.0.1:1", "zookeeper://127.0.0.1:1", "redlock://a:1,b:1,c:1"])
def test_engine_that_cannot_resize_refuses_without_connecting(url: str) -> None:
    with Client(url) as client:
        with pytest.raises(Unsupported) as caught:
            client.set_limit("pool", 2)
        assert caught.value.missing == ("resizable",)
        with pytest.raises(Unsupported, match="resizable"):
            client.lock("pool", require={"resizable"})
