"""The API server's own record of what ServiceAccounts asked for, and what it answered.

Source of truth: ``audit.k8s.io/v1``. The record of a request is written before its answer is sent; a watch has a record
when it begins and one when it ends.
"""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

AUDIT_POLICY: Final[dict[str, Any]] = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata", "userGroups": ["system:serviceaccounts"]}, {"level": "None"}],
}
_WRITES: Final = frozenset({"create", "update", "patch", "delete", "deletecollection"})
_CREATED: Final = 201
_CREDENTIAL: Final = "authentication.kubernetes.io/credential-id"


@dataclass(frozen=True, slots=True)
class Right:
    """As in a role's rules; ``resource`` with its subresource."""

    group: str
    resource: str
    verb: str


@dataclass(frozen=True, slots=True)
class Record:
    """One request. ``user``: ``namespace:name`` of the ServiceAccount; ``token_id``: of the token that it showed.
    ``code``: 0 for a request that got no answer."""

    user: str
    token_id: str
    right: Right
    namespace: str
    name: str
    code: int

    @property
    def is_write(self) -> bool:
        return self.right.verb in _WRITES

    @property
    def rights(self) -> list[Right]:
        """All that it needed: an apply of what is not there needs ``create`` too."""
        is_made = self.right.verb == "patch" and self.code == _CREATED
        return [self.right, Right(self.right.group, self.right.resource, "create")] if is_made else [self.right]


def token_id_of(token: str) -> str:
    """What the records call a ServiceAccount's token: two of one account are told apart by it."""
    payload = token.split(".")[1]
    return str(json.loads(urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))["jti"])


def end_of_records(file: Path) -> int:
    """Bytes to the end of the last record that is whole: the server may be in the middle of the next one."""
    return file.read_bytes().rfind(b"\n") + 1


def read_records(file: Path, user: str, *, since: int = 0) -> list[Record]:
    """The user's requests of objects, in the order of their answers. ``since``: bytes of the file that are not read."""
    with file.open("rb") as lines:
        lines.seek(since)
        found = [json.loads(line) for line in lines if line.endswith(b"\n")]
    return [record for record in _records_in(found) if record.user == user]


def _records_in(events: list[dict[str, Any]]) -> Iterator[Record]:
    for event in events:
        user, asked = event["user"]["username"].removeprefix("system:serviceaccount:"), event.get("objectRef")
        if asked is None:
            continue  # Of no object: which kinds there are.
        resource = "/".join(filter(None, (asked["resource"], asked.get("subresource"))))
        right = Right(asked.get("apiGroup", ""), resource, event["verb"])
        code = (event.get("responseStatus") or {}).get("code", 0)
        [token_id] = event["user"]["extra"][_CREDENTIAL]
        yield Record(
            user, token_id.removeprefix("JTI="), right, asked.get("namespace", ""), asked.get("name", ""), code
        )
