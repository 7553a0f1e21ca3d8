"""Record a call to a fence in a history."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.checkers.history import History
from leasehold import StaleToken


def recorded(
    history: History, who: str, action: str, name: str, token: int, work: Callable[[], Any], **detail: Any
) -> Any:
    """Return what `work` returns, or None if the fence refused it."""
    op = history.invoke(who, action, name, token=token, **detail)
    try:
        found = work()
    except StaleToken:
        op.fail("stale")
        return None
    op.ok(token=token)
    return found
