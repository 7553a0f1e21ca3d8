"""The store of memory: what only it has to care for."""

import os

from leasehold.runtime.threads import Threads
from leasehold.store import Record
from leasehold.stores.memory import MemoryStore


def test_it_does_not_grow_for_ever():
    at = [0.0]
    store = MemoryStore(Threads(lambda: at[0]))
    for number in range(5000):
        at[0] += 1.0
        assert store.write(f"k{number}", Record(os.urandom(16).hex(), b""), "", 10.0, 1.0)
    assert len(store._kept) < 1100


def test_a_forked_child_has_a_guard_of_its_own():
    store = MemoryStore(Threads())
    with store._guard:  # as another thread might, at the moment of the fork
        child = os.fork()
        if child == 0:
            os._exit(0 if store.read("a", 1.0) is None and store._pid == os.getpid() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
