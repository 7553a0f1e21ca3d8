"""The Redlock engine: locks by a majority of Redis servers that do not depend on one another.

agreement.py why it is safe, and what the answers of the nodes mean together: read this first
engine.py    the verbs: one round of all nodes each
attempt.lua  confirm.lua  renew.lua  retake.lua  release.lua  break.lua   what one node decides; over the Redis engine's
             machine.lua, and its inspect.lua
renewing.py  renewal by majority, and taking part again   looking.py  inspection
asking.py    one question to all nodes at once, and who answered
node.py      one node: whether it is worth waiting for, what it missed   address.py  the URL
listener.py  wake-ups from all nodes, heard by one thread
requests.py  requests as bytes; what replies mean   shared.py  numbers and tickets
"""

from leasehold.engines.redlock.engine import open

__all__ = ["open"]
