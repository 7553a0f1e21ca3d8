"""`leasehold bench`: how fast an engine is from here.

command.py       the command
cases.py         what it measures, in round trips of that same engine
measurement.py   interleaved rounds, ratios per round; bench/ uses it too
"""
