"""The Redlock engine: locks by a majority of independent Redis servers.

quorum.py         the safety argument, and how the nodes' answers are counted: read this first
engine.py         the verbs: one round to all nodes each
attempt.lua  confirm.lua  renew.lua  rejoin.lua  release.lua  break.lua  node_preamble.lua
                  what one node decides, over lock_state.lua and inspect.lua of the Redis engine
renew.py          renewal by majority, and rejoining on nodes that lost a grant
inspect.py        inspection: merges the nodes' views of a name
broadcast.py      sends one request to all nodes at once, and collects the answers
node.py           one node: its backoff, and the releases it missed
pubsub.py         wake-ups from all nodes, read by one thread
protocol.py       encodes requests; decodes replies
client_state.py   what a client's two engine instances share
health.py         the health of each node
url.py            redlock:// URLs
"""

from leasehold.engines.redlock.engine import open

__all__ = ["open"]
