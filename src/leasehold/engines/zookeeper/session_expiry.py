"""Until when a session surely lives: never later than the leader's own count.

The leader ends a session, and with it all its nodes, when nothing was heard of it for its timeout. A client that talks
to a follower is heard of at second hand: a follower answers heart-beats and reads by itself, and tells the leader which
sessions it has heard of only when the leader asks, every half tick. A follower cut off from the leader answers on until
it notices, and the one next in line is granted the name meanwhile. So an answer proves nothing by itself.

An answered *write* has been to the leader, on the same stream as all the follower told it before. What the client sent
half a tick or more before that write had been told by then: that touch is proven, and the session lives at least one
timeout longer than it. The connect that began a session is proven at once: a majority has agreed to it. One that took
a session up again the leader has confirmed by itself, and perhaps it leads nobody any more: any write after it proves
it. The tick is not known here, but no session is shorter than two of them, so a quarter of the timeout is half a tick
or more.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from leasehold.core.timing import DRIFT

LEADER_DELAY_SHARE: Final = (
    1 / 4
)  # of the timeout: what was answered so long before a write, the leader knew when it answered
_MIN_SPACING: Final = 1 / 32  # of the timeout: touches closer together than this are not kept apart
_NEVER: Final = float("-inf")


class SessionExpiry:
    __slots__ = ("_confirmed_at", "_heartbeats", "session_id", "timeout")

    def __init__(self) -> None:
        self.session_id = 0  # its number
        self.timeout = 0.0
        self._confirmed_at = _NEVER
        self._heartbeats: deque[tuple[float, float]] = deque()  # (answered, sent), by age

    def on_connected(self, sent: float, timeout: float, session_id: int) -> None:
        """A leader confirmed the session, or began it, upon a connect sent then."""
        if session_id != self.session_id:
            self.session_id, self._confirmed_at = session_id, sent
        self.timeout = timeout
        # Another server may be on the way now: what the last one was told proves nothing. What the leader itself was
        # told needs no time to settle.
        self._heartbeats.clear()
        self._heartbeats.append((_NEVER, sent))

    def on_answered(self, sent: float, now: float) -> None:
        """Some server answered a request or a heart-beat sent then."""
        if not self._heartbeats or now - self._heartbeats[-1][0] >= self.timeout * _MIN_SPACING:
            self._heartbeats.append((now, sent))

    def provable_heartbeat(self, now: float) -> float:
        """Which touch a write sent now will prove once it is answered."""
        heartbeats, settled_before = self._heartbeats, now - self.timeout * LEADER_DELAY_SHARE
        while len(heartbeats) > 1 and heartbeats[1][0] <= settled_before:
            heartbeats.popleft()
        return heartbeats[0][1] if heartbeats and heartbeats[0][0] <= settled_before else _NEVER

    def confirm(self, heartbeat: float) -> None:
        self._confirmed_at = max(self._confirmed_at, heartbeat)

    def expires_at(self, session_id: int) -> float:
        """The leader keeps this session at least until then. An older one it has ended."""
        return self._confirmed_at + self.timeout * (1 - DRIFT) if session_id == self.session_id else _NEVER
