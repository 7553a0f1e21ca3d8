"""Pure decisions: no I/O, no clock, no threads, no randomness of its own."""
