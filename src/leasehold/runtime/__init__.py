"""The only package that uses threads and event loops.

base.py            the Runtime protocol, `run_sync`, `maybe_await`
threads.py         blocking mode: awaits never suspend
loop.py            asyncio mode
polling.py         `select.poll`, also under eventlet
simulated.py       a seeded virtual clock, for the simulator and tests
simulator.py       its scheduler: time, tasks, faults
net/               sockets of both kinds
"""
