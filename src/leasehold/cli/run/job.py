"""`leasehold run`: hold a name while a command runs. Without click: `command.py` has what click needs."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from leasehold.blocking import Client, Lease, Lock
from leasehold.cli import exit_codes, render
from leasehold.cli.console import Console, is_terminal
from leasehold.cli.option import Option, Options, choice, file_path
from leasehold.cli.options import (
    LEASE_VARIABLE,
    AcquireOptions,
    acquire_options,
    audit_options,
    is_label,
    positive_seconds_option,
    seconds_option,
    strict_options,
    usage_error_if,
)
from leasehold.cli.run.child import CannotRun, Child
from leasehold.cli.run.result_file import RunResult
from leasehold.cli.run.signals import Interrupted, SignalQueue
from leasehold.cli.run.supervisor import OnLost, Supervisor
from leasehold.cli.run.telemetry import RunHooks, RunTelemetry, telemetry_options
from leasehold.cli.run.terminal import Terminal
from leasehold.config import API_KEY_VARIABLE, URL_VARIABLE
from leasehold.core import timing
from leasehold.errors import LeaseholdError, LeaseLost, NotAcquired, SelfDeadlock

DEFAULT_KILL_AFTER = 5.0
RELEASE_TIMEOUT = 1.5  # of the two seconds that the docs promise


class RunOptions(NamedTuple):
    """The options that only `run` and `elect` have, checked against the ttl."""

    ttl: float
    max_hold: float | None
    on_lost: OnLost
    kill_after: float | None
    drift: float = timing.DRIFT

    def checked(self) -> RunOptions:
        if self.kill_after is None:
            return self
        usage_error_if(
            self.kill_after > self.ttl / 3,
            f"--kill-after {self.kill_after:g} is more than a third of --ttl {self.ttl:g}: "
            f"SIGTERM would be sent before a renewal could fail. Use at most {self.ttl / 3:.4g}, or a longer --ttl",
        )
        usage_error_if(
            self.max_hold is not None and self.kill_after >= self.max_hold,
            f"--kill-after {self.kill_after:g} must be shorter than --max-hold",
        )
        return self

    def grace(self, granted: float) -> float:
        """Seconds between SIGTERM and SIGKILL, from the ttl that the engine granted, which may be less than --ttl."""
        life = granted if self.max_hold is None else min(granted, self.max_hold)
        return min(DEFAULT_KILL_AFTER if self.kill_after is None else self.kill_after, life / 3)


# The options of `run`, in the order of its help.
RUN_OPTIONS = Options(
    (
        Option("-c", "--command", "line", metavar="STRING", help="Run STRING through /bin/sh instead of CMD."),
        *acquire_options,
        *strict_options,
        positive_seconds_option(
            "--max-hold", help="Stop CMD after SECS: send SIGTERM shortly before, and SIGKILL when the time is up."
        ),
        Option(
            "--on-lost",
            click_type=partial(choice, "term", "kill", "ignore"),
            default="term",
            show_default=True,
            help="What to do when the lease is lost. term: SIGTERM, then SIGKILL; kill: SIGKILL only; "
            "ignore: leave CMD running (only if the resource checks tokens).",
        ),
        seconds_option(
            "--kill-after",
            help="Time between SIGTERM and SIGKILL; at most a third of --ttl. "
            "Default: 5, or a third of the granted ttl if that is shorter.",
        ),
        Option(
            "--skip-ok",
            is_flag=True,
            help="If NAME is busy, exit 0 without a message: another process is running the job, and cron has "
            "nothing to mail.",
        ),
        Option(
            "--result-file",
            click_type=file_path,
            metavar="FILE",
            help="At the end, write the result to FILE as JSON, described by `leasehold docs reference/json`.",
        ),
        *audit_options,
        *telemetry_options,
    )
)


def run_job(
    console: Console,
    /,
    name: str,
    command: tuple[str, ...],
    line: str | None,
    max_hold: float | None,
    on_lost: OnLost,
    kill_after: float | None,
    strict: bool,
    drift: float,
    skip_ok: bool,
    result_file: str | None,
    metrics_file: str | None,
    metrics_group: tuple[str, ...],
    otel: bool,
    audit_file: str | None,
    audit_key_file: str | None,
    **given: Any,
) -> int:
    """Hold NAME while CMD runs; see the help of the command."""
    options = AcquireOptions(**given).checked()
    run_options = RunOptions(options.ttl, max_hold, on_lost, kill_after, drift).checked()
    usage_error_if(line is not None and bool(command), "-c STRING cannot be combined with CMD")
    usage_error_if(line is None and not command, "nothing to run: pass CMD after NAME, or -c STRING")
    argv = ["/bin/sh", "-c", line] if line is not None else list(command)
    usage_error_if(argv[0].startswith("-"), f"CMD cannot begin with a dash: {argv[0]!r}. Is it a misspelt option?")
    usage_error_if(options.min_hold > (max_hold or options.min_hold), "--min-hold must not exceed --max-hold")
    result = RunResult(console.namespace, name, argv, result_file)
    telemetry = RunTelemetry(console, metrics_file, metrics_group, otel, audit_file, audit_key_file)
    if options.purpose is None and is_label(os.path.basename(argv[0])):
        options = options._replace(purpose=os.path.basename(argv[0]))
    busy_code = exit_codes.BUSY if options.busy_code is None else options.busy_code

    def lock(client: Client) -> Lock:
        return options.lock(client, name, max_hold=max_hold, strict=strict)

    busy_code = exit_codes.OK if skip_ok else busy_code
    job = RunJob(console, name, argv, lock, run_options, result, busy_code, telemetry)
    try:
        job.run()
    except LeaseholdError as error:
        result.failed(error, exit_codes.code_for(error))
        raise
    except Interrupted as interrupted:
        result.interrupted(exit_codes.SIGNALLED + interrupted.signum)
        raise
    finally:
        try:
            result.write()
        except OSError as error:  # keep the exit code of the run
            console.say(f"the --result-file could not be written: {error}", error=True)
        telemetry.write_result(name, result.exit_code)
    return result.exit_code


class RunJob(NamedTuple):
    """One run: fork the child, acquire, supervise, release."""

    console: Console
    name: str
    argv: list[str]
    lock: Callable[[Client], Lock]
    run_options: RunOptions
    result: RunResult
    busy_code: int
    telemetry: RunTelemetry

    def run(self) -> None:
        child = Child(self.argv)  # fork before the client starts a thread
        try:
            with (
                self.telemetry.start() as hooks,
                self.console.client(
                    ttl=self.run_options.ttl, on_event=hooks.hook, drift=self.run_options.drift
                ) as client,
            ):
                try:
                    lease = self._hold_and_run(client, child, hooks)
                finally:
                    # Leaving the block releases the lease, or undoes an attempt without an answer. A silent engine must
                    # not delay the caller: a release that is not confirmed by then leaves the name to its ttl.
                    client._core.options = client._core.options.replace(call_timeout=RELEASE_TIMEOUT)
            if lease is not None:
                self._check_release(lease)
        finally:
            child.abandon()

    def _hold_and_run(self, client: Client, child: Child, hooks: RunHooks) -> Lease | None:
        """Acquire the lease, and run CMD under it. None: the name is busy."""
        lock = self.lock(client)
        began = time.monotonic()
        try:
            lease = self._acquire(lock)
        except NotAcquired as busy:
            self.result.busy(busy, self.busy_code)
            if self.busy_code != exit_codes.OK or self._interactive:  # cron sends a mail for every line
                advice = "" if busy.waited else "; pass -w SECS to wait for it"
                self.console.say(render.busy_text(busy) + advice)
            return None
        self.result.granted(lease, time.monotonic() - began)
        self.console.say(f"acquired {self.name} (token {lease.token})", detail=True)
        signal_queue = SignalQueue()
        try:
            self._run_child(lease, child, signal_queue, hooks.environment(lease))
        finally:
            signal_queue.close()
        return lease

    def _check_release(self, lease: Lease) -> None:
        """If the engine no longer had the grant when it was released, another holder may have worked beside CMD. The
        exit code says so, unless CMD failed: its own code tells the caller more."""
        reason = lease.lost_reason
        if reason is None or self.result.outcome != "done":
            return
        self.console.say(
            f"the lease of {self.name} (token {lease.token}) was lost before CMD ended: "
            f"{LeaseLost.EXPLANATIONS[reason]}; another holder may have worked at the same time",
            error=True,
        )
        code = exit_codes.OK if self.run_options.on_lost == "ignore" else exit_codes.LOST
        self.result.lost_at_release(reason, self.result.exit_code or code)

    def _acquire(self, lock: Lock) -> Lease:
        """Acquire. Report the wait to a person first: a silent wait would look like a hang."""
        nested = os.environ.get("LEASEHOLD_LOCK") == self.name and lock.shape.limit == 1
        if (self._interactive or nested) and lock.options.wait != 0:
            try:
                return lock.acquire(wait=0)
            except NotAcquired as busy:
                if nested and str(busy.token) == os.environ.get("LEASEHOLD_TOKEN"):
                    why = "this command runs under that lock and would wait for itself"
                    raise SelfDeadlock(self.name, token=busy.token, why=why) from None
                if self._interactive:
                    self.console.say(f"{render.busy_text(busy)}; waiting")
        return lock.acquire()

    @property
    def _interactive(self) -> bool:
        """Whether a person reads the messages: on a terminal, or with -v."""
        return self.console.verbosity > 0 or is_terminal(sys.stderr)

    def _run_child(
        self, lease: Lease, child: Child, signal_queue: SignalQueue, trace_environment: dict[str, str | None]
    ) -> None:
        terminal = Terminal()
        supervisor = Supervisor(
            lease,
            child,
            signal_queue,
            terminal,
            on_lost=self.run_options.on_lost,
            kill_after=self.run_options.grace(lease.ttl),
            say=lambda text: self.console.say(text, error=True),
        )
        signal_queue.open()
        if terminal.stdio_is_tty:
            terminal.give_to(child.pid)
        try:
            if (descriptor := lease._core.liveness_descriptor()) is not None:
                child.keep_open(descriptor, lease.ttl)
            child.start({**lease_environment(lease), **engine_environment(self.console), **trace_environment})
        except CannotRun as failed:
            terminal.take_back(child.pid)
            self._report_cannot_run(failed)
            return
        began = time.monotonic()
        try:
            supervisor.watch()
        except BaseException:  # a bug, or no memory: nothing may go on under a lease that is released now
            child.signal_group(signal.SIGKILL)
            raise
        seconds = time.monotonic() - began
        code = exit_codes.LOST if supervisor.stopped else child.exit_code
        self.result.ended(code, child.exit_code, seconds, supervisor.lost_reason, supervisor.end_signal)

    def _report_cannot_run(self, failed: CannotRun) -> None:
        code = exit_codes.NOT_FOUND if failed.missing else exit_codes.CANNOT_RUN
        hint = "is it in $PATH?" if failed.missing else "is it executable, with a #! line?"
        if failed.missing and " " in failed.program:
            hint = "use -c to run it through a shell"
        self.console.say(f"cannot run {failed}; {hint}", error=True)
        self.result.not_run(str(failed), code)


def lease_environment(lease: Lease) -> dict[str, str | None]:
    """The variables for CMD. None removes a variable that was inherited, such as from an outer `leasehold run`, or from
    a script that used `leasehold acquire`."""
    return {
        "LEASEHOLD_LOCK": lease.name,
        "LEASEHOLD_TOKEN": str(lease.token),
        "LEASEHOLD_HOLDER": lease.holder,
        "LEASEHOLD_TTL": f"{lease.ttl:g}",
        "LEASEHOLD_SHARED": "1" if lease.shared else None,
        "LEASEHOLD_SLOT": None if lease.slot is None else str(lease.slot),
        "LEASEHOLD_HELD": "1",
        LEASE_VARIABLE: None,
    }


def engine_environment(console: Console) -> dict[str, str | None]:
    """The engine and namespace of this command for CMD, as far as they may be seen: a process's environment is readable
    by every process of its user, and often logged."""
    found: dict[str, str | None] = {API_KEY_VARIABLE: None}
    if console.namespace:
        found["LEASEHOLD_NAMESPACE"] = console.namespace
    if console.url is not None and has_password(console.url):
        found[URL_VARIABLE] = ""  # an error for a `leasehold` in CMD; without it, that would use another engine
    elif console.url is not None:
        scheme, _, target = console.url.partition("://")
        if scheme == "sqlite" and target.startswith("."):  # CMD may change its working directory
            target = f"{quote(os.getcwd())}/{target}"
        found[URL_VARIABLE] = f"{scheme}://{target}"
    return found


def has_password(url: str) -> bool:
    """Whether a URL has, or may have, a password: `user:password@`, also inside an option, or an option for one."""
    if url.startswith("sqlite:"):
        return False
    options = [option.partition("=")[2] for option in url.partition("?")[2].split("&")]
    for each in (url, *map(unquote, options)):  # an option may be a URL, such as listen_url
        credentials, at, _ = each.partition("://")[2].rpartition("@")
        if at and ":" in credentials:
            return True
    return re.search("pass|secret|token|scram", unquote(url)) is not None
