"""ZooKeeper nodes over kazoo: what is compared changes, or is checked, in the same multi as what it guards.

A multi is all or nothing. `ZooKeeperFence` keeps a mark in a node of its own, for leases of any engine: the multi names
the version of the mark that was compared, so a token that came in between makes it fail as a whole; then it is done
again with the mark as it is now. `ZooKeeperLockFence` is for leases of the same ZooKeeper, and keeps nothing: the multi
checks that the lock's own node is there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError, RolledBackError, RuntimeInconsistency

from leasehold.core.names import check_name, check_namespace, key
from leasehold.engines.zookeeper.nodes import BASE, ROOT, Line, base_of, mode_of
from leasehold.errors import ConfigError, Unavailable
from leasehold.fences.rules import (
    NEVER,
    Pass,
    Shown,
    check_resource,
    check_shared,
    in_bytes,
    mark_of,
    place_of,
    raised,
    refuse,
    to_read,
    to_write,
)

_TRIES: Final = 100  # each failed one means that somebody else got through
_ANY: Final = -1  # version of a node
_Errors: TypeAlias = tuple[type[Exception], ...]
_OVERTAKEN: Final[_Errors] = (BadVersionError, NodeExistsError, NoNodeError)
_ROLLED_BACK: Final[_Errors] = (RolledBackError, RuntimeInconsistency)  # of the others in a multi that failed


def _nothing(transaction: Any) -> None:
    """To be done beside raising the mark."""


class _ZooKeeper(ABC):
    def __init__(self, client: Any, path: str) -> None:
        self.path = self.resource = check_resource(path)
        if not path.startswith("/") or path.endswith("/"):
            raise ConfigError(f"{path!r} is no path of a node: /a/b")
        self._client = client

    def claim(self, lease: Shown) -> None:
        """Raise the mark, and nothing else. Raises `StaleToken`, as all of these do, and what kazoo raises."""
        self._commit(lease, to_write(lease), _nothing)

    def read(self, lease: Shown) -> bytes:
        """The data, to decide a write by: older holders write no more. NoNodeError: the mark is raised."""
        # In this order: the session then sees all that was accepted before the mark, and after it only newer tokens.
        self._commit(lease, to_read(lease), _nothing)
        data: bytes = self._client.get(self.path)[0]
        return data

    def write(self, lease: Shown, data: bytes | str) -> None:
        """Set the data; the node is made if it is not there. Text is written as UTF-8."""
        body, shown = in_bytes(data), to_write(lease)

        def build(transaction: Any) -> None:
            if self._client.exists(self.path) is None:
                self._client.ensure_path(self.path.rpartition("/")[0] or "/")
                transaction.create(self.path, body)
            else:
                transaction.set_data(self.path, body)

        self._commit(lease, shown, build, again=_OVERTAKEN)

    def multi(self, lease: Shown, build: Callable[[Any], object]) -> list[Any]:
        """Whatever `build(transaction)` adds to a kazoo transaction, in one step with the mark; gives the results.

        `build` is called again when another one came in between.
        """
        return self._commit(lease, to_write(lease), build)

    def _commit(self, lease: Shown, shown: Pass, build: Callable[[Any], object], again: _Errors = ()) -> list[Any]:
        """`again`: what tells, beside a failed comparison, that another one came in between."""
        for _ in range(_TRIES):
            transaction = self._client.transaction()
            self._show(transaction, lease, shown)
            build(transaction)
            results: Sequence[Any] = transaction.commit()
            wrong = [one for one in results if isinstance(one, Exception) and not isinstance(one, _ROLLED_BACK)]
            if not wrong:
                return list(results[1:])
            if not isinstance(results[0], _OVERTAKEN) and not isinstance(wrong[0], again):
                raise wrong[0]
        raise Unavailable(f"{self.resource} changed under each of {_TRIES} tries") from wrong[0]

    @abstractmethod
    def _show(self, transaction: Any, lease: Shown, shown: Pass) -> None:
        """Begin the transaction with the one operation that compares. Raises `StaleToken` for what is stale already."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path}>"


class ZooKeeperFence(_ZooKeeper):
    """The data of one node; with `multi`, any nodes. The mark is in the node `PATH.fence` (and `.fence.SLOT`).

    kazoo has no asyncio side: there, use `await asyncio.to_thread(fence.write, lease, data)`.
    """

    def __init__(self, client: Any, path: str, *, mark: str | None = None) -> None:
        super().__init__(client, path)
        self._mark = place_of(mark, f"{path}.fence", path)

    def _show(self, transaction: Any, lease: Shown, shown: Pass) -> None:
        path = self._mark if shown.slot is None else f"{self._mark}.{shown.slot}"
        try:
            text, about = self._client.get(path)
        except NoNodeError:
            raised(lease, shown, NEVER, self.resource)
            self._client.ensure_path(path.rpartition("/")[0] or "/")
            transaction.create(path, b"%d" % (NEVER if shown.shared else shown.token))
            return
        mark = mark_of(text, path)
        after = raised(lease, shown, mark, self.resource)
        if after == mark:
            transaction.check(path, about.version)
        else:
            transaction.set_data(path, b"%d" % after, about.version)


class ZooKeeperLockFence(_ZooKeeper):
    """The data of one node; with `multi`, any nodes: while the node of the lock itself is there, in the same ZooKeeper.

    Nothing is stored. A lease is refused from the moment its lock is free for others, also if nobody has come yet.
    """

    def __init__(self, client: Any, path: str, *, lock: str, namespace: str = "", chroot: str = "") -> None:
        """`lock`: the name that is locked, in `namespace`, by a client of `zookeeper://.../chroot`. `client`: connected
        to that very ZooKeeper."""
        super().__init__(client, path)
        root = "/" + chroot.strip("/") if chroot.strip("/") else ""
        self._base, self._line = root + BASE, f"{root}{ROOT}/{key(check_namespace(namespace), check_name(lock))}"

    def _show(self, transaction: Any, lease: Shown, shown: Pass) -> None:
        # That it is there is compared again, by the multi. Its version is not: every renewal changes it.
        transaction.check(self._own(lease, shown), _ANY)

    def _own(self, lease: Shown, shown: Pass) -> str:
        """The node of the lock that has this token: a number that the server gave it, once for all."""
        self._client.sync(self._line)  # a follower may be behind, and a lock just granted is to be found
        names, about = self._found(self._client.get_children, self._line, include_data=True) or ([], None)
        base = base_of((self._found(self._client.get, self._base) or (b"0", None))[0])
        holders = {f"{self._line}/{node.name}": mode_of(node) for node in Line(names).holders}
        stats = {path: stat for path in holders if (stat := self._client.exists(path)) is not None}
        tokens = {base + stat.czxid: path for path, stat in stats.items()}
        if (path := tokens.get(shown.token)) is None:
            # Nobody need have come since: then it is told when the line last changed: by the end of this one, or later.
            over = base + (self._client.last_zxid if about is None else about.pzxid)
            newer = [token for token in tokens if token > shown.token]
            refuse(lease, shown, max(newer, default=over), self.resource)
        check_shared(shown, holders[path] == "shared")
        return path

    def _found(self, ask: Callable[..., Any], *words: Any, **more: Any) -> Any:
        """None: there is no such node."""
        try:
            return ask(*words, **more)
        except NoNodeError:
            return None
