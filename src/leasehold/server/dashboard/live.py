"""The parts of a page that change. A template marks each with `live`; a frame has those that changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from markupsafe import Markup


class Part(NamedTuple):
    html: Markup
    key: object  # the part is sent again when this changes
    within: tuple[str, ...]  # the parts around it


class Parts:
    """Collects the parts while a page is rendered. In a template:

        {% call live("rows", shape) %}<tbody id="rows" data-live> ... </tbody>{% endcall %}

    `shape` is for a part that contains others: it is sent again only if its shape changed, and its parts by
    themselves otherwise."""

    def __init__(self) -> None:
        self.found: dict[str, Part] = {}
        self._open: list[str] = []

    def live(self, part_id: str, shape: object = None, *, caller: Callable[[], Markup]) -> Markup:
        self._open.append(part_id)
        html = caller()
        self._open.pop()
        self.found[part_id] = Part(html, html if shape is None else shape, tuple(self._open))
        return html


class Changes:
    """Which frame last changed which part."""

    def __init__(self) -> None:
        self.frame = 0
        self._parts: dict[str, Part] = {}
        self._changed: dict[str, int] = {}

    def update(self, parts: Mapping[str, Part]) -> None:
        """Note a new rendering of the page."""
        self.frame += 1
        for part_id, part in parts.items():
            before = self._parts.get(part_id)
            if before is None or before.key != part.key:
                self._changed[part_id] = self.frame
        for gone in self._parts.keys() - parts.keys():
            del self._changed[gone]
        self._parts = dict(parts)

    def since(self, frame: int) -> dict[str, str]:
        """The parts that changed after a frame, none of them twice."""
        changed = {part_id for part_id, at in self._changed.items() if at > frame}
        return {
            part_id: str(part.html)
            for part_id, part in self._parts.items()
            if part_id in changed and changed.isdisjoint(part.within)
        }
