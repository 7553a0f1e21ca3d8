"""Real usage of the public API, for `mypy --strict`; never run.

`assert_type` pins the type of a call's result. A `type: ignore[...]` proves that wrong usage is refused: mypy reports
one that is not needed.
"""

import threading
from datetime import datetime, timedelta
from typing import TypedDict, assert_type

import leasehold
from leasehold import (
    Client,
    Deadlock,
    Election,
    Event,
    Holding,
    Lease,
    LeaseLost,
    Leases,
    LeaseState,
    Lock,
    MultiLock,
    NotAcquired,
    Outcome,
    Schedule,
    Status,
    Term,
    Traits,
)
from leasehold.records import stores
from leasehold.records.store import Store

# -------------------------------------------------------------------------- clients


def report(event: Event) -> None:
    print(event.kind, event.name, event.token, event.seconds)


def create_clients() -> None:
    Client()
    Client("memory://", namespace="shop", holder="web-3", ttl=10, call_timeout=2.5, on_event=report, breaker=True)
    with Client("memory://") as client:
        assert_type(client, Client)
        assert_type(client.traits, Traits)
        assert_type(client.traits.max_limit, int | None)
        assert_type(client.ping(), float)
        client.connect()

    Client("memory://", breaker="yes")  # type: ignore[arg-type]
    Client("memory://", "shop")  # type: ignore[call-arg]  # options are keyword-only
    Client("memory://", timeout=3)  # type: ignore[call-arg]
    Client("memory://", on_event=lambda: None)  # type: ignore[misc, arg-type]  # the hook takes the event
    Client("memory://", ttl=b"30")  # type: ignore[arg-type]


# ------------------------------------------------------------------- many locks, one leader


def acquire_multilock(client: Client, other: Client) -> None:
    multilock = client.multilock(["a", "b"], ttl=30, wait=5, strict=True)
    assert_type(multilock, MultiLock)
    with multilock as leases:
        assert_type(leases, Leases)
        assert_type(leases["a"], Lease)
        assert_type(leases.held, bool)
        leases.on_lost(lambda lost: print(lost.lost_reason))
        leases.on_at_risk(lambda leases: print(leases.remaining))
    lock = client.lock("a")
    with MultiLock([lock, other.lock("a")], wait=None) as leases:
        assert_type(leases.of(lock), Lease)
    assert_type(multilock.acquire(wait=0).release(), bool)
    assert_type(multilock.try_acquire(), Leases | None)
    for deadlock in client.deadlocks():
        assert_type(deadlock, Deadlock)
        assert_type(deadlock.victim, Holding)
        assert_type(deadlock.waits[0].waiter.owner, str)

    with client.any_of(["gpu0", "gpu1"], wait=5) as lease:
        assert_type(lease, Lease)
    assert_type(client.any_of(["gpu0"]).try_acquire(), Lease | None)

    client.lock("a", on_deadlock="raise")
    client.lock("a", on_deadlock="break")  # type: ignore[arg-type]
    client.any_of([1])  # type: ignore[list-item]
    client.multilock(["a"], timeout=3)  # type: ignore[call-arg]
    client.multilock([1])  # type: ignore[list-item]
    MultiLock(["a"])  # type: ignore[list-item]


def lead_election(client: Client) -> None:
    election = client.election("scheduler", ttl=10, max_hold=3600)
    assert_type(election, Election)
    with election.lead() as term:
        assert_type(term, Lease)
    assert_type(election.campaign(wait=5), Lease)
    assert_type(election.resign(), bool)
    assert_type(election.leader(), Term | None)
    for seen in election.observe(seconds=5):
        assert_type(seen, Term)
        assert_type(seen.missed, bool)

    def start(term: Lease) -> None:
        print(term.token)

    election.serve(start, lambda term: term.check())
    election.serve(start)  # type: ignore[call-arg]
    assert_type(leasehold.advise_ttl(2, 0.5, safety=4), float)


# ---------------------------------------------------------------------------- locks


