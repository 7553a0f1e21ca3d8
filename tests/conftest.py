"""For all tests."""

import random

import kazoo.protocol.connection
import kazoo.retry

# kazoo's threads draw from the program's own generator, whenever they like. Hypothesis looks whether a strategy does,
# and would take them for one: they get a generator of their own.
kazoo.protocol.connection.random = kazoo.retry.random = random.Random()
