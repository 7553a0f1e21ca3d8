"""Options as data: click's are made from them when click is needed. `leasehold run` mostly starts without it, because
click would take a quarter of the start: see `quick.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import click

F = TypeVar("F", bound=Callable[..., Any])


class Option:
    """An option of a command. As a decorator, it adds itself to a command of click.

    The settings are those of `click.option`, but a type of click is given by `click_type`, a function that makes it.
    """

    def __init__(
        self, *names: str, click_type: Callable[[], click.ParamType[Any]] | None = None, **settings: Any
    ) -> None:
        self.flags = [name for name in names if name.startswith("-")]
        self._names, self._click_type, self._settings = names, click_type, settings
        self.is_flag: bool = settings.get("is_flag", False)
        self.variable: str | None = settings.get("envvar")

    def __call__(self, command: F) -> F:
        from click import option

        return option(*self._names, **self.click_settings())(command)

    def click_settings(self) -> dict[str, Any]:
        return self._settings if self._click_type is None else {**self._settings, "type": self._click_type()}

    # -- what `quick.py` needs

    @property
    def name(self) -> str:
        """The parameter that gets the value. click has the same rule."""
        own = [name for name in self._names if not name.startswith("-")]
        return own[0] if own else next(flag for flag in self.flags if flag[:2] == "--")[2:].replace("-", "_")

    @property
    def default(self) -> Any:
        """The value if it is not given."""
        otherwise = False if self.is_flag else () if "multiple" in self._settings else None
        return self._settings.get("default", otherwise)

    def convert(self, text: str) -> Any:
        """The value that this text gives. Raises an error of some kind if it is wrong, or if only click can tell."""
        if self._click_type is not None or self._settings.keys() & {"is_flag", "multiple", "count"}:
            raise ValueError("only click knows")
        return self._settings.get("type", str)(text)


class Options(tuple[Option, ...]):
    """Options of several commands, in the order of the help. As a decorator, they add themselves to a command."""

    __slots__ = ()

    def __call__(self, command: F) -> F:
        for option in reversed(self):
            command = option(command)
        return command


def whole_number(min: int | None = None, max: int | None = None) -> click.IntRange:
    from click import IntRange

    found = IntRange(min, max)
    found.name = "whole number"  # in the error: click says "integer range"
    return found


def choice(*values: str) -> click.Choice[str]:
    from click import Choice

    return Choice(values)


def file_path() -> click.Path:
    from click import Path

    return Path(dir_okay=False)


def bad_value(text: str) -> Exception:
    """The error for a value of an option or an argument."""
    from click import BadParameter

    return BadParameter(text)


def usage_error(text: str) -> Exception:
    from click import UsageError

    return UsageError(text)
