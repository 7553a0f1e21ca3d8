"""SQL tables over DB-API connections: a fence row for any statements, a fence column for rows that have one."""
