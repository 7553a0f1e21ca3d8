"""A Leasehold server as an engine, over HTTP: the engine behind the server decides who holds a name.

engine.py        the verbs
servers.py       the servers of a URL, and how a call reaches one that answers
connections.py   a pool for threads, a few shared connections for asyncio
listener.py      the stream of wake-ups
refusals.py      tokens that fences refused, reported to the server
parsing.py       HTTP responses and event streams
wire.py          claims, answers, problems and notifications as JSON values; the server uses it too
url.py           addresses, certificates and the API key
health.py        what `leasehold doctor` probes
"""

from leasehold.engines.remote.engine import RemoteEngine, open

__all__ = ["RemoteEngine", "open"]
