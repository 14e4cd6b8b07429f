"""The API server's record of requests, read while it writes."""

from __future__ import annotations

import json
from pathlib import Path

from control_plane.audit import end_of_records, read_records

USER = "system:operator"


def line_of(name: str) -> bytes:
    asked = {"resource": "pods", "namespace": "default", "name": name}
    shown = {"authentication.kubernetes.io/credential-id": ["JTI=1"]}
    user = {"username": f"system:serviceaccount:{USER}", "extra": shown}
    event = {"user": user, "verb": "patch", "objectRef": asked}
    return json.dumps(event).encode() + b"\n"


def test_a_record_that_is_half_written_at_a_mark_belongs_to_what_comes_after_it(tmp_path: Path) -> None:
    file, before, after = tmp_path / "audit.log", line_of("before"), line_of("after")
    file.write_bytes(before[:20])
    assert end_of_records(file) == 0
    file.write_bytes(before + after[:20])
    since = end_of_records(file)
    assert [one.name for one in read_records(file, USER)] == ["before"]
    file.write_bytes(before + after)
    assert [one.name for one in read_records(file, USER, since=since)] == ["after"]
