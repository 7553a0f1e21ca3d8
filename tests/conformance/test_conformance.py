"""Every case over every engine and both runtimes. `pytest -k memory-asyncio` runs one of them."""

from leasehold.testing import RIGS, conformance_tests

for _name in RIGS:
    globals()[f"test_{_name}"] = conformance_tests(_name)
