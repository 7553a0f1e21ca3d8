"""The command line, one module per command. `import leasehold` never loads it, nor click.

app.py          the program: global options, commands, errors as exit codes
console.py      what every command gets: options, a client, the two streams
options.py      options that several commands share
exit_codes.py  help.py  render.py  lease_input.py     exit codes, help pages, tables and JSON, a lease from stdin
run/  demo/  bench/     commands with folders of their own
"""

from __future__ import annotations


def main() -> None:
    """The program `leasehold`. Ends the process with one of the codes of `leasehold.cli.exit_codes`."""
    from leasehold.cli.app import start

    raise SystemExit(start())
