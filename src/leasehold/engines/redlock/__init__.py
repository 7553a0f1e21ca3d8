"""The Redlock engine: locks by a majority of independent Redis servers.

quorum.py         why it is safe, and what the answers of the nodes mean together: read this first
engine.py         the verbs: one round of all nodes each
attempt.lua  confirm.lua  renew.lua  rejoin.lua  release.lua  break.lua  clock_limits.lua
                  what one node decides, over lock_state.lua and inspect.lua of the Redis engine
renew.py          renewal by majority, and rejoining nodes that lost a grant
inspect.py        every node's view of a name, merged
broadcast.py      one request to all nodes at once, and who answered
node.py           one node: whether to wait for it, and which releases it missed
pubsub.py         wake-ups from all nodes, read by one thread
protocol.py       requests as bytes; what replies mean
client_state.py   what a client's two engine instances share
url.py            redlock:// URLs
"""

from leasehold.engines.redlock.engine import open

__all__ = ["open"]
