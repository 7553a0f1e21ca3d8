"""What the twins of a client share: one session, and with it one connection, their nodes, and their watches.

The session owns every node the client has in a line; when it ends, they are gone. Requests of one session are carried
out in the order they were sent, whichever twin sent them, and those of one flight arrive together: so a list asked for
with a create sees that create, and a release sent after an attempt nobody waited for finds what it made.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar
from weakref import ref

from kazoo.exceptions import NoNodeError
from kazoo.protocol.serialization import Delete
from kazoo.protocol.states import KazooState

from leasehold.book import Book, every
from leasehold.core.timing import BEAT, LOOK_EVERY
from leasehold.engines.zookeeper.address import Address
from leasehold.engines.zookeeper.trust import Trust
from leasehold.engines.zookeeper.wire import Keeper, Lost, Reply, is_write, meaning
from leasehold.errors import ConfigError, Unavailable
from leasehold.model import Claim
from leasehold.runtime.base import Runtime, Signal

T = TypeVar("T")

_log = logging.getLogger("leasehold.zookeeper")

_SWEEP: Final = 1 / 16  # of the session's timeout, between two looks for what is over
_ELECTIONS: Final = 3  # each lets a session begin anew: so many of its timeouts it may outlast a silence
_GOODBYE: Final = 0.5  # seconds for the server to confirm that the session is over
_MEMORY: Final = 1_000  # lines, and nodes of others, that are remembered; forgetting one costs a request or a wait


def remember(memory: dict[str, T], path: str, value: T) -> None:
    """Enter it as the newest, and forget the oldest."""
    memory.pop(path, None)
    memory[path] = value
    while len(memory) > _MEMORY:
        memory.pop(next(iter(memory)), None)


class Mine:
    """A node of this session, by its claim's mark."""

    __slots__ = ("born", "claim", "name", "path", "session", "slot", "token", "until", "waits")

    def __init__(self, claim: Claim, path: str, stat: Any, until: float) -> None:
        self.claim, self.path, self.born, self.session = claim, path, stat.czxid, stat.ephemeralOwner
        self.name = path.rpartition("/")[2]
        self.token = 0  # made when it is first seen to hold, and never again
        self.slot: int | None = None
        self.until = until  # nobody else ends it before
        self.waits = False  # what its data say


class Watch:
    """One watch upon one node, for all claims of this client that wait for it. Calls come from the session's thread."""

    __slots__ = ("_session", "marks", "path")

    def __init__(self, session: Session, path: str) -> None:
        self._session = ref(session)
        self.path, self.marks = path, set[str]()

    def __call__(self, _event: object) -> None:
        """It changed, or the connection is gone and with it the watch: whoever waits looks again."""
        if session := self._session():
            session.fired(self)
            for mark in list(self.marks):
                session.book.deliver("go", mark, 0.0, None)


