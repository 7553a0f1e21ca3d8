"""The verbs without procedures, for an account that may not have any: locks only, first come first served by chance.

Each verb is a handful of statements sent at once, in one transaction, on the same tables and under the lock of
the same bucket's row as the procedures use (`verbs.sql`). So the two kinds of client exclude each other. A client of
this kind wakes nobody and joins no line; it does not pass whoever stands in one, and those look again by themselves.
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
_VALUES: Final[dict[str, tuple[str, ...]]] = {
    "attempt": (*_KEY, *_WHO, "mode", "kind", "most", "ttl", "delay", "queue", "sweep", "patience"),
    "release": (*_KEY, "min_hold", "held", "patience"),
    "break": ("namespace", "bucket", "name", "token", "patience"),
    "inspect": ("namespace", "prefix", "exact"),
}
_RENEWED: Final = ("namespace", "name", "mark", "token", "ttl")
_HERE: Final = "namespace = {namespace} and name = {name}"


@cache
def _scripts() -> dict[str, str]:
    """By the name of their section."""
    found = {}
    for section in (files(__package__) / "plain.sql").read_text(encoding="utf-8").split("-- :")[1:]:
        head, _, body = section.partition("\n")
        found[head.split()[0]] = body.strip().replace("{here}", _HERE)
    return {name: body.replace("{enter}", found["enter"]) for name, body in found.items()}


class PlainLane(Lane):
    async def call(self, verb: str, values: Sequence[Value], deadline: float, claim: Claim | None = None) -> list[Row]:
        return await self._ask(self._script(verb, values), (), deadline, claim)

    def take_back(self, mark: str, values: Sequence[Value]) -> None:
        session = self._limbo.pop(mark, None)
        if session is not None:
            self._see_off(session.regret(self._script("release", values), ()))

    def _script(self, verb: str, values: Sequence[Any]) -> bytes:
        if verb == "renew":
            return self._renewal(*values)
        return self._filled(verb, dict(zip(_VALUES[verb], values, strict=True))).encode()

    def _renewal(self, *values: Any) -> bytes:
        *columns, _patience = values
        changes, answers = [], []
        for nr, row in enumerate(zip(*columns, strict=True), 1):
            fields = dict(zip(_RENEWED, row, strict=True))
            changes.append(self._filled("change", fields))
            answers.append(self._filled("answer", fields | {"nr": nr}))
        whole = {"changes": "\n".join(changes), "answers": "\nunion all ".join(answers)}
        return _scripts()["renew"].format(**whole).encode()

    def _filled(self, section: str, values: dict[str, Value]) -> str:
        return _scripts()[section].format(
            db=self._prefix, **{name: literal(value).decode() for name, value in values.items()}
        )
