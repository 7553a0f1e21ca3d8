"""The URL of an ensemble: where it is, who we are, and who may touch what we make there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from kazoo.hosts import collect_hosts
from kazoo.security import ACL, CREATOR_ALL_ACL, OPEN_ACL_UNSAFE, Id

from leasehold.config import EngineConfig, check_seconds
from leasehold.errors import ConfigError

SESSION: Final = 40.0  # the longest that a server grants unless told otherwise: twenty ticks of two seconds
_LONGEST: Final = 2_000_000  # it is sent as milliseconds, in 32 bits
_PERMISSIONS: Final = {"r": 1, "w": 2, "c": 4, "d": 8, "a": 16}


@dataclass(frozen=True, slots=True)
class Address:
    hosts: str
    chroot: str  # empty, or an absolute path
    session: float  # the timeout to ask for
    acl: tuple[ACL, ...]
    options: dict[str, Any] = field(repr=False)  # for kazoo: credentials, SASL, TLS

    @property
    def count(self) -> int:
        return self.hosts.count(",") + 1


def located(config: EngineConfig) -> Address:
    """`zookeeper://[user:password@]host[:port],host[:port]/chroot?options`"""
    kinds: dict[str, Callable[[str], Any]] = dict.fromkeys(
        ("sasl", "sasl_service", "ca", "cert", "key", "key_password"), str
    )
    given = config.accept(session=_seconds, acl=_acl, tls=_switch, verify=_switch, **kinds)
    user, at, where = config.target.rpartition("@")
    hosts, slash, chroot = where.partition("/")
    _check_hosts(hosts or "localhost")
    options = _credentials(user if at else "", given) | _tls(given)
    own = CREATOR_ALL_ACL if at or "sasl" in given else OPEN_ACL_UNSAFE
    return Address(
        hosts or "localhost",
        _checked_chroot(slash + chroot),
        given.get("session", SESSION),
        tuple(given.get("acl", own)),
        options,
    )


def _credentials(user: str, given: dict[str, Any]) -> dict[str, Any]:
    name, colon, password = user.partition(":")
    if user and not (name and colon):
        raise ConfigError("credentials in a zookeeper:// URL are user:password@")
    if "sasl" not in given:
        if "sasl_service" in given:
            raise ConfigError("the option sasl_service goes with sasl=DIGEST-MD5 or sasl=GSSAPI")
        return {"auth_data": [("digest", user)]} if user else {}
    try:
        import puresasl  # noqa: F401
    except ImportError:
        raise ConfigError('sasl= needs pure-sasl, which is not installed: pip install "kazoo[sasl]"') from None
    sasl: dict[str, Any] = {"mechanism": given["sasl"], "service": given.get("sasl_service", "zookeeper")}
    if user:
        sasl |= {"username": name, "password": password}
    return {"sasl_options": sasl}


def _tls(given: dict[str, Any]) -> dict[str, Any]:
    names = {"ca": "ca", "cert": "certfile", "key": "keyfile", "key_password": "keyfile_password"}
    files = {theirs: given[ours] for ours, theirs in names.items() if ours in given}
    if not given.get("tls", False):
        if files or "verify" in given:
            raise ConfigError("ca, cert, key, key_password and verify go with tls=yes")
        return {}
    if ("cert" in given) != ("key" in given):
        raise ConfigError("cert and key go together")
    verify = given.get("verify", True)
    return {"use_ssl": True, "verify_certs": verify, "check_hostname": verify, **files}


def _check_hosts(hosts: str) -> None:
    try:
        found, _ = collect_hosts(hosts)
    except ValueError:
        found = []
    if not found or any(not host or "/" in host for host, _ in found):
        raise ConfigError('the hosts of a zookeeper:// URL are "host:port,host:port"; a port is a number')


def _checked_chroot(path: str) -> str:
    path = path.rstrip("/")
    if any(part in ("", ".", "..") for part in path.split("/")[1:]) or "\0" in path:
        raise ConfigError("the path of a zookeeper:// URL is a node's: no empty part, no dots alone")
    return path


def _seconds(text: str) -> float:
    seconds = float(text)
    check_seconds("session", seconds, zero=False)
    if seconds > _LONGEST:
        _refuse(f"at most {_LONGEST} seconds")
    return seconds


def _switch(text: str) -> bool:
    if text not in ("yes", "no"):
        _refuse("yes or no")
    return text == "yes"


def _acl(text: str) -> list[ACL]:
    """`scheme:id:permissions`, separated by commas: `digest:app:hash:cdrwa,world:anyone:r`."""
    found, permitted = [], set[str]()
    for each in text.split(","):
        scheme, _, rest = each.partition(":")
        who, _, letters = rest.rpartition(":")
        if not scheme or not letters or set(letters) - set(_PERMISSIONS):
            _refuse("scheme:id:permissions, such as world:anyone:cdrw, permissions being letters of cdrwa")
        found.append(ACL(sum(_PERMISSIONS[letter] for letter in set(letters)), Id(scheme, who)))
        permitted |= set(letters)
    if not permitted >= set("cdrw"):  # a node that nobody may delete stays in its line for as long as its session
        _refuse("an acl that lets somebody create, delete, read and write: all of cdrw")
    return found


def _refuse(wanted: str) -> NoReturn:
    raise ValueError(wanted)
