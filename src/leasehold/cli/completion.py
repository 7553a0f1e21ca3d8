"""`leasehold completion`: the script with which a shell completes commands, options and live names."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from leasehold.cli.console import Console, pass_console
from leasehold.cli.help import command

EXAMPLES = """
leasehold completion bash > ~/.local/share/bash-completion/completions/leasehold
leasehold completion zsh > "${fpath[1]}/_leasehold"
leasehold completion fish > ~/.config/fish/completions/leasehold.fish
eval "$(leasehold completion bash)"             for the current shell only
"""


@command("completion", EXAMPLES)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@pass_console
@click.pass_context
def completion(ctx: click.Context, console: Console, shell: str) -> None:
    """Print the completion script for bash, zsh or fish.

    The script completes commands, options, and names that have a holder or a waiter, if the engine answers within a
    second.
    """
    kind = get_completion_class(shell)
    assert kind is not None, f"click knows {shell}"  # noqa: S101  # for the type checker
    script = kind(ctx.find_root().command, {}, "leasehold", "_LEASEHOLD_COMPLETE").source()
    # zsh calls a file in its fpath as the function `_leasehold`, and only the first time as "loadautofunc": with the
    # condition of click the second completion of a shell offers nothing.
    script = script.replace("$zsh_eval_context[-1] == loadautofunc", "$funcstack[1] == _leasehold")
    # In fish, click would end a name or a description at its first comma.
    console.put(script.replace('(string split "," $completion)', '(string split --max 1 "," $completion)'))
