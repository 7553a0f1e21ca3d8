"""Log lines as JSON, one object per line:

handler = logging.StreamHandler()
handler.setFormatter(leasehold.telemetry.JSONFormatter())
logging.getLogger("leasehold").addHandler(handler)
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any, Final

from leasehold import tracing
from leasehold.telemetry.groups import group_of

# Their order in a line; others follow.
_FIELDS: Final = (
    *("event", "namespace", "lock", "group", "token", "fingerprint", "holder", "engine", "reason", "error", "seconds"),
    *("request", "trace"),
)


class JSONFormatter(logging.Formatter):
    """Formats any log record as one line of JSON, in ASCII: `at` (UTC), `level`, `logger`, `message`, the fields of
    `record.leasehold`, and `exception` if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "at": at.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields = dict(getattr(record, "leasehold", {}))
        if fields.get("lock"):
            fields.setdefault("group", group_of(fields["lock"]))
        if "trace" not in fields and (trace := tracing.find(None)):
            fields["trace"] = trace
        for name in (*_FIELDS, *fields):
            if name in fields:
                line[name] = _rounded(fields[name])
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, separators=(",", ":"), default=str)


def _rounded(value: object) -> object:
    return round(value, 6) if isinstance(value, float) else value
