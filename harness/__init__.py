"""What proves Leasehold and does not ship with it: imported by tests, bench and comparison.

servers/     real servers as plain processes on loopback, and proxies in front of them
rigs/        how the conformance suite starts and breaks each real engine
simulator/   thousands of seeded runs with faults, and the oracles that judge them
checkers/    histories of calls, and whether a correct lock could have made them
"""
