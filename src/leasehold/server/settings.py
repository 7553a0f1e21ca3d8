"""The settings of `leasehold serve`: flags over LEASEHOLD_SERVE_* over the configuration file over defaults.

One table, `SETTINGS`, has every setting with its name in each of the three places, its check, its default and its text
for the help and the documentation.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast

from leasehold.config import DEFAULT_URL, URL_VARIABLE, EngineConfig, check_seconds, did_you_mean
from leasehold.core.texts import without_credentials
from leasehold.errors import ConfigError
from leasehold.server.watched_files import read_toml

PREFIX: Final = "LEASEHOLD_SERVE_"
CONFIG_VARIABLE: Final = f"{PREFIX}CONFIG"
DEFAULT_LISTEN: Final = "127.0.0.1:7420"
_MAX_FILE: Final = 1024 * 1024
_MOST: Final = 10_000_000  # of anything that is counted

Log: TypeAlias = Literal["json", "text"]


@dataclass(frozen=True, slots=True)
class LimitSettings:
    """How much one worker admits. 0 for a limit per key, name or namespace: no such limit."""

    connections: int = 10_000
    connections_per_key: int = 5_000
    calls: int = 2_000
    calls_per_key: int = 1_000
    calls_per_namespace: int = 1_000
    calls_per_name: int = 500
    waiters: int = 20_000
    waiters_per_key: int = 2_000
    waiters_per_namespace: int = 10_000
    waiters_per_name: int = 10_000
    leases_per_key: int = 100_000
    wait: float = 60.0


@dataclass(frozen=True, slots=True)
class TLSFiles:
    """The server's certificate with its private key, and the authority of client certificates."""

    cert: Path
    key: Path
    client_ca: Path | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything `leasehold serve` needs to know, checked."""

    engine: str = field(default=DEFAULT_URL, repr=False)  # may contain a password
    listen: tuple[str, ...] = (DEFAULT_LISTEN,)
    workers: int = 1
    call_timeout: float = 5.0
    tls: TLSFiles | None = None
    keys: Path | None = None
    no_auth: bool = False
    admin: bool = False
    demo: bool = False
    limits: LimitSettings = LimitSettings()
    audit_file: Path | None = None
    audit_required: bool = False
    log: Log = "json"
    picture_max_age: float = 1.0
    peers: tuple[str, ...] = field(default=(), repr=False)
    otel: bool = False
    trace_url: str | None = None

    def __post_init__(self) -> None:
        scheme = EngineConfig.parse(self.engine, self.call_timeout).scheme
        if scheme == "memory" and self.workers > 1:
            raise ConfigError(
                f"workers = {self.workers} cannot be combined with memory://, because each worker would have locks of "
                "its own: use one worker, or another engine"
            )
        if self.demo and self.workers > 1:
            raise ConfigError(
                "demo cannot be combined with workers: each worker would generate traffic of its own; use one worker"
            )
        if self.audit_required and self.audit_file is None:
            raise ConfigError("audit.required needs audit.file: name the file, or leave audit.required out")
        if self.no_auth and self.authenticates:
            raise ConfigError(
                "no_auth cannot be combined with auth.keys or tls.client_ca: remove no_auth or the other one"
            )
        public = [address for address in self.listen if not is_local(address)]
        if public and not self.authenticates and not self.no_auth:
            raise ConfigError(
                f"{public[0]} can be reached by other machines, and any caller could break any lock: create an API key "
                "with `leasehold serve key create` and pass --keys FILE, ask for client certificates with "
                "--tls-client-ca FILE, or pass --no-auth if only trusted machines can reach this address"
            )

    @property
    def authenticates(self) -> bool:
        return self.keys is not None or (self.tls is not None and self.tls.client_ca is not None)

    def warnings(self) -> list[str]:
        """Settings that are permitted, and probably not meant."""
        if self.tls is None and self.keys is not None and not all(is_local(address) for address in self.listen):
            return [
                "API keys cross the network unencrypted unless a proxy in front of this server adds TLS: pass "
                "--tls-cert FILE --tls-key FILE"
            ]
        return []


class Setting(NamedTuple):
    """One setting. `name` is its path in the configuration file, such as limits.waiters."""

    name: str
    check: Callable[[object], object]  # raises ConfigError with a text that continues "NAME must be ..."
    text: str
    metavar: str = "TEXT"
    word: str = ""  # in flags and variables, if it is not the name with `_` for `.`

    @property
    def key(self) -> str:
        """Its name in the mapping of flags that `read` takes."""
        return self.word or self.name.replace(".", "_")

    @property
    def flag(self) -> str:
        return "-u" if self.key == "engine" else "--" + self.key.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.key.upper()

    @property
    def default(self) -> object:
        """None: there is none, or it is worked out."""
        section, _, last = self.name.rpartition(".")
        if section == "limits":
            return getattr(_DEFAULTS.limits, last)
        return None if section == "tls" else getattr(_DEFAULTS, self.key)


def read(flags: Mapping[str, object], environ: Mapping[str, str], config: Path | None) -> Settings:
    """The settings from their three sources. `flags` has them by `Setting.key`; None and () mean not given.

    Raises ConfigError, which names the setting, the source and the known words, and never shows an engine's URL."""
    if config is None and environ.get(CONFIG_VARIABLE):
        config = Path(environ[CONFIG_VARIABLE])
    values = {} if config is None else _from_file(config)
    values |= _from_environment(environ)
    for key, value in flags.items():
        if key not in _BY_KEY:
            raise ConfigError(f"unknown flag {key!r}; known: {', '.join(_BY_KEY)}")
        if value is not None and value != ():
            setting = _BY_KEY[key]
            values[setting.name] = _checked(setting, value, setting.flag)
    if values.get("demo") and not flags.get("engine"):
        values["engine"] = "memory://"  # never the engine of a variable or a file: the demo fills it with its own locks
    return _build(values)


