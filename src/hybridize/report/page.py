"""What every page shares: cells, figures, the templates' environment, the file beside the JSON."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from hybridize.atomic import atomic_write
from hybridize.report import summary

REPORT_FILE = "report.html"


@dataclass(frozen=True)
class Cell:
    """A value and, in small print, its interval."""

    value: str
    interval: str = ""


@dataclass(frozen=True)
class Plot:
    """An inline SVG and the sentence under it."""

    svg: Markup
    caption: str


def render(template: str, **values: Any) -> str:
    """A page as text. It loads nothing: styles and figures are inside, and there is no script."""
    return _environment().get_template(template).render(**values)


def write_page(folder: str | os.PathLike[str], page: str) -> Path:
    """Write `report.html` into `folder`; the file appears whole or not at all."""
    path = Path(folder) / REPORT_FILE
    with atomic_write(path, "w") as file:
        file.write(page)
    return path


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hybridize.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["bytes"] = summary.format_bytes
    environment.filters["short"] = partial(summary.shorten, length=60)
    environment.filters["seconds"] = summary.format_seconds
    return environment
