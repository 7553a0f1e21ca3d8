"""Fences for ZooKeeper nodes over kazoo: one multi checks the token and runs the operations.

A multi is applied completely or not at all. `ZooKeeperFence` keeps the highest token in a node of its own, for leases
of any engine. Its multi names the version of that node which was compared. If another token has raised it meanwhile,
the whole multi fails and is retried with the new highest token. `ZooKeeperLockFence` is for leases of the same
ZooKeeper and stores nothing: its multi checks that the lock's own node exists.
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
    LeaseLike,
    TokenInfo,
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

_TRIES: Final = 100  # each failed try means that another client's multi succeeded
_ANY_VERSION: Final = -1  # check() accepts any version of the node
_Errors: TypeAlias = tuple[type[Exception], ...]
_CONFLICTS: Final[_Errors] = (BadVersionError, NodeExistsError, NoNodeError)
_ROLLED_BACK: Final[_Errors] = (RolledBackError, RuntimeInconsistency)  # the other results of a failed multi


def _no_operations(transaction: Any) -> None:
    """Add no operations: only raise the highest token."""


class _BaseZooKeeperFence(ABC):
    def __init__(self, client: Any, path: str) -> None:
        self.path = self.resource = check_resource(path)
        if not path.startswith("/") or path.endswith("/"):
            raise ConfigError(f"{path!r} is not the path of a node: use a path such as /a/b")
        self._client = client

    def claim(self, lease: LeaseLike) -> None:
        """Only raise the highest token. All methods raise `StaleToken`, and the errors of kazoo."""
        self._commit(lease, token_for_write(lease), _no_operations)

    def read(self, lease: LeaseLike) -> bytes:
        """The data, to base a write on. Older holders are refused from now on, even after NoNodeError."""
        # Claim first: the session then reads every write accepted before the claim, and later ones have newer tokens.
        self._commit(lease, token_for_read(lease), _no_operations)
        data: bytes = self._client.get(self.path)[0]
        return data

    def write(self, lease: LeaseLike, data: bytes | str) -> None:
        """Set the data, and create the node if it does not exist. Text is written as UTF-8."""
        body, token_info = to_bytes(data), token_for_write(lease)

        def build(transaction: Any) -> None:
            if self._client.exists(self.path) is None:
                self._client.ensure_path(self.path.rpartition("/")[0] or "/")
                transaction.create(self.path, body)
            else:
                transaction.set_data(self.path, body)

        self._commit(lease, token_info, build, retry_on=_CONFLICTS)

    def multi(self, lease: LeaseLike, build: Callable[[Any], object]) -> list[Any]:
        """Run the operations that `build(transaction)` adds to a kazoo transaction, and return their results.

        `build` is called again if another client's multi came first.
        """
        return self._commit(lease, token_for_write(lease), build)

    def _commit(
        self, lease: LeaseLike, token_info: TokenInfo, build: Callable[[Any], object], retry_on: _Errors = ()
    ) -> list[Any]:
        """`retry_on`: errors of `build`'s operations which show that another client's multi came first."""
        for _ in range(_TRIES):
            transaction = self._client.transaction()
            self._add_token_check(transaction, lease, token_info)
            build(transaction)
            results: Sequence[Any] = transaction.commit()
            if not any(isinstance(result, Exception) for result in results):
                if len(results) != len(transaction.operations):
                    raise Unavailable(f"{self.resource}: ZooKeeper sent an invalid reply; it may have been written")
                return list(results[1:])
            errors = [
                result for result in results if isinstance(result, Exception) and not isinstance(result, _ROLLED_BACK)
            ]
            if not errors:  # nothing was applied, and nothing says why
                raise Unavailable(f"{self.resource}: ZooKeeper refused the operations without a reason")
            if not isinstance(results[0], _CONFLICTS) and not isinstance(errors[0], retry_on):
                raise errors[0]
        raise Unavailable(
            f"{self.resource} was changed by other clients during each of {_TRIES} tries; try again"
        ) from errors[0]

    @abstractmethod
    def _add_token_check(self, transaction: Any, lease: LeaseLike, token_info: TokenInfo) -> None:
        """Add the operation that compares, as the first of the transaction. Raises `StaleToken` if already stale."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path}>"


