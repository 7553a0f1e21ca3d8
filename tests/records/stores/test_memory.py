"""Behaviour specific to the memory store."""

import os

from leasehold.records.store import Record
from leasehold.records.stores.memory import MemoryStore
from leasehold.runtime.threads import Threads
from tests.support import probe_records


def test_memory_store_drops_expired_records():
    now = [0.0]
    store = MemoryStore(Threads(lambda: now[0]))
    for number in range(5000):
        now[0] += 1.0
        assert store.write(f"k{number}", Record(os.urandom(16).hex(), b""), "", 10.0, 1.0)
    assert probe_records.kept_records(store) < 1100


def test_forked_child_has_its_own_mutex():
    store = MemoryStore(Threads())
    with probe_records.mutex(store):  # as another thread might at the moment of the fork
        child = os.fork()
        if child == 0:
            os._exit(0 if store.read("a", 1.0) is None and probe_records.process_id(store) == os.getpid() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
