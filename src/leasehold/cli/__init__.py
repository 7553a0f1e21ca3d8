"""The command line, one module per command. `import leasehold` never comes here: click is loaded by the shell's
users alone.
"""

from __future__ import annotations


def main() -> None:
    """The program `leasehold`. Ends the process with one of the codes of `leasehold.cli.exits`."""
    from leasehold.cli.app import start

    raise SystemExit(start())
