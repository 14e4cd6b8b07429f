"""``/docs``: what a port serves, as one page without scripts or pictures from elsewhere.

FastAPI's own page loads its scripts from a public network, so it stays blank in a closed cluster. The source of
truth is the application's OpenAPI document, which is at ``/openapi.json`` for tools.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse

DOCS_PATH = "/docs"


def add_docs(app: FastAPI) -> None:
    """``app`` serves ``/docs``. It must have been made without FastAPI's own page."""

    async def read_docs() -> HTMLResponse:
        return HTMLResponse(render(app.openapi()))

    app.get(DOCS_PATH, include_in_schema=False)(read_docs)


def render(document: dict[str, Any]) -> str:
    """The page as HTML. ``document``: an OpenAPI description."""
    title, text = (escape(str(document["info"].get(key, ""))) for key in ("title", "description"))
    rows = "".join(_rows(document.get("paths", {})))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<h1>{title}</h1><p>{text}</p><table><tr><th>method<th>path<th>what it does</tr>{rows}</table>"
        '<p>For tools: <a href="/openapi.json">/openapi.json</a></p></html>'
    )


def _rows(paths: dict[str, dict[str, Any]]) -> Iterator[str]:
    for path, methods in paths.items():
        for method, operation in methods.items():
            text = escape(str(operation.get("description") or operation.get("summary", "")))
            yield f"<tr><td>{escape(method.upper())}<td><code>{escape(path)}</code><td>{text}</tr>"
