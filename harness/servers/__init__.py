"""Real servers for tests and rigs, as plain processes on loopback, and a proxy that injects network faults.

process.py       starts, pauses and kills a server
etcd.py  zookeeper.py  redis.py  redis_ha.py  redlock.py  postgresql.py  mysql.py  lock_server.py  prometheus.py
                 each kind of server: its command line and readiness check
proxy.py         injects network faults; hostile.py: answers in the server's place; forged.py: answers of wrong types
machine.py       a client machine that reaches the servers through its own proxies
hosts.py         hosts of their own for the members of a cluster; sites.py: three sites far from each other
shared.py        one server per engine for all processes of a test run
folders.py       folders for the data of servers
fake_clock.py    a server clock that a test can set
http_load.py     load for a lock server, and what it costs
"""
