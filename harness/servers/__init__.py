"""Real servers for tests and rigs, as plain processes on loopback, and a proxy that injects network faults.

`process` starts, pauses and kills a server. Each kind of server has a module with its command line and readiness check.
"""
