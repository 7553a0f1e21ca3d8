"""zookeeper:// URLs: the hosts, the credentials, TLS, and the ACL of the nodes that the client creates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from kazoo.hosts import collect_hosts
from kazoo.security import ACL, CREATOR_ALL_ACL, OPEN_ACL_UNSAFE, Id

from leasehold.config import EngineConfig, check_seconds, parse_yes_no
from leasehold.credentials import Password
from leasehold.errors import ConfigError

DEFAULT_SESSION_TIMEOUT: Final = 40.0  # the longest that servers grant by default: twenty ticks of two seconds
_MAX_SESSION_TIMEOUT: Final = 2_000_000  # seconds: sent as milliseconds in 32 bits
_PERMISSIONS: Final = {"r": 1, "w": 2, "c": 4, "d": 8, "a": 16}


@dataclass(frozen=True, slots=True)
class ZookeeperUrl:
    hosts: str
    chroot: str  # empty, or an absolute path
    session_timeout: float  # the timeout to request
    acl: tuple[ACL, ...]
    options: dict[str, Any] = field(repr=False)  # for kazoo: SASL, TLS
    user: str
    password: Password

    def session_options(self) -> dict[str, Any]:
        """For kazoo: the options of a new session, with the password as it is now."""
        if not self.user:
            return self.options
        password = self.password.read()
        if "sasl_options" not in self.options:
            return {"auth_data": [("digest", f"{self.user}:{password}")], **self.options}
        sasl = {**self.options["sasl_options"], "username": self.user, "password": password}
        return {**self.options, "sasl_options": sasl}

    @property
    def servers(self) -> str:
        """Host and port of every server, for messages."""
        return ",".join(f"{host}:{port}" for host, port in collect_hosts(self.hosts)[0])


def parse_url(config: EngineConfig) -> ZookeeperUrl:
    """`zookeeper://[user:password@]host[:port],host[:port]/chroot?options`"""
    text_options: dict[str, Callable[[str], Any]] = dict.fromkeys(
        ("sasl", "sasl_service", "ca", "cert", "key", "key_password"), str
    )
    accepted = config.accept(
        session=_parse_session_timeout, acl=_parse_acl, tls=parse_yes_no, verify=parse_yes_no, **text_options
    )
    userinfo, at, location = config.target.rpartition("@")
    user, colon, in_url = userinfo.partition(":")
    if (at and not (user and (colon or config.password))) or (config.password and not user):
        raise ConfigError("credentials in a zookeeper:// URL must be user:password@")
    hosts, slash, chroot = location.partition("/")
    _check_hosts(hosts or "localhost")
    options = _sasl_options(accepted) | _tls_options(accepted)
    default_acl = CREATOR_ALL_ACL if at or "sasl" in accepted else OPEN_ACL_UNSAFE
    return ZookeeperUrl(
        hosts or "localhost",
        _parse_chroot(slash + chroot),
        accepted.get("session", DEFAULT_SESSION_TIMEOUT),
        tuple(accepted.get("acl", default_acl)),
        options,
        user,
        config.password_or(in_url),
    )


def _sasl_options(accepted: dict[str, Any]) -> dict[str, Any]:
    if "sasl" not in accepted:
        if "sasl_service" in accepted:
            raise ConfigError("the option sasl_service needs sasl=DIGEST-MD5 or sasl=GSSAPI")
        return {}
    try:
        import puresasl  # noqa: F401
    except ImportError:
        raise ConfigError('sasl= needs pure-sasl, which is not installed: pip install "kazoo[sasl]"') from None
    return {"sasl_options": {"mechanism": accepted["sasl"], "service": accepted.get("sasl_service", "zookeeper")}}


def _tls_options(accepted: dict[str, Any]) -> dict[str, Any]:
    names = {"ca": "ca", "cert": "certfile", "key": "keyfile", "key_password": "keyfile_password"}
    files = {theirs: accepted[ours] for ours, theirs in names.items() if ours in accepted}
    if not accepted.get("tls", False):
        if files or "verify" in accepted:
            raise ConfigError("the options ca, cert, key, key_password and verify need tls=yes")
        return {}
    if ("cert" in accepted) != ("key" in accepted):
        raise ConfigError("the options cert and key must be given together")
    verify = accepted.get("verify", True)
    return {"use_ssl": True, "verify_certs": verify, "check_hostname": verify, **files}


def _check_hosts(hosts: str) -> None:
    try:
        found, _ = collect_hosts(hosts)
    except ValueError:
        found = []
    if not found or any(not host or "/" in host for host, _ in found):
        raise ConfigError('the hosts of a zookeeper:// URL must be "host:port,host:port" with numeric ports')


def _parse_chroot(path: str) -> str:
    path = path.rstrip("/")
    if any(part in ("", ".", "..") for part in path.split("/")[1:]) or "\0" in path:
        raise ConfigError('the path of a zookeeper:// URL must be a valid node path, without empty, "." or ".." parts')
    return path


def _parse_session_timeout(text: str) -> float:
    try:
        seconds = check_seconds("session", text, allow_zero=False)
    except ValueError:
        _raise_expected("must be a number of seconds greater than 0, or a text such as '30s'")
    if seconds > _MAX_SESSION_TIMEOUT:
        _raise_expected(f"must be at most {_MAX_SESSION_TIMEOUT} seconds")
    return seconds


def _parse_acl(text: str) -> list[ACL]:
    """`scheme:id:permissions`, separated by commas: `digest:app:hash:cdrwa,world:anyone:r`."""
    acls, permitted = [], set[str]()
    for entry in text.split(","):
        scheme, _, remainder = entry.partition(":")
        identity, _, letters = remainder.rpartition(":")
        if not scheme or not letters or set(letters) - set(_PERMISSIONS):
            _raise_expected("must be scheme:id:permissions with letters of cdrwa, such as world:anyone:cdrw")
        acls.append(ACL(sum(_PERMISSIONS[letter] for letter in set(letters)), Id(scheme, identity)))
        permitted |= set(letters)
    if not permitted >= set("cdrw"):  # a node that no user may delete blocks its queue until its session ends
        _raise_expected("must grant all of create, delete, read and write: cdrw")
    return acls


def _raise_expected(wanted: str) -> NoReturn:
    raise ValueError(wanted)
