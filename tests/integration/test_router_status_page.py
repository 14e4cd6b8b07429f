"""``/status`` and ``/pdcluster/status``, over real sockets: what they show, to whom, and that no stranger's word is
markup."""

from __future__ import annotations

import re
import ssl
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import pytest

from fakes.access_log import KEY, ask
from fakes.answers import models_answer
from fakes.certificates import FOR_CLIENTS, Authority
from fakes.faults import Fault, Gate
from fakes.http import Message, request_bytes
from fakes.router import PROMPT, Rig, running_rig, send
from integration.test_router_internal_tls import files_of
from integration.tls_clients import trusting
from pdcluster_protocol.status_page import STATUS_PAGE_PATH, STATUS_PATH, StatusPage
from pdcluster_router.core.engines.breaker import NUM_IN_A_ROW
from pdcluster_router.front.status_page import NUM_RECENT
from pdcluster_router.telemetry.kept import Fate

pytestmark = pytest.mark.anyio

HOSTILE: Final = [
    "<script>alert(1)</script>",
    '"><img/src=x/onerror=alert(1)>',
    "'onmouseover='alert(1)",
    "</script><script>alert(1)</script>",
    "<!--",
    "]]>",
    "&lt;b&gt;",
    "javascript:alert(1)",
    "{{7*7}}",
    "${alert(1)}",
    "__proto__",
]
"""Each may be a request id, a model's name, and, behind a letter, a key's name."""


