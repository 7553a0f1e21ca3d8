"""The Redis engine: locks between all machines that reach one server, its primary behind sentinels, or a cluster.

engine.py    the verbs: one script each, one trip each
machine.lua  who may hold: core/admission.py over keys; included by the scripts that follow
attempt.lua  renew.lua  release.lua  break.lua  inspect.lua
requests.py  requests as bytes, packed once per lock; what replies mean
asking.py    what may happen to a request: silence, a forgotten script, a refusal, too few replicas
wire.py      connections: a pool in blocking mode, a shared one under asyncio
listener.py  wake-ups: one subscription of a client
topology.py  which server has a name; the URL of one server (several.py: of several)
sentinel.py  the primary that sentinels name        (doors.py: asking several who knows)
cluster.py   the nodes of a cluster                 (shards.py: wake-ups from all of them)
deployment.py  what a URL leads to, put together
server.py    signing in, and the settings read then (settings.py)
"""

from leasehold.engines.redis.engine import open

__all__ = ["open"]