def acquire_lock(client: Client) -> None:
    with client.lock("orders/42", ttl=30, wait=5) as lease:
        assert_type(lease, Lease)

    lock = client.lock(
        "orders/42",
        ttl=30,
        wait=None,
        holder="web-3",
        purpose="refund",
        min_hold=1,
        max_hold=60.0,
        delay=2,
        reentrant=True,
        require={"fencing", "fair"},
    )
    assert_type(lock, Lock)
    assert_type(lock.acquire(), Lease)
    assert_type(lock.acquire(wait=0), Lease)
    assert_type(lock.acquire(wait=None), Lease)
    assert_type(lock.try_acquire(), Lease | None)
    assert_type(lock.locked(), bool)
    assert_type(lock.name, str)

    client.lock("orders/42", timeout=3)  # type: ignore[call-arg]
    client.lock("orders/42", 30)  # type: ignore[call-arg]  # options are keyword-only
    client.lock("orders/42", tll=30)  # type: ignore[call-arg]
    client.lock("orders/42", wait=b"30s")  # type: ignore[arg-type]
    client.lock("orders/42", ttl="30s", wait="1h30m", max_hold=timedelta(hours=2))
    client.lock(42)  # type: ignore[arg-type]
    lock.acquire(5)  # type: ignore[call-arg]
    lock.acquire(timeout=5)  # type: ignore[arg-type]
    lock.release()  # type: ignore[attr-defined]  # the lease is released, not the lock
    lock.try_acquire().check()  # type: ignore[union-attr]  # may be None
    if lock.acquire():  # type: ignore[truthy-bool]  # acquire raises: there is no boolean to look at
        pass
    with client.lock("a"), client.lock("b") as other:
        assert_type(other, Lease)


def acquire_other_kinds(client: Client) -> None:
    client.lock("a", wait=60, on_unavailable="wait")
    client.semaphore("a", 3, on_unavailable="run")
    client.lock("a", on_unavailable="ignore")  # type: ignore[arg-type]
    with client.semaphore("scanners", 3, wait=1) as permit:
        assert_type(permit.slot, int | None)
    with client.semaphore("scanners", limit=3):
        pass
    settings = client.rwlock("settings")
    with settings.read(wait=1) as reader, settings.write(ttl=5) as writer:
        assert_type(reader, Lease)
        assert_type(writer, Lease)
    threading_lock = client.lock("legacy").as_threading()
    assert_type(threading_lock.acquire(timeout=3), bool)
    assert_type(threading_lock.lease, Lease | None)
    with threading_lock as acquired:
        assert_type(acquired, bool)
    threading.Condition(threading_lock)  # type: ignore[arg-type]  # the shape of one, but not the class

    client.semaphore("scanners")  # type: ignore[call-arg]
    client.semaphore("scanners", 3, 5)  # type: ignore[call-arg]
    client.rwlock("settings", wait=1)  # type: ignore[call-arg]  # options belong to read() and write()


def use_lease(lease: Lease) -> None:
    assert_type(lease.token, int)
    assert_type(lease.guaranteed, bool)
    assert_type(lease.ttl, float)
    assert_type(lease.state, LeaseState)
    assert_type(lease.held, bool)
    assert_type(lease.remaining, float)
    assert_type(lease.name, str)
    assert_type(lease.holder, str)
    assert_type(lease.fingerprint, str)
    assert_type(lease.release(), bool)
    assert_type(lease.wait_lost(1.5), bool)
    lease.check()
    lease.verify()
    lease.renew()
    lease.renew(60)
    lease.on_lost(lambda lost: print(assert_type(lost, Lease).lost_reason))
    lease.on_lost(print)
    if lease.state is LeaseState.AT_RISK:
        print(lease.lost_reason)

    lease.state = LeaseState.HELD  # type: ignore[misc]
    lease.on_lost(lambda: None)  # type: ignore[misc, arg-type]  # it gets the lease
    lease.renew(ttl=b"60")  # type: ignore[arg-type]
    lease.renew("90s")


def handle_errors(lock: Lock) -> None:
    try:
        lock.acquire(wait=0)
    except NotAcquired as busy:
        assert_type(busy.holder, str | None)
        assert_type(busy.left, float | None)
        assert_type(busy.waited, float)
        timeout: TimeoutError = busy
        print(timeout)
    except LeaseLost as lost:
        if lost.reason == "max_hold":
            print(lost.token)
        if lost.reason == "lapsed":  # type: ignore[comparison-overlap]  # no such reason
            print()
    except leasehold.LeaseholdError:
        raise
    stale = leasehold.StaleToken("stock", token=1, highest=2)
    assert_type(stale.highest, int)


