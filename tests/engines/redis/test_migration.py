"""Migration to Leasehold: runs together the releases that docs/how-to/replacing-redis-py-lock.md says may overlap."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest
import redis

from leasehold import Client

NAME = "orders/42"


class Worker(threading.Thread):
    """A thread as a process of one release: takes that release's locks and counts the other workers inside."""

    def __init__(self, server, locks: str, inside: set[threading.Thread]) -> None:
        super().__init__(daemon=True)
        self._url, self._locks, self._inside = f"redis://127.0.0.1:{server.port}", locks, inside
        self.overlap_count = self.finished_rounds = 0
        self.start()

    def run(self) -> None:
        with redis.Redis.from_url(self._url) as old, Client(self._url) as new:
            for _ in range(25):
                with ExitStack() as held:
                    if "old" in self._locks:
                        held.enter_context(old.lock(NAME, timeout=30, sleep=0.001))
                    if "new" in self._locks:
                        held.enter_context(new.lock(NAME, ttl=30))
                    self.overlap_count += len(self._inside)
                    self._inside.add(self)
                    old.ping()  # some work, and time for another worker to enter
                    self._inside.discard(self)
                    self.finished_rounds += 1


@pytest.mark.parametrize(
    "releases",
    [("old", "old", "old and new", "old and new"), ("old and new", "old and new", "new", "new")],
    ids=["the first release comes", "the second release comes"],
)
def test_old_and_new_releases_exclude_each_other_during_rollout(start_redis, releases) -> None:
    server = start_redis()
    inside: set[threading.Thread] = set()
    workers = [Worker(server, locks, inside) for locks in releases]
    for worker in workers:
        worker.join(60)
    assert [worker.finished_rounds for worker in workers] == [25] * 4
    assert [worker.overlap_count for worker in workers] == [0] * 4


def test_new_lock_alone_does_not_exclude_redis_py_lock(start_redis) -> None:
    server = start_redis()
    url = f"redis://127.0.0.1:{server.port}"
    with redis.Redis.from_url(url) as old, old.lock(NAME, timeout=30), Client(url) as new, new.lock(NAME) as lease:
        assert lease.held
