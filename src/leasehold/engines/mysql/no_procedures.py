"""The verbs without procedures, for an account that may not create any: locks only, and no wake-ups.

Each verb is a few statements sent at once, in one transaction, on the same tables and under the same bucket's row lock
as the procedures (`verbs.sql`). So the two kinds of client exclude each other and share one queue. A waiter of this
kind polls, often at the head of the queue. A client of this kind makes no reservations, so waiters of the other kind
have to re-check too. If the head of the queue falls silent, the waiters behind it wait until its heartbeat expires
(E7): so `fair` is not promised.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Final

from leasehold.engines.mysql.connection import MyConnection
from leasehold.engines.mysql.session import literal
from leasehold.engines.sql.session import Row, Value, Values
from leasehold.model import Claim

_KEY: Final = ("namespace", "bucket", "name", "id_hash")
_HOLDER: Final = ("client", "label", "host", "pid", "purpose")
_ATTEMPT: Final = (
    *_KEY,
    *_HOLDER,
    "mode",
    "kind",
    "grant_limit",
    "ttl",
    "delay",
    "min_hold",
    "queue",
    "sweep",
    "lock_timeout_ms",
)
_PARAMETERS: Final[dict[str, tuple[str, ...]]] = {
    "attempt": _ATTEMPT,
    "attempt_free": _ATTEMPT,
    "release": (*_KEY, "keep", "held", "lock_timeout_ms", "token"),
    "decline": (*_KEY, "client", "lock_timeout_ms"),
    "break": ("namespace", "bucket", "name", "token", "lock_timeout_ms"),
    "inspect": ("namespace", "prefix", "exact"),
}
_RENEWAL: Final = ("namespace", "name", "id_hash", "token", "ttl", "bucket")
_SWEEP_COUNT: Final = 4  # names per sweep, each in its own transaction
_THIS_NAME: Final = "namespace = {namespace} and name = {name}"


@cache
def _load_sections() -> dict[str, str]:
    """The sections of no_procedures.sql by name, with the shared sections inserted."""
    found = {}
    for section in (files(__package__) / "no_procedures.sql").read_text(encoding="utf-8").split("-- :")[1:]:
        header, _, body = section.partition("\n")
        found[header.split()[0]] = body.strip().replace("{here}", _THIS_NAME)
    for shared in ("drop_queue", "lock_bucket", "grant", "expire"):
        found = {name: body.replace(f"{{{shared}}}", found[shared]) for name, body in found.items()}
    return found


class NoProceduresConnection(MyConnection):
    async def call(
        self, verb: str, values: Values, deadline: float, claim: Claim | None = None, *, first: bool = False
    ) -> list[Row]:
        found: list[Row] = []
        if verb == "attempt" and claim is not None and not claim.queue:  # most attempts find their name free
            found = await self._execute(self._render("attempt_free", values), (), deadline, claim)
        return found or await self._execute(self._render(verb, values), (), deadline, claim, first=first)

    async def list_rows(self, values: Values, deadline: float) -> list[bytes]:
        return await self._execute(self._render("inspect", values), (), deadline, listed=True)

    def compensate(self, id_hash: str, values: Values) -> None:
        self._abandoned.compensate(id_hash, self._render("release", values), ())

    def _render(self, verb: str, values: Sequence[Any]) -> bytes:
        if verb == "renew":
            return self._render_renewals(*values)
        if verb == "heartbeat":
            return self._render_heartbeats(*values)
        fields = dict(zip(_PARAMETERS[verb], values, strict=True))
        script = self._fill(verb, fields)
        if sweep := fields.get("sweep"):
            script += self._render_sweep(queues=sweep > 1) * _SWEEP_COUNT
        return script.encode()

    def _render_sweep(self, queues: bool) -> str:
        return _load_sections()["sweep"].format(
            db=self._prefix, namespace="@lh_sweep_namespace", name="@lh_sweep_name", lines=int(queues)
        )

    def _render_renewals(self, *values: Any) -> bytes:
        *columns, _lock_timeout_ms = values
        rows = [dict(zip(_RENEWAL, row, strict=True)) for row in zip(*columns, strict=True)]
        return self._render_batch(
            "renew", changes=self._render_each("change", rows), answers=self._render_answers("answer", rows)
        )

    def _render_heartbeats(self, *values: Any) -> bytes:
        *columns, _lock_timeout_ms = values
        rows = [dict(zip(_KEY, row, strict=True)) for row in zip(*columns, strict=True)]
        buckets = sorted({(row["namespace"].encode(), row["bucket"]) for row in rows})
        locks = [{"namespace": namespace.decode(), "bucket": bucket} for namespace, bucket in buckets]
        return self._render_batch(
            "heartbeat",
            buckets=self._render_each("bucket", locks),
            beats=self._render_each("heartbeat_update", rows),
            answers=self._render_answers("heartbeat_answer", rows),
        )

    def _render_each(self, section: str, rows: list[dict[str, Any]]) -> str:
        return "\n".join(self._fill(section, row) for row in rows)

    def _render_answers(self, section: str, rows: list[dict[str, Any]]) -> str:
        return "\nunion all ".join(
            self._fill(section, row | {"ordinal": ordinal}) for ordinal, row in enumerate(rows, 1)
        )

    def _render_batch(self, verb: str, **parts: str) -> bytes:
        return _load_sections()[verb].format(**parts).encode()

    def _fill(self, section: str, values: dict[str, Value]) -> str:
        return _load_sections()[section].format(
            db=self._prefix, **{name: literal(value).decode() for name, value in values.items()}
        )
