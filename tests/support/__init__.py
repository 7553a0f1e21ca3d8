"""Helpers, fixtures and child programs that several test folders share."""
