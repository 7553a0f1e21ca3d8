"""Running a function under a lock: whether it takes the lease, and the lock name that its arguments give."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from string import Formatter
from typing import Any, Final, Literal, TypeAlias

from leasehold.client.lock import BaseLock
from leasehold.config import LockArguments
from leasehold.errors import ConfigError, NotAcquired

OnBusy: TypeAlias = Literal["wait", "raise", "skip"]
_ON_BUSY: Final = ("wait", "raise", "skip")


def accepted_parameters(fn: Callable[..., Any], blocking: bool, *names: str) -> tuple[str, ...]:
    """Which of `names` are parameters of `fn`. Blocking mode, which cannot await, refuses a coroutine function."""
    if blocking and inspect.iscoroutinefunction(fn):
        raise ConfigError(f"{_qualified_name(fn)} is a coroutine function: use the asyncio API, such as AsyncClient")
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):  # some built-ins have no signature
        return ()
    return tuple(name for name in names if name in parameters)


def accepts_lease(fn: Callable[..., Any], blocking: bool) -> bool:
    """Whether `fn` has a parameter called `lease`."""
    return bool(accepted_parameters(fn, blocking, "lease"))


class LockedFunction:
    """A decorated function: the template of its lock's name (`"user:{user_id}"`), and what to do if the lock is busy.

    Checked when the function is decorated, not when it is first called.
    """

    def __init__(self, fn: Callable[..., Any], template: str, on_busy: OnBusy, *, blocking: bool) -> None:
        if on_busy not in _ON_BUSY:
            raise ConfigError(f"on_busy must be one of {', '.join(_ON_BUSY)}, not {on_busy!r}")
        self._fn, self._template, self._on_busy = fn, template, on_busy
        self._pass_lease = accepts_lease(fn, blocking)
        signature = inspect.signature(fn)
        # Leasehold passes the lease: callers leave it out.
        parameters = [p for p in signature.parameters.values() if not (self._pass_lease and p.name == "lease")]
        self._signature = signature.replace(parameters=parameters)
        self._var_keyword = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)
        self._has_fields = self._check_template()

    def _check_template(self) -> bool:
        try:
            fields = [field for _, field, _, _ in Formatter().parse(self._template) if field is not None]
        except ValueError as bad:
            raise ConfigError(f"{self._template!r} is not a valid name template: {bad}") from None
        for field in fields:
            root = field.partition(".")[0].partition("[")[0]
            if root not in self._signature.parameters and self._var_keyword is None:
                what = repr(root) if root else "an unnamed field"
                raise ConfigError(
                    f"{self._template!r} uses {what}, which is not a parameter of {_qualified_name(self._fn)}"
                )
        return bool(fields)

    def format_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        if not self._has_fields:
            return self._template.format()
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = dict(bound.arguments)
        if self._var_keyword is not None:
            values |= values.pop(self._var_keyword)
        return self._template.format(**values)

    def options(self, options: LockArguments) -> LockArguments:
        return options if self._on_busy == "wait" else {**options, "wait": 0}

    async def run(self, lock: BaseLock[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return await lock._call(self._fn, args, kwargs, self._pass_lease)
        except NotAcquired as busy:
            if self._on_busy == "skip" and busy.name == lock.name:
                return None
            raise


def _qualified_name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", repr(fn))
