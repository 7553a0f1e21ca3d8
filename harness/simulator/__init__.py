"""Seeded runs of the real client against a simulated network and server.

seeds.py             one seed, one run; the command line
run.py               SimulationRun: who takes part, who judges, when it is over
workload.py          the simulated programs
faults.py            what goes wrong, by the seed's own chances
safety_oracle.py     judges what the server answers
client_oracle.py     judges what programs believe to hold
liveness_oracle.py   judges whether anybody waits for what is free
"""
