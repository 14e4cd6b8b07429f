"""The status page's script, run by Node.js where there is one, in the least of a browser (``fakes/browser.js``).

The project needs no Node.js; where there is none, ``test_router_status_page.py`` still reads the script.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from fakes.access_log import ask
from fakes.answers import models_answer
from fakes.faults import Fault
from fakes.router import PROMPT, running_rig
from integration.test_router_status_page import HOSTILE
from patience import PATIENCE_S
from pdcluster_protocol.status_page import STATUS_PATH
from pdcluster_router.front import status_page

NODE: Final = shutil.which("node")
BROWSER: Final = Path(__file__).parents[1] / "fakes" / "browser.js"
SCRIPT: Final = Path(status_page.__file__).with_name("status") / "page.js"
POOL: Final[dict[str, Any]] = {
    "discovery": {"kind": "static"},
    "policy": "affinity",
    "requests": {"running": 3, "queued": {"prefill": 2, "decode": 0}, "backlog_tokens": {"prefill": 70, "decode": 0}},
    "failures": {"seconds": 300.0, "kinds": {}},
    "revisions": [],
    "engines": [],
    "ended": {"ok": 7},
}

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(NODE is None, reason="needs Node.js")]


def drawn(tmp_path: Path, answer: dict[str, Any]) -> dict[str, Any]:
    """What the page shows, by the id of its parts, after this answer."""
    given = tmp_path / "answer.json"
    given.write_text(json.dumps(answer))
    command = [NODE or "", str(BROWSER), str(SCRIPT), str(given)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return dict(json.loads(done.stdout))


def elements(tree: Any) -> Iterator[dict[str, Any]]:
    for one in tree:
        if isinstance(one, dict):
            yield one
            yield from elements(one["children"])


def texts(tree: Any) -> list[str]:
    return [one for one in tree if isinstance(one, str)] + [
        text for one in elements(tree) for text in one["children"] if isinstance(text, str)
    ]


async def test_words_of_strangers_are_drawn_as_text_in_elements_of_the_pages_own(tmp_path: Path) -> None:
    async with running_rig(num_prefill=2, models=[models_answer(*HOSTILE)] * 3) as rig:
        rig.prefills[0].faults_to_come = rig.prefills[1].faults_to_come = [Fault.ERROR_500]  # One of both fails.
        for word in HOSTILE:
            await ask(rig, {**PROMPT, "model": word}, x_request_id=word)
        body = (await (await rig.internal()).get(STATUS_PATH)).json()
    for engine in body["pool"]["engines"]:
        engine["pod"] = engine["last_failure"] = HOSTILE[0]
    body["recent"][0]["steps"][0]["kind"] = HOSTILE[0]
    seen = drawn(tmp_path, {"status": 200, "body": body})
    found = texts(seen["parts"]["requests"])
    assert all(found.count(word) == 2 for word in HOSTILE)
    assert "200 ok after a failure" in found
    assert {one["tag"] for part in seen["parts"].values() for one in elements(part)} <= {
        "dt", "dd", "tr", "td", "div", "span"
    }  # fmt: skip
    kinds = {one["className"] for part in seen["parts"].values() for one in elements(part)}
    assert not [kind for kind in kinds if not kind.replace(" ", "").replace("_", "").isalpha() and kind]
    assert {name for one in elements(seen["parts"]["requests"]) for name in one["style"]} == {"flexGrow"}


def test_a_bar_has_the_parts_up_to_the_first_byte(tmp_path: Path) -> None:
    steps = [
        {"kind": "queue", "took_s": 0.5, "text": "waits to be admitted"},
        {"kind": "decode_sent", "took_s": 1.25, "text": "sent to decode-0"},
        {"kind": "first_byte", "took_s": 9.0, "text": "first byte from decode-0"},
    ]
    request = {"request_id": "R-7", "ended_s": 3.0, "fate": "served", "status": 200, "outcome": "ok", "total_s": 10.75}
    body = {"pool": POOL, "recent": [{**request, "steps": steps}]}
    seen = drawn(tmp_path, {"status": 200, "body": body})
    parts = [one for one in elements(seen["parts"]["requests"]) if one["tag"] == "span"]
    assert [(one["className"], one["style"]["flexGrow"], one["title"]) for one in parts] == [
        ("part queue", "500000", "500.0 ms: waits to be admitted"),
        ("part decode_sent", "1250000", "1.25 s: sent to decode-0"),
    ]
    assert "10.75 s" in texts(seen["parts"]["requests"])
    assert "3 run, wait for: prefill 2" in texts(seen["parts"]["facts"])


def test_the_bar_of_a_request_of_microseconds_is_filled(tmp_path: Path) -> None:
    steps = [{"kind": kind, "took_s": 3e-6, "text": kind} for kind in ("queue", "decode_sent")]
    request = {"request_id": "R", "ended_s": 3.0, "fate": "served", "status": 200, "outcome": "ok", "steps": steps}
    seen = drawn(tmp_path, {"status": 200, "body": {"pool": POOL, "recent": [request]}})
    parts = [one for one in elements(seen["parts"]["requests"]) if one["tag"] == "span"]
    assert sum(float(one["style"]["flexGrow"]) for one in parts) >= 1, "below 1 a browser leaves the rest of it empty"


def test_it_asks_again_two_seconds_after_each_answer_good_or_bad(tmp_path: Path) -> None:
    good = drawn(tmp_path, {"status": 200, "body": {"pool": POOL, "recent": []}})
    bad = drawn(tmp_path, {"status": 503})
    gone = drawn(tmp_path, {"error": "Failed to fetch"})
    for seen in (good, bad, gone):
        assert (seen["asked"], seen["waits"]) == (["pdcluster/status"], [2000])
    assert "it answered 503" in bad["parts"]["note"][0]
    assert "Failed to fetch" in gone["parts"]["note"][0]


def test_a_hidden_page_asks_nothing(tmp_path: Path) -> None:
    seen = drawn(tmp_path, {"hidden": True})
    assert (seen["asked"], seen["waits"]) == ([], [2000])
