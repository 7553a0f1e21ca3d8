"""Every case on every engine and in both runtimes. `pytest -k memory-asyncio` runs one combination.

All workers of a run share the servers. Cases that break a server get the one of their process: `test_redis_broken`.
"""

import pytest

from harness.rigs import with_own_server
from leasehold.testing import RIGS, conformance_tests
from leasehold.testing.conformance.rig import rig_type
from leasehold.testing.conformance.suite import all_cases

BREAKING = {"pause", "restart", "lose_minority", "advance_clock"}  # what a case does to all clients of a server
SAME_ENGINE = {"valkey"}  # on another server: left to the second tier

_breaking = [case for case in all_cases() if case.rig & BREAKING]
_others = [case for case in all_cases() if not case.rig & BREAKING]

for _name in RIGS:
    _tests = {
        f"test_{_name}": conformance_tests(_name, cases=_others),
        f"test_{_name}_broken": conformance_tests(with_own_server(rig_type(_name)), name=_name, cases=_breaking),
    }
    if _name in SAME_ENGINE:
        _tests = {name: pytest.mark.extended(test) for name, test in _tests.items()}
    globals().update(_tests)
