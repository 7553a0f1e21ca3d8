"""The cases of `leasehold bench`: each does what its name says, and nothing stays behind."""

import pytest

from leasehold import Client, Unavailable
from leasehold.speed.engine import cases


def test_every_case_runs_and_nothing_stays(tmp_path):
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


def test_an_engine_that_fails_in_a_thread_fails_the_case():
    with Client("memory://") as client, cases(client, 1) as chosen:
        crowd = chosen[3]

        def refuse(*_):
            raise Unavailable("gone")

        client._desk._engine._link.store.attempt = refuse
        with pytest.raises(Unavailable):
            crowd.run(8)
