"""Shared fixtures of the PostgreSQL tests: servers of their own, tables, and a waiter in another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from harness.servers.postgresql import PostgreSQL
from leasehold import Client
from tests.support import probe


@pytest.fixture
def start_postgresql(database) -> Iterator[Callable[..., PostgreSQL]]:
    """Start servers for this test alone, so that it may break them."""
    started: list[PostgreSQL] = []

    def start(*settings: str, **options: Any) -> PostgreSQL:
        started.append(PostgreSQL(*settings, **options).start())
        return started[-1]

    yield start
    for each in started:
        each.kill()


@pytest.fixture
def create_schema() -> Callable[[str], None]:
    """Create the tables: on a busy machine that takes longer than a short `call_timeout`."""

    def create(url: str) -> None:
        with Client(url, call_timeout=20) as client:
            client.lock("job").acquire().release()

    return create


@pytest.fixture
def background_waiter(wait_until) -> Callable[..., AbstractContextManager[list[Any]]]:
    """Wait for a lock in another thread while the block runs. Yields the list that will get the lease or the error."""

    @contextmanager
    def waiter(client: Client, name: str, **options: Any) -> Iterator[list[Any]]:
        got: list[Any] = []

        def wait() -> None:
            try:
                got.append(client.lock(name, **options).acquire())
            except BaseException as error:
                got.append(error)

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        wait_until(lambda: got or probe.waiters(client))
        yield got
        thread.join(60)
        assert not thread.is_alive()

    return waiter