class Seen(HTMLParser):
    """Tags with their attributes, and the text of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts = {"script": "", "style": ""}
        self._within = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._within = tag

    def handle_endtag(self, tag: str) -> None:
        self._within = ""

    def handle_data(self, data: str) -> None:
        if self._within in self.texts:
            self.texts[self._within] += data


async def get(rig: Rig, path: str) -> Message:
    return await (await rig.internal()).get(path)


async def document_of(rig: Rig) -> StatusPage:
    answer = await get(rig, STATUS_PATH)
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    return msgspec.json.decode(answer.body, type=StatusPage, strict=True)


async def test_the_document_has_the_pool_and_where_the_time_of_requests_went() -> None:
    async with running_rig() as rig:
        await ask(rig, x_request_id="R-7")
        page = await document_of(rig)
    (request,) = page.recent
    assert (request.request_id, request.fate, request.status, request.outcome) == ("R-7", "served", 200, "ok")
    assert [step.kind for step in request.steps] == [
        "read",
        "queue",
        "decode_sent",
        "reserved",
        "prefill_sent",
        "prefill_replied",
        "first_byte",
    ]
    assert request.read_s is not None
    assert request.total_s is not None
    assert sum(step.took_s for step in request.steps) == pytest.approx(request.read_s + request.total_s, abs=1e-5)
    assert [engine.name for engine in page.pool.engines] == ["prefill-0", "decode-0"]
    assert page.pool.ended == {"ok": 1}


async def test_an_engine_says_why_it_was_ejected_and_how_long_it_starts_slowly() -> None:
    async with running_rig() as rig:
        rig.prefill.faults_to_come = [Fault.ERROR_500]
        await ask(rig)
        engine = rig.router.services.all_engines()[0]
        for _ in range(NUM_IN_A_ROW):
            engine.failed(engine.breaker.era)
        bad, good = (await document_of(rig)).pool.engines
    assert (bad.name, bad.circuit, bad.ejections) == ("prefill-0", "ejected", 1)
    assert bad.last_failure.startswith("prefill_failed: prefill-0 answered 500")
    assert bad.last_failure_s is not None
    assert (good.ejections, good.last_failure, good.last_failure_s) == (0, "", None)
    assert 0 < good.slow_start_s <= 10


async def test_a_flood_of_one_kind_hides_no_other_and_the_document_is_bounded() -> None:
    async with running_rig(on_prefill_failure="fail") as rig:
        await ask(rig, x_request_id="good")
        rig.prefill.faults_to_come = [Fault.ERROR_500]
        await ask(rig, x_request_id="bad")
        for number in range(30):
            await ask(rig, "no object", x_request_id=f"ugly-{number}")
        recent = (await document_of(rig)).recent
    fates = [request.fate for request in recent]
    assert [fates.count(fate) for fate in ("refused", "failed", "served")] == [NUM_RECENT[Fate.REFUSED], 1, 1]
    assert recent[0].request_id == "ugly-29"
    assert sorted(request.ended_s for request in recent) == [request.ended_s for request in recent]


async def test_a_request_that_runs_is_counted_and_has_no_row() -> None:
    async with running_rig() as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        client = await send(rig)
        await rig.prefill.next_request()
        page = await document_of(rig)
        rig.prefill.open_gate(Gate.PREFILL)
        await client.receive()
    assert (page.pool.requests.running, page.recent) == (1, ())


async def test_a_router_that_remembers_nothing_shows_its_pool() -> None:
    async with running_rig(kept_requests_bytes=0) as rig:
        await ask(rig)
        page = await document_of(rig)
    assert (page.recent, page.pool.ended) == ((), {"ok": 1})


# Strangers' words.


async def test_words_of_strangers_are_in_the_document_as_they_are_and_in_the_page_not_at_all(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    digests = [sha256(f"{KEY}{number}".encode()).hexdigest() for number in range(len(HOSTILE))]
    keys.write_text("".join(f"{digest}  k{word}\n" for digest, word in zip(digests, HOSTILE, strict=True)))
    async with running_rig(api_key_file=keys, models=[models_answer(*HOSTILE)] * 2) as rig:
        before = await get(rig, STATUS_PAGE_PATH)
        for number, word in enumerate(HOSTILE):
            body = {**PROMPT, "model": word}
            await ask(rig, body, x_request_id=word, authorization=f"Bearer {KEY}{number}")
        document, after = await document_of(rig), await get(rig, STATUS_PAGE_PATH)
    told = {(request.request_id, request.model, request.client) for request in document.recent}
    assert told == {(word, word, f"k{word}") for word in HOSTILE}
    assert after.body == before.body
    assert after.headers["content-security-policy"] == before.headers["content-security-policy"]


async def test_the_documents_words_are_json_and_no_browser_takes_it_for_a_page() -> None:
    async with running_rig() as rig:
        await ask(rig, {**PROMPT, "model": HOSTILE[0]}, x_request_id=HOSTILE[0])
        answer = await get(rig, STATUS_PATH)
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"


@pytest.fixture
async def page() -> Message:
    async with running_rig() as rig:
        return await get(rig, STATUS_PAGE_PATH)


async def test_the_page_loads_nothing_from_elsewhere_and_has_one_script_and_one_style(page: Message) -> None:
    seen = Seen(page.body.decode())
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    attributes = {name for _, found in seen.tags for name in found}
    assert attributes <= {"lang", "charset", "name", "content", "id", "role", "class"}
    tags = [tag for tag, _ in seen.tags]
    assert (tags.count("script"), tags.count("style")) == (1, 1)
    assert not {"link", "img", "iframe", "object", "base", "form", "a"} & set(tags)
    assert not re.search(r"https?:|@import|url\(", page.body.decode())


async def test_the_policy_allows_this_script_and_this_style_and_calls_home(page: Message) -> None:
    seen = Seen(page.body.decode())
    rules = dict(rule.strip().split(" ", 1) for rule in page.headers["content-security-policy"].split(";"))
    for tag in ("script", "style"):
        digest = sha256(seen.texts[tag].encode()).digest()
        assert rules.pop(f"{tag}-src") == f"'sha256-{b64encode(digest).decode()}'"
    assert rules == {
        "default-src": "'none'",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
    }


@pytest.mark.parametrize(
    "sink",
    ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval", "Function(", "setAttribute", "href",
     "src", "cssText", "srcdoc", "DOMParser", "createContextualFragment", "setTimeout(\"", "setTimeout('", "import("],
)  # fmt: skip
async def test_the_script_has_no_way_to_make_markup_of_a_word(page: Message, sink: str) -> None:
    script = Seen(page.body.decode()).texts["script"]
    assert sink not in script


async def test_the_script_asks_no_more_than_once_a_second_and_only_the_path_that_is_there(page: Message) -> None:
    script = Seen(page.body.decode()).texts["script"]
    assert re.findall(r'fetch\("([^"]*)"', script) == [STATUS_PATH.removeprefix("/")]
    (every_ms,) = re.findall(r"EVERY_MS = (\d+);", script)
    assert int(every_ms) >= 1000
    assert script.count("look()") == 1
    assert script.count("setTimeout(look, EVERY_MS)") == 1


# Who may see it.


@pytest.mark.parametrize("path", [STATUS_PATH, STATUS_PAGE_PATH])
@pytest.mark.parametrize("has_keys", [True, False])
async def test_it_is_on_the_internal_port_only_whatever_key_a_client_shows(
    path: str, has_keys: bool, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{sha256(KEY.encode()).hexdigest()}  team-a\n")
    async with running_rig(api_key_file=keys if has_keys else None) as rig:
        client = await rig.client()
        await client.send(request_bytes(path, b"", {"authorization": f"Bearer {KEY}"}, method="GET"))
        assert (await client.receive()).status == 404
        assert (await get(rig, path)).status == 200


async def test_with_tls_it_is_shown_to_those_whom_the_port_believes(authority: Authority, tmp_path: Path) -> None:
    settings: dict[str, Any] = files_of(authority, tmp_path / "internal")
    known = authority.issue(usage=FOR_CLIENTS).write(tmp_path / "known")
    async with running_rig(**settings, internal_client_ca=authority.ca) as rig:
        context = trusting(authority)
        async with httpx.AsyncClient(verify=context, base_url=rig.internal_url) as stranger:
            with pytest.raises((httpx.TransportError, ssl.SSLError)):
                await stranger.get(STATUS_PAGE_PATH)
        context.load_cert_chain(known["tls_cert"], known["tls_key"])
        async with httpx.AsyncClient(verify=context, base_url=rig.internal_url) as client:
            for path in (STATUS_PATH, STATUS_PAGE_PATH):
                assert (await client.get(path)).status_code == 200
        async with httpx.AsyncClient(base_url=rig.internal_url.replace("https", "http")) as plain:
            assert (await plain.get(STATUS_PAGE_PATH)).status_code == 400
