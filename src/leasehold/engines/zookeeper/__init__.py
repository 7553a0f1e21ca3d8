"""The ZooKeeper engine: a queue of ephemeral sequential nodes.

engine.py           the verbs
attempt.py          one attempt: join the queue, see who is ahead, be granted, end a holder that expired
nodes.py            what a node's name and data say, and who may hold, given all names: pure
slots.py            which permit of a semaphore a holder has: pure
session_expiry.py   until when the session surely lives at the leader: pure
session.py          what a client's two engine instances share: one connection, their nodes, their watches
kazoo_adapter.py    kazoo without its retries, callback threads and goodbyes
connection.py       its one thread: heartbeats, pipelined requests, and when to leave a silent server
inspect.py          holders and waiters
url.py              zookeeper:// URLs: hosts, credentials, TLS, ACLs
"""

from leasehold.engines.zookeeper.engine import open

__all__ = ["open"]
