"""`leasehold run`: hold a name while a command runs.

command.py         options, exit codes, the order of events
child.py           the process that becomes CMD
supervisor.py      the loop between lease and child
orphan_killer.py   ends CMD if the wrapper is killed
parent_death.py    a child that dies with its parent
signals.py         signals as values, queued for the loop
terminal.py        the controlling terminal
result_file.py     `--result-file`
"""
