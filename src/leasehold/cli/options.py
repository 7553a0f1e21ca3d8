"""Options that several commands share. They are checked before anything else happens: a wrong one exits with 64."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from leasehold.blocking import Client, Lock
from leasehold.cli.console import Console
from leasehold.cli.option import Option, Options, bad_value, usage_error, whole_number
from leasehold.config import DAY, LockArguments, check_ttl, parse_duration
from leasehold.core import timing
from leasehold.core.names import check_name
from leasehold.errors import ConfigError, LeaseholdError

if TYPE_CHECKING:
    import click
    from click.shell_completion import CompletionItem

    from leasehold.telemetry.audit import AuditFile

F = TypeVar("F", bound=Callable[..., Any])


LEASE_VARIABLE = "LEASEHOLD_LEASE"
AUDIT_VARIABLE = "LEASEHOLD_AUDIT"
KEY_FILE_VARIABLE = "LEASEHOLD_AUDIT_KEY_FILE"
MAX_SLOTS = 2**31 - 1  # the largest limit that every engine supports


def checked_name(value: str) -> str:
    """A lock's name: any text of 1 to 255 bytes."""
    try:
        return check_name(value)
    except ConfigError as bad:
        raise bad_value(str(bad)) from None


def checked_prefix(value: str) -> str:
    """The beginning of names. It may be empty."""
    return checked_name(value) if value else value


