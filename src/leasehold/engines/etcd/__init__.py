"""The etcd engine: locks kept by a cluster that agrees on every step.

queue.py          the keys of a name in order, and the transactions on them: the safety argument
acquire.py        one attempt: enqueue, see who is ahead, become the holder
renew.py          a batch of renewals: leases first, then the keys
release.py        release and break
inspect.py        holders and waiters below a prefix
leases.py         etcd's own leases, and the pool of unused ones
delays.py         what a waiter knows of the delays of those ahead
watch.py          the watch stream: the entry ahead, and a break of one's own
client_state.py   what a client's two engine instances share
engine.py         the verbs
rpc.py            several members, one deadline, one mapping of errors (E9)
messages.py       etcd's messages as values and bytes (protocol buffers)
url.py            etcd:// URLs
grpc/             gRPC over HTTP/2 on a plain socket
"""

from leasehold.engines.etcd.engine import open

__all__ = ["open"]
