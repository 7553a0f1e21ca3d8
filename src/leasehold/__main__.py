"""`python -m leasehold` is the program `leasehold`."""

from leasehold.cli import main

main()
