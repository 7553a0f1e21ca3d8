"""`leasehold doctor`: what is unsafe about an engine's configuration, which promise that affects, and how to fix it.

findings.py   the values: a finding, its severity, the six red flags
servers.py    judges the health of the engine's servers, as `engines.health` reports it
host.py       judges this machine: is its clock synchronised, is a file on a network file system
real_lock.py  acquires, renews, hands over and breaks a real lock in a namespace of its own, and times it
command.py    the command
"""
