"""`Idempotency-Key`: requests that are in progress at the same time, and requests that are cancelled."""

import asyncio

import pytest

import leasehold
from leasehold.http.idempotency import IdempotencyKey


def test_repeated_request_is_409_while_first_is_in_progress(http):
    async def work(app, shop):
        first = asyncio.create_task(http.post(app))
        while not shop.orders:
            await asyncio.sleep(0)
        status, headers, _ = await http.post(app)
        assert (status, headers[b"retry-after"]) == (409, b"3")
        assert (await http.post(app, b"other"))[0] == 422
        shop.gate.set()
        assert (await first)[2] == b"order 1"
        assert (await http.post(app))[2] == b"order 1"
        assert len(shop.orders) == 1

    http.served(work, http.Shop(gate=asyncio.Event()), retry_after=3)


def test_one_of_fifty_concurrent_tasks_is_executed(http):
    async def work(app, shop):
        requests = [asyncio.create_task(http.post(app)) for _ in range(50)]
        while not shop.orders:
            await asyncio.sleep(0)
        shop.gate.set()
        answers = [status for status, _, _ in await asyncio.gather(*requests)]
        assert len(shop.orders) == 1
        assert set(answers) <= {201, 409}
        assert answers.count(201) >= 1
        assert (await http.post(app))[0] == 201

    async def main():
        gate = asyncio.Event()
        async with leasehold.AsyncClient("memory://") as client:
            shop = http.Shop(gate=gate)
            await work(IdempotencyKey(shop, client), shop)

    asyncio.run(main())


def test_first_requests_of_new_client_may_be_concurrent(http, tmp_path):
    """On SQLite, whose calls run on a worker thread that the first lock of the client once replaced."""

    async def main():
        async with leasehold.AsyncClient(f"sqlite://{tmp_path}/locks.db?durable=no", call_timeout=30) as client:
            app = IdempotencyKey(http.Shop(), client)
            answers = await asyncio.gather(*(http.post(app, key=b"k%d" % number) for number in range(20)))
            assert [status for status, _, _ in answers] == [201] * 20

    asyncio.run(main())


def test_cancelled_request_frees_its_key(http):
    """Some servers cancel a request when its sender hangs up."""

    async def main():
        gate = asyncio.Event()
        async with leasehold.AsyncClient("memory://") as client:
            shop = http.Shop(gate=gate)
            app = IdempotencyKey(shop, client)
            request = asyncio.create_task(http.post(app))
            while not shop.orders:
                await asyncio.sleep(0)
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request
            gate.set()
            assert (await http.post(app))[0] == 201
            assert len(shop.orders) == 2
            assert await client.inspect() == []

    asyncio.run(main())
