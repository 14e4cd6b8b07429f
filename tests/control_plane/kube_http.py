"""Requests to an API server as tests make them: JSON over TLS, one connection each, the answer as it came.

Shares no code with the router's and the operator's clients, which it helps to judge.
"""

from __future__ import annotations

import http.client
import json
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

Object = dict[str, Any]

JSON: Final = "application/json"
MERGE_PATCH: Final = "application/merge-patch+json"
APPLY_PATCH: Final = "application/apply-patch+yaml"
LIMIT_S: Final = 120.0


class KubeRefused(Exception):
    """The API server said no, to somebody who counted on a yes."""

    def __init__(self, request: str, answer: Answer) -> None:
        super().__init__(f"{request}: {answer.status}: {'; '.join(answer.complaints)}")
        self.answer = answer


@dataclass(frozen=True, slots=True)
class Answer:
    """``body``: an object, a list of objects, or the Status of a refusal; empty when the answer was no JSON."""

    status: int
    body: Object

    @property
    def complaints(self) -> list[str]:
        """Of a refusal: ``field: message`` for each cause, the message where it names none; else nothing."""
        if self.status < http.client.BAD_REQUEST:
            return []
        causes = self.body.get("details", {}).get("causes")
        if not causes:
            return [self.body.get("message", "")]
        return [f"{cause.get('field', '')}: {cause['message']}" for cause in causes]


@dataclass(frozen=True, slots=True)
class KubeHttp:
    """One user of one API server. Keeps nothing open; any thread may call; every call waits ``LIMIT_S`` at most."""

    url: str
    ca_file: Path
    token: str

    def ask(
        self, method: str, path: str, body: Object | None = None, *, content_type: str = JSON, **query: str
    ) -> Answer:
        """The answer, whatever it says.

        Raises:
            OSError: There is none.
        """
        parts = urlsplit(self.url)
        context = ssl.create_default_context(cafile=self.ca_file)
        connection = http.client.HTTPSConnection(parts.netloc, timeout=LIMIT_S, context=context)
        headers = {"authorization": f"Bearer {self.token}", "accept": JSON, "content-type": content_type}
        target = f"{path}?{urlencode(query)}" if query else path
        try:
            connection.request(method, target, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            raw = answer.read()
        except http.client.HTTPException as error:
            raise ConnectionError(f"no whole answer: {error!r}") from error
        finally:
            connection.close()
        is_json = answer.headers.get_content_type() == JSON
        return Answer(answer.status, json.loads(raw) if is_json else {})

    def get(self, path: str) -> Object:
        return self._must("GET", path)

    def create(self, path: str, one: Object) -> Object:
        """``path``: that of all objects of its kind."""
        return self._must("POST", path, one)

    def replace(self, path: str, one: Object) -> Object:
        return self._must("PUT", path, one)

    def apply(self, path: str, one: Object, *, manager: str = "tests") -> Object:
        """Server-side apply; other managers' fields are taken over."""
        return self._must("PATCH", path, one, content_type=APPLY_PATCH, fieldManager=manager, force="true")

    def delete(self, path: str) -> Object:
        """It is gone, or will be when its finalizers are."""
        return self._must("DELETE", path)

    def _must(self, method: str, path: str, body: Object | None = None, **rest: str) -> Object:
        """Raises: KubeRefused."""
        answer = self.ask(method, path, body, **rest)
        if answer.complaints:
            raise KubeRefused(f"{method} {path}", answer)
        return answer.body
