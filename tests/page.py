"""A page of `core` as a test reads it."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any


class Page(HTMLParser):
    """Reads a page: refuses tags that do not nest, ids that occur twice, anything loaded from elsewhere, and a table
    that a narrow window would cut."""

    VOID = frozenset({"br", "input", "meta", "wbr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.scrolls = False
        self.ids: set[str] = set()
        #: Ids that links lead to, and addresses of files.
        self.places: set[str] = set()
        self.files: set[str] = set()
        self.rows: dict[str, dict[str, Any]] = {}
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        attributes = dict(attrs)
        assert tag not in ("img", "link", "iframe") and "src" not in attributes
        assert not [name for name in attributes if name.startswith("on")]
        if "id" in attributes:
            assert attributes["id"] not in self.ids
            self.ids.add(attributes["id"])
        if tag == "a":
            href = attributes["href"]
            assert href.startswith(("#", "file:///"))
            (self.places if href.startswith("#") else self.files).add(href.removeprefix("#"))
        if tag == "table":
            assert self.open[-1] == "div" and self.scrolls, "a table stands outside of what scrolls"
        self.scrolls = "scroll" in (attributes.get("class") or "").split()
        if "n" in (attributes.get("class") or "").split():
            self.rows[attributes["id"]] = attributes
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
