"""Behaviour specific to ZooKeeper."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from kazoo.exceptions import BadVersionError, NoNodeError, RolledBackError, RuntimeInconsistency

from leasehold import ConfigError, StaleToken, Unavailable, fences


def test_zookeeper_multi_changes_nothing_when_it_fails(resource):
    number = resource("zookeeper")
    client, path = number.client, number.path

    def move(transaction):
        transaction.create(f"{path}-a", b"1")
        transaction.set_data(path, b"7")

    assert number.fence.multi(5, move)[0] == f"{path}-a"
    with pytest.raises(StaleToken):
        number.fence.multi(4, lambda transaction: transaction.delete(path))
    with pytest.raises(NoNodeError):
        number.fence.multi(6, lambda transaction: transaction.delete(f"{path}-none"))
    with pytest.raises(BadVersionError):
        number.fence.multi(6, lambda transaction: transaction.set_data(path, b"8", 99))
    number.write(5, 9)  # the failed multi did not raise the highest token
    assert client.get(path)[0] == b"9"


def test_zookeeper_first_write_creates_the_node(resource):
    number = resource("zookeeper")
    fence = fences.ZooKeeperFence(number.client, f"/new/{number.spec['run']}/node")
    with pytest.raises(NoNodeError):
        fence.read(5)
    with pytest.raises(StaleToken):
        fence.write(4, b"")
    fence.write(5, "text")
    assert fence.read(6) == b"text"
    for bad in ("a", "/", "/a/"):
        with pytest.raises(ConfigError):
            fences.ZooKeeperFence(number.client, bad)


def test_zookeeper_multi_is_refused_when_newer_token_came_before_it(resource):
    """The multi checks the version of the token node that was compared."""
    number = resource("zookeeper")
    number.write(5, 1)
    newer_writes = []

    def build(transaction):
        if not newer_writes:
            newer_writes.append(fences.ZooKeeperFence(number.client, number.path).write(9, b"2"))
        transaction.set_data(number.path, b"3")

    with pytest.raises(StaleToken):
        number.fence.multi(6, build)
    assert number.peek() == 2


class BrokenClient:
    """A kazoo client whose multis have these results, whatever they ask for."""

    def __init__(self, results: list[object]) -> None:
        self._results, self.operations = results, list[object]()

    def get(self, path: str) -> tuple[bytes, SimpleNamespace]:
        return b"4", SimpleNamespace(version=1)

    def exists(self, path: str) -> bool:
        return True

    def transaction(self) -> BrokenClient:
        return self

    def set_data(self, *operation: object) -> None:
        self.operations.append(operation)

    def commit(self) -> list[object]:
        return self._results


@pytest.mark.parametrize(
    "results", [[RolledBackError(), RolledBackError()], [RuntimeInconsistency()] * 2, [], ["stat"]]
)
def test_results_that_do_not_fit_the_operations_are_no_success(results):
    """A multi of which every operation was rolled back counted as written."""
    with pytest.raises(Unavailable):
        fences.ZooKeeperFence(BrokenClient(results), "/a").write(5, "x")
