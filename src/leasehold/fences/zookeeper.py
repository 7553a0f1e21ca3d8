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

from leasehold.core.names import check_name, check_namespace, engine_key
from leasehold.engines.zookeeper.nodes import ROOT, TOKEN_BASE, NodeQueue, mode_of, parse_base
from leasehold.errors import ConfigError, Unavailable
from leasehold.fences.rules import (
    NO_TOKEN,
    Pass,
    Shown,
    check_resource,
    check_shared,
    check_token,
    choose_token_key,
    parse_highest_token,
    raise_stale,
    to_bytes,
    token_for_read,
    token_for_write,
)

_TRIES: Final = 100  # each failed one means that somebody else got through
_ANY_VERSION: Final = -1  # version of a node
_Errors: TypeAlias = tuple[type[Exception], ...]
_CONFLICTS: Final[_Errors] = (BadVersionError, NodeExistsError, NoNodeError)
_ROLLED_BACK: Final[_Errors] = (RolledBackError, RuntimeInconsistency)  # of the others in a multi that failed


def _no_operations(transaction: Any) -> None:
    """To be done beside raising the mark."""


class _BaseZooKeeperFence(ABC):
    def __init__(self, client: Any, path: str) -> None:
        self.path = self.resource = check_resource(path)
        if not path.startswith("/") or path.endswith("/"):
            raise ConfigError(f"{path!r} is no path of a node: /a/b")
        self._client = client

    def claim(self, lease: Shown) -> None:
        """Raise the mark, and nothing else. Raises `StaleToken`, as all of these do, and what kazoo raises."""
        self._commit(lease, token_for_write(lease), _no_operations)

    def read(self, lease: Shown) -> bytes:
        """The data, to decide a write by: older holders write no more. NoNodeError: the mark is raised."""
        # In this order: the session then sees all that was accepted before the mark, and after it only newer tokens.
        self._commit(lease, token_for_read(lease), _no_operations)
        data: bytes = self._client.get(self.path)[0]
        return data

    def write(self, lease: Shown, data: bytes | str) -> None:
        """Set the data; the node is made if it is not there. Text is written as UTF-8."""
        body, token_info = to_bytes(data), token_for_write(lease)

        def build(transaction: Any) -> None:
            if self._client.exists(self.path) is None:
                self._client.ensure_path(self.path.rpartition("/")[0] or "/")
                transaction.create(self.path, body)
            else:
                transaction.set_data(self.path, body)

        self._commit(lease, token_info, build, retry_on=_CONFLICTS)

    def multi(self, lease: Shown, build: Callable[[Any], object]) -> list[Any]:
        """Whatever `build(transaction)` adds to a kazoo transaction, in one step with the mark; gives the results.

        `build` is called again when another one came in between.
        """
        return self._commit(lease, token_for_write(lease), build)

    def _commit(
        self, lease: Shown, token_info: Pass, build: Callable[[Any], object], retry_on: _Errors = ()
    ) -> list[Any]:
        """`retry_on`: what tells, beside a failed comparison, that another one came in between."""
        for _ in range(_TRIES):
            transaction = self._client.transaction()
            self._add_token_check(transaction, lease, token_info)
            build(transaction)
            results: Sequence[Any] = transaction.commit()
            errors = [
                result for result in results if isinstance(result, Exception) and not isinstance(result, _ROLLED_BACK)
            ]
            if not errors:
                return list(results[1:])
            if not isinstance(results[0], _CONFLICTS) and not isinstance(errors[0], retry_on):
                raise errors[0]
        raise Unavailable(f"{self.resource} changed under each of {_TRIES} tries") from errors[0]

    @abstractmethod
    def _add_token_check(self, transaction: Any, lease: Shown, token_info: Pass) -> None:
        """Begin the transaction with the one operation that compares. Raises `StaleToken` for what is stale already."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path}>"


class ZooKeeperFence(_BaseZooKeeperFence):
    """The data of one node; with `multi`, any nodes. The mark is in the node `PATH.fence` (and `.fence.SLOT`).

    kazoo has no asyncio side: there, use `await asyncio.to_thread(fence.write, lease, data)`.
    """

    def __init__(self, client: Any, path: str, *, mark: str | None = None) -> None:
        super().__init__(client, path)
        self._token_path = choose_token_key(mark, f"{path}.fence", path)

    def _add_token_check(self, transaction: Any, lease: Shown, token_info: Pass) -> None:
        path = self._token_path if token_info.slot is None else f"{self._token_path}.{token_info.slot}"
        try:
            text, stat = self._client.get(path)
        except NoNodeError:
            check_token(lease, token_info, NO_TOKEN, self.resource)
            self._client.ensure_path(path.rpartition("/")[0] or "/")
            transaction.create(path, b"%d" % (NO_TOKEN if token_info.shared else token_info.token))
            return
        highest_token = parse_highest_token(text, path)
        new_highest = check_token(lease, token_info, highest_token, self.resource)
        if new_highest == highest_token:
            transaction.check(path, stat.version)
        else:
            transaction.set_data(path, b"%d" % new_highest, stat.version)


class ZooKeeperLockFence(_BaseZooKeeperFence):
    """The data of one node; with `multi`, any nodes: while the node of the lock itself is there, in the same ZooKeeper.

    Nothing is stored. A lease is refused from the moment its lock is free for others, also if nobody has come yet.
    """

    def __init__(self, client: Any, path: str, *, lock: str, namespace: str = "", chroot: str = "") -> None:
        """`lock`: the name that is locked, in `namespace`, by a client of `zookeeper://.../chroot`. `client`: connected
        to that very ZooKeeper."""
        super().__init__(client, path)
        root = "/" + chroot.strip("/") if chroot.strip("/") else ""
        self._base_path, self._queue_path = (
            root + TOKEN_BASE,
            f"{root}{ROOT}/{engine_key(check_namespace(namespace), check_name(lock))}",
        )

    def _add_token_check(self, transaction: Any, lease: Shown, token_info: Pass) -> None:
        # That it is there is compared again, by the multi. Its version is not: every renewal changes it.
        transaction.check(self._lock_node_path(lease, token_info), _ANY_VERSION)

    def _lock_node_path(self, lease: Shown, token_info: Pass) -> str:
        """The node of the lock that has this token: a number that the server gave it, once for all."""
        self._client.sync(self._queue_path)  # a follower may be behind, and a lock just granted is to be found
        names, queue_stat = self._read_if_exists(self._client.get_children, self._queue_path, include_data=True) or (
            [],
            None,
        )
        base = parse_base((self._read_if_exists(self._client.get, self._base_path) or (b"0", None))[0])
        holders = {f"{self._queue_path}/{node.name}": mode_of(node) for node in NodeQueue(names).holders}
        stats = {path: stat for path in holders if (stat := self._client.exists(path)) is not None}
        tokens = {base + stat.czxid: path for path, stat in stats.items()}
        if (path := tokens.get(token_info.token)) is None:
            # Nobody need have come since: then it is told when the line last changed: by the end of this one, or later.
            ended_at = base + (self._client.last_zxid if queue_stat is None else queue_stat.pzxid)
            newer = [token for token in tokens if token > token_info.token]
            raise_stale(lease, token_info, max(newer, default=ended_at), self.resource)
        check_shared(token_info, holders[path] == "shared")
        return path

    def _read_if_exists(self, read: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """None: there is no such node."""
        try:
            return read(*args, **kwargs)
        except NoNodeError:
            return None
