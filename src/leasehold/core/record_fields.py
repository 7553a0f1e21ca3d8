"""The JSON of records, read with care: another program may have written it, and no call may act on what it says."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Mapping
from typing import Any, Final, NoReturn

from leasehold.errors import ConfigError

_MAX_NUMBER: Final = 2**63  # larger than any token and any count
_EARLIEST: Final = -1e9  # seconds since 1970: simulated clocks begin near 0
_LATEST: Final = 2e11  # in the year 8307: for later ones, Python has no date


def load_fields(
    data: bytes, what: str, is_valid: Mapping[str, Callable[[Any], bool]], optional: Container[str] = ()
) -> dict[str, Any]:
    """The fields of a record. Raises ConfigError unless it is an object in which each field that has a check passes it.
    Other fields may be there: a newer version may have written it."""
    try:
        found = json.loads(data.decode(), parse_constant=_refuse_constant)
        if isinstance(found, dict) and all(
            check(found[field]) for field, check in is_valid.items() if field in found or field not in optional
        ):
            return found
    except (ValueError, KeyError, TypeError, RecursionError):  # TypeError: what cannot be hashed
        pass
    raise ConfigError(
        f"the value stored under this key is not {what}: is the key used for something else? Use another key or "
        "namespace, or remove the value"
    )


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def is_whole_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -_MAX_NUMBER < value < _MAX_NUMBER


def is_count(value: Any) -> bool:
    return is_whole_number(value) and value >= 0


def is_time(value: object) -> bool:
    """Seconds since 1970."""
    return isinstance(value, int | float) and not isinstance(value, bool) and _EARLIEST < value < _LATEST


def is_text(value: object) -> bool:
    """A text that can be encoded: without lone surrogates."""
    return isinstance(value, str) and (value.isascii() or value == value.encode(errors="ignore").decode())
