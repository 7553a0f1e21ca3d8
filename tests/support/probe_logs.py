"""What tests read and change of what modules remember about log lines, slow hooks and traces."""

from __future__ import annotations

from leasehold import events, tracing
from leasehold.engines import repeated_logs
from tests.support.probe import Place

MAX_TRACED_LEASES = Place(tracing, "_MAX_LEASES")

# So that a line is logged once, or seldom.
LOGGED_LINES = Place(repeated_logs, "_logged")
RECENT_LINES = Place(repeated_logs, "_recent")
SLOW_CALLS = Place(events, "_slow_calls")
SLOW_HOOKS = Place(events, "_slow_hooks")

TRACED_LEASES = Place(tracing, "_of_leases")  # the trace that each lease belongs to
