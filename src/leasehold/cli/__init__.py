"""The command line, one module per command. `import leasehold` loads neither this package nor click.

app.py          runs a command, and turns errors into exit codes; program.py: the commands, for click
quick.py        `run` without click, for plain command lines; option.py: options for both
console.py      what every command gets: global options, a client, stdout and stderr
options.py      options that several commands share
exit_codes.py  help.py  render.py     exit codes, help pages, tables and JSON
lease_input.py  output_file.py        a lease as input; a file that a command writes at its end
server_api.py   GET requests to a lock server, for stats, history and top
run/  demo/  bench/  doctor/  top/     commands with folders of their own
acquire.py  renew.py  release.py  break_.py  resize.py  rebase.py  elect.py     commands that change locks
ls.py  get.py  watch.py  deadlocks.py  stats.py  history.py  audit.py           commands that show them
serve.py  serve_key.py  schema.py  alerts.py     a lock server, its API keys; what to install beside an engine
advise.py  docs.py  completion.py     whether a lock is needed; the documentation in a terminal; shell completion
"""

from __future__ import annotations

import gc
import signal
import sys


def main() -> None:
    """The program `leasehold`. Ends the process with one of the codes of `leasehold.cli.exit_codes`."""
    if sys.platform == "win32":
        raise SystemExit(
            "leasehold: this program needs Linux or macOS. On Windows the package works with memory://, redis://, "
            "etcd:// and lock servers: import leasehold"
        )
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until `start`: nothing to undo, so no traceback either
    from leasehold.cli.app import start

    code = start()
    gc.freeze()  # the interpreter would search all that was loaded for garbage, several times, just before it exits
    raise SystemExit(code)
