"""Running a function under a lock: whether it takes the lease, and the lock name that its arguments give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import update_wrapper
from string import Formatter
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar

from leasehold.config import LockArguments
from leasehold.errors import ConfigError, NotAcquired

if TYPE_CHECKING:
    from inspect import Signature

    from leasehold.client.lock import BaseLock

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

OnBusy: TypeAlias = Literal["wait", "raise", "skip"]
_ON_BUSY: Final = ("wait", "raise", "skip")
_BY_KEYWORD: Final = -1

# The parameters of a function that Leasehold fills in: the index at which to insert the argument, or _BY_KEYWORD.
FilledParameters: TypeAlias = Mapping[str, int]


def accepted_parameters(fn: Callable[..., Any], blocking: bool, *names: str) -> FilledParameters:
    """Those of `names` that are parameters of `fn`. Refuses a generator function, whose body runs after the call, and
    in blocking mode, which cannot await, a coroutine function."""
    from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction, signature  # only here: slow

    if isgeneratorfunction(fn) or isasyncgenfunction(fn):
        raise ConfigError(
            f"{_qualified_name(fn)} is a generator function: its body runs after the call has returned, and so "
            "unprotected. Acquire the lock in its body"
        )
    if blocking and iscoroutinefunction(fn):
        raise ConfigError(f"{_qualified_name(fn)} is a coroutine function: use the asyncio API, such as AsyncClient")
    try:
        parameters = signature(fn).parameters
    except (TypeError, ValueError):  # some built-ins have no signature
        return {}
    return {
        name: index if parameter.kind <= parameter.POSITIONAL_OR_KEYWORD else _BY_KEYWORD
        for index, (name, parameter) in enumerate(parameters.items())
        if name in names
    }


def call_filled(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    filled: FilledParameters,
    values: Mapping[str, object],
) -> Any:
    """Call `fn` with the caller's arguments, which leave out the filled parameters, and with the values for those."""
    all_args, all_kwargs = list(args), dict(kwargs)
    for name, index in filled.items():
        if name in kwargs:
            raise TypeError(f"{_qualified_name(fn)} gets {name!r} from Leasehold: leave it out")
        if 0 <= index <= len(all_args):
            all_args.insert(index, values[name])
        else:
            all_kwargs[name] = values[name]
    return fn(*all_args, **all_kwargs)


def refuse_coroutine(result: T, fn: Callable[..., Any]) -> T:
    """Where no caller awaits: the result of `fn`, unless its work is still to be done, without the lock. `fn` may be no
    coroutine function itself, but return what one does."""
    if isinstance(result, CoroutineType):
        result.close()
        raise ConfigError(
            f"{_qualified_name(fn)} returned a coroutine: make it an async function, and use the asyncio API"
        )
    return result


class LockedFunction:
    """A decorated function: the template of its lock's name (`"user:{user_id}"`), and what to do if the lock is busy.

    Checked when the function is decorated, not when it is first called.
    """

    def __init__(self, fn: Callable[..., Any], template: str, on_busy: OnBusy, *, blocking: bool) -> None:
        from inspect import signature

        if on_busy not in _ON_BUSY:
            raise ConfigError(f"on_busy must be one of {', '.join(_ON_BUSY)}, not {on_busy!r}")
        self._fn, self._template, self._on_busy = fn, template, on_busy
        self._filled = accepted_parameters(fn, blocking, "lease")
        self._signature = self._without_filled(signature(fn))
        parameters = self._signature.parameters.values()
        self._var_keyword = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)
        self._has_fields = self._check_template()

    def _without_filled(self, signature: Signature) -> Signature:
        """The signature for callers: they leave out what Leasehold passes."""
        return signature.replace(parameters=[p for n, p in signature.parameters.items() if n not in self._filled])

    def wrap(self, run: F) -> F:
        """Make `run` look like the function, without the parameters that Leasehold fills in: web frameworks, command
        line parsers and pytest read the signature to find what to pass."""
        from inspect import signature

        update_wrapper(run, self._fn)
        if self._filled:
            try:
                own = signature(self._fn, eval_str=True)
            except Exception:  # an annotation that can be evaluated only later, or never
                own = signature(self._fn)
            run.__signature__ = self._without_filled(own)  # type: ignore[attr-defined]
            annotations = getattr(self._fn, "__annotations__", {})
            run.__annotations__ = {name: value for name, value in annotations.items() if name not in self._filled}
        return run

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
            return await lock._call(self._fn, args, kwargs, self._filled)
        except NotAcquired as busy:
            if self._on_busy == "skip" and busy.name == lock.name:
                return None
            raise


def _qualified_name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", repr(fn))
