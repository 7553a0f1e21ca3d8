"""What happened through this server, for callers that watch it. For what happens through all servers, collect their
audit logs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from leasehold.core.names import check_namespace, check_prefix
from leasehold.core.timing import HEARTBEAT_INTERVAL
from leasehold.events import Event
from leasehold.server.messages import EventStream, Request, checked, encode, known_arguments
from leasehold.server.problems import TooMany
from leasehold.server.routes import Stream

if TYPE_CHECKING:
    from leasehold.server.app import App

OnEvent: TypeAlias = Callable[[Event, str], None]

MAX_WATCHERS: Final = 100  # streams of one caller
_NOT_STREAMED: Final = frozenset({"attempted", "renewed"})  # too many, and rarely of interest
_JSON_MEMBERS: Final = tuple(field for field in Event._fields if field not in ("kind", "engine", "group"))


class _Watcher(NamedTuple):
    namespace: str
    prefix: str
    who: str
    stream: Stream[bytes]


class Feed:
    """A hook that passes events on to callers that watch, also at other workers of this server."""

    def __init__(self) -> None:
        self._watchers: dict[int, _Watcher] = {}
        self.on_event: OnEvent = _ignore  # gets every event of all workers, with the trace id of its request
        self.send_to_workers: OnEvent = _ignore

    def __call__(self, event: Event, trace: str = "") -> None:
        self.pass_on_here(event, trace)
        self.send_to_workers(event, trace)

    def pass_on_here(self, event: Event, trace: str) -> None:
        self.on_event(event, trace)
        if event.kind in _NOT_STREAMED:
            return
        encoded = b""
        for watcher in self._watchers.values():
            if watcher.namespace == event.namespace and event.name.startswith(watcher.prefix):
                encoded = encoded or _encode(event)  # once for all
                watcher.stream.push(encoded)

    def watch(self, namespace: str, prefix: str, who: str) -> Stream[bytes]:
        """A stream of encoded events for the caller `who`. Raises TooMany: each event costs something per stream."""
        if sum(watcher.who == who for watcher in self._watchers.values()) >= MAX_WATCHERS:
            raise TooMany(f"{who} has {MAX_WATCHERS} streams of events at this server, which is the limit: retry")
        stream = Stream[bytes]()
        self._watchers[id(stream)] = _Watcher(namespace, prefix, who, stream)
        return stream

    def forget(self, stream: Stream[bytes]) -> None:
        stream.close()
        self._watchers.pop(id(stream), None)

    def close(self) -> None:
        for watcher in self._watchers.values():
            watcher.stream.close()

    def __len__(self) -> int:
        return len(self._watchers)


def _ignore(_event: Event, _trace: str) -> None:
    """Until a handler is set."""


async def events(app: App, request: Request) -> EventStream:
    """Server-sent events: `event` is the kind, `data` what happened. A comment every 5 s keeps the connection alive."""
    arguments = known_arguments(request, "namespace", "prefix")
    with checked():
        namespace = check_namespace(arguments.get("namespace", ""))
        prefix = check_prefix(arguments.get("prefix", ""))
    request.allow_reading(namespace, prefix, exact=False)
    with app.limits.call(request.caller, "read", namespace):
        stream = app.watch(namespace, prefix, request.caller.who)

    async def next_events() -> bytes | None:
        found = await stream.take(HEARTBEAT_INTERVAL)
        if not app.authenticator.still(request.caller):
            return None
        if found:
            return b"".join(found)
        return None if stream.closed else b": alive\n\n"

    return EventStream(next_events, lambda: app.feed.forget(stream))


def _encode(event: Event) -> bytes:
    members = {name: value for name in _JSON_MEMBERS if (value := getattr(event, name)) is not None}
    return b"event: %s\ndata: %s\n\n" % (event.kind.encode(), encode(members))
