"""What the tests of every page share: a strict reader of HTML, and what each page must hold."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser

from hybridize.report.drawing import INK

VOID = {"meta", "link", "br", "hr", "img", "input"}
LOADING = {"src", "href", "xlink:href", "action", "poster", "srcset", "data", "background"}


class Page(HTMLParser):
    """Counts elements, collects attributes and visible text, and checks that elements nest."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: Counter[str] = Counter()
        self.ids: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == [], f"unclosed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.ids.update(value for name, value in attrs if name == "id" and value)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> does not close what is open"

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def check_loads_nothing(html: str) -> None:
    """No address of another place, no script; figures may carry their own pixels, and draw in the page's colour."""
    page = Page(html)
    assert page.elements["script"] == 0
    assert "http:" not in html and "https:" not in html and "@import" not in html
    for tag, name, value in page.attributes:
        if name in LOADING:
            assert value.startswith(("#", "data:image/png;base64,")), (tag, name, value[:60])
    assert not re.search(r"url\((?!#)", html)
    assert INK not in html and (page.elements["svg"] == 0 or "currentColor" in html)


def check_references(html: str) -> None:
    """Ids are unique, and every reference to one resolves."""
    page = Page(html)
    assert [name for name, count in page.ids.items() if count > 1] == []
    references = set(re.findall(r"url\(#([^)]+)\)", html))
    references |= {
        value[1:] for _, name, value in page.attributes if name == "href" and value.startswith("#")
    }
    described = {value for _, name, value in page.attributes if name == "aria-describedby"}
    assert references and references | described <= set(page.ids)
