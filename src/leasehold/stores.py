"""Stores for users: `leasehold.stores.within(connection)` and the tables they need. The code is in
`leasehold.records`."""

from leasehold.records.store import Record, Store
from leasehold.records.stores import schema, within

__all__ = ["Record", "Store", "schema", "within"]
