"""An extension of griffe: comments that begin with ``#:`` describe the assignment below them.

griffe reads the text behind an assignment alone.
"""

from __future__ import annotations

from typing import Any

from griffe import Attribute, Docstring, Extension


class Comments(Extension):
    def on_attribute(self, *, attr: Attribute, **_: Any) -> None:
        if attr.docstring is None and attr.lineno:
            lines: list[str] = []
            for line in reversed(attr.lines_collection[attr.filepath][: attr.lineno - 1]):
                if not line.lstrip().startswith("#:"):
                    break
                lines.insert(0, line.lstrip()[2:].strip())
            if lines:
                attr.docstring = Docstring("\n".join(lines), parent=attr)
