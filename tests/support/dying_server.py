"""`leasehold serve` that kills itself at one call of its engine: `dying_server.py NUMBER before|after ARGUMENTS`.

The call with this number, counted over all verbs that change something or wait, is never sent, or was carried out and
its answer reaches no caller.
"""

import os
import signal
import sys

from leasehold import engines
from leasehold.cli import main

_VERBS = frozenset({"attempt", "wait", "renew", "release", "decline"})
_number, _when = int(sys.argv.pop(1)), sys.argv.pop(1)
_calls = 0


class DyingEngine:
    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        verb = getattr(self._engine, name)
        return self._dying(verb) if name in _VERBS else verb

    def _dying(self, verb):
        async def call(*args):
            global _calls
            _calls += 1
            is_last = _calls == _number
            if is_last and _when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return await verb(*args)
            finally:
                if is_last:
                    os.kill(os.getpid(), signal.SIGKILL)

        return call


_opener = engines.opener
engines.opener = lambda scheme: lambda *args: DyingEngine(_opener(scheme)(*args))

if __name__ == "__main__":
    main()
