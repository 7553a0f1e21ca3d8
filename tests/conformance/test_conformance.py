"""Every case on every engine and in both runtimes. `pytest -k memory-asyncio` runs one combination."""

from leasehold.testing import RIGS, conformance_tests

for _name in RIGS:
    globals()[f"test_{_name}"] = conformance_tests(_name)
