"""Judges of recorded histories.

history.py        what clients saw, in order: invoke, ok, fail, unknown
intervals.py      the quick checker: overlapping holds, falling tokens
linearizable.py   the exact checker: a search for an order that a correct lock allows
fences.py         whether a fence let a stale token through
mutation.py       plants a bug in an engine and shows which cases notice
"""
