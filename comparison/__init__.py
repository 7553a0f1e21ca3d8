"""Every approach to locking against the same pause, crash and fail-over, run for real: `make comparison`."""
