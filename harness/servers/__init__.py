"""Real servers for tests and rigs, as plain processes on loopback, and a proxy that hurts the way to them.

`process` starts, pauses and kills one; each server has a module that knows its command line and when it is ready.
"""
