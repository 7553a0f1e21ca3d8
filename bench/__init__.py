"""Benchmarks: ratios against a base measured in the same run, never bare seconds."""
