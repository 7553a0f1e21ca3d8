"""Seeded runs of the real client against a simulated network and server.

seeds.py             one seed, one run; the command line
run.py               SimulationRun: the programs, the oracles, and when the run ends
workload.py          the simulated programs
faults.py            which faults are injected, chosen by the seed
safety_oracle.py     checks the answers of the server
client_oracle.py     checks the leases that programs trust
liveness_oracle.py   checks that no client waits for a free name
"""
