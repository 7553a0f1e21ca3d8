"""Passwords that change: read again for every new connection, from a file or by a function of the caller's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

from leasehold.errors import ConfigError, LeaseholdError, Unavailable

if TYPE_CHECKING:
    from leasehold.runtime.base import Runtime

PasswordArgument: TypeAlias = str | Callable[[], str]

_MAX_RUNNING: Final = 32  # calls of a function at a time
_PAUSE: Final = 0.01  # seconds between two looks at how many are running
_MAX_PASSWORD: Final = 65_536  # characters: tokens of cloud services have a few thousand


_PERMITTED: Final = f"a text of at most {_MAX_PASSWORD} characters, no NUL, that can be encoded in UTF-8"


def _is_password(value: object) -> bool:
    """Drivers fail to encode a lone surrogate, and their errors show the text that they could not encode."""
    if not isinstance(value, str) or len(value) > _MAX_PASSWORD or "\0" in value:
        return False
    return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)


class Password:
    """Where a password comes from. Never shown."""

    def __init__(self, source: PasswordArgument, description: str) -> None:
        if not isinstance(source, str) and not callable(source):
            raise ConfigError(f"{description} must be a text or a function without arguments that returns one")
        if isinstance(source, str) and not _is_password(source):
            raise ConfigError(f"{description} must be {_PERMITTED}")
        self._source, self._description = source, description
        self._running = set[object]()  # calls of the function that have not returned

    def __repr__(self) -> str:
        return f"<password of {self._description}>"

    def read(self) -> str:
        """The password as it is now. Raises `Unavailable` if it cannot be read now: a later try may succeed."""
        if isinstance(self._source, str):
            return self._source
        try:
            found = self._source()
        except LeaseholdError:
            raise
        except BaseException as error:
            # sys.exit() or a cancellation in the function must not end a thread of the client. On the main thread it
            # may be Ctrl-C, or a signal that ends the program.
            if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
                raise
            # Without its text, which may show the password, not even as the cause that a log prints.
            raise Unavailable(f"{self._description} raised {type(error).__name__}: the password is not known") from None
        if not _is_password(found):
            raise ConfigError(f"{self._description} must return {_PERMITTED}")
        return found

    async def read_with(self, runtime: Runtime, deadline: float) -> str:
        """The same, but a function runs on a thread of its own, and is not waited for beyond the deadline: it may ask a
        service for the password, and the watchdog must report lost leases meanwhile."""
        if isinstance(self._source, str):
            return self._source
        while len(self._running) >= _MAX_RUNNING:
            if runtime.now() >= deadline:
                raise Unavailable(f"{self._description} has not returned from {_MAX_RUNNING} earlier calls")
            await runtime.sleep(_PAUSE)
        call, done, found = object(), runtime.signal(), list[str | LeaseholdError]()
        self._running.add(call)

        async def run(_: Runtime) -> None:
            try:
                found.append(self.read())
            except LeaseholdError as error:  # nothing else, on a thread that is not the main one
                found.append(error)
            finally:
                self._running.discard(call)
                done.set()

        try:
            runtime.start_thread(run, "leasehold-password")
        except RuntimeError:  # the program ends: a release may still need a connection
            self._running.discard(call)
            return self.read()
        if not await done.wait(deadline - runtime.now()):
            raise Unavailable(f"{self._description} did not return in time: the password is not known")
        if isinstance(found[0], LeaseholdError):
            raise found[0]
        return found[0]


def file_password(path: str) -> Password:
    """The first line of a file, which must exist now. It may be replaced at any time."""

    from leasehold import files  # only here: it would slow `import leasehold` down

    def read() -> str:
        try:
            return files.read_file(path, _MAX_PASSWORD).decode().partition("\n")[0].removesuffix("\r")
        except OSError as error:
            raise Unavailable(f"the file of password_file= cannot be read: {error.strerror}") from error
        except UnicodeDecodeError:
            raise ConfigError("the file of password_file= is not text in UTF-8") from None

    password = Password(read, "the file of password_file=")
    try:
        if not password.read():
            raise ConfigError("the file of password_file= is empty: write the password into its first line")
    except Unavailable as error:
        raise ConfigError(str(error)) from error
    return password
