"""Values that change by compare-and-set, for short work with rare conflicts: no lock is held, nothing expires.

    stock = leasehold.versioned.Value(client, "stock/teapot")
    stock.update(lambda left: str(int(left or 5) - 1))     # read, decide, write if unchanged; else again

The value is a record in a store, on any engine that has one. The code is in `leasehold.records`.
"""

from leasehold.aio.records import AsyncValue
from leasehold.blocking.records import Value
from leasehold.records.value import Versioned

__all__ = ["AsyncValue", "Value", "Versioned"]
