"""Values that change by compare-and-set, for short work with rare conflicts: no lock is held, nothing expires.

    stock = leasehold.versioned.Value(client, "stock/teapot")
    stock.update(lambda left: str(int(left or 5) - 1))     # read, decide, write if unchanged; else again

The value is a record in a store, on any engine that has one. The code is in `leasehold.records`.
"""

from typing import TYPE_CHECKING

from leasehold.blocking.records import Value
from leasehold.records.value import Versioned

if TYPE_CHECKING:
    from leasehold.aio.records import AsyncValue

__all__ = ["AsyncValue", "Value", "Versioned"]


def __getattr__(name: str) -> object:
    if name == "AsyncValue":
        from leasehold.aio.records import AsyncValue

        return AsyncValue
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
