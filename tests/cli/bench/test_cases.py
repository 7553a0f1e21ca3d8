"""The cases of `leasehold bench`: each does what its name says, and nothing stays behind."""

import pytest

from leasehold import Client, Unavailable
from leasehold.cli.bench.cases import cases
from tests.support import probe_memory


def test_every_bench_case_runs_and_releases_its_locks(tmp_path):
    events = []
    with Client(f"sqlite:///{tmp_path}/locks.db", on_event=events.append) as client:
        with cases(client, 3) as chosen:
            counts = {}
            for case in chosen:
                events.clear()
                case.run(7)
                counts[case.name] = sum(event.kind == "granted" for event in events)
            assert len(client.inspect()) == 3
        assert client.inspect() == []
    assert list(counts.values()) == [0, 7, 7, 7, 0]


def test_bench_case_fails_when_engine_fails_in_a_thread():
    with Client("memory://") as client, cases(client, 1) as chosen:
        eight_threads = chosen[3]

        def refuse(*_):
            raise Unavailable("gone")

        probe_memory.transport(client).server.attempt = refuse
        with pytest.raises(Unavailable):
            eight_threads.run(8)
