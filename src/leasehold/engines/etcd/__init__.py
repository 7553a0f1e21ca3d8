"""The etcd engine: locks that survive the loss of a machine, kept by a cluster that agrees on every step.

line.py      who stands in line, and the transactions that ask and change that: the safety argument
taking.py    one attempt: stand in line, look whose turn it is, make a turn a grant
renewing.py  a batch of renewals: the leases, and then the keys themselves
ending.py    release and break
showing.py   inspect
leases.py    etcd's own leases, and the pool of those that nothing hangs on
delays.py    what a waiter knows of the delays of those ahead
watch.py     the stream that tells of the one ahead, and of a break
shared.py    what the twins of a client share
engine.py    the verbs
calls.py     several members, one deadline, one mapping of errors
http2.py     gRPC over HTTP/2 on a plain socket; dialing.py, frames.py and hpack.py are its parts
wire.py      etcd's messages and their bytes
address.py   what a URL says
"""

from leasehold.engines.etcd.engine import open

__all__ = ["open"]
