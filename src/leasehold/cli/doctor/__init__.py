"""`leasehold doctor`: what is wrong with an engine's set-up, which promise that touches, and what mends it.

findings.py   the values: a finding, its severity, the six red flags
servers.py    judges the health of the engine's servers, as `engines.health` reports it
host.py       judges this machine: is its clock synchronised, is a file on a network file system
trial.py      takes, renews, hands over and breaks a real lock in a namespace of its own, and times it
command.py    the command
"""