def is_local(address: str) -> bool:
    """Whether only processes of this machine can reach an address of `listen`."""
    if address.startswith("unix:"):
        return True
    host, _ = split_address(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # another name: it may be resolved to anything


def split_address(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT. Raises ConfigError."""
    found = _ADDRESS.fullmatch(address)
    if found is None or int(found["port"]) > 65_535:
        raise ConfigError(
            f"an address to listen on is HOST:PORT, [IPV6]:PORT or unix:/PATH, with a port from 0 to 65535, "
            f"not {_shorten(address)}"
        )
    return found["v6"] or found["host"], int(found["port"])


_ADDRESS: Final = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>[0-9]{1,5})")


def _build(values: Mapping[str, object]) -> Settings:
    tls = {name.removeprefix("tls."): value for name, value in values.items() if name.startswith("tls.")}
    limits = {name.removeprefix("limits."): value for name, value in values.items() if name.startswith("limits.")}
    plain = {_BY_NAME[name].key: value for name, value in values.items() if not name.startswith(("tls.", "limits."))}
    if tls and "cert" not in tls:
        raise ConfigError("tls.cert is missing: TLS needs the server's certificate (--tls-cert FILE)")
    if tls:
        tls.setdefault("key", tls["cert"])  # one file may have both
    return Settings(
        tls=TLSFiles(**cast(Any, tls)) if tls else None, limits=LimitSettings(**cast(Any, limits)), **cast(Any, plain)
    )


def _from_file(path: Path) -> dict[str, object]:
    try:
        content = read_toml(path, _MAX_FILE)
    except OSError as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error.strerror}") from None
    found: dict[str, object] = {}
    sections = {name.partition(".")[0] for name in _BY_NAME if "." in name}
    for word, value in content.items():
        if word in sections:
            if not isinstance(value, dict):
                raise ConfigError(f"{path}: {word} is a table: write [{word}], and its settings below it")
            found |= {f"{word}.{inner}": each for inner, each in value.items()}
        else:
            found[word] = value
    for name in found:
        if name not in _BY_NAME:
            raise ConfigError(
                f"{path}: unknown word {_shorten(name)}{did_you_mean(name, _BY_NAME)}; known: {', '.join(_BY_NAME)}"
            )
    return {name: _checked(_BY_NAME[name], value, str(path)) for name, value in found.items()}


def _from_environment(environ: Mapping[str, str]) -> dict[str, object]:
    found = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable == CONFIG_VARIABLE:
            continue
        setting = _BY_VARIABLE.get(variable)
        if setting is None:
            known = ", ".join([*_BY_VARIABLE, CONFIG_VARIABLE])
            raise ConfigError(f"unknown variable {variable}{did_you_mean(variable, _BY_VARIABLE)}; known: {known}")
        found[setting.name] = _checked(setting, text, f"${variable}")
    if "engine" not in found and (url := environ.get(URL_VARIABLE)) is not None:
        found["engine"] = _checked(_BY_NAME["engine"], url, f"${URL_VARIABLE}")
    return found


def _checked(setting: Setting, value: object, source: str) -> object:
    try:
        return setting.check(value)
    except ConfigError as bad:
        raise ConfigError(f"{source}: {setting.name} must be {bad}") from None


# -- checks: each takes the value of a file, or a text of the environment or a flag


def _whole(least: int, most: int) -> Callable[[object], int]:
    def check(value: object) -> int:
        if isinstance(value, str) and re.fullmatch(r"[0-9][0-9_]{0,15}", value):
            value = int(value.rstrip("_").replace("__", "_"))
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ConfigError(f"a whole number from {least} to {most}, not {_shorten(value)}")
        return value

    return check


def _seconds(most: float) -> Callable[[object], float]:
    def check(value: object) -> float:
        try:
            seconds = check_seconds("", cast(Any, value), allow_zero=False)
        except ConfigError:
            seconds = 0.0
        if not 0 < seconds <= most:
            raise ConfigError(f"seconds, more than 0 and at most {most:g}, such as 5 or '5s', not {_shorten(value)}")
        return float(seconds)

    return check


def _yes_no(value: object) -> bool:
    if isinstance(value, str):
        value = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}.get(value, value)
    if not isinstance(value, bool):
        raise ConfigError(f"true or false, not {_shorten(value)}")
    return value


def _path(value: object) -> Path:
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        raise ConfigError(f"the path of a file, not {_shorten(value)}")
    return Path(value).absolute()


def _engine(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError("an engine's URL, such as redis://host:6379/0")
    return value


def _listen(value: object) -> tuple[str, ...]:
    addresses: Sequence[object]
    if isinstance(value, str):
        addresses = [part.strip() for part in value.split(",")]
    elif isinstance(value, list | tuple):
        addresses = value
    else:
        addresses = ()
    if not addresses or not all(isinstance(address, str) for address in addresses):
        raise ConfigError(f"a list of addresses, such as ['127.0.0.1:7420'], not {_shorten(value)}")
    found = tuple(str(address) for address in addresses)
    if len(set(found)) < len(found):
        raise ConfigError("a list of different addresses")
    for address in found:
        if address.startswith("unix:"):
            if not address.startswith("unix:/") or "\0" in address:
                raise ConfigError(f"an absolute path after unix:, such as unix:/run/leasehold.sock, in {address!r}")
        else:
            try:
                split_address(address)
            except ConfigError as bad:
                raise ConfigError(f"a list of addresses: {bad}") from None
    return found


def _peers(value: object) -> tuple[str, ...]:
    found = value.split() if isinstance(value, str) else value
    if not isinstance(found, list | tuple) or not all(
        isinstance(url, str) and url.startswith(("http://", "https://")) for url in found
    ):
        raise ConfigError("a list of http:// or https:// URLs, written as for clients of those servers")
    return tuple(found)


def _log(value: object) -> Log:
    if value == "json" or value == "text":
        return value
    raise ConfigError(f"json or text, not {_shorten(value)}")


def _trace_url(value: object) -> str:
    if not isinstance(value, str) or not _TRACE_URL.fullmatch(value) or value.count("{trace}") != 1:
        raise ConfigError(
            f"an http:// or https:// address with {{trace}} in it, such as https://tempo/trace/{{trace}}, "
            f"not {_shorten(value)}"
        )
    return value


def _shorten(value: object) -> str:
    text = without_credentials(repr(value))
    return text if len(text) <= 40 else f"{text[:40]}..."


_TRACE_URL: Final = re.compile(r"https?://[!-~]+")
_COUNT: Final = _whole(1, _MOST)
_COUNT_OR_NONE: Final = _whole(0, _MOST)

SETTINGS: Final = (
    Setting("engine", _engine, "URL of the engine behind the server.", "URL"),
    Setting(
        "listen",
        _listen,
        "Address to listen on: HOST:PORT, [IPV6]:PORT or unix:/PATH. Port 0 picks a free port.",
        "ADDRESS",
    ),
    Setting("workers", _whole(1, 256), "Processes that serve requests. Each has its own limits.", "N"),
    Setting("call_timeout", _seconds(300), "How long one call waits for the engine.", "SECS"),
    Setting("log", _log, "Format of log lines on stderr: json or text.", "FORMAT"),
    Setting("no_auth", _yes_no, "Serve callers without authentication, on any address.", ""),
    Setting("admin", _yes_no, "Let the dashboard break locks, for keys with the right to break.", ""),
    Setting("demo", _yes_no, "Fill the dashboard with example traffic, in memory unless -u is given.", ""),
    Setting("auth.keys", _path, "File of API keys, made by `leasehold serve key create`.", "FILE", word="keys"),
    Setting("tls.cert", _path, "Certificate chain of the server, PEM.", "FILE"),
    Setting("tls.key", _path, "Private key of the certificate, PEM. Default: in the file of the certificate.", "FILE"),
    Setting(
        "tls.client_ca",
        _path,
        "Authorities of client certificates, PEM. Callers may then authenticate with one.",
        "FILE",
    ),
    Setting("limits.connections", _COUNT, "Open connections; further ones get the answer 503 and are closed.", "N"),
    Setting("limits.connections_per_key", _COUNT_OR_NONE, "The same, for one API key. 0: no limit.", "N"),
    Setting("limits.calls", _COUNT, "Calls to the engine in progress.", "N"),
    Setting("limits.calls_per_key", _COUNT_OR_NONE, "The same, for one API key. 0: no limit.", "N"),
    Setting("limits.calls_per_namespace", _COUNT_OR_NONE, "The same, for one namespace. 0: no limit.", "N"),
    Setting("limits.calls_per_name", _COUNT_OR_NONE, "The same, for one name. 0: no limit.", "N"),
    Setting("limits.waiters", _whole(0, _MOST), "Waiters in queues, by stream and by long-poll.", "N"),
    Setting("limits.waiters_per_key", _COUNT_OR_NONE, "The same, for one API key. 0: no limit.", "N"),
    Setting("limits.waiters_per_namespace", _COUNT_OR_NONE, "The same, for one namespace. 0: no limit.", "N"),
    Setting("limits.waiters_per_name", _COUNT_OR_NONE, "The same, for one name. 0: no limit.", "N"),
    Setting(
        "limits.leases_per_key",
        _COUNT_OR_NONE,
        "Leases of one API key, acquired through this server. 0: no limit.",
        "N",
    ),
    Setting("limits.wait", _seconds(3600), "Longest wait of one request; a longer one is shortened.", "SECS"),
    Setting("audit.file", _path, "File of the audit log, JSON lines.", "FILE"),
    Setting("audit.required", _yes_no, "Refuse attempts if the audit log cannot be written.", ""),
    Setting(
        "peers",
        _peers,
        "URL of another server of the same engine, whose history is shown too. The URL may name a file with its API "
        "key: ?api_key_file=FILE.",
        "URL",
    ),
    Setting(
        "picture_max_age",
        _seconds(60),
        "Maximum age of a picture: the list of a namespace's locks that all readers share.",
        "SECS",
    ),
    Setting("otel", _yes_no, "Export spans with OpenTelemetry, configured by its OTEL_* variables.", ""),
    Setting("trace_url", _trace_url, "Address of a trace, for links in the dashboard; {trace} is its id.", "URL"),
)
_BY_NAME: Final = {setting.name: setting for setting in SETTINGS}
_BY_KEY: Final = {setting.key: setting for setting in SETTINGS}
_BY_VARIABLE: Final = {setting.variable: setting for setting in SETTINGS}
_DEFAULTS: Final = Settings()
