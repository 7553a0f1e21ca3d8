"""`leasehold bench`: measure how fast an engine is from this machine.

command.py       the command
cases.py         what it measures, relative to one round trip to the engine
measurement.py   interleaved rounds and ratios per round; bench/ uses it, too
until_breaks.py  --until-breaks: client processes that offer more and more load
load_worker.py   one of these processes
ramp.py          which load comes next, and whether and why the last one broke
plot.py          plots and charts as SVG; bench/ uses it, too
"""
