"""ZooKeeper nodes over kazoo: the mark is a node of its own, and changes in the same multi as what it guards.

A multi is all or nothing. It names the version of the mark that was compared, so a token that came in between makes it
fail as a whole; then it is done again with the mark as it is now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError, RolledBackError, RuntimeInconsistency

from leasehold.errors import ConfigError, Unavailable
from leasehold.fences.rules import NEVER, Pass, Shown, check_resource, raised, to_read, to_write

_TRIES: Final = 100  # each failed one means that somebody else got through
_Errors: TypeAlias = tuple[type[Exception], ...]
_OVERTAKEN: Final[_Errors] = (BadVersionError, NodeExistsError, NoNodeError)
_ROLLED_BACK: Final[_Errors] = (RolledBackError, RuntimeInconsistency)  # of the others in a multi that failed


def _nothing(transaction: Any) -> None:
    """To be done beside raising the mark."""


class ZooKeeperFence:
    """The data of one node; with `multi`, any nodes. The mark is in the node `PATH.fence` (and `.fence.SLOT`).

    kazoo has no asyncio side: there, use `await asyncio.to_thread(fence.write, lease, data)`.
    """

    def __init__(self, client: Any, path: str, *, mark: str | None = None) -> None:
        self.path = self.resource = check_resource(path)
        if not path.startswith("/") or path.endswith("/"):
            raise ConfigError(f"{path!r} is no path of a node: /a/b")
        self._client = client
        self._mark = f"{path}.fence" if mark is None else mark

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
        body, shown = data.encode() if isinstance(data, str) else data, to_write(lease)

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
        """`again`: what tells, beside a changed mark, that another one came in between."""
        path = self._mark if shown.slot is None else f"{self._mark}.{shown.slot}"
        for _ in range(_TRIES):
            transaction = self._client.transaction()
            self._show(transaction, path, lease, shown)
            build(transaction)
            results: Sequence[Any] = transaction.commit()
            wrong = [one for one in results if isinstance(one, Exception) and not isinstance(one, _ROLLED_BACK)]
            if not wrong:
                return list(results[1:])
            if not isinstance(results[0], _OVERTAKEN) and not isinstance(wrong[0], again):
                raise wrong[0]
        raise Unavailable(f"{self.resource} changed under each of {_TRIES} tries") from wrong[0]

    def _show(self, transaction: Any, path: str, lease: Shown, shown: Pass) -> None:
        try:
            text, about = self._client.get(path)
        except NoNodeError:
            raised(lease, shown, NEVER, self.resource)
            self._client.ensure_path(path.rpartition("/")[0] or "/")
            transaction.create(path, b"%d" % (NEVER if shown.shared else shown.token))
            return
        mark = int(text)
        after = raised(lease, shown, mark, self.resource)
        if after == mark:
            transaction.check(path, about.version)
        else:
            transaction.set_data(path, b"%d" % after, about.version)

    def __repr__(self) -> str:
        return f"<ZooKeeperFence {self.path}>"
