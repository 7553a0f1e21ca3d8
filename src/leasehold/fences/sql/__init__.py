"""Fences for SQL databases over DB-API: a fence row for any statements, a fence column for rows of one table."""
