"""One stream of server-sent events per open tab: frames with the parts of its page that changed.

Tabs that show the same to callers with the same rights share a channel, which renders at most twice a second, and only
while a tab takes frames. Nothing is queued: a tab takes what changed since its last frame, each part once, when its
connection has room. A tab that was too slow, or is behind by more than 256 kB, gets `resync` instead and loads the page
again. `drain` says that the server is shutting down.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Sized
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from time import thread_time
from typing import Any, Final, NamedTuple

from leasehold.server.dashboard.live import Changes, Part
from leasehold.server.messages import EventStream, encode
from leasehold.server.problems import TooMany

INTERVAL: Final = 0.5  # seconds between two frames
MAX_FRAME: Final = 256 * 1024  # bytes, but for the first of a tab, which has the whole page
MAX_TABS: Final = 200  # of one caller; more must poll
MAX_CHANNELS: Final = 250  # that are kept: a page has some hundred kilobytes
SLOW_READER: Final = 5.0  # seconds that a frame may take to leave
_KEEP_CHANNEL: Final = 30.0  # seconds without a tab: it may come back and go on where it was

_log = logging.getLogger("leasehold.server.dashboard")


class Rendered(NamedTuple):
    """A page as it is now."""

    parts: dict[str, Part]
    as_of: float  # of the picture
    say: str = ""  # for those who do not see the page: what matters most


Render = Callable[[], Awaitable[Rendered]]
Turn = Callable[[], AbstractAsyncContextManager[None]]  # of a caller, to render


class Channel:
    """What one page shows to callers with the same rights."""

    def __init__(self, channel_id: str, now: Callable[[], float], channels: Sized) -> None:
        self.channel_id, self._now, self._channels = channel_id, now, channels
        self.changes = Changes()
        self.as_of, self.say = 0.0, ""
        self.taken_at = now()
        self._next_at = float("-inf")
        self._rendering = asyncio.Lock()

    async def advance(self, render: Render, turn: Turn) -> None:
        """Render the page again, unless that was just done. Raises what the page and the turn raise. A tab waits for
        the turn of its own caller: another caller, who sees the same page, may have used up its turns for long."""
        self.taken_at = self._now()
        if self.taken_at < self._next_at:
            return
        async with turn(), self._rendering:
            if self._now() < self._next_at:
                return
            began = thread_time()
            page = await render()
            # Large pages, or many of them, are rendered less often: all together use about a tenth of a core, so that
            # renewals are answered in time.
            pause = 9 * (thread_time() - began) * len(self._channels)
            self._next_at = self._now() + max(INTERVAL * 0.9, pause)
            self.as_of, self.say = page.as_of, page.say
            self.changes.update(page.parts)

    def position(self, event_id: str) -> int:
        """The frame that a tab had last, by the id of its last event; 0: none that is known here."""
        channel_id, _, frame = event_id.rpartition("-")
        known = channel_id == self.channel_id and frame.isascii() and frame.isdigit() and len(frame) < 16
        return min(int(frame), self.changes.frame) if known else 0


class Streams:
    """The open tabs of this worker."""

    def __init__(self, now: Callable[[], float], wall: Callable[[], float], new_id: Callable[[], str]) -> None:
        self._now, self._wall, self._new_id = now, wall, new_id
        self._channels: dict[Hashable, Channel] = {}
        self._tabs: set[Tab] = set()
        self.resyncs = 0

    def __len__(self) -> int:
        return len(self._tabs)

    def open(
        self, key: Hashable, render: Render, turn: Turn, last_event_id: str, who: str, still: Callable[[], bool]
    ) -> EventStream:
        """A stream for a tab of the caller `who`. `still`: whether it may go on to see this. Raises TooMany."""
        if sum(tab.who == who for tab in self._tabs) >= MAX_TABS:
            raise TooMany(f"{who} has {MAX_TABS} live pages at this server, which is the limit: retry")
        self._forget_old_channels()
        channel = self._channels.get(key)
        if channel is None:
            while len(self._channels) >= MAX_CHANNELS:  # its tabs go on; one that comes back gets the whole page
                del self._channels[min(self._channels, key=lambda each: self._channels[each].taken_at)]
            channel = self._channels[key] = Channel(self._new_id(), self._now, self._channels)
        tab = Tab(self, channel, partial(channel.advance, render, turn), last_event_id, who, still)
        self._tabs.add(tab)
        return EventStream(tab.next_events, tab.close)

    def drain(self) -> None:
        for tab in self._tabs:
            tab.end()

    def forget(self, tab: Tab) -> None:
        self._tabs.discard(tab)
        asyncio.get_running_loop().call_later(_KEEP_CHANNEL + INTERVAL, self._forget_old_channels)

    def _forget_old_channels(self) -> None:
        for old in [each for each, channel in self._channels.items() if self._now() - channel.taken_at > _KEEP_CHANNEL]:
            del self._channels[old]

    def frame(self, channel: Channel, after: int) -> bytes:
        """The event with what changed after a frame."""
        data: dict[str, Any] = {
            "now": round(self._wall(), 3),
            "as_of": round(channel.as_of, 3),
            "parts": channel.changes.since(after),
            "say": channel.say,
        }
        event_id = f"{channel.channel_id}-{channel.changes.frame}".encode()
        return b"id: %s\nevent: frame\ndata: %s\n\n" % (event_id, encode(data))

    @property
    def now(self) -> Callable[[], float]:
        return self._now


class Tab:
    def __init__(
        self,
        streams: Streams,
        channel: Channel,
        advance: Callable[[], Awaitable[None]],
        last_event_id: str,
        who: str,
        still: Callable[[], bool],
    ) -> None:
        self._streams, self._channel, self._advance, self.who, self._still = streams, channel, advance, who, still
        self._last_event_id = last_event_id
        self._seen = -1  # the last frame that was taken; -1: none yet
        self._given_at: float | None = None
        self._ending = asyncio.Event()
        self._ended = self._drained = False

    async def next_events(self) -> bytes | None:
        """The next frame; None at the end."""
        if self._ended:
            return None
        if self._given_at is not None:
            if self._streams.now() - self._given_at > SLOW_READER:
                return self._resync()
            with suppress(TimeoutError):
                async with asyncio.timeout(INTERVAL):
                    await self._ending.wait()
        if self._ending.is_set():
            self._ended = True
            return b"event: drain\ndata:\n\n" if self._drained else None
        if not self._still():
            return self._resync()  # loading the page again leads to the login
        try:
            await self._advance()
        except Exception as error:  # the page says what is wrong when it is loaded
            _log.info("a page cannot be rendered for its stream: %s", type(error).__name__)
            return self._resync()
        if self._seen < 0:
            self._seen = self._channel.position(self._last_event_id)
        data = self._streams.frame(self._channel, self._seen)
        if self._given_at is not None and len(data) > MAX_FRAME:
            return self._resync()
        self._seen, self._given_at = self._channel.changes.frame, self._streams.now()
        return data

    def _resync(self) -> bytes:
        self._ended = True
        self._streams.resyncs += 1
        return b"event: resync\ndata:\n\n"

    def end(self) -> None:
        """The server is shutting down."""
        self._drained = True
        self._ending.set()

    def close(self) -> None:
        """The browser is gone."""
        self._streams.forget(self)
        self._ending.set()