def live_names(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names for shell completion. Errors give no names: a message would disturb the prompt. Names in which a shell
    would find more than a word are left out: bash puts a completion on the command line as it is, and another client
    may have chosen it."""
    from click.shell_completion import CompletionItem

    console = ctx.find_object(Console) or Console()
    try:
        with Client(console.url, namespace=console.namespace, call_timeout=1.0) as client:
            names = {holding.name for holding in client.inspect(incomplete)}
    except LeaseholdError:
        return []
    return [CompletionItem(name) for name in sorted(names) if _is_word(name)]


def _is_word(name: str) -> bool:
    """Whether it means nothing but itself on the command line of a shell."""
    return name[0] != "-" and all(char.isalnum() or char in "-_./:,@%+=" for char in name)


def seconds(value: str | float) -> float:
    """A finite number of seconds, 0 or more; also as 30s, 10m or 1h30m."""
    try:
        number = parse_duration(value) if isinstance(value, str) else float(value)
    except ValueError:
        raise bad_value(f"{value!r} is not a number of seconds, such as 30, 0.5, 10m or 1h30m") from None
    if not isfinite(number) or number < 0:
        raise bad_value(f"{value!r} is not a valid number of seconds: it must be finite, and 0 or more")
    return number


def positive_seconds(value: str | float) -> float:
    """A finite number of seconds, more than 0."""
    number = seconds(value)
    if number == 0:
        raise bad_value("it must be more than 0 seconds")
    return number


seconds_option = partial(Option, type=seconds, metavar="SECS")
positive_seconds_option = partial(Option, type=positive_seconds, metavar="SECS")


def drift_share(value: str | float) -> float:
    """A share of the time measured."""
    try:
        return timing.check_drift(float(value))
    except ValueError:  # ConfigError is one
        raise bad_value(f"{value!r} is not a share between 0 and {timing.MAX_DRIFT}, such as 0.01") from None


def label(value: str) -> str:
    """A short text, for display only."""
    if not is_label(value):
        raise bad_value("it must be printable text of 1 to 200 characters")
    return value


def is_label(text: str) -> bool:
    return 0 < len(text) <= 200 and text.isprintable()


def name_argument(command: F) -> F:
    from click import argument

    return argument("name", type=checked_name, shell_complete=live_names)(command)


# Of `run` and `acquire`, the commands that acquire a lock.
acquire_options = Options(
    (
        Option("-n", "--nonblock", is_flag=True, help="Do not wait: exit 75 at once if NAME is busy."),
        seconds_option("-w", "--wait", help="Wait for at most SECS, then exit 75. Default: wait for ever."),
        Option("-x", "--exclusive", is_flag=True, help="Hold NAME exclusively. This is the default."),
        Option("-s", "--shared", is_flag=True, help="Share NAME with other shared holders, as a reader."),
        Option(
            "--slots",
            click_type=partial(whole_number, 1),
            metavar="N",
            help="Allow up to N holders at once, as a semaphore. All users of NAME must pass the same N.",
        ),
        positive_seconds_option(
            "--ttl",
            default=30.0,
            show_default=True,
            help="Time to live: the lease expires SECS after its last renewal.",
        ),
        seconds_option(
            "--delay",
            default=0.0,
            help="After the lease is lost, keep NAME taken for SECS more. "
            "Use it when the resource cannot check tokens.",
        ),
        seconds_option(
            "--min-hold",
            default=0.0,
            help="Keep NAME taken for at least SECS even if it is released earlier, for example so that a cron job "
            "runs once although the clocks of its hosts differ.",
        ),
        Option(
            "-E",
            "--conflict-exit-code",
            "busy_code",
            click_type=partial(whole_number, 0, 255),
            metavar="CODE",
            help="Exit with CODE instead of 75 if NAME is busy.",
        ),
        Option(
            "--holder", type=label, metavar="TEXT", help="Label of the holder, for display only. Default: host:pid."
        ),
        Option("--purpose", type=label, metavar="TEXT", help="Purpose of the lock, for display only."),
    )
)


class AcquireOptions(NamedTuple):
    """The values of `acquire_options`, with their combinations checked."""

    nonblock: bool
    wait: float | None
    exclusive: bool
    shared: bool
    slots: int | None
    ttl: float
    delay: float
    min_hold: float
    busy_code: int | None
    holder: str | None
    purpose: str | None

    def checked(self) -> AcquireOptions:
        usage_error_if(self.nonblock and self.wait is not None, "-n cannot be combined with -w: -n means -w 0")
        usage_error_if(self.exclusive and self.shared, "-x cannot be combined with -s")
        usage_error_if(
            self.shared and self.slots is not None,
            "-s cannot be combined with --slots: the number of readers is not limited",
        )
        usage_error_if(
            self.exclusive and (self.slots or 1) > 1,
            "-x cannot be combined with --slots N greater than 1",
        )
        check_ttl_option(self.ttl)
        usage_error_if((self.slots or 1) > MAX_SLOTS, f"--slots {self.slots} is too large: the maximum is {MAX_SLOTS}")
        return self

    def lock(
        self,
        client: Client,
        name: str,
        *,
        max_hold: float | None = None,
        outlives: bool = False,
        strict: bool = False,
    ) -> Lock:
        options: LockArguments = {
            "ttl": self.ttl,
            "wait": 0 if self.nonblock else self.wait,
            "holder": self.holder,
            "purpose": self.purpose,
            "min_hold": self.min_hold,
            "max_hold": max_hold,
            "delay": self.delay,
            "require": {"outlives"} if outlives else (),
            "strict": strict,
        }
        try:
            if self.slots is not None:
                return client.semaphore(name, self.slots, **options)
            if self.shared:
                return client.rwlock(name).read(**options)
            return client.lock(name, **options)
        except ConfigError as bad:  # a number out of range; a missing feature of the engine is `Unsupported`
            raise usage_error(str(bad)) from None


# How long a command trusts its lease; for those that watch one.
strict_options = Options(
    (
        Option(
            "--strict",
            is_flag=True,
            help="Lose the lease as soon as one renewal fails or is overdue, instead of retrying until its time is up.",
        ),
        Option(
            "--drift",
            type=drift_share,
            default=timing.DRIFT,
            show_default=True,
            metavar="SHARE",
            help="How far the clocks of this machine and of the engine may drift apart, as a share of the time "
            "measured. CMD must end this share of the ttl before the lease expires.",
        ),
    )
)


def check_ttl_option(ttl: float) -> None:
    usage_error_if(
        ttl > DAY,
        f"--ttl must be at most {DAY:g} s, not {ttl:g}: a holder that dies would keep the name for that long. A lease "
        "may be held for longer: `leasehold run` and `elect` renew it while CMD runs, `leasehold renew` on request",
    )
    try:
        check_ttl(ttl)
    except ConfigError as bad:
        raise usage_error(str(bad)) from None


def files_or_default(files: tuple[str, ...], otherwise: str = "") -> tuple[str, ...]:
    """The audit files that were named, else the one of the environment."""
    default = os.environ.get(AUDIT_VARIABLE)
    usage_error_if(not files and not default, f"name the audit FILE, or set {AUDIT_VARIABLE}{otherwise}")
    return files or (str(default),)


def audit_files(command: F) -> F:
    from click import argument

    return argument(
        "files", nargs=-1, metavar="[FILE]...", callback=lambda _ctx, _param, files: files_or_default(files)
    )(command)


key_file_option = Option(
    "--key-file",
    envvar=KEY_FILE_VARIABLE,
    show_envvar=True,
    metavar="FILE",
    help="The file with the key that the audit records are sealed with.",
)


# Of commands that write audit records; `audit_hook` takes their values.
audit_options = Options(
    (
        Option(
            "--audit",
            "audit_file",
            envvar=AUDIT_VARIABLE,
            show_envvar=True,
            metavar="FILE",
            help="Append audit records to FILE, described by `leasehold docs operations/audit`. If FILE cannot be "
            "written, the command does nothing.",
        ),
        Option(
            "--audit-key-file",
            envvar=KEY_FILE_VARIABLE,
            show_envvar=True,
            metavar="FILE",
            help="Seal the audit records with the key in FILE.",
        ),
    )
)


@contextmanager
def audit_hook(path: str | None, key_file: str | None) -> Iterator[AuditFile | None]:
    """The hook that writes audit records. None: no file was named."""
    if not path:
        yield None
        return
    from leasehold.telemetry.audit import AuditFile  # loaded if needed: every `leasehold run` would wait for it

    file = AuditFile(path, key_file=key_file or None)
    try:
        yield file
    finally:
        with suppress(OSError, LeaseholdError):  # logged; it must not change the exit code
            file.close()


def usage_error_if(condition: bool, text: str) -> None:
    if condition:
        raise usage_error(text)
