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

SETTLED: Final = 1 / 4  # of the timeout: what was answered so long before a write, the leader knew when it answered
_APART: Final = 1 / 32  # of the timeout: touches closer together than this are not kept apart
_NEVER: Final = float("-inf")


class Trust:
    __slots__ = ("_proven", "_touches", "session", "timeout")

    def __init__(self) -> None:
        self.session = 0  # its number
        self.timeout = 0.0
        self._proven = _NEVER
        self._touches: deque[tuple[float, float]] = deque()  # (answered, sent), by age

    def connected(self, sent: float, timeout: float, session: int) -> None:
        """A leader confirmed the session, or began it, upon a connect sent then."""
        if session != self.session:
            self.session, self._proven = session, sent
        self.timeout = timeout
        # Another server may be on the way now: what the last one was told proves nothing. What the leader itself was
        # told needs no time to settle.
        self._touches.clear()
        self._touches.append((_NEVER, sent))

    def answered(self, sent: float, now: float) -> None:
        """Some server answered a request or a heart-beat sent then."""
        if not self._touches or now - self._touches[-1][0] >= self.timeout * _APART:
            self._touches.append((now, sent))

    def provable(self, now: float) -> float:
        """Which touch a write sent now will prove once it is answered."""
        touches, settled = self._touches, now - self.timeout * SETTLED
        while len(touches) > 1 and touches[1][0] <= settled:
            touches.popleft()
        return touches[0][1] if touches and touches[0][0] <= settled else _NEVER

    def proved(self, touch: float) -> None:
        self._proven = max(self._proven, touch)

    def end(self, session: int) -> float:
        """The leader keeps this session at least until then. An older one it has ended."""
        return self._proven + self.timeout * (1 - DRIFT) if session == self.session else _NEVER
