"""Every approach to locking under the same pause, crash and fail-over, with real servers: `make comparison`."""
