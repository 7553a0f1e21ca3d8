"""Splits what a server sends into replies (RESP2), and refuses what no Redis server would send to Leasehold.

hiredis builds the replies. But it allocates what a reply merely announces: `*1000000000` is a list of eight gigabytes,
made while the interpreter's lock is held. So the headers are checked before hiredis gets the bytes: how many elements a
reply has, and how deep they are nested. `runtime.net` bounds its size.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import hiredis

from leasehold.core.texts import escape

MAX_ELEMENTS: Final = 131_072  # of one reply, nested ones included: `inspect` of a queue with ten thousand waiters
MAX_DEPTH: Final = 8  # lists within lists
_MAX_STRINGS: Final = 8 << 20  # bytes that the strings of a reply may have; hiredis allocates them as they arrive
_MAX_LINE: Final = 65_536  # bytes of a status, an error or a number

# Nearly every reply is an integer (a release), two (a renewal) or three (a grant). Complete ones need no check: they
# announce nothing that is not there. `++`: does not remember where it could have ended earlier.
_NUMBER: Final = rb":-?[0-9]{1,19}\r\n"
_RELEASED: Final = b":1\r\n"  # not worth a regular expression
_usual_replies: Final = re.compile(rb"(?:(?:\*2\r\n%b|\*3\r\n%b%b)?%b)++" % ((_NUMBER,) * 4))
_are_usual: Final = _usual_replies.fullmatch
_begin_usual: Final = _usual_replies.match
# In a queue also: that a claim has to wait, and a published message, as far as its last string. `_end_of_queue_reply`
# compares the lengths that they announce.
_begin_busy: Final = re.compile(rb"\*6\r\n:0\r\n%b%b%b\$([0-9]{1,3})\r\n([^\r\n]*)\r\n%b" % ((_NUMBER,) * 4)).match
_begin_message: Final = re.compile(
    rb"\*3\r\n\$(?:7\r\n|8\r\ns)message\r\n\$([0-9]{1,3})\r\n([^\r\n]*)\r\n\$([0-9]{1,3})\r\n"
).match
_is_number: Final = re.compile(rb"-1|[0-9]{1,9}").fullmatch


class BoundedReader:
    """A parser for `runtime.net`. Raises `hiredis.ProtocolError` for anything but acceptable replies."""

    __slots__ = (
        *("_bytes_left", "_elements_left", "_hiredis_feed", "_max_bytes", "_max_elements", "_open_lists"),
        *("_string_left", "_unchecked", "gets", "mid_reply"),
    )

    def __init__(self, servers: int = 1) -> None:
        """`servers`: how many are asked at once, so that the replies of all are in memory."""
        reader = hiredis.Reader(replyError=_reply_error)
        self._hiredis_feed = reader.feed
        self.gets: Callable[[], Any] = reader.gets  # the next reply; False: it is not complete
        self.mid_reply = False  # a checked reply is incomplete, be it only its header
        self._unchecked = b""  # passed on unchecked: the begin of a header
        self._string_left = 0  # bytes that are missing of the current string
        self._open_lists: list[int] = []  # for each list around the next element: how many elements are missing
        self._elements_left = self._max_elements = MAX_ELEMENTS // servers
        self._bytes_left = self._max_bytes = _MAX_STRINGS // servers

    def feed(self, data: bytes) -> None:
        if self.mid_reply or (data != _RELEASED and not _are_usual(data)):
            self._check(self._unchecked + data)
        self._hiredis_feed(data)

    def _check(self, data: bytes) -> None:
        offset, end = 0, len(data)
        while offset < end:
            if self._string_left:
                taken = min(self._string_left, end - offset)
                self._string_left -= taken
                offset += taken
                if not self._string_left:
                    self._end_element()
                continue
            if not self.mid_reply and (usual := _begin_usual(data, offset)):
                offset = usual.end()
                continue
            if not self.mid_reply and (reply_end := _end_of_queue_reply(data, offset)):
                offset = reply_end
                continue
            self.mid_reply = True
            line_end = data.find(b"\r\n", offset, offset + _MAX_LINE)
            if line_end < 0:
                if end - offset >= _MAX_LINE:
                    raise hiredis.ProtocolError("the server sent a line without an end")
                break
            self._check_header(data[offset : offset + 1], data[offset + 1 : line_end])
            offset = line_end + 2
        self._unchecked = data[offset:]

    def _check_header(self, kind: bytes, rest: bytes) -> None:
        if kind in (b":", b"+", b"-"):
            self._end_element()
            return
        if kind not in (b"*", b"$") or not _is_number(rest):
            raise hiredis.ProtocolError(f"the server sent no Redis reply, but {(kind + rest)[:40]!r}")
        number = int(rest)
        if kind == b"$" and number >= 0:
            self._bytes_left -= number
            if self._bytes_left < 0:
                raise hiredis.ProtocolError(f"the server announced a reply with too long strings ({number} bytes)")
            self._string_left = number + 2  # with its line end
        elif kind == b"*" and number > 0:
            self._elements_left -= number
            if self._elements_left < 0 or len(self._open_lists) >= MAX_DEPTH:
                raise hiredis.ProtocolError(f"the server announced a reply of too many elements ({number}) or levels")
            self._open_lists.append(number)
        else:
            self._end_element()

    def _end_element(self) -> None:
        while self._open_lists:
            self._open_lists[-1] -= 1
            if self._open_lists[-1]:
                return
            self._open_lists.pop()
        self.mid_reply, self._elements_left, self._bytes_left = False, self._max_elements, self._max_bytes


def _end_of_queue_reply(data: bytes, offset: int) -> int:
    """Where a busy reply or a message ends that begins at `offset`; 0: neither is complete there."""
    if found := _begin_busy(data, offset):
        return found.end() if int(found[1]) == len(found[2]) else 0
    if found := _begin_message(data, offset):
        message_end = found.end() + int(found[3])
        if int(found[1]) == len(found[2]) and data[message_end : message_end + 2] == b"\r\n":
            return message_end + 2
    return 0


def _reply_error(text: str) -> hiredis.ReplyError:
    """An error reply. Escaped here and cut in `RedisEndpoint.map_error`, which first removes the password."""
    return hiredis.ReplyError(escape(text))
