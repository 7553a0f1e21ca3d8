"""The loop that watches a lease and a child: it ends the child when the lease ends, and forwards signals to the child.

If the lease cannot be renewed: SIGTERM at `valid_until` less `kill_after`, SIGKILL at `valid_until`, to its group.
If the lease is strict, and a renewal failed or is overdue: SIGTERM at once, SIGKILL `kill_after` later: the engine
keeps the name for longer than that.
If the engine reports the lease gone: both at once, because there may be another holder already. The same after a pause
of this process or machine past `valid_until`: on waking, the loop checks the lease before it forwards any signal.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable
from time import monotonic
from typing import Final, Literal, TypeAlias

from leasehold.blocking import Lease
from leasehold.cli.run.child import Child
from leasehold.cli.run.signals import FORWARDED_TO_CHILD, FORWARDED_TO_GROUP, TERMINATING, SignalQueue
from leasehold.cli.run.terminal import Terminal
from leasehold.errors import LeaseLost
from leasehold.model import Reason

OnLost: TypeAlias = Literal["term", "kill", "ignore"]

# `select` does not count suspend, the lease does: without frequent checks, a wake-up would be noticed late.
_CHECK_INTERVAL: Final = 0.5
_GROUP_POLL_INTERVAL: Final = 0.02  # the end of a grandchild sends no signal here


class Supervisor:
    """Runs until the child has ended, and after SIGTERM for a lost lease until its whole group has."""

    def __init__(
        self,
        lease: Lease,
        child: Child,
        signal_queue: SignalQueue,
        terminal: Terminal,
        *,
        on_lost: OnLost,
        kill_after: float,
        say: Callable[[str], None],
    ) -> None:
        self._lease, self._child, self._signal_queue, self._terminal = lease, child, signal_queue, terminal
        self._on_lost, self._kill_after, self._say = on_lost, kill_after, say
        self.end_signal: int | None = None  # the terminating signal that was forwarded to the child
        self.lost_reason: Reason | None = None  # why the child was stopped, or continued unprotected
        self._kill_at: float | None = None  # set when SIGTERM is sent; a later renewal does not cancel it
        self._killed = False
        self._suspending = False  # got SIGTSTP, and waits until the child has stopped
        self._pending_messages: list[str] = []
        lease._call_when_lost(lambda _: signal_queue.wake())

    def watch(self) -> None:
        while True:
            self._enforce_lease()
            self._child_stopped(self._child.poll())
            if self._child.ended and not self._group_still_stopping():
                break
            for signum in self._signal_queue.read(self._seconds_to_next_check()):
                # The lease first: after a pause, nothing may continue on a lease that has ended.
                self._enforce_lease()
                self._forward_signal(signum)
        self._terminal.take_back(self._child.pid)
        for text in self._pending_messages:
            self._say(text)

    # ------------------------------------------------------------ the lease

    def _enforce_lease(self) -> None:
        """Stop the child if the lease is lost or about to expire."""
        if not self._lease.held and not self._lost_before_its_time():
            self._on_lease_lost(self._lease.lost_reason or "unknown")
        elif self._kill_at is not None and monotonic() >= self._kill_at:
            self._kill()
        elif self._on_lost == "term" and self._kill_at is None and (left := self._seconds_left()) <= self._kill_after:
            self._term(self._lease.lost_reason or self._lease._expiry_reason(), left)

    def _lost_before_its_time(self) -> bool:
        """Whether a strict lease was lost, while the engine surely keeps the name: CMD gets the time to end itself."""
        lease = self._lease
        by_clock = lease.lost_reason in ("unreachable", "stalled")
        return lease._strict and by_clock and self._on_lost == "term" and lease._until_engine_deadline() > 0

    def _seconds_left(self) -> float:
        """Until CMD must have ended."""
        left = self._lease._until_engine_deadline()
        return left if self._lease.held else min(left, self._kill_after)

    def _on_lease_lost(self, reason: Reason) -> None:
        if self.lost_reason is None:
            self.lost_reason = reason
            if self._on_lost == "ignore":
                self._report(f"{self._lost_text(reason)}; {self._program} continues because of --on-lost ignore")
        if self._on_lost == "ignore" or self._killed:
            return
        if self._on_lost == "term" and self._kill_at is None:
            self._child.signal_group(signal.SIGTERM)
        self._kill()

    def _term(self, reason: Reason, seconds: float) -> None:
        self.lost_reason, self._kill_at = reason, monotonic() + seconds
        self._child.signal_group(signal.SIGTERM)
        self._child.signal_group(signal.SIGCONT)  # a stopped process does not handle signals
        why = LeaseLost.EXPLANATIONS[reason] if reason == "max_hold" else "it could not be renewed in time"
        self._report(
            f"the lease of {self._lease.name} (token {self._lease.token}) ends in {seconds:.1f} s: {why}; "
            f"sent SIGTERM to {self._program}, SIGKILL follows"
        )

    def _kill(self) -> None:
        assert self.lost_reason is not None  # noqa: S101  # for the type checker
        self._killed = True
        self._child.signal_group(signal.SIGKILL)
        self._report(f"{self._lost_text(self.lost_reason)}; killed {self._program} and its process group")

    def _report(self, text: str) -> None:
        """Print it now if stderr is writable, else at the end: a full pipe must not delay SIGKILL after SIGTERM."""
        self._pending_messages.append(text)
        while self._pending_messages and _is_writable(2):
            self._say(self._pending_messages.pop(0))

    def _lost_text(self, reason: Reason) -> str:
        return f"the lease of {self._lease.name} (token {self._lease.token}) is lost: {LeaseLost.EXPLANATIONS[reason]}"

    @property
    def stopped(self) -> bool:
        """Whether the child was stopped because of the lease, or ended only after the lease was lost."""
        return self.lost_reason is not None and self._on_lost != "ignore"

    @property
    def _program(self) -> str:
        return f"{os.path.basename(self._child.command[0])} (pid {self._child.pid})"

    def _group_still_stopping(self) -> bool:
        """After SIGTERM the child may have ended while its own children still run: they get the same time."""
        return self._kill_at is not None and not self._killed and self._child.signal_group(0)

    def _seconds_to_next_check(self) -> float:
        if self._child.ended:
            return _GROUP_POLL_INTERVAL
        if self._on_lost == "ignore" or self._killed:
            return _CHECK_INTERVAL
        if self._kill_at is not None:
            return min(_CHECK_INTERVAL, self._kill_at - monotonic())
        seconds = self._seconds_left() - (self._kill_after if self._on_lost == "term" else 0.0)
        return min(_CHECK_INTERVAL, seconds)

    # ---------------------------------------------------------- the signals

    def _forward_signal(self, signum: int) -> None:
        if signum in FORWARDED_TO_GROUP:
            self._child.signal_group(signum)
            if signum in TERMINATING:
                self.end_signal = signum
        elif signum in FORWARDED_TO_CHILD:
            self._child.signal(signum)
        elif signum == signal.SIGTSTP:  # Ctrl-Z while this process has the terminal: stop once the child has stopped
            self._suspending = True
            self._child.signal_group(signal.SIGTSTP)
        elif signum == signal.SIGCONT:
            self._resume()

    def _child_stopped(self, stopped_by: int | None) -> None:
        """React to a stopped child if the terminal stopped it. A stop by another process is left to that process."""
        if stopped_by in (signal.SIGTTIN, signal.SIGTTOU):
            if self._terminal.give_to(self._child.pid):
                self._child.signal_group(signal.SIGCONT)
            else:  # this job is in the background: stop it, so that the shell shows it as waiting for the terminal
                self._suspend()
        elif stopped_by == signal.SIGTSTP and (self._suspending or self._terminal.is_foreground_group(self._child.pid)):
            self._suspend()

    def _suspend(self) -> None:
        """Stop like the child, so that the shell gets its prompt back. The lease is not renewed meanwhile: so the whole
        group must be stopped, and `_resume` runs only after `_enforce_lease`."""
        self._suspending = False
        self._child.signal_group(signal.SIGSTOP)
        self._terminal.take_back(self._child.pid)
        os.kill(os.getpid(), signal.SIGSTOP)

    def _resume(self) -> None:
        if self._killed:
            return
        if self._terminal.stdio_is_tty:
            self._terminal.give_to(self._child.pid)
        self._child.signal_group(signal.SIGCONT)


def _is_writable(descriptor: int) -> bool:
    """Whether a line can be written without blocking: a writable pipe has room for a page."""
    try:
        return bool(select.select([], [descriptor], [], 0)[1])
    except OSError:  # closed
        return False
