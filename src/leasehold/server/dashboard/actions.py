"""The one action of the dashboard: break a lock. Only what the reader saw is broken: the engine compares the token in
the same step, so a lock that another grant holds by then stays as it is (412)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from leasehold.core.names import check_name, check_namespace
from leasehold.server.messages import Request, checked
from leasehold.server.problems import Problem, invalid

if TYPE_CHECKING:
    from leasehold.server.app import App

MIN_REASON: Final = 8  # characters
MAX_REASON: Final = 500


class BreakResult(NamedTuple):
    """`token` is None if the engine did not have that grant any more."""

    namespace: str
    name: str
    token: int | None


async def break_(app: App, request: Request, fields: dict[str, str]) -> BreakResult:
    """Break what the form names. Raises Problem."""
    with checked():
        namespace, name = check_namespace(fields.get("namespace", "")), check_name(fields.get("name", ""))
    request.allow("break", namespace, name)
    token, reason = _read_token(fields.get("token", "")), fields.get("reason", "").strip()
    if fields.get("typed") != name:
        raise invalid("the typed name is not that of the lock: nothing was broken")
    if not MIN_REASON <= len(reason) <= MAX_REASON:
        raise invalid(f"a reason has {MIN_REASON} to {MAX_REASON} characters: nothing was broken")
    with app.limits.call(request.caller, "release"):
        broken = await app.service.break_(namespace, name, token, app.deadline(request))
    if broken:
        app.report_break(request, namespace, name, token, reason)
    return BreakResult(namespace, name, token if broken else None)


def _read_token(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 19 or int(text) < 1:
        raise Problem("invalid", 422, "the form has no token: load the page again")
    return int(text)
