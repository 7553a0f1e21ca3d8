"""The command line, one module per command. `import leasehold` loads neither this package nor click.

app.py          the program: its commands, and errors as exit codes
console.py      what every command gets: global options, a client, stdout and stderr
options.py      options that several commands share
exit_codes.py  help.py  render.py  lease_input.py     exit codes, help pages, tables and JSON, a lease as input
server_api.py   GET requests to a lock server, for stats, history and top
run/  demo/  bench/  doctor/  top/     commands with folders of their own
"""

from __future__ import annotations


def main() -> None:
    """The program `leasehold`. Ends the process with one of the codes of `leasehold.cli.exit_codes`."""
    from leasehold.cli.app import start

    raise SystemExit(start())
