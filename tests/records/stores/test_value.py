"""Versioned values on every store, in both APIs: no update is lost, conflicts are counted, and retries are bounded."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from leasehold import AsyncClient, Client, ConfigError, Conflict, Event, Unavailable
from leasehold.records.stores.memory import MemoryStore
from leasehold.runtime.threads import Threads
from leasehold.versioned import AsyncValue, Value, Versioned


class BlockingWrapper:
    """Blocking calls to an asyncio value, which runs on its own loop in its own thread."""

    def __init__(self, url: str, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._client = AsyncClient(url)
        self._value = AsyncValue(self._client, name)

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def __getattr__(self, verb: str) -> Any:
        return lambda *args, **kwargs: self._run(getattr(self._value, verb)(*args, **kwargs))

    def close(self) -> None:
        self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()


@pytest.fixture
def make(kind: str, mode: str, url_of: Callable[[str], str], key: str) -> Iterator[Callable[[], Any]]:
    """A function that creates clients of the same value."""
    opened: list[Any] = []

    def make_value() -> Any:
        if mode == "asyncio":
            opened.append(BlockingWrapper(url_of(kind), key))
            return opened[-1]
        opened.append(Client(url_of(kind)))
        return Value(opened[-1], key)

    yield make_value
    for each in opened:
        each.close()


@pytest.fixture
def value(make: Callable[[], Any]) -> Any:
    return make()


def add_one(found: bytes | None) -> str:
    return str(int(found or 0) + 1)


def test_value_is_created_read_and_replaced(value):
    assert value.read() == Versioned(None, "")
    first = value.write("one", "")
    assert first.value == b"one"
    assert value.read() == first
    second = value.write(b"", first.version)
    assert value.read() == second == Versioned(b"", second.version)
    assert second.version != first.version


def test_write_with_another_version_is_conflict(value):
    """Also with a text that no database takes, or that some take for the same one: a version may come from a request,
    as an ETag."""
    first = value.write("one", "")
    second = value.write("two", first.version)
    near = (second.version.upper(), f"{second.version} ", second.version[:16])
    for version in ("", first.version, "0" * 32, "\udc80", "a\0b", "../x", *near):
        with pytest.raises(Conflict):
            value.write("late", version)
    assert value.read() == second


def test_concurrent_updates_lose_nothing(make):
    values = [make(), make()]
    conflicts: list[Event] = []

    def work(value: Any) -> None:
        for _ in range(5):
            value.update(add_one, attempts=1000, pause=0.001, most_pause=0.02, on_event=conflicts.append)

    threads = [threading.Thread(target=work, args=(values[number % 2],)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert values[0].read().value == b"30"
    assert {event.kind for event in conflicts} <= {"conflict"}


def test_update_gives_up_after_its_attempts_and_reports_conflicts(make):
    value, other = make(), make()
    conflicts: list[Event] = []
    calls: list[bytes | None] = []

    def change_in_between(found: bytes | None) -> str:
        calls.append(found)
        other.update(add_one)  # another client writes in between
        return "never"

    with pytest.raises(Conflict, match="in each of 3 attempts") as over:
        value.update(change_in_between, attempts=3, pause=0, on_event=conflicts.append)
    assert over.value.attempts == 3
    assert calls == [None, b"1", b"2"], "each attempt must read again"
    assert [event.kind for event in conflicts] == ["conflict"] * 3
    assert value.read().value == b"3"


# ------------------------------------------------------------- in one process


@pytest.fixture
def memory_value() -> Iterator[Value]:
    with Client("memory://") as client:
        yield Value(client, "stock")


def test_update_returning_none_leaves_the_value(memory_value):
    first = memory_value.write("one", "")
    assert memory_value.update(lambda found: None) == memory_value.read() == first
    assert memory_value.update(lambda found, more: found + more, b" and two").value == b"one and two"


def test_async_update_function_is_awaited_and_refused_when_blocking(memory_value):
    async def add(found: bytes | None) -> str:
        await asyncio.sleep(0)
        return add_one(found)

    async def main() -> None:
        async with AsyncClient("memory://") as client:
            value = AsyncValue(client, "stock")
            await asyncio.gather(*(value.update(add, attempts=100, pause=0.001) for _ in range(10)))
            assert (await value.read()).value == b"10"

    asyncio.run(main())
    with pytest.raises(ConfigError, match="coroutine function"):
        memory_value.update(add)


@pytest.mark.parametrize("version", [-1, True, None, 0])
def test_write_with_invalid_version_is_refused(memory_value, version):
    with pytest.raises(ConfigError):
        memory_value.write("two", version)


@pytest.mark.parametrize("wrong", [None, 7, ["x"]])
def test_write_of_value_other_than_bytes_or_text_is_refused(memory_value, wrong):
    with pytest.raises(ConfigError):
        memory_value.write(wrong, "")


def test_value_needs_a_client_of_its_own_kind():
    with Client("memory://") as client:
        with pytest.raises(ConfigError, match=r"AsyncValue needs a leasehold\.AsyncClient, not Client"):
            AsyncValue(client, "stock")
        with pytest.raises(ConfigError, match="lock name"):
            Value(client, "")
        with pytest.raises(ConfigError, match=r"Value needs a leasehold\.Client, not str"):
            Value("memory://", "stock")


def test_value_does_not_collide_with_a_status_of_the_same_name():
    with Client("memory://") as client:
        Value(client, "order").write("x", "")
        assert client.status("order", {"new": {"paid"}}, "new").get() == "new"


def test_lost_answer_is_unavailable_only_if_the_value_changed_since():
    class LosesAnswers(MemoryStore):
        replace_after = False

        def write(self, key, record, expected_version, keep, seconds):
            written = super().write(key, record, expected_version, keep, seconds)
            if written and record.data == b"mine":
                if self.replace_after:
                    super().write(key, record._replace(version="f" * 32, data=b"other"), record.version, keep, seconds)
                raise Unavailable("answer lost")
            return written

    store = LosesAnswers(Threads())
    with Client("memory://") as client:
        value = Value(client, "stock", store=store)
        assert value.write("mine", "").value == b"mine"
        store.replace_after = True
        with pytest.raises(Unavailable, match=r"stock.*may have been applied"):
            value.write("mine", value.read().version)


def test_async_value_has_the_methods_of_value():
    for verb in ("__init__", "read", "write", "update"):
        ours, theirs = inspect.signature(getattr(Value, verb)), inspect.signature(getattr(AsyncValue, verb))
        assert [(each.name, each.default) for each in ours.parameters.values()] == [
            (each.name, each.default) for each in theirs.parameters.values()
        ]
        assert inspect.iscoroutinefunction(getattr(AsyncValue, verb)) == (verb != "__init__")
