"""Checkers of recorded histories.

history.py        what clients observed, in order: invoke, ok, fail, unknown
intervals.py      the fast checker: overlapping holds, decreasing tokens
linearizable.py   the exact checker: a search for an order that a correct lock allows
fences.py         whether a fence accepted a stale token
mutation.py       plants a bug in an engine and checks that the conformance cases detect it
"""
