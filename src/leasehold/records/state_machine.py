"""A status that changes by atomic steps along defined transitions: `new` to `paid` once, however many callers try.

No lock is needed: a step is one compare-and-set of the record (S1), refused unless the status is still in the expected
state.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, Final

from leasehold.core import timing
from leasehold.core.record_fields import is_count, is_text, load_fields
from leasehold.errors import ConfigError, Conflict
from leasehold.records.access import RecordAccess
from leasehold.records.store import Record

KIND: Final = "status"

_IS_VALID: Final = {"state": is_text, "steps": is_count}
_TRIES: Final = 20  # each failed one means that another caller made a step
_PAUSE: Final = 0.005
_MAX_PAUSE: Final = 0.2


class BaseStatus:
    """What `Status` and `AsyncStatus` share."""

    def __init__(self, records: RecordAccess, name: str, moves: Mapping[str, Collection[str]], start: str) -> None:
        self.name, self.start = name, start
        self._records, self._moves = records, _check_moves(moves, start)
        self._record_key = records.key(KIND, name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} of {', '.join(self._moves)}>"

    async def _get(self) -> str:
        record = await self._records.read(self._record_key)
        return self.start if record is None else str(_load(record)["state"])

    async def _move(self, to: str, expected: str | Collection[str] | None) -> str:
        """Move to the state `to`, and return the previous state."""
        allowed = self._allowed_sources(to, expected)
        runtime = self._records.core.runtime
        for tries in range(_TRIES):
            record = await self._records.read(self._record_key)
            found: dict[str, Any] = _load(record) if record else {"state": self.start, "steps": 0}
            state = found["state"]
            if state not in allowed:
                wanted = " or ".join(sorted(allowed))
                raise Conflict(self.name, text=f"{self.name} is {state}, not {wanted}: it was not moved", found=state)
            new_record = {"state": to, "steps": found["steps"] + 1, "at": runtime.wall()}
            if await self._records.swap(self._record_key, json.dumps(new_record).encode(), record, None, self.name):
                return str(state)
            await runtime.sleep(timing.backoff(tries, _PAUSE, _MAX_PAUSE, runtime.random()))
        raise Conflict(self.name, attempts=_TRIES)

    def _allowed_sources(self, to: str, expected: str | Collection[str] | None) -> frozenset[str]:
        """The states it may be moved from. Raises `ConfigError` if no transition allows the move."""
        defined = frozenset(state for state, targets in self._moves.items() if to in targets)
        wanted = defined if expected is None else frozenset([expected] if isinstance(expected, str) else expected)
        if not defined:
            raise ConfigError(f"{self.name} cannot be moved to {to!r}: no transition in `moves` leads there")
        if not wanted or not wanted <= defined:
            chosen = " or ".join(map(repr, sorted(wanted - defined))) or "no state at all"
            known = " or ".join(map(repr, sorted(defined)))
            raise ConfigError(f"{self.name} cannot be moved to {to!r} from {chosen}, only from {known}")
        return wanted


def _load(record: Record) -> dict[str, Any]:
    return load_fields(record.data, "the record of a status", _IS_VALID)


def _check_moves(moves: Mapping[str, Collection[str]], start: str) -> dict[str, frozenset[str]]:
    if any(isinstance(targets, str) for targets in moves.values()):
        raise ConfigError('moves must map each state to a set of states: {"new": {"paid", "cancelled"}, ...}')
    defined = {state: frozenset(targets) for state, targets in moves.items()}
    defined |= {target: frozenset() for targets in moves.values() for target in targets if target not in defined}
    if start not in defined:
        raise ConfigError(f"start must be one of {', '.join(defined)}, not {start!r}")
    if any(not isinstance(state, str) or not state for state in defined):
        raise ConfigError("states must be non-empty strings")
    return defined
