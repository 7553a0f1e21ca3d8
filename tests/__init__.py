"""Tests, mirroring src/leasehold; helpers in support/. Importable, so that tests can share them."""
