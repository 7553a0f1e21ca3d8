"""Questions to several servers at once, from one thread: each is asked before any answer is waited for.

A `Strand` is a connection to one server that never blocks: connecting, the handshake of TLS and signing in are steps
that `poll` tells it to take, so that a server which does not answer costs the others nothing. A `Bundle` has one
strand to each server and belongs to one caller at a time. Its twin for asyncio is `gathering` in `loopscatter.py`.

A strand whose answer nobody waits for any more is not to be used again: an answer still to come must never be taken for
another's.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, Protocol, TypeAlias
from weakref import finalize

from leasehold.runtime.streams import NOT_NOW, Address, Clock, Inbox, OnSocket, Parser, targets

_LONGEST: Final = 1_000_000.0  # seconds: the system counts milliseconds in 32 bits

Answers: TypeAlias = dict[int, Any]  # by number of the server: a list of replies, or the exception instead of one


class Questions(NamedTuple):
    first: Mapping[int, bytes]  # by number of the server
    later: Mapping[int, bytes] = {}  # for those not worth asking, unless the others do not decide it
    regret: Callable[[], bytes] = bytes  # what is sent behind a question that was given up


class Limit(NamedTuple):
    """How long a question is waited for."""

    patience: float  # until this instant for all answers
    deadline: float  # until this one for enough of them
    decided: Callable[[Answers], bool]  # whether they are enough

    def until(self, now: float, answers: Answers) -> float:
        return self.patience if now < self.patience or self.decided(answers) else self.deadline

    def needs_more(self, now: float, answers: Answers, waiting: Collection[int]) -> bool:
        """Whether those asked first are too slow, or too few, to decide it."""
        return (now >= self.patience or not waiting) and not self.decided(answers)

    def beside(self, known: Answers) -> Limit:
        """The same, for a question to the others once these have answered."""
        return self._replace(decided=lambda more: self.decided(known | more))


class Host(Protocol):
    """A server to connect to."""

    address: Address
    tls: ssl.SSLContext | None

    def greeting(self) -> tuple[bytes, int, Callable[[list[Any]], None]]:
        """What is said first on a connection, how many replies it has, and who is given them: raises if they are no
        reason to go on."""


class Strand(OnSocket):
    """A connection to one server, from before it is made."""

    def __init__(self, host: Host, parser: Parser) -> None:
        self._host, self._inbox = host, Inbox(parser)
        self._targets = targets(host.address)
        self._out = b""  # not taken by the kernel yet
        self._then = b""  # to be sent once it is open
        self._greets = 0
        self.replies: list[Any] = []
        self.wanted = 0  # replies to what was asked last; they are all that is in `replies`
        self.open = self.served = False  # served: it has answered before
        self._shaking = False
        self._error: OSError = ConnectionRefusedError("it has no address")
        self._box: list[socket.socket] = []  # the socket of the moment, for when the strand is dropped without a close
        self._sock = self._dial()
        finalize(self, _close_all, self._box).atexit = False

    @property
    def fd(self) -> int:
        return self._sock.fileno()

    @property
    def events(self) -> int:
        connecting = not self.open and not self._greets and not self._shaking
        return select.POLLOUT if connecting else select.POLLIN | (select.POLLOUT if self._out else 0)

    @property
    def asked(self) -> bool:
        """Whether all of the last question has left: whatever is sent now comes behind it."""
        return self.open and not self._out

    def ask(self, data: bytes, count: int) -> None:
        self.replies, self.wanted = [], count
        if self.open:
            self._send(data)
        else:
            self._then = data

    def turn(self) -> None:
        """Do what can be done at once. Raises what ends the connection."""
        if not self.open and not self._greets:
            self._connect()
        elif self._out:
            self._send(b"")
        if self.open or self._greets:
            self._read()

    def _dial(self) -> socket.socket:
        """Begin to connect to the next address of the server."""
        while self._targets:
            family, target = self._targets.pop(0)
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setblocking(False)
            self._box[:] = [sock]
            try:
                sock.connect(target)
            except NOT_NOW:
                return sock
            except OSError as error:
                sock.close()
                self._error = error
                continue
            return sock
        raise self._error

    def _connect(self) -> None:
        if not self._shaking:
            if number := self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self._error = OSError(number, os.strerror(number))
                self._sock.close()
                self._sock = self._dial()
                return
            if self._sock.family != socket.AF_UNIX:
                self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if self._host.tls is not None:
                self._shaking, name = True, self._host.address.host
                self._sock = self._host.tls.wrap_socket(self._sock, server_hostname=name, do_handshake_on_connect=False)
                self._box[0] = self._sock
        if isinstance(self._sock, ssl.SSLSocket):
            try:
                self._sock.do_handshake()
            except NOT_NOW:
                return
        greeting, self._greets, self._meet = self._host.greeting()
        self._send(greeting)

    def _send(self, data: bytes) -> None:
        data = self._out + data if self._out else data
        try:
            sent = self._sock.send(data)
        except NOT_NOW:
            sent = 0
        self._out = data[sent:]

    def _read(self) -> None:
        self.replies += self._inbox.replies(self._sock)
        if not self.open and len(self.replies) >= self._greets:
            self._meet(self.replies)
            self.open, self.replies = True, []
            self._send(self._then)

    def last_words(self, data: bytes) -> None:
        """Send what can be sent at once, behind what was asked, and hang up. What was not asked yet never is."""
        if data and self.asked:
            with suppress(OSError):
                self._sock.send(data)
        self.close()


class Bundle:
    """A strand to each of several servers, as far as there is one."""

    def __init__(self, hosts: Sequence[Host], parser: Callable[[], Parser], clock: Clock) -> None:
        self._hosts, self._parser, self._clock = hosts, parser, clock
        self._strands: dict[int, Strand] = {}
        self._numbers: dict[int, int] = {}  # by descriptor
        self._poll = select.poll()

    def ask(self, asked: Questions, count: int, limit: Limit) -> Answers:
        """Ask each its question, and wait for `count` replies of each, as long as the limit says.

        A connection that had served before and breaks is made anew, and the question repeated, once. Who has not
        answered by the end was sent the regret behind the question, if that had left. Who is not in what is returned
        was not asked.
        """
        answers: Answers = {}
        waiting: dict[int, bytes] = {}
        try:
            self._put_all(asked.first, count, answers, waiting)
            later = asked.later
            while waiting or later:
                now = self._clock()
                if later and limit.needs_more(now, answers, waiting):
                    self._put_all(later, count, answers, waiting)
                    later = {}
                left = limit.until(now, answers) - now
                if left <= 0 or not waiting:
                    break
                for fd, _ in self._poll.poll(min(left, _LONGEST) * 1000 + 1):
                    if (found := self._numbers.get(fd)) is not None:
                        self._move(found, count, answers, waiting)
        finally:
            for number in waiting:
                self.drop(number, asked.regret())
                answers[number] = TimeoutError("no answer in time")
        return answers

    def _put_all(self, questions: Mapping[int, bytes], count: int, answers: Answers, waiting: dict[int, bytes]) -> None:
        for number, data in questions.items():
            waiting[number] = data
            self._put(number, data, count, answers, waiting)

    def tell(self, number: int, data: bytes) -> None:
        """Send it as soon as there is a connection; what is said back is heard."""
        strand = self._strands.get(number) or self._add(number)
        strand.ask(data, 0)
        self._poll.modify(strand.fd, strand.events)

    def hear(self, seconds: float) -> list[tuple[int, Any]]:
        """What they say, each with its number; an exception: that connection is no more."""
        said: list[tuple[int, Any]] = []
        for fd, _ in self._poll.poll(max(0.0, min(seconds, _LONGEST)) * 1000):
            number = self._numbers[fd]
            strand = self._strands[number]
            try:
                strand.turn()
            except Exception as error:
                self.drop(number)
                said.append((number, error))
                continue
            self._watch(number, strand, fd)
            if strand.open:
                said += [(number, reply) for reply in strand.replies]
                strand.replies = []
        return said

    def _put(self, number: int, data: bytes, count: int, answers: Answers, waiting: dict[int, bytes]) -> None:
        try:
            strand = self._strands.get(number) or self._add(number)
            strand.ask(data, count)
        except Exception as error:
            self._broken(number, error, count, answers, waiting)
            return
        if strand._out or not strand.open:
            self._poll.modify(strand.fd, strand.events)

    def _move(self, number: int, count: int, answers: Answers, waiting: dict[int, bytes]) -> None:
        strand = self._strands[number]
        before, fd = strand.events, strand.fd
        try:
            strand.turn()
            if strand.open and len(strand.replies) > count:
                raise ConnectionAbortedError("it answered what nobody asked")
        except Exception as error:  # whatever the parser or the host calls it
            self._broken(number, error, count, answers, waiting)
            return
        if strand.fd != fd or strand.events != before:
            self._watch(number, strand, fd)
        if strand.open and len(strand.replies) >= count and number in waiting:
            answers[number], strand.served = strand.replies, True
            del waiting[number]

    def _broken(self, number: int, error: Exception, count: int, answers: Answers, waiting: dict[int, bytes]) -> None:
        strand = self._strands.get(number)
        again = strand is not None and strand.served and isinstance(error, OSError) and number in waiting
        self.drop(number)
        if again:
            self._put(number, waiting[number], count, answers, waiting)
        elif number in waiting:
            del waiting[number]
            answers[number] = error

    def _add(self, number: int) -> Strand:
        strand = self._strands[number] = Strand(self._hosts[number], self._parser())
        self._numbers[strand.fd] = number
        self._poll.register(strand.fd, strand.events)
        return strand

    def _watch(self, number: int, strand: Strand, fd: int) -> None:
        if strand.fd != fd:  # another address of the same server; the kernel may give it the same descriptor
            del self._numbers[fd]
            with suppress(KeyError):
                self._poll.unregister(fd)
        self._numbers[strand.fd] = number
        self._poll.register(strand.fd, strand.events)

    def drop(self, number: int, last: bytes = b"") -> None:
        strand = self._strands.pop(number, None)
        if strand is None:
            return
        fd = next((fd for fd, found in self._numbers.items() if found == number), -1)
        self._numbers.pop(fd, None)
        with suppress(KeyError):
            self._poll.unregister(fd)
        strand.last_words(last)

    def shut(self) -> None:
        for strand in list(self._strands.values()):
            strand.shut()

    def close(self) -> None:
        for number in list(self._strands):
            self.drop(number)

    def after_fork(self) -> None:
        for strand in self._strands.values():
            strand.after_fork()
        self._strands, self._numbers, self._poll = {}, {}, select.poll()


def _close_all(socks: list[socket.socket]) -> None:
    for sock in socks:
        sock.close()
