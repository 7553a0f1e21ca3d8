"""The public API of stores: `leasehold.stores.within(connection)` and the schema of the table it needs. The code is in
`leasehold.records`."""

from leasehold.records.store import Record, Store
from leasehold.records.stores import schema, within

__all__ = ["Record", "Store", "schema", "within"]
