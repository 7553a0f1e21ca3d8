"""The Redis engine: one server, its primary behind sentinels, or a cluster.

engine.py            the verbs: one script, one round trip each
lock_state.lua       decides who may hold: core/lock_state.py over keys; included by the scripts
attempt.lua  renew.lua  release.lua  break.lua  inspect.lua
attempt_claim.lua  renew_claims.lua  end_claim.lua  release_uncontended.lua
                     what these scripts share with the scripts of Redlock; included by both
scripts.py           assembles the scripts; the server knows them by their hash
protocol.py          encodes requests, once per lock; decodes replies
executor.py          runs a script: retries, redirects, NOSCRIPT, too few replicas; maps errors (E9)
connections.py       a pool in blocking mode, a shared connection under asyncio
pubsub.py            wake-ups: one subscription per client       cluster_pubsub.py  one per bucket in a cluster
topology.py          which server has a name; URLs of one server
url.py               URLs of several servers
sentinel.py          the primary as reported by sentinels        discovery.py  queries several servers in turn
cluster.py           the nodes of a cluster
deployment.py        builds all of this from a URL
server.py            one server: sign-in, settings               server_settings.py  what they mean for locks
"""

from leasehold.engines.redis.engine import open

__all__ = ["open"]
