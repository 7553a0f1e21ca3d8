"""The Redis engine: one server, its primary behind sentinels, or a cluster.

engine.py            the verbs: one script each, one trip each
lock_state.lua       who may hold: core/lock_state.py over keys; included by the scripts
attempt.lua  renew.lua  release.lua  break.lua  inspect.lua
scripts.py           the scripts put together, known by their hash
protocol.py          requests as bytes, packed once per lock; what replies mean
executor.py          runs a script: retries, redirects, NOSCRIPT, too few replicas; errors as ours (E9)
connections.py       a pool in blocking mode, a shared connection under asyncio
pubsub.py            wake-ups: one subscription per client       cluster_pubsub.py  in a cluster
topology.py          which server has a name; the URL of one server
url.py               URLs of several servers
sentinel.py          the primary that sentinels name             discovery.py  asking several servers in turn
cluster.py           the nodes of a cluster
deployment.py        what a URL leads to, put together
server.py            one server: sign in, and read its settings  server_settings.py  what they mean for locks
"""

from leasehold.engines.redis.engine import open

__all__ = ["open"]