class Session:
    def __init__(self, address: Address, runtime: Runtime, book: Book, call_timeout: float) -> None:
        self.address, self.book = address, book
        self._runtime, self._call_timeout = runtime, call_timeout
        self.now = runtime.now
        self._start()

    def _start(self) -> None:
        """As if nothing had ever been sent."""
        self._guard = self._runtime.guard()
        self._keeper: Keeper | None = None
        self._callers: set[Signal] = set()  # who waits for a connection, or for its end
        self._connected = False
        self.trust = Trust()
        self.mine: dict[str, Mine] = {}
        self.doubts: set[str] = set()  # marks whose node may be there: the answer to its create never came
        self.watches: dict[str, Watch] = {}  # by path
        self._watching: dict[str, Watch] = {}  # by mark
        self.parents: dict[str, float] = {}  # lines that were there when last used
        self.draining: dict[str, int] = {}  # lines out of numbers, by the transaction that made them
        self.seen: dict[str, tuple[int, float]] = {}  # nodes of others: a version, and since when it is unchanged
        self.skew = 0.0  # the leader's wall clock less our own clock, when it last wrote for us
        self._sweep_at = self._sweep_every = 0.0

    # ------------------------------------------------------------- requests

    async def flight(
        self, runtime: Runtime, requests: Sequence[Any], deadline: float, *, creates: str | None = None
    ) -> list[Reply]:
        """Send all at once and wait for all answers. `Lost`: the connection broke; `Unavailable`: the deadline.
        `creates`: the mark whose node is made by it, and in doubt from the moment it is sent."""
        keeper = await self._ready(runtime, deadline)
        sent, signal = runtime.now(), runtime.signal()
        with self._guard:
            proof = self.trust.provable(sent)
        replies = [Reply() for _ in requests]
        last = replies[-1]  # answers come in the order of their requests
        last.told = lambda _: signal.set()
        if creates is not None:
            self.doubts.add(creates)
        keeper.submit(requests, replies)
        while not last.done:
            left = deadline - runtime.now()
            if left <= 0:
                raise self._silence()
            await signal.wait(min(left, LOOK_EVERY))
        for reply in replies:
            if reply.error is not None and isinstance(meaning(reply.error), Lost):
                raise Lost from reply.error
        with self._guard:
            self.trust.answered(sent, runtime.now())
            if any(is_write(request) and reply.error is None for request, reply in zip(requests, replies, strict=True)):
                self.trust.proved(proof)  # an error may be a follower's own: an operation it throttled, say
        return replies

    async def _ready(self, runtime: Runtime, deadline: float) -> Keeper:
        """The keeper, once it is connected: what is sent before that would be carried out at nobody knows what time."""
        if self._connected and (keeper := self._keeper):
            return keeper
        signal = runtime.signal()
        self._callers.add(signal)
        try:
            while True:
                with self._guard:
                    if self.book.over or not self.book.twins:  # a call that was under way when the client was closed
                        raise ConfigError("this client is closed: make a new one")
                    keeper = self._keeper or self._open()
                if self._connected:
                    return keeper
                if keeper.refused:
                    self._ended(keeper)  # the next call tries anew
                    raise ConfigError("ZooKeeper refused the credentials of this URL") from keeper.trouble
                left = deadline - runtime.now()
                if left <= 0:
                    raise self._silence()
                await signal.wait(min(left, LOOK_EVERY))
        finally:
            self._callers.discard(signal)

    def _silence(self) -> Unavailable:
        trouble = self._keeper.trouble if self._keeper is not None else None
        why = f" ({trouble})" if trouble is not None else ""
        return Unavailable(f"ZooKeeper at {self.address.hosts} gave no answer in time{why}", engine="zookeeper")

    # --------------------------------------------------------------- watches

    def watch(self, path: str, mark: str) -> Watch:
        """What to send along with a read, so that this claim is woken. One per node, however many wait for it."""
        with self._guard:
            if (last := self._watching.get(mark)) and last.path != path:
                self._leave(last, mark)
            watch = self.watches.get(path)
            if watch is None:
                watch = self.watches[path] = Watch(self, path)
            watch.marks.add(mark)
            self._watching[mark] = watch
        return watch

    def fired(self, watch: Watch) -> None:
        with self._guard:
            if self.watches.get(watch.path) is watch:
                del self.watches[watch.path]

    def _leave(self, watch: Watch, mark: str) -> None:
        """A watch that nobody waits for must not stay for as long as its node does."""
        watch.marks.discard(mark)
        if not watch.marks:
            if self.watches.get(watch.path) is watch:
                del self.watches[watch.path]
            if self._keeper is not None:
                self._keeper.unwatch(watch.path, watch)

    def unchanged(self, path: str, version: int, now: float) -> float:
        """For how long this node has been seen with this version, by our own clock."""
        seen = self.seen.get(path)
        if seen is None or seen[0] != version:
            seen = (version, now)
            remember(self.seen, path, seen)
        return now - seen[1]

    def forget(self, mark: str) -> None:
        """Nothing of this claim is left at the server."""
        self.mine.pop(mark, None)
        self.doubts.discard(mark)
        with self._guard:
            if watch := self._watching.pop(mark, None):
                self._leave(watch, mark)

    @property
    def owner(self) -> int:
        return self._keeper.owner if self._keeper is not None else 0

    def trusted(self, mine: Mine) -> float:
        """Until when its node surely stands. `Lost`: its session is over, whatever an earlier answer may have said."""
        with self._guard:
            end = min(mine.until, self.trust.end(mine.session))
        if end == float("-inf"):
            raise Lost
        return end

    # ------------------------------------- from the session's own thread

    def _open(self) -> Keeper:
        """Its callbacks know this session weakly: a dropped client must not be kept alive by its own connection. What a
        keeper says that is not this session's any more, a goodbye above all, is not about its nodes."""
        here = ref(self)

        def on(step: Callable[..., None]) -> Callable[..., None]:
            def call(*args: Any) -> None:
                if (session := here()) is not None and session._keeper is keeper:
                    step(session, *args)

            return call

        keeper = self._keeper = Keeper(
            self.address,
            self._call_timeout,
            self.now,
            confirmed=on(Session._confirmed),
            touched=on(Session._touched),
            passed=on(Session._sweep),
            changed=on(Session._changed),
            ended=on(Session._ended),
        )
        try:
            keeper.open()
        except (OSError, RuntimeError) as error:
            self._keeper = None
            raise Unavailable(f"no connection to ZooKeeper can be made: {error}", engine="zookeeper") from error
        return keeper

    def _confirmed(self, sent: float, timeout: float, session: int) -> None:
        with self._guard:
            self.trust.connected(sent, timeout, session)
        self.book.lingers = max(BEAT, _ELECTIONS * timeout)
        self._sweep_every = timeout * _SWEEP

    def _touched(self, sent: float) -> None:
        with self._guard:
            self.trust.answered(sent, self.now())

    def _sweep(self) -> None:
        """End what nobody answers for any more. A session keeps its nodes for as long as it lives, and whoever asks but
        once cannot tell how long a node has stood there: so a lease that lapsed, and a place that was given up while
        the server could not be told, are ended by the client they were of.

        `until` is past: a lease was trusted for less, and an attempt that nobody knows of has reached its deadline.
        """
        now = self.now()
        if now < self._sweep_at or not self._connected:
            return
        self._sweep_at = now + self._sweep_every
        for mark, mine in every(self.mine):
            if now > mine.until and (mine.token or not self.book.knows(mark)):
                self.delete(mark, mine)

    def delete(self, mark: str, mine: Mine, then: Callable[[], object] = lambda: None) -> None:
        """Send it without waiting; whatever is not answered is left as it is."""

        def told(reply: Reply) -> None:
            if reply.error is None or isinstance(reply.error, NoNodeError):
                self.forget(mark)
                then()

        if (keeper := self._keeper) is not None and self._connected:
            keeper.submit([Delete(mine.path, -1)], [Reply(told)])

    def _changed(self, state: str) -> None:
        self._connected = state == KazooState.CONNECTED
        if state == KazooState.LOST:
            self._over()
        if not self._connected:
            self.book.doubt("the connection to ZooKeeper broke")
        if state == KazooState.SUSPENDED:
            _log.warning("the connection to ZooKeeper at %s broke; connecting anew", self.address.hosts)
        self._wake()

    def _over(self) -> None:
        """The session has ended, and its nodes with it."""
        self.mine.clear()
        self.doubts.clear()

    def _ended(self, keeper: Keeper) -> None:
        if self._keeper is keeper:
            self._keeper, self._connected = None, False
        self._wake()

    def _wake(self) -> None:
        for signal in list(self._callers):
            signal.set()

    # ------------------------------------------------------------- its end

    async def close(self, runtime: Runtime) -> None:
        """End the session, and with it whatever it still holds. Waits a moment for the server to confirm."""
        signal = runtime.signal()
        with self._guard:  # whoever opens one just now found the client open
            keeper = self._keeper
        if keeper is None:
            return
        self._callers.add(signal)
        keeper.leave()
        until = runtime.now() + min(_GOODBYE, self._call_timeout)
        while self._keeper is keeper and runtime.now() < until:
            await signal.wait(until - runtime.now())
        keeper.sever()
        self._callers.discard(signal)
        self._keeper, self._connected = None, False
        self._over()

    def after_fork(self) -> None:
        if self._keeper is not None:
            self._keeper.after_fork()
        self._start()

    def __del__(self) -> None:
        keeper = getattr(self, "_keeper", None)
        if keeper is not None and not sys.is_finalizing():  # nothing is released at exit
            keeper.leave()
