"""Log lines that every client of one server would repeat.

A process may have a hundred clients of one server. What is true of the server is logged once per process; what happens
to all their connections at the same moment, at most every ten seconds.
"""

from __future__ import annotations

import logging
from time import monotonic
from typing import Final

_INTERVAL: Final = 10.0
_MAX_LINES: Final = 1000  # remembered; texts of servers vary without end

_logged: set[tuple[str, str]] = set()  # logger, text
_recent: dict[tuple[str, str], tuple[float, int]] = {}  # the same -> when it was logged, how often since


def log_once(log: logging.Logger, level: int, text: str) -> None:
    """Log a text that names its server; after the first time, at DEBUG."""
    key = log.name, text
    if key in _logged:
        level = logging.DEBUG
    elif log.isEnabledFor(level):  # else it is still to be logged
        if len(_logged) >= _MAX_LINES:
            _logged.clear()
        _logged.add(key)
    log.log(level, "%s", text)


def log_seldom(log: logging.Logger, level: int, text: str, detail: str = "") -> None:
    """Log a text at most every ten seconds, with how often it happened since the last time. `detail`: what is different
    each time, such as what a server says; it is shown at the end."""
    key, now = (log.name, text), monotonic()
    logged_at, skipped = _recent.get(key, (-_INTERVAL, 0))
    if now < logged_at + _INTERVAL:
        _recent[key] = logged_at, skipped + 1
        log.debug("%s%s", text, detail)
        return
    if len(_recent) >= _MAX_LINES:
        _recent.clear()
    _recent[key] = now, 0
    text = f"{text} ({skipped} more times since the last line)" if skipped else text
    log.log(level, "%s%s", text, detail)
