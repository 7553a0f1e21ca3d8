"""Until when a session surely lives: never later than by the leader's own count.

The leader ends a session, and with it all its nodes, when it has not heard from the session for the session timeout. If
the client is connected to a follower, the leader hears from it only indirectly. The follower answers heartbeats and
reads without the leader, and reports the sessions it has heard from only when the leader asks, every half tick. A
follower that is cut off from the leader keeps answering until it notices, and meanwhile the next waiter may be granted
the name. So an answer alone proves nothing.

An answered *write* has been to the leader, on the same stream as everything the follower reported before. What the
client sent half a tick or more before that write had been reported by then. That heartbeat is confirmed, and the
session lives for at least one timeout after it. The connect that created a session is confirmed at once: a majority has
agreed to it. A connect that resumed a session was accepted by the leader alone, which may have lost its majority: any
later write confirms it. The client does not know the tick, but no session timeout is shorter than two ticks, so a
quarter of the timeout is half a tick or more.
"""

from __future__ import annotations

from collections import deque
from typing import Final

# Of the timeout: the leader knows every heartbeat that was answered at least this long before a write that it answers.
LEADER_DELAY_SHARE: Final = 1 / 4
_MIN_SPACING: Final = 1 / 32  # of the timeout: of heartbeats closer together than this only the first is kept
_NEVER: Final = float("-inf")


class SessionExpiry:
    __slots__ = ("_confirmed_at", "_drift", "_heartbeats", "session_id", "timeout")

    def __init__(self, drift: float) -> None:
        self._drift = drift
        self.session_id = 0
        self.timeout = 0.0
        self._confirmed_at = _NEVER
        self._heartbeats: deque[tuple[float, float]] = deque()  # (answered, sent), by age

    def on_connected(self, sent: float, timeout: float, session_id: int) -> None:
        """A leader created or resumed the session after a connect sent at `sent`."""
        if session_id != self.session_id:
            self.session_id, self._confirmed_at = session_id, sent
        self.timeout = timeout
        # The client may be connected to another server now: what it sent to the last one proves nothing. The connect
        # went to the leader itself, so a write can confirm it at once.
        self._heartbeats.clear()
        self._heartbeats.append((_NEVER, sent))

    def on_answered(self, sent: float, now: float) -> None:
        """A server answered a request or heartbeat that was sent at `sent`."""
        if not self._heartbeats or now - self._heartbeats[-1][0] >= self.timeout * _MIN_SPACING:
            self._heartbeats.append((now, sent))

    def provable_heartbeat(self, now: float) -> float:
        """The send time of the heartbeat that a write sent now confirms once it is answered."""
        heartbeats, settled_before = self._heartbeats, now - self.timeout * LEADER_DELAY_SHARE
        while len(heartbeats) > 1 and heartbeats[1][0] <= settled_before:
            heartbeats.popleft()
        return heartbeats[0][1] if heartbeats and heartbeats[0][0] <= settled_before else _NEVER

    def confirm(self, heartbeat: float) -> None:
        self._confirmed_at = max(self._confirmed_at, heartbeat)

    def expires_at(self, session_id: int) -> float:
        """The leader keeps this session at least until then. An older session has ended."""
        return self._confirmed_at + self.timeout * (1 - self._drift) if session_id == self.session_id else _NEVER
