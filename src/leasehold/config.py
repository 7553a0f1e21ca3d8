"""Options of clients and locks, checked once when they are built: a bad value never reaches an engine."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import timedelta
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, Self, TypeAlias, TypedDict, TypeVar, get_args

from leasehold.core import timing
from leasehold.core.names import check_namespace
from leasehold.credentials import Password, PasswordArgument, file_password
from leasehold.errors import ConfigError, Unsupported
from leasehold.events import Hook
from leasehold.model import Traits

T = TypeVar("T")

URL_VARIABLE: Final = "LEASEHOLD_URL"
API_KEY_VARIABLE: Final = "LEASEHOLD_API_KEY"  # for lock servers
# Other names of a scheme, as other libraries write them.
SCHEME_ALIASES: Final = {
    "postgres": "postgresql",
    "postgresql+psycopg": "postgresql",
    "mysql+pymysql": "mysql",
    "mariadb+pymysql": "mariadb",
    "valkey": "redis",
    "valkeys": "rediss",
}
_SCHEMES_WITHOUT_CREDENTIALS: Final = frozenset({"memory", "sqlite"})

_SCHEMES_WITHOUT_PASSWORD: Final = _SCHEMES_WITHOUT_CREDENTIALS | {"http", "https"}  # those have API keys

DEFAULT_URL: Final = "sqlite://"  # a file in the user's state directory: locks do not exclude other users


# Seconds, or a text such as "30s", "10m" or "1h30m".
Duration: TypeAlias = float | str | timedelta
OnUnavailable: TypeAlias = Literal["raise", "wait", "run"]
OnDeadlock: TypeAlias = Literal["wait", "raise"]
MAX_GROUP: Final = 80  # characters
# How long records are kept, and the longest ttl, unless a caller says otherwise: a mistyped ttl would block a name for
# as long.
DAY: Final = 86_400.0
MAX_RESULT: Final = 65_536  # bytes of a result that `once` keeps, unless a caller says otherwise
_DURATION: Final = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m(?!s))?(?:(\d+(?:\.\d+)?)s)?(?:(\d+)ms)?", re.ASCII)
_UNITS: Final = (86_400, 3_600, 60, 1, 0.001)


class Unset:
    """The type of UNSET: the argument was not given. For arguments where None has a meaning."""

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = Unset()


class _WithSecrets:
    """Options that contain a password. Not a named tuple: tools that report errors together with local variables, such
    as Sentry, write a tuple out value by value, whatever its repr shows."""

    def replace(self, **changes: Any) -> Self:
        """A copy with these values changed. All attributes are arguments of the constructor."""
        return type(self)(**{**vars(self), **changes})


class EngineConfig(_WithSecrets):
    """An engine's URL in parts. Only the scheme is ever shown, because the rest may contain a password."""

    def __init__(
        self,
        url: str,
        scheme: str,
        target: str,
        options: Mapping[str, str],
        call_timeout: float = 5.0,
        password: Password | None = None,
        drift: float = timing.DRIFT,
    ) -> None:
        self.url, self.scheme = url, scheme
        self.target = target  # everything between `scheme://` and `?`, decoded
        self.options = options
        self.call_timeout, self.drift = call_timeout, drift
        self.password = password  # of the option `password_file` or of `Client(password=...)`; not that in the URL

    def __repr__(self) -> str:
        return f"<EngineConfig {self.scheme}://>"

    @classmethod
    def parse(
        cls, url: str, call_timeout: float, drift: float = timing.DRIFT, password: PasswordArgument | None = None
    ) -> EngineConfig:
        """Split a URL. No part of one that cannot be parsed is shown: a character of the password that was not escaped
        may have made any part of it something else."""
        from urllib.parse import parse_qsl, unquote, urlsplit  # only here: it would slow `import leasehold` down

        if not isinstance(url, str) or not (found := re.fullmatch(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", url, re.DOTALL)):
            raise ConfigError(
                'an engine URL looks like "sqlite:///absolute/path.db" or "redis://host:6379/0"; '
                'this one does not begin with "scheme://"'
            )
        scheme, remainder = SCHEME_ALIASES.get(found[1].lower(), found[1].lower()), found[2]
        if not remainder.isprintable() or (
            scheme not in _SCHEMES_WITHOUT_CREDENTIALS and _has_unescaped_characters(remainder)
        ):
            raise ConfigError(
                f"this {scheme}:// URL has a character that must be percent-encoded, perhaps in its password: "
                "write @ as %40, / as %2F, ? as %3F, # as %23, [ as %5B, ] as %5D, % as %25, a space as %20"
            )
        try:
            query = urlsplit(f"//{remainder}").query
        except ValueError:
            raise ConfigError(
                f"the host of this {scheme}:// URL cannot be parsed: an IPv6 address has a bracket on each side, [::1]"
            ) from None
        try:
            pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
        except ValueError:
            raise ConfigError(
                f"the options of this {scheme}:// URL cannot be parsed: they are written ?name=value&name=value"
            ) from None
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            raise ConfigError(f"an option is given twice in this {scheme}:// URL")
        target, options = unquote(remainder.partition("?")[0]), dict(pairs)
        given = None if password is None else Password(password, "password=")
        if given is not None and scheme in _SCHEMES_WITHOUT_CREDENTIALS:
            raise ConfigError(f"{scheme}:// has no password: leave password= out")
        if scheme not in _SCHEMES_WITHOUT_PASSWORD and "password_file" in options:
            if given is not None:
                raise ConfigError(f"this {scheme}:// URL has password_file=: give either that or password=")
            given = file_password(options.pop("password_file"))
        return cls(f"{scheme}://{remainder}", scheme, target, MappingProxyType(options), call_timeout, given, drift)

    def password_or(self, in_url: str) -> Password:
        """The password for new connections. `in_url`: the one that is written in the URL, decoded."""
        if self.password is None:
            return Password(in_url, "the URL")
        if in_url:
            raise ConfigError(f"this {self.scheme}:// URL has a password: remove it, or password= or password_file=")
        return self.password

    def accept(self, **converters: Callable[[str], T]) -> dict[str, T]:
        """The URL's options after conversion. An unknown option is a ConfigError that lists the known ones.

        The ValueErrors of converters are shown, so their texts must not contain the value."""
        shared = () if self.scheme in _SCHEMES_WITHOUT_PASSWORD else ("password_file",)  # which `parse` has taken out
        for number, name in enumerate(self.options, 1):
            if name not in converters:
                known = sorted({*converters, *shared})
                raise ConfigError(
                    f"option {number} of this {self.scheme}:// URL does not exist{did_you_mean(name, known)}; "
                    f"known options: {', '.join(known) or 'none'}"
                )
        found = {}
        for name, text in self.options.items():
            try:
                found[name] = converters[name](text)
            except ValueError as bad:
                raise ConfigError(f"the option {name} of this {self.scheme}:// URL: {bad}") from None
        return found


def _has_unescaped_characters(remainder: str) -> bool:
    """Whether what follows `scheme://` has a delimiter of URLs where only a password would have one."""
    authority = re.split("[/?#]", remainder, maxsplit=1)[0]
    userinfo, _, _ = authority.rpartition("@")
    return "#" in remainder or "@" in remainder[len(authority) :] or any(char in userinfo for char in "@[] ")


def did_you_mean(name: str, known: Iterable[str], form: str = "{}") -> str:
    """` (did you mean x?)` if a known name is similar. Shows nothing of the given name."""
    from difflib import get_close_matches  # only here: it would slow `import leasehold` down

    similar = get_close_matches(name, list(known), n=1)
    return f" (did you mean {form.format(similar[0])}?)" if similar else ""


def parse_yes_no(text: str) -> bool:
    """For options of URLs."""
    if text not in ("yes", "no"):
        raise ValueError("must be yes or no")
    return text == "yes"


class ClientOptions(_WithSecrets):
    """The arguments of `Client` and `AsyncClient`. A client is pickled as its options."""

    def __init__(
        self,
        url: str | None = None,
        namespace: str = "",
        holder: str | None = None,
        ttl: float = 30.0,
        call_timeout: float = 5.0,
        on_event: Hook | None = None,
        max_ttl: float = DAY,
        breaker: bool = False,
        password: PasswordArgument | None = None,
        drift: float = timing.DRIFT,
    ) -> None:
        self.url, self.namespace, self.holder, self.password = url, namespace, holder, password
        self.ttl, self.max_ttl, self.call_timeout, self.drift = ttl, max_ttl, call_timeout, drift
        self.on_event, self.breaker = on_event, breaker

    def checked(self) -> ClientOptions:
        check_namespace(self.namespace)
        check_seconds("max_ttl", self.max_ttl, allow_zero=False)
        check_ttl(self.ttl, self.max_ttl)
        check_seconds("call_timeout", self.call_timeout, allow_zero=False)
        if self.on_event is not None and not callable(self.on_event):
            raise ConfigError("on_event must be a function that takes one event")
        _check_label("holder", self.holder)
        if not isinstance(self.breaker, bool):
            raise ConfigError(f"breaker must be True or False, not {_shorten(self.breaker)}")
        timing.check_drift(self.drift)
        return self

    def __repr__(self) -> str:
        return f"<ClientOptions namespace={self.namespace!r}>"

    def engine_config(self) -> EngineConfig:
        url, source = self.url, "the URL"
        if url is None:
            url, source = os.environ.get(URL_VARIABLE, DEFAULT_URL), f"${URL_VARIABLE}"
        if isinstance(url, str) and not url.strip():  # a variable that is not set: never silently another engine
            raise ConfigError(f"{source} is empty: set it to an engine's URL, or leave it out to use {DEFAULT_URL}")
        return EngineConfig.parse(url, self.call_timeout, self.drift, self.password)


class LockArguments(TypedDict, total=False):
    """The keyword arguments of `lock`, `read`, `write`, `semaphore` and `locked`."""

    ttl: Duration | None  # seconds a grant lives unrenewed; None: the client's
    wait: Duration | None  # seconds to wait in the queue; None: for ever, 0: try once
    holder: str | None  # who holds it, for display only; None: the client's
    purpose: str | None  # why it is held, for display only
    min_hold: Duration  # hold the name for at least this many seconds, even if released earlier
    max_hold: Duration | None  # give the name up after this many seconds: the lease is then lost
    delay: Duration  # extra seconds the engine holds the name after a lease is lost
    reentrant: bool  # the same thread or task may acquire it again
    require: Collection[str]  # traits the engine must promise, or the lock is refused
    on_unavailable: OnUnavailable  # if the engine does not answer: raise, wait, or run without any guarantee
    group: str | None  # the label `group` of its metrics; None: the name without its ids
    strict: bool  # the lease is lost at the first renewal that fails or is overdue, instead of AT_RISK
    on_deadlock: OnDeadlock  # if waiting for it is a deadlock: keep waiting, or search for deadlocks and raise


# Arguments of other lock libraries, and ours for the same.
_OTHER_ARGUMENTS: Final = {
    "timeout": "use ttl= for how long a lease lives unrenewed, wait= for how long to wait in the queue",
    "blocking_timeout": "use wait= for how long to wait in the queue",
    "blocking": "use wait=0 or try_acquire() to try once, wait=None to wait for ever",
    "expire": "use ttl= for how long a lease lives unrenewed",
    "auto_renewal": "every lease is renewed in the background until it is released; max_hold= limits that",
    "auto_renew": "every lease is renewed in the background until it is released; max_hold= limits that",
}


def refuse_unknown(where: str, names: Collection[str]) -> None:
    """Raise TypeError for an argument that does not exist, with ours if another library has it."""
    for name in sorted(names, key=lambda name: name not in _OTHER_ARGUMENTS):
        if advice := _OTHER_ARGUMENTS.get(name):
            raise TypeError(f"{where} has no {name!r}: {advice}")
        raise TypeError(f"{where} got an unexpected keyword argument {name!r}")


_DURATION_OPTIONS: Final = ("ttl", "wait", "min_hold", "max_hold", "delay")


def lock_options(where: str, default_ttl: float, max_ttl: float, arguments: Mapping[str, Any]) -> LockOptions:
    """Checked options from keyword arguments. A misspelt argument is a TypeError, as for any function."""
    if not arguments:
        return _default_options(default_ttl)
    refuse_unknown(where, set(arguments) - set(LockArguments.__annotations__))
    given = dict(arguments)
    for name in _DURATION_OPTIONS:
        if given.get(name) is not None:
            given[name] = check_seconds(name, given[name])
    if given.get("ttl") is None:
        given["ttl"] = default_ttl
    check_ttl(given["ttl"], max_ttl)
    given["require"] = parse_requirements(given.get("require", ()))
    return LockOptions(**given).checked()


@lru_cache(maxsize=64, typed=True)
def _default_options(ttl: float) -> LockOptions:
    """The options of a lock without arguments, as most are. Checking them took as long as building the lock."""
    return LockOptions(ttl).checked()


class LockOptions(NamedTuple):
    """The arguments of a lock, checked."""

    ttl: float
    wait: float | None = None
    holder: str | None = None
    purpose: str | None = None
    min_hold: float = 0.0
    max_hold: float | None = None
    delay: float = 0.0
    reentrant: bool = False
    require: frozenset[str] = frozenset()
    on_unavailable: OnUnavailable = "raise"
    group: str | None = None
    strict: bool = False
    on_deadlock: OnDeadlock = "wait"

    def checked(self) -> LockOptions:
        check_ttl(self.ttl, timing.NEVER)
        check_wait(self.wait)
        check_seconds("min_hold", self.min_hold)
        check_seconds("delay", self.delay)
        if self.max_hold is not None:
            check_seconds("max_hold", self.max_hold, allow_zero=False)
            if self.min_hold > self.max_hold:
                raise ConfigError(f"min_hold ({self.min_hold} s) must not exceed max_hold ({self.max_hold} s)")
        _check_label("holder", self.holder)
        _check_label("purpose", self.purpose)
        _check_label("group", self.group, MAX_GROUP)
        if not isinstance(self.strict, bool):
            raise ConfigError(f"strict must be True or False, not {_shorten(self.strict)}")
        if self.on_unavailable not in get_args(OnUnavailable):
            known = ", ".join(get_args(OnUnavailable))
            raise ConfigError(f"on_unavailable must be one of {known}, not {_shorten(self.on_unavailable)}")
        if self.on_deadlock not in get_args(OnDeadlock):
            known = ", ".join(get_args(OnDeadlock))
            raise ConfigError(f"on_deadlock must be one of {known}, not {_shorten(self.on_deadlock)}")
        if self.on_unavailable == "run" and "fencing" in self.require:
            raise ConfigError(
                'on_unavailable="run" cannot be combined with require={"fencing"}: a lease that the engine did not '
                'grant has no token; choose "raise" or "wait"'
            )
        return self


REQUIREMENTS: Final[Mapping[str, Callable[[Traits], bool]]] = MappingProxyType(
    {
        "fencing": lambda traits: traits.fencing,
        "fair": lambda traits: traits.fair,
        "push": lambda traits: traits.push,
        "shared": lambda traits: traits.shared,
        "slots": lambda traits: traits.slots,
        "outlives": lambda traits: traits.outlives,
        "break-notice": lambda traits: traits.break_notice,
        "resizable": lambda traits: traits.resizable,
        "engine-clock": lambda traits: traits.clock == "engine",
        "survives-restart": lambda traits: traits.survives in ("restart", "minority"),
        "survives-minority": lambda traits: traits.survives == "minority",
    }
)


def check_required(required: Collection[str], traits: Traits, engine: str) -> None:
    """Raise Unsupported if the engine's traits do not meet the lock's requirements."""
    missing = tuple(requirement for requirement in sorted(required) if not REQUIREMENTS[requirement](traits))
    if missing:
        raise Unsupported(
            f"{engine} does not promise {', '.join(missing)}, which this lock requires: use another engine, "
            "or remove it from require=",
            engine=engine,
            missing=missing,
        )


def parse_requirements(names: Collection[str]) -> frozenset[str]:
    if isinstance(names, str):
        raise ConfigError(f"require must be a set of names, such as {{{names!r}}}, not a string")
    unknown = sorted(set(names) - set(REQUIREMENTS))
    if unknown:
        raise ConfigError(f"require accepts {', '.join(REQUIREMENTS)}; not {', '.join(map(repr, unknown))}")
    return frozenset(names)


def check_limit(limit: int) -> int:
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit < 2**31:
        raise ConfigError(f"a semaphore's limit must be a whole number of at least 1 and below 2^31, not {limit!r}")
    return limit


def check_ttl(ttl: Duration, max_ttl: float = DAY) -> float:
    seconds = check_seconds("ttl", ttl, allow_zero=False)
    if seconds <= timing.MIN_DRIFT:
        raise ConfigError(f"ttl must be greater than {timing.MIN_DRIFT} s (the clock-drift margin), not {ttl!r}")
    if seconds > max_ttl:
        raise ConfigError(
            f"ttl must be at most {max_ttl:.15g} s, not {ttl!r}: a holder that dies would keep the name for that long; "
            "if you want that, pass max_ttl= to the client"
        )
    return seconds


def advise_ttl(work: Duration, network: Duration, safety: float = 3.0, drift: float = timing.DRIFT) -> float:
    """A ttl in seconds that survives `safety` times the worst case between two renewals.

    work     the longest your program may not run at all: a pause of its garbage collector or its virtual machine, a C
             call that keeps the interpreter lock; for a lease that is not renewed, the longest the work takes
    network  the longest a call to the engine may take, including a change of its leader or master
    safety   how many such cases in a row the lease must survive; at least 1
    drift    how far your clocks may drift apart, as a share of the time measured: the `drift` of the client

    Never less than a second. A longer ttl has one cost: a holder that dies keeps the name for that long.
    """
    seconds = check_seconds("work of advise_ttl", work) + check_seconds("network of advise_ttl", network)
    if not 1 <= safety < 1e9:
        raise ConfigError(f"safety of advise_ttl must be at least 1, not {safety!r}")
    return max(1.0, safety * seconds / (1 - timing.check_drift(drift)))


def check_wait(wait: Duration | None) -> float | None:
    return None if wait is None else check_seconds("wait", wait)


def check_keep(keep: Duration | None) -> float | None:
    return None if keep is None else check_seconds("keep", keep, allow_zero=False)


def check_seconds(what: str, value: Duration, allow_zero: bool = True) -> float:
    """The value in seconds. Raises ConfigError unless it is finite and not negative, and not 0 unless 0 is allowed."""
    seconds = value if value.__class__ is float or value.__class__ is int else _to_seconds(what, value)
    if 0 < seconds < 1e15 or (seconds == 0 and allow_zero):
        return seconds
    if seconds != seconds or abs(seconds) >= 1e15:
        raise ConfigError(f"{what} must be a finite number of seconds, not {_shorten(value)}")
    raise ConfigError(f"{what} must be {'0 or more' if allow_zero else 'more than 0'} seconds, not {_shorten(value)}")


def _to_seconds(what: str, value: Duration) -> float:
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, str):
        try:
            return parse_duration(value)
        except ValueError as bad:
            raise ConfigError(f"{what} must be {bad}") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(
            f"{what} must be a number of seconds, a timedelta, or a text such as '30s', not {_shorten(value)}"
        )
    return value


def parse_duration(text: str) -> float:
    """Seconds from "30", "0.5", "30s", "10m", "1h30m", "2d" or "250ms". Raises ValueError."""
    found = _DURATION.fullmatch(text)
    if found is not None and found[0]:
        return sum(float(number) * unit for number, unit in zip(found.groups(), _UNITS, strict=True) if number)
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"seconds, or a text such as '30s', '10m' or '1h30m', not {_shorten(text)}") from None


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _check_label(what: str, text: str | None, max_length: int = 200) -> None:
    if text is None:
        return
    if not isinstance(text, str) or len(text) > max_length or not text.isprintable():
        raise ConfigError(f"{what} must be printable text of at most {max_length} characters, not {_shorten(text)}")


def default_holder() -> str:
    from socket import gethostname  # only here: it would slow `import leasehold` down

    return f"{gethostname()}:{os.getpid()}"
