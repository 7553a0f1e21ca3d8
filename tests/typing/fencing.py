"""Real usage of fences, for `mypy --strict`; never run."""

import sqlite3
from typing import Any, assert_type

from leasehold import AsyncLease, CurrentLease, Lease, StaleToken, current_lease, fences


def pass_lease_to_fences(lease: Lease, async_lease: AsyncLease, connection: sqlite3.Connection) -> None:
    file = fences.File("report.csv", wait=5)
    assert_type(file.read(lease), bytes)
    file.write(lease, "text")
    file.write(async_lease, b"bytes")
    file.write(lease.token, "by its token")
    file.write(current_lease(), "of a child of leasehold run")
    file.write(fences.TokenInfo(7, slot=2), "from a message")
    file.write("7", "text")  # type: ignore[arg-type]
    file.write(lease)  # type: ignore[call-arg]
    file.write("text", lease)  # type: ignore[arg-type]  # the lease comes first

    stock = fences.SQLColumn(connection, "stock", key="item")
    assert_type(stock.take(lease, "teapot", quantity=1), bool)
    stock.write(lease, "teapot", quantity=3)
    assert_type(stock.read(lease, "teapot", "quantity"), tuple[Any, ...])
    fence = fences.SQLFence(connection, "stock")
    assert_type(fence.write(lease, "update stock set quantity = ?", (1,)), int)
    with fence.transaction(lease) as cursor:
        cursor.execute("delete from stock")

    number = fences.Local("number", 10)
    assert_type(number.read(lease), int)
    number.write(lease, "ten")  # type: ignore[arg-type]
    with number.held(lease) as held:
        assert_type(held, int)
    assert_type(fences.headers(lease), dict[str, str])


async def use_async_fences(lease: AsyncLease, client: Any) -> None:
    fence = fences.AsyncRedisFence(client, "stock")
    await fence.write(lease, 3, "EX", 60)
    await fence.calls(lease, ("SET", "a", 1), ("GET", "a"))
    async with fences.AsyncSQLFence(client, "stock").transaction(lease) as cursor:
        await cursor.execute("delete from stock")


def read_slot_types(stale: StaleToken) -> None:
    assert_type(current_lease("stock"), Lease | AsyncLease | CurrentLease)
    assert_type(current_lease().slot, int | None)
    if not isinstance(lease := current_lease(), CurrentLease):
        lease.check()
    assert_type(stale.slot, int | None)


class OwnObjectStore:
    """A user-defined store."""

    def get(self, key: str) -> fences.StoredObject | None:
        return fences.StoredObject(key.encode(), "1")

    def put(self, key: str, body: bytes, metadata: Any, match: str | None) -> str | None:
        return match


fences.ObjectFence(OwnObjectStore(), "2026/10.csv", in_metadata=True)
