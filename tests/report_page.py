"""A parser of report pages, and the checks that every page passes."""

from __future__ import annotations

import html.parser

VOID = {"meta", "br", "img", "link", "input", "hr", "wbr", "path", "use", "rect"}


class Page(html.parser.HTMLParser):
    """The elements of a page with their attributes, and its text."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.elements, self.words, self._open = [], [], []
        self.feed(text.replace("<wbr>", ""))
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, data):
        if not self._open or self._open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).replace("\u202f", " ").split())


def check_page(text: str) -> Page:
    """Checks that a page is well formed, needs no other file, and runs no script."""
    page = Page(text)
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "img", "iframe", "object", "embed", "link", "form", "base"}
    for _, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("href", "xlink:href", "src"):
            target = attributes.get(name, "#")
            assert target.startswith(("#", "runs/")), target
    assert "url(http" not in text and "@import" not in text
    policy = [a["content"] for t, a in page.elements if t == "meta" and "http-equiv" in a]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]
    assert text.startswith("<!doctype html>") and "prefers-color-scheme: dark" in text
    assert "@media print" in text
    return page
