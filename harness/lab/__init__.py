"""The fault lab: every engine under every fault, with real servers, contenders as processes, and a verdict.

setups.py        the servers of each engine, and how contenders reach them
faults.py        what is injected
expectations.py  what is promised for each setup and fault: the table
contender.py     the process that acquires the lock and writes to the account
run.py           one run
verdict.py       the recorded history, the checkers' findings, the figures
evidence.py      the results that are kept, and the tables of docs/reliability.md
soak.py          a long run with another fault every 15 s, beside most of the load that the servers can carry
distances.py     how long acquiring takes when servers and clients are at three sites
"""
