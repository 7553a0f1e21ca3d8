"""`leasehold bench`: measure how fast an engine is from this machine.

command.py       the command
cases.py         what it measures, relative to one round trip to the engine
measurement.py   interleaved rounds and ratios per round; bench/ uses it, too
"""
