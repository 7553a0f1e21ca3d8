"""`leasehold run` without click, for command lines that need no explanation.

A cron job starts `run` every minute, and a quarter of the start would be click. So a command line is first read here,
by the same options. What is not plain (an error, a request for help, two letters in one word, a type of click) is left
to click, which reads everything again. Nothing has been done by then.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from leasehold.cli.console import GLOBAL_OPTIONS, Console
from leasehold.cli.option import Option

_COMPLETION_VARIABLE = "_LEASEHOLD_COMPLETE"  # of click: the shell asks for completions


def understood(arguments: Sequence[str]) -> Callable[[], int] | None:
    """The run that the command line asks for. None: leave it to click."""
    if "run" not in arguments or _COMPLETION_VARIABLE in os.environ:
        return None
    try:
        return _parse(deque(arguments))
    except Exception:  # whatever is wrong, click finds it, too, and explains it
        return None


def _parse(words: deque[str]) -> Callable[[], int]:
    before = _given(words, GLOBAL_OPTIONS)
    if words.popleft() != "run":
        raise ValueError("another command")
    from leasehold.cli.options import checked_name
    from leasehold.cli.run.job import RUN_OPTIONS, run_job  # only here: other commands do without

    after = _given(words, (*GLOBAL_OPTIONS, *RUN_OPTIONS))
    if words[0] == "--":
        raise ValueError("no NAME")
    name = checked_name(words.popleft())
    after |= _given(words, (*GLOBAL_OPTIONS, *RUN_OPTIONS))
    if words and words[0] == "--":
        words.popleft()
    console = Console()
    for values in (_from_environment(GLOBAL_OPTIONS) | before, after):
        for option in GLOBAL_OPTIONS:
            if option in values:
                console = console.with_option(option.name, values[option])
    console.prepare_logs()
    given = _from_environment(RUN_OPTIONS) | after
    values_by_name = {option.name: given.get(option, option.default) for option in RUN_OPTIONS}
    return partial(run_job, console, name=name, command=tuple(words), **values_by_name)


def _given(words: deque[str], options: Iterable[Option]) -> dict[Option, Any]:
    """The values of the options that come next, which are taken out of `words`."""
    by_flag = {flag: option for option in options for flag in option.flags}
    found: dict[Option, Any] = {}
    while words and words[0].startswith("-") and words[0] != "--":
        flag, has_value, text = words.popleft().partition("=")
        option = by_flag[flag]
        if option.is_flag and not has_value:
            found[option] = True
            continue
        if has_value and not flag.startswith("--"):
            raise ValueError("for click, the value begins with =")
        found[option] = option.convert(text if has_value else words.popleft())
    return found


def _from_environment(options: Iterable[Option]) -> dict[Option, Any]:
    return {
        option: option.convert(text)
        for option in options
        if option.variable is not None and (text := os.environ.get(option.variable))
    }
