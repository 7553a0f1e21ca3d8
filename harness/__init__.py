"""Test equipment that is not in the wheel: tests, bench and comparison import it.

servers/     real servers as plain processes on loopback, and proxies in front of them
rigs/        how the conformance suite starts each real engine and injects faults into it
simulator/   thousands of seeded runs with faults, and the oracles that check them
lab/         the fault lab: every engine under every fault
probe.py     what the rigs, the simulator and bench/ read and change inside a client
checkers/    histories of calls, and checks whether a correct lock could have produced them
"""
