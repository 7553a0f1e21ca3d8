"""The etcd engine: locks kept by a cluster whose members agree on every step.

queue.py          the queue keys of a name, and the transactions on them: the safety argument
attempt.py        one attempt: enqueue, check which entries are ahead, become the holder
renew.py          a batch of renewals: leases first, then the keys
release.py        release and break
inspect.py        holders and waiters below a prefix
leases.py         etcd's own leases, and the pool of unused ones
delays.py         what a waiter knows about the delays of earlier entries
watch.py          the watch stream: the entry ahead, and the claim's own key
waiter_leases.py  keeps the leases of waiters alive, on the connection of the watch stream
client_state.py   what a client's two engine instances share
engine.py         the engine's verbs
rpc.py            several members, one deadline, one mapping of errors (E9)
messages.py       etcd's messages as values and bytes (protocol buffers)
health.py         the health of each endpoint, and of the cluster
url.py            etcd:// URLs
grpc/             gRPC over HTTP/2 on a plain socket
"""

from leasehold.engines.etcd.engine import open

__all__ = ["open"]