class ZooKeeperFence(_BaseZooKeeperFence):
    """Fences the data of one node or, with `multi`, any nodes. The highest token is kept in the node `PATH.fence` (for
    a semaphore, `PATH.fence.SLOT`). `token_path`: another node where it is kept.

    kazoo has no asyncio API: use `await asyncio.to_thread(fence.write, lease, data)`.
    """

    def __init__(self, client: Any, path: str, *, token_path: str | None = None) -> None:
        super().__init__(client, path)
        self._token_path = choose_token_key("token_path", token_path, f"{path}.fence", path)

    def _add_token_check(self, transaction: Any, lease: LeaseLike, token_info: TokenInfo) -> None:
        path = self._token_path if token_info.slot is None else f"{self._token_path}.{token_info.slot}"
        try:
            text, stat = self._client.get(path)
        except NoNodeError:
            check_token(lease, token_info, NO_TOKEN, self.resource, "zookeeper")
            self._client.ensure_path(path.rpartition("/")[0] or "/")
            transaction.create(path, b"%d" % (NO_TOKEN if token_info.shared else token_info.token))
            return
        highest_token = parse_highest_token(text, path)
        new_highest = check_token(lease, token_info, highest_token, self.resource, "zookeeper")
        if new_highest == highest_token:
            transaction.check(path, stat.version)
        else:
            transaction.set_data(path, b"%d" % new_highest, stat.version)


class ZooKeeperLockFence(_BaseZooKeeperFence):
    """Fences the data of one node or, with `multi`, any nodes, by checking that the lock's node exists in the same
    ZooKeeper.

    Nothing is stored. A lease is refused from the moment its lock is free, even if no other client has acquired it yet.
    """

    def __init__(self, client: Any, path: str, *, lock: str, namespace: str = "", chroot: str = "") -> None:
        """`lock`: the name of the lock, in `namespace`, of clients with the URL `zookeeper://.../chroot`. `client`: a
        kazoo client connected to the same ZooKeeper."""
        super().__init__(client, path)
        root = "/" + chroot.strip("/") if chroot.strip("/") else ""
        self._base_path, self._queue_path = (
            root + TOKEN_BASE,
            f"{root}{ROOT}/{engine_key(check_namespace(namespace), check_name(lock))}",
        )

    def _add_token_check(self, transaction: Any, lease: LeaseLike, token_info: TokenInfo) -> None:
        # The multi checks again that the node exists, but not its version: every renewal changes that.
        transaction.check(self._lock_node_path(lease, token_info), _ANY_VERSION)

    def _lock_node_path(self, lease: LeaseLike, token_info: TokenInfo) -> str:
        """The lock's node with this token: the base plus the zxid that created the node, which never changes."""
        self._client.sync(self._queue_path)  # a follower may lag behind and not have a lock that was just granted
        names, queue_stat = self._read_if_exists(self._client.get_children, self._queue_path, include_data=True) or (
            [],
            None,
        )
        base = parse_base((self._read_if_exists(self._client.get, self._base_path) or (b"0", None))[0])
        holders = {f"{self._queue_path}/{node.name}": mode_of(node) for node in NodeQueue(names).holders}
        stats = {path: stat for path in holders if (stat := self._client.exists(path)) is not None}
        tokens = {base + stat.czxid: path for path, stat in stats.items()}
        if (path := tokens.get(token_info.token)) is None:
            # If there is no newer holder, the error names the zxid at which the queue last changed.
            ended_at = base + (self._client.last_zxid if queue_stat is None else queue_stat.pzxid)
            newer = [token for token in tokens if token > token_info.token]
            raise_stale(lease, token_info, max(newer, default=ended_at), self.resource, "zookeeper")
        check_shared(token_info, holders[path] == "shared")
        return path

    def _read_if_exists(self, read: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of `read`; None if the node does not exist."""
        try:
            return read(*args, **kwargs)
        except NoNodeError:
            return None
