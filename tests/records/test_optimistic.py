"""Optimistic concurrency: bounded attempts with full jitter, counted conflicts, real conflicts in real databases."""

import asyncio
import sqlite3
import threading

import pytest

from leasehold import Client, ConfigError, Conflict, Event, optimistic, optimistic_async
from leasehold.core.conflicts import is_conflict
from leasehold.records.optimistic import RetryPolicy
from leasehold.runtime.base import run_sync
from leasehold.runtime.threads import Threads
from leasehold.versioned import Value


class ConflictingFunction:
    """Raises a given number of conflicts, then succeeds."""

    def __init__(self, conflicts: int, error: type[Exception] = Conflict) -> None:
        self.remaining, self.calls, self.error = conflicts, 0, error

    def __call__(self, *args: object) -> object:
        self.calls += 1
        if self.remaining:
            self.remaining -= 1
            raise self.error("row")
        return args


def test_optimistic_retries_on_conflict_and_returns_result():
    work = ConflictingFunction(3)
    assert optimistic(work, 1, 2, pause=0) == (1, 2)
    assert work.calls == 4


def test_optimistic_raises_conflict_after_max_attempts():
    events: list[Event] = []
    work = ConflictingFunction(99)
    with pytest.raises(Conflict, match="stock was changed by another writer in each of 4 attempts") as exhausted:
        optimistic(work, attempts=4, pause=0, name="stock", on_event=events.append)
    assert (work.calls, exhausted.value.attempts, exhausted.value.name) == (4, 4, "stock")
    assert isinstance(exhausted.value.__cause__, Conflict)
    assert [(event.kind, event.name, event.reason[:9]) for event in events] == [("conflict", "stock", "Conflict:")] * 4


def test_optimistic_retries_other_errors_only_if_listed():
    with pytest.raises(KeyError):
        optimistic(ConflictingFunction(1, KeyError))
    assert optimistic(ConflictingFunction(1, KeyError), on=KeyError, pause=0) == ()
    assert optimistic(ConflictingFunction(1, KeyError), on=(ValueError, KeyError), pause=0) == ()


def test_blocking_update_refuses_coroutine_that_a_plain_function_returns():
    """It would be awaited, if at all, after the check for conflicts."""

    async def later(_value: object = None) -> bytes:
        return b""

    def plain(value: object = None) -> object:
        return later(value)

    with pytest.raises(ConfigError, match="plain returned a coroutine"):
        optimistic(plain)
    with Client("memory://") as client, pytest.raises(ConfigError, match="plain returned a coroutine"):
        Value(client, "a").update(plain)


def test_optimistic_pauses_grow_with_jitter_up_to_a_limit():
    class RecordingThreads(Threads):
        def __init__(self, fraction: float) -> None:
            super().__init__()
            self.random = lambda: fraction
            self.slept = []

        async def sleep(self, seconds: float) -> None:
            self.slept.append(seconds)

    for fraction in (1.0, 0.5, 0.0):
        runtime = RecordingThreads(fraction)
        run_sync(RetryPolicy(7, (), 0.01, 0.1, "", None).run(runtime, ConflictingFunction(6), ()))
        assert runtime.slept == pytest.approx([fraction * each for each in (0.01, 0.02, 0.04, 0.08, 0.1, 0.1)])


@pytest.mark.parametrize("wrong", [{"attempts": 0}, {"attempts": True}, {"pause": -1}, {"most_pause": "long"}])
def test_optimistic_refuses_invalid_options(wrong):
    work = ConflictingFunction(0)
    with pytest.raises(ConfigError):
        optimistic(work, **wrong)
    assert work.calls == 0


def test_optimistic_async_accepts_plain_and_async_functions():
    async def main():
        work = ConflictingFunction(2)

        async def awaited(number):
            await asyncio.sleep(0)
            work()
            return number

        assert await optimistic_async(awaited, 5, pause=0) == 5
        assert await optimistic_async(ConflictingFunction(2), 6, pause=0) == (6,)
        with pytest.raises(Conflict):
            await optimistic_async(ConflictingFunction(2), attempts=2, pause=0)

    asyncio.run(main())
    with pytest.raises(ConfigError, match="coroutine function"):
        optimistic(asyncio.sleep, 1)


@pytest.mark.parametrize(
    ("error", "known"),
    [
        (Conflict(), True),
        (type("Failure", (Exception,), {"sqlstate": "40001"})(), True),
        (type("Failure", (Exception,), {"sqlstate": "40P01"})(), True),
        (type("Failure", (Exception,), {"sqlstate": "23505"})(), False),
        (type("Wrapped", (Exception,), {"orig": type("Inner", (Exception,), {"sqlstate": "40001"})()})(), True),
        (ValueError(1213), False),
        (sqlite3.OperationalError("database is locked"), False),
    ],
)
def test_is_conflict_recognises_conflict_errors(error, known):
    assert is_conflict(error) is known


def test_is_conflict_recognises_errors_of_real_drivers():
    pymysql, redis, exc = (pytest.importorskip(name) for name in ("pymysql", "redis", "sqlalchemy.orm.exc"))
    psycopg = pytest.importorskip("psycopg")
    for error in (
        pymysql.OperationalError(1213, "Deadlock found"),
        redis.WatchError("changed"),
        exc.StaleDataError("version"),
        psycopg.errors.SerializationFailure(),
        psycopg.errors.DeadlockDetected(),
    ):
        assert is_conflict(error), error
    assert not is_conflict(pymysql.OperationalError(1205, "Lock wait timeout"))
    assert not is_conflict(redis.ConnectionError())


def test_optimistic_updates_of_sqlalchemy_rows_lose_nothing(tmp_path):
    """Ten threads add one each, five times: no update is lost, and the conflicts were real."""
    sqlalchemy = pytest.importorskip("sqlalchemy")
    from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

    class Base(DeclarativeBase):
        pass

    class Stock(Base):
        __tablename__ = "stock"
        id: Mapped[int] = mapped_column(primary_key=True)
        left: Mapped[int]
        version = mapped_column(sqlalchemy.Integer, nullable=False)
        __mapper_args__ = {"version_id_col": version}  # noqa: RUF012

    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path}/stock.db", connect_args={"timeout": 30})
    Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        session.add(Stock(id=1, left=0))
    conflicts: list[Event] = []
    barrier = threading.Barrier(10)

    def add_one(first: list[bool]) -> None:
        with Session(engine) as session, session.begin():
            row = session.get(Stock, 1)
            if first:
                first.pop()
                barrier.wait(30)  # all threads have read before one writes
            row.left += 1

    def work() -> None:
        first = [True]
        for _ in range(5):
            optimistic(add_one, first, attempts=200, most_pause=0.05, on_event=conflicts.append)

    threads = [threading.Thread(target=work) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    with Session(engine) as session:
        assert session.get(Stock, 1).left == 50
    engine.dispose()
    assert len(conflicts) >= 9
    assert all("StaleDataError" in event.reason for event in conflicts)
