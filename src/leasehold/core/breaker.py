"""When to stop asking an engine that does not answer: the decisions of the circuit breaker, without clock or locks."""

from __future__ import annotations

from typing import Final

MAX_UNANSWERED: Final = 5  # calls in a row without an answer open the breaker
PROBE_INTERVAL: Final = 1.0  # seconds between the calls that go to the engine while it is open


class Breaker:
    """Closed: every call passes. Open: one call per `PROBE_INTERVAL` passes, as a probe. Any answer closes it.

    A probe reserves nothing: if it is cancelled, or gets no answer for minutes, the next one still follows in time.
    """

    def __init__(self) -> None:
        self.unanswered = 0
        self.open = False
        self._next_probe_at = 0.0

    def retry_in(self, now: float) -> float:
        """0: the call may go to the engine. Otherwise the call is refused: the seconds until a probe is due."""
        if not self.open:
            return 0.0
        if now >= self._next_probe_at:
            self._next_probe_at = now + PROBE_INTERVAL
            return 0.0
        return self._next_probe_at - now

    def on_answer(self) -> bool:
        """The engine answered a call. True: this closed the breaker."""
        was_open, self.open, self.unanswered = self.open, False, 0
        return was_open

    def on_silence(self, now: float) -> bool:
        """A call got no answer. True: this opened the breaker."""
        self.unanswered += 1
        if self.open or self.unanswered < MAX_UNANSWERED:
            return False
        self.open, self._next_probe_at = True, now + PROBE_INTERVAL
        return True
