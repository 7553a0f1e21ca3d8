"""The verbs without procedures, for an account that may not have any: locks only, and nobody is woken.

Each verb is a handful of statements sent at once, in one transaction, on the same tables and under the lock of
the same bucket's row as the procedures use (`verbs.sql`). So the two kinds of client exclude each other, and stand in
one line. Whoever waits here looks by itself, often at the head of the line; and a client of this kind gives nobody a
turn, so that others, too, find out by themselves. A head that falls silent keeps the line waiting until its place
lapses (E7): `fair` is not promised.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Final

from leasehold.engines.mysql.lane import Lane
from leasehold.engines.mysql.wire import literal
from leasehold.engines.sql.wire import Row, Value
from leasehold.model import Claim

_KEY: Final = ("namespace", "bucket", "name", "mark")
_WHO: Final = ("client", "label", "host", "pid", "purpose")
_ATTEMPT: Final = (*_KEY, *_WHO, "mode", "kind", "most", "ttl", "delay", "queue", "sweep", "patience")
_VALUES: Final[dict[str, tuple[str, ...]]] = {
    "attempt": _ATTEMPT,
    "idle": _ATTEMPT,
    "release": (*_KEY, "min_hold", "held", "patience", "token"),
    "break": ("namespace", "bucket", "name", "token", "patience"),
    "inspect": ("namespace", "prefix", "exact"),
}
_RENEWED: Final = ("namespace", "name", "mark", "token", "ttl")
_SWEPT: Final = 4  # names, each in a transaction of its own
_HERE: Final = "namespace = {namespace} and name = {name}"


@cache
def _scripts() -> dict[str, str]:
    """By the name of their section."""
    found = {}
    for section in (files(__package__) / "plain.sql").read_text(encoding="utf-8").split("-- :")[1:]:
        head, _, body = section.partition("\n")
        found[head.split()[0]] = body.strip().replace("{here}", _HERE)
    for shared in ("enter", "grant", "settle"):
        found = {name: body.replace(f"{{{shared}}}", found[shared]) for name, body in found.items()}
    return found


class PlainLane(Lane):
    async def call(self, verb: str, values: Sequence[Value], deadline: float, claim: Claim | None = None) -> list[Row]:
        found: list[Row] = []
        if verb == "attempt" and claim is not None and not claim.queue:  # most find their name free
            found = await self._ask(self._script("idle", values), (), deadline, claim)
        return found or await self._ask(self._script(verb, values), (), deadline, claim)

    def take_back(self, mark: str, values: Sequence[Value]) -> None:
        session = self._limbo.pop(mark, None)
        if session is not None:
            self._see_off(session.regret(self._script("release", values), ()))

    def _script(self, verb: str, values: Sequence[Any]) -> bytes:
        if verb == "renew":
            return self._renewal(*values)
        if verb == "beat":
            return self._beats(*values)
        fields = dict(zip(_VALUES[verb], values, strict=True))
        script = self._filled(verb, fields)
        if sweep := fields.get("sweep"):
            script += self._sweep(lines=sweep > 1) * _SWEPT
        return script.encode()

    def _sweep(self, lines: bool) -> str:
        return _scripts()["sweep"].format(db=self._prefix, namespace="@lh_ns", name="@lh_n", lines=int(lines))

    def _renewal(self, *values: Any) -> bytes:
        *columns, _patience = values
        rows = [dict(zip(_RENEWED, row, strict=True)) for row in zip(*columns, strict=True)]
        return self._batch("renew", changes=self._each("change", rows), answers=self._answers("answer", rows))

    def _beats(self, *values: Any) -> bytes:
        *columns, _patience = values
        rows = [dict(zip(_KEY, row, strict=True)) for row in zip(*columns, strict=True)]
        buckets = sorted({(row["namespace"].encode(), row["bucket"]) for row in rows})
        locks = [{"namespace": namespace.decode(), "bucket": bucket} for namespace, bucket in buckets]
        return self._batch(
            "beat",
            buckets=self._each("bucket", locks),
            beats=self._each("keep", rows),
            answers=self._answers("kept", rows),
        )

    def _each(self, section: str, rows: list[dict[str, Any]]) -> str:
        return "\n".join(self._filled(section, row) for row in rows)

    def _answers(self, section: str, rows: list[dict[str, Any]]) -> str:
        return "\nunion all ".join(self._filled(section, row | {"nr": nr}) for nr, row in enumerate(rows, 1))

    def _batch(self, verb: str, **parts: str) -> bytes:
        return _scripts()[verb].format(**parts).encode()

    def _filled(self, section: str, values: dict[str, Value]) -> str:
        return _scripts()[section].format(
            db=self._prefix, **{name: literal(value).decode() for name, value in values.items()}
        )
