"""Fences for SQL databases over DB-API: a fence row for any statements, a fence column for rows of one table.

row.py         a fence row: the first statement of a transaction fences all others
column.py      a fence column: each row has its own highest token
column_ops.py  its steps, the same for SQLAlchemy
dialect.py     how databases differ
"""
