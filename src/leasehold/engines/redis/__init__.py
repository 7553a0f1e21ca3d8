"""The Redis engine: one server, its primary behind sentinels, or a cluster.

engine.py            the verbs: one script, one round trip each
lock_state.lua       decides who may hold: core/lock_state.py over keys; included by the scripts
attempt.lua  renew.lua  release.lua  decline.lua  break.lua  set_limit.lua  inspect.lua
                     one script per verb
release_to_next.lua  join_queue.lua  the usual hand-off, without lock_state.lua
attempt_claim.lua  renew_claims.lua  end_claim.lua  release_uncontended.lua
                     what these scripts share with the scripts of Redlock; included by both
scripts.py           assembles the scripts; the server knows them by their hash
protocol.py          encodes requests, once per lock; decodes replies
bounded_reader.py    splits what a server sends into replies, and refuses what no Redis server would send
executor.py          runs a script: retries, redirects, NOSCRIPT, too few replicas; maps errors (E9)
connections.py       a pool in blocking mode, a shared connection under asyncio
pubsub.py            wake-ups: one subscription per client       cluster_pubsub.py  one per bucket in a cluster
topology.py          which server has a name; URLs of one server
url.py               URLs of several servers
sentinel.py          the primary as reported by sentinels        discovery.py  queries several servers in turn
cluster.py           the nodes of a cluster
deployment.py        builds all of this from a URL
health.py            the health of the servers
server.py            one server: sign-in, settings               server_settings.py  what they mean for locks
"""

from leasehold.engines.redis.engine import open

__all__ = ["open"]
