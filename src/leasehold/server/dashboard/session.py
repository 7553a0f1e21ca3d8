"""Who uses the dashboard: an API key that was typed once, and a token that shows that a form is ours.

The browser keeps the key in a cookie that scripts cannot read and other sites cannot make it send. The API does not
read that cookie, so a web page can do nothing there with it. A key that is revoked or expires ends the session with it.

Over TLS the cookies' names begin with `__Host-`: browsers accept such a cookie only from this very host, over TLS.
Neither a neighbouring host nor an attacker on the network can set one. A server with TLS of its own reads no other.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Final
from urllib.parse import parse_qsl

from leasehold.server.messages import Request
from leasehold.server.problems import Problem, invalid

SECONDS: Final = 8 * 3600
_KEY: Final = "leasehold_key"
_FORM: Final = "leasehold_form"
_OF_THIS_HOST: Final = "__Host-"


def authorization(request: Request, secure: bool) -> bytes:
    """What the API would get as the header of the same name: the header itself, or the key of the cookie."""
    if given := request.header(b"authorization"):
        return given
    key = _cookie_value(request, _KEY, secure)
    return b"Bearer " + key.encode() if key else b""


def key_cookie(key: str, secure: bool) -> tuple[bytes, bytes]:
    """Keeps the key; an empty one forgets it."""
    return _cookie(_KEY, key, SECONDS if key else 0, secure)


def over_tls(request: Request) -> bool:
    """Whether the browser sent this form over TLS, which a proxy may have ended."""
    return request.header(b"origin").lower().startswith(b"https:")


def form_token(request: Request, secure: bool) -> tuple[str, tuple[tuple[bytes, bytes], ...]]:
    """A token for the forms of a page, with the cookie it is compared to."""
    token = _cookie_value(request, _FORM, secure)
    if len(token) >= 32:
        return token, ()
    token = secrets.token_hex(16)
    return token, (_cookie(_FORM, token, SECONDS, secure),)


def read_form(request: Request, secure: bool) -> dict[str, str]:
    """The fields of a form that this server made. Raises Problem if another page made it."""
    try:
        fields = dict(parse_qsl(request.body.decode(), keep_blank_values=True, max_num_fields=20, errors="strict"))
    except ValueError:
        raise invalid("the form cannot be read", 400) from None
    expected = _cookie_value(request, _FORM, secure)
    if len(expected) < 32 or not hmac.compare_digest(fields.get("form", "").encode(), expected.encode()):
        raise Problem("forbidden", 403, "this form is not of this server, or too old: load the page again")
    return fields


def _cookie(name: str, value: str, seconds: int, secure: bool) -> tuple[bytes, bytes]:
    prefix, flag = (_OF_THIS_HOST, "; Secure") if secure else ("", "")
    text = f"{prefix}{name}={value}; Max-Age={seconds}; Path=/; HttpOnly; SameSite=Strict{flag}"
    return b"set-cookie", text.encode()


def _cookie_value(request: Request, name: str, secure: bool) -> str:
    """Empty: there is none. Other programs on this host set cookies, too, and write them as they like, so nothing is
    expected of theirs. `http.cookies` stops at the first that it does not understand, and its time for quoted values
    grows with the square of their length."""
    given: dict[str, str] = {}
    for part in request.header(b"cookie").decode("latin-1").split(";"):
        found, _, value = part.strip().partition("=")
        given.setdefault(found, value)
    of_this_host = given.get(_OF_THIS_HOST + name, "")
    return of_this_host if secure else of_this_host or given.get(name, "")  # a proxy may add TLS, so either may come
