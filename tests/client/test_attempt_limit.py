"""How many attempts of a client are under way at a time: two threads of the client meet."""

from __future__ import annotations

import types

from leasehold.client.attempt_limit import MAX_ATTEMPTS, AttemptLimit


class SuspendingRuntime:
    """Suspends a caller that waits, so that a test decides when it goes on."""

    def now(self) -> float:
        return 100.0

    def signal(self) -> SuspendingRuntime:
        return self

    def set(self) -> None:
        pass

    @types.coroutine
    def wait(self, _seconds: float):
        yield


class InterruptedSet(set):
    """Lets another thread run before an id hash is added."""

    def __init__(self, id_hashes, interrupt) -> None:
        super().__init__(id_hashes)
        self._interrupt = interrupt

    def add(self, id_hash: str) -> None:
        self._interrupt(id_hash)
        super().add(id_hash)


def test_caller_that_gives_up_while_it_is_admitted_leaves_room_for_others() -> None:
    limit = AttemptLimit(SuspendingRuntime(), 5.0, "engine")
    for number in range(MAX_ATTEMPTS):
        assert limit.try_enter(f"sent {number}")
    callers = {id_hash: limit.enter(id_hash, 200.0) for id_hash in ("first", "second")}
    for caller in callers.values():
        caller.send(None)

    def give_up(id_hash: str) -> None:
        if id_hash == "first":
            callers["first"].close()
            limit.leave("first", answered=False)

    limit._under_way = InterruptedSet(limit._under_way, give_up)
    limit.leave("sent 0", answered=True)
    assert "first" not in limit._under_way
    assert "second" in limit._under_way
    callers["second"].close()
