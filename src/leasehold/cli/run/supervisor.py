"""The loop between a lease and a child: the lease's end is the child's end, and a signal to one reaches the other.

When the lease runs out:  TERM at its local deadline less `kill_after`, KILL at the deadline, to the whole group.
When the engine says gone: both at once, since another holder may exist already. The same after a pause of this
process or machine past the deadline: the first thing looked at on waking is the lease, before anything is passed on.
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

# `select` counts time awake only, the lease counts suspend too: look this often, or waking up would be noticed late.
_CHECK_INTERVAL: Final = 0.5
_GROUP_POLL_INTERVAL: Final = 0.02  # the end of a grandchild is told to nobody


class Supervisor:
    """Runs from the child's start to the end of its group, or of the child alone if the lease was good throughout."""

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
        self.end_signal: int | None = None  # by a signal, which the child got as well
        self.lost_reason: Reason | None = None  # why the child was stopped, or went on unprotected
        self._kill_at: float | None = None  # set once TERM is sent; a renewal that comes later does not call it back
        self._killed = False
        self._suspending = False  # told to stop, and waiting for the child to have stopped
        self._pending_messages: list[str] = []
        lease.on_lost(lambda _: signal_queue.wake())

    def watch(self) -> None:
        while True:
            self._enforce_lease()
            self._child_stopped(self._child.poll())
            if self._child.ended and not self._group_still_stopping():
                break
            for signum in self._signal_queue.read(self._seconds_to_next_check()):
                # The lease comes first: after a pause nothing may run on a lease that ended meanwhile.
                self._enforce_lease()
                self._forward_signal(signum)
        self._terminal.take_back(self._child.pid)
        for text in self._pending_messages:
            self._say(text)

    # ------------------------------------------------------------ the lease

    def _enforce_lease(self) -> None:
        """Stop the child when the lease says so."""
        if not self._lease.held:
            self._on_lease_lost(self._lease.lost_reason or "unknown")
        elif self._kill_at is not None and monotonic() >= self._kill_at:
            self._kill()
        elif self._on_lost == "term" and self._kill_at is None and self._lease.remaining <= self._kill_after:
            self._term(self._lease._expiry_reason(), self._lease.remaining)

    def _on_lease_lost(self, reason: Reason) -> None:
        if self.lost_reason is None:
            self.lost_reason = reason
            if self._on_lost == "ignore":
                self._report(f"{self._lost_text(reason)}; --on-lost ignore lets {self._program} go on")
        if self._on_lost == "ignore" or self._killed:
            return
        if self._on_lost == "term" and self._kill_at is None:
            self._child.signal_group(signal.SIGTERM)
        self._kill()

    def _term(self, reason: Reason, seconds: float) -> None:
        self.lost_reason, self._kill_at = reason, monotonic() + seconds
        self._child.signal_group(signal.SIGTERM)
        self._child.signal_group(signal.SIGCONT)  # a stopped process would never see it
        why = LeaseLost.EXPLANATIONS[reason] if reason == "max_hold" else "it was not renewed in time"
        self._report(
            f"the lease of {self._lease.name} (token {self._lease.token}) ends in {seconds:.1f} s: {why}; "
            f"sent TERM to {self._program}, KILL follows"
        )

    def _kill(self) -> None:
        assert self.lost_reason is not None
        self._killed = True
        self._child.signal_group(signal.SIGKILL)
        self._report(f"{self._lost_text(self.lost_reason)}; killed {self._program} and its group")

    def _report(self, text: str) -> None:
        """Say it now if stderr takes it, else at the end: a full pipe must not come between TERM and KILL."""
        self._pending_messages.append(text)
        while self._pending_messages and _is_writable(2):
            self._say(self._pending_messages.pop(0))

    def _lost_text(self, reason: Reason) -> str:
        return f"the lease of {self._lease.name} (token {self._lease.token}) is lost: {LeaseLost.EXPLANATIONS[reason]}"

    @property
    def stopped(self) -> bool:
        """Whether the child was stopped for the lease's sake, or ended too late to be sure that it was not needed."""
        return self.lost_reason is not None and self._on_lost != "ignore"

    @property
    def _program(self) -> str:
        return f"{os.path.basename(self._child.command[0])} (pid {self._child.pid})"

    def _group_still_stopping(self) -> bool:
        """After TERM the child may be gone and its own children still busy: they get the same time."""
        return self._kill_at is not None and not self._killed and self._child.signal_group(0)

    def _seconds_to_next_check(self) -> float:
        if self._child.ended:
            return _GROUP_POLL_INTERVAL
        if self._on_lost == "ignore" or self._killed:
            return _CHECK_INTERVAL
        if self._kill_at is not None:
            return min(_CHECK_INTERVAL, self._kill_at - monotonic())
        seconds = self._lease.remaining - (self._kill_after if self._on_lost == "term" else 0.0)
        return min(_CHECK_INTERVAL, seconds)

    # ---------------------------------------------------------- the signals

    def _forward_signal(self, signum: int) -> None:
        if signum in FORWARDED_TO_GROUP:
            self._child.signal_group(signum)
            if signum in TERMINATING:
                self.end_signal = signum
        elif signum in FORWARDED_TO_CHILD:
            self._child.signal(signum)
        elif signum == signal.SIGTSTP:  # Ctrl-Z, where this process has the terminal: rest once the child does
            self._suspending = True
            self._child.signal_group(signal.SIGTSTP)
        elif signum == signal.SIGCONT:
            self._resume()

    def _child_stopped(self, stopped_by: int | None) -> None:
        """The child has been stopped. By the terminal: do as any job would. By anybody else: that is their affair."""
        if stopped_by in (signal.SIGTTIN, signal.SIGTTOU):
            if self._terminal.give_to(self._child.pid):
                self._child.signal_group(signal.SIGCONT)
            else:  # this job is in the background itself: tell the shell that it waits for the terminal
                self._suspend()
        elif stopped_by == signal.SIGTSTP and (self._suspending or self._terminal.is_foreground_group(self._child.pid)):
            self._suspend()

    def _suspend(self) -> None:
        """Stop as the child has, so that the shell has its prompt back. Nothing is renewed meanwhile: so all of the
        group must stand still, and `_resume` is only reached past `_enforce_lease`."""
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
    """Whether a line can be written without waiting: a pipe that is ready has room for a page."""
    try:
        return bool(select.select([], [descriptor], [], 0)[1])
    except OSError:  # closed
        return False
