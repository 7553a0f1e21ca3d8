"""The ZooKeeper engine: locks that survive the loss of a machine, as a queue of ephemeral sequential nodes.

engine.py      the verbs
line.py        one claim's way through the line: join, look, be granted, end a holder that lapsed
nodes.py       what a node's name and data say, and who may hold, given all names: pure
slots.py       which permit of a semaphore a holder has: pure
trust.py       until when the session surely lives at the leader: pure
session.py     what a client's twins share: the one connection, their nodes, their watches
wire.py        kazoo with its retries, its extra threads and its goodbyes taken off
connection.py  its one thread: heart-beats, whole flights, and when to leave a silent server
address.py     the URL: hosts, credentials, TLS, who may touch the nodes
"""

from leasehold.engines.zookeeper.engine import open

__all__ = ["open"]
