"""Locks where frameworks need them: one module for each framework, which alone imports it."""
