"""`leasehold run`: hold a name while a command runs.

command.py         the command for click: its help, and where CMD begins
job.py             its options, the steps of a run, exit codes
child.py           the process that becomes CMD
supervisor.py      the loop that watches lease and child
orphan_killer.py   kills CMD's process group if the wrapper is killed
parent_death.py    lets a child die with its parent
signals.py         signals as values, queued for the loop
telemetry.py       metrics and traces of a run
terminal.py        the controlling terminal
result_file.py     `--result-file`
"""
