"""A Leasehold server as an engine, over HTTP: the engine behind the server decides who holds a name.

wire.py        claims, answers, problems and notifications as JSON values; the server uses it too
"""
