"""Every approach to locking under the same pause, crash and failover, with real servers: `make comparison`."""
