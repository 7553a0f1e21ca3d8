"""`leasehold serve key`: create, list and revoke API keys of a lock server."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click

from leasehold.cli import exit_codes
from leasehold.cli.console import Console, pass_console
from leasehold.cli.help import Group
from leasehold.cli.options import positive_seconds_option
from leasehold.core.texts import escape
from leasehold.errors import ConfigError
from leasehold.server import keys
from leasehold.server.settings import PREFIX

KEYS = click.option(
    "--keys",
    "path",
    type=click.Path(path_type=Path),
    required=True,
    envvar=f"{PREFIX}KEYS",
    show_envvar=True,
    metavar="FILE",
    help="File of the API keys.",
)
EXAMPLES = """
leasehold serve key create web --allow lock,read:shop:orders/ --keys keys.toml
leasehold serve key list --keys keys.toml
leasehold serve key revoke web --keys keys.toml
"""
CREATE_EXAMPLES = """
leasehold serve key create web --allow lock,read:shop:orders/ --keys keys.toml
leasehold serve key create ops --allow read,break:*: --expires 90d --keys keys.toml
leasehold serve key create web.internal --certificate --allow lock:: --keys keys.toml
"""
MAX_EXPIRES = 100 * 365 * 86_400


@click.group("key", cls=Group, examples=EXAMPLES, prints=False)
def key() -> None:
    """Create, list and revoke the API keys of a lock server.

    A server reads its file of keys again when the file changes, so these commands take effect on running servers
    within 6 seconds.
    """


def _right(text: str) -> keys.Right:
    try:
        return keys.Right.parse(text)
    except ConfigError as bad:
        raise click.BadParameter(str(bad)) from None


_right.__name__ = "right"  # in the help


@key.command(
    "create", short_help="Create an API key and print it.", examples=CREATE_EXAMPLES, codes=(exit_codes.CONFIG,)
)
@click.argument("who")
@KEYS
@click.option(
    "--allow",
    type=_right,
    multiple=True,
    required=True,
    metavar="VERBS:NAMESPACE:PREFIX",
    help="What the key may do. Can be repeated.",
)
@positive_seconds_option("--expires", help="When the key expires, such as 90d. Default: never.")
@click.option(
    "--certificate",
    is_flag=True,
    help="Make no key: WHO is a DNS name or URI in a client certificate, and the certificate identifies the caller.",
)
@pass_console
def create(
    console: Console,
    who: str,
    path: Path,
    allow: tuple[keys.Right, ...],
    expires: float | None,
    certificate: bool,
) -> None:
    """Create an API key for WHO and print it, once. The file contains only its hash.

    VERBS are one or more of read (list locks, holders and events), lock (acquire, renew and release) and break. None
    includes another. They apply to the names of NAMESPACE that begin with PREFIX. An empty NAMESPACE is the default
    namespace, `*` stands for every namespace, and an empty PREFIX for every name.

    WHO appears in logs, so that you see which key was used. Each WHO has one key. To replace a key, create one for
    another WHO, switch your programs to it, and revoke the old one.

    A caller sends the key in the header `Authorization: Bearer KEY`; Leasehold clients take it from
    LEASEHOLD_API_KEY or from the file that the URL names with `api_key_file=`.
    """
    now = datetime.now(UTC).replace(microsecond=0)
    end = None
    if expires is not None:
        if expires > MAX_EXPIRES:
            raise click.BadParameter("it must be at most 100 years", param_hint="'--expires'")
        end = now + timedelta(seconds=expires)
    made = keys.create(path, who, allow, now=now, expires=end, certificate=certificate)
    rights = " and ".join(escape(str(right)) for right in allow)
    until = "" if end is None else f" until {_time(end)}"
    if made is None:
        console.say(f"a client certificate with the name {who} may now {rights}{until}")
    else:
        console.say(f"the key of {who} may {rights}{until}; the key is not shown again:")
        console.put(made)


@key.command("list", short_help="List the API keys of a file.", examples=EXAMPLES, codes=(exit_codes.CONFIG,))
@KEYS
@pass_console
def list_(console: Console, path: Path) -> None:
    """List who has a key, since when, until when, and what it may do. The keys themselves are stored nowhere."""
    try:
        found = keys.read(path).values()
    except PermissionError:
        raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    now = datetime.now(UTC).timestamp()
    if console.json:
        console.put_json([_as_json(entry, now) for entry in found])
        return
    if not found:
        console.say(f"{path} has no keys")
        return
    rows = [("WHO", "KIND", "CREATED", "EXPIRES", "ALLOW")]
    for entry in found:
        expires = "never" if entry.expires is None else _time(entry.expires) + (" (over)" if entry.expired(now) else "")
        kind = "certificate" if entry.sha256 is None else "key"
        rights = " ".join(escape(str(right)) for right in entry.allow)
        rows.append((entry.who, kind, _time(entry.created), expires, rights))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        console.put("  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[4]]))


@key.command("revoke", short_help="Revoke the API key of WHO.", examples=EXAMPLES, codes=(exit_codes.CONFIG,))
@click.argument("who")
@KEYS
@pass_console
def revoke(console: Console, who: str, path: Path) -> None:
    """Remove the key of WHO from the file.

    Running servers refuse the key, or the certificate with this name, within 6 seconds. Leases that its callers hold
    are not released: they expire, because the callers can no longer renew them.
    """
    keys.revoke(path, who)
    console.say(f"the key of {who} is revoked")


def _as_json(entry: keys.Key, now: float) -> dict[str, Any]:
    return {
        "who": entry.who,
        "kind": "certificate" if entry.sha256 is None else "key",
        "created": _time(entry.created),
        "expires": None if entry.expires is None else _time(entry.expires),
        "expired": entry.expired(now),
        "allow": [
            {"verbs": sorted(right.verbs), "namespace": right.namespace, "prefix": right.prefix}
            for right in entry.allow
        ],
    }


def _time(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
