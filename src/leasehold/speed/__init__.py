"""Measuring: rounds that compare like with like, and the cases of `leasehold bench`."""
