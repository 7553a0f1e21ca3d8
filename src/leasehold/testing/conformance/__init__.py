"""The conformance suite: every engine passes the same cases, in both runtimes.

suite.py            `conformance_tests(rig)`: the cases as pytest tests
case.py             `@case`: what a case needs from an engine, and which rules of the contract it tests
rig.py              Rig: opens an engine, and injects faults
context.py          CaseContext: what a case is given
engine_driver.py    EngineDriver: one client at the engine interface, without a watchdog
unified_client.py   the blocking and the asyncio client as one
memory_rig.py       the rig of the memory engine
cases/              the cases, by subject
"""
