"""The only home of threads and event loops."""