def inspect_locks(client: Client) -> None:
    holdings = client.inspect("orders/", exact=False)
    assert_type(holdings, list[Holding])
    for holding in holdings:
        if holding.state == "held" and holding.token is not None:
            assert_type(client.break_lock(holding.name, token=holding.token), bool)

    client.break_lock("orders/42")  # type: ignore[call-arg]  # which grant?
    client.break_lock("orders/42", 7)  # type: ignore[call-arg]
    holdings[0].token = 3  # type: ignore[misc]  # frozen
    print(holdings[0].id)  # type: ignore[attr-defined]  # the secret is not shown


# ------------------------------------------------------------------ functions under a lock


def count(item: str) -> int:
    return len(item)


def count_with(item: str, lease: Lease) -> int:
    return lease.token


def call_under_lock(client: Client) -> None:
    assert_type(client.with_lock("stock", count, "teapot"), int)
    assert_type(client.with_lock("stock", count_with, item="teapot"), int)
    assert_type(client.lock("stock", wait=1).call(count, "teapot"), int)

    client.locked("stock", on_busy="never")  # type: ignore[call-overload]
    client.locked("stock", "skip")  # type: ignore[call-overload]
    client.locked("stock", timeout=3)  # type: ignore[call-overload]


def decorate_functions(client: Client) -> None:
    @client.locked("stock/{item}", on_busy="skip", ttl=5)
    def skipping(item: str) -> int:
        return len(item)

    assert_type(skipping("teapot"), int | None)

    @client.locked("stock/{item}", wait=5)
    def waiting(lease: Lease, item: str, count: int = 1) -> int:
        return lease.token + count

    assert_type(waiting("teapot", count=2), int)
    waiting()  # type: ignore[call-arg]
    waiting(42)  # type: ignore[arg-type]
    waiting("teapot", lease=None)  # type: ignore[call-arg]

    class Warehouse:
        @client.locked("stock/{item}")
        def move(self, lease: Lease, item: str) -> str:
            return f"{item} {lease.token}"

        @client.locked("stock/{item}", on_busy="skip")
        def count(self, item: str) -> int:
            return len(item)

    assert_type(Warehouse().move("teapot"), str)
    assert_type(Warehouse().count("teapot"), int | None)
    Warehouse().move(42)  # type: ignore[arg-type]


async def mix_blocking_and_async() -> None:
    client = Client("memory://")
    async with client.lock("a"):  # type: ignore[attr-defined]
        pass
    async with client:  # type: ignore[attr-defined]
        pass
    await client.lock("a").acquire()  # type: ignore[misc]


# -------------------------------------------------------------------------- records


class Receipt(TypedDict):
    number: int


def charge(amount: int) -> Receipt:
    return {"number": amount}


def use_records(client: Client, store: Store) -> None:
    assert_type(client.once("order-42", charge, 10), Receipt)
    client.once("order-42", charge, 10, keep=None, wait=0, ttl=5, on_failure="keep", request="10", max_result=0)
    client.once("order-42", charge, 10, store="postgresql://host/shop")
    client.once("order-42", charge, 10, store=store)
    client.once("order-42", charge, 10, store=stores.within(object()))
    client.once("order-42", charge, 10, on_failure="ignore")  # type: ignore[arg-type]
    client.once("order-42", charge, 10, timeout=3)  # type: ignore[call-arg]
    client.once("order-42")  # type: ignore[call-arg]

    @client.once_per("order-{amount}", keep=60)
    def decorated(amount: int) -> Receipt:
        return charge(amount)

    assert_type(decorated(10), Receipt)
    assert_type(client.outcome("order-42"), Outcome | None)

    schedule = client.schedule("cleanup", 3600, offset=60, missed="last", late=30, most=3, on_failure="retry")
    assert_type(schedule, Schedule)
    schedule.run(lambda tick: tick)
    assert_type(schedule.run_due(print), list[datetime])
    client.schedule("cleanup", 3600, missed="some")  # type: ignore[arg-type]

    status = client.status("order-42", {"new": {"paid"}, "paid": ["shipped"]}, "new")
    assert_type(status, Status)
    assert_type(status.get(), str)
    assert_type(status.move("paid", expected="new"), str)
    status.move("paid", "new")  # type: ignore[call-arg]

    assert_type(leasehold.optimistic(charge, 10, attempts=3, on=KeyError, on_event=report), Receipt)
    stock = leasehold.versioned.Value(client, "stock")
    assert_type(stock.update(lambda left: left or b"5", attempts=3, on_event=report), leasehold.versioned.Versioned)
    assert_type(stock.read().value, bytes | None)
