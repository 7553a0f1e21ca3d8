"""The conformance suite: every engine passes the same cases, in both runtimes.

suite.py            `conformance_tests(rig)`: the cases as pytest tests
case.py             `@case`: what a case needs of an engine and shows of the contract
rig.py              Rig: makes an engine, and breaks it on demand
context.py          CaseContext: what a case is given
engine_driver.py    EngineDriver: one client at the engine interface, without a watchdog
unified_client.py   the blocking and the asyncio client as one
memory_rig.py       the rig of the memory engine
cases/              the cases, by subject
"""
