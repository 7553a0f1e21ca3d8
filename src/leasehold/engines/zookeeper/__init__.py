"""The ZooKeeper engine: a queue of ephemeral sequential nodes.

engine.py           the engine's verbs
attempt.py          one attempt: join the queue, check which nodes are ahead, become the holder, end an expired holder
nodes.py            what a node's name and data say, and who may hold, given all names: pure
slots.py            which slot of a semaphore a holder gets: pure
session_expiry.py   until when the session surely lives at the leader: pure
session.py          what a client's two engine instances share: one session, its nodes and its watches
kazoo_adapter.py    kazoo without its retries, callback threads, long timeouts and blocking shutdown
connection.py       the session's thread: heartbeats, pipelined requests, and when to leave a silent server
requests.py         requests whose replies are checked while they are decoded
health.py           the health of each server, by its four-letter words
inspect.py          holders and waiters below a prefix
url.py              zookeeper:// URLs: hosts, credentials, TLS, ACLs
"""

from leasehold.engines.zookeeper.engine import open

__all__ = ["open"]
