"""Which engines a request gets that waits, or is tried again, while engines begin to serve other models."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from zlib import crc32

import pytest

from fakes.answers import models_answer
from pdcluster_protocol.labels import Role
from pdcluster_router.core.apis.pooling import parse_pooling
from pdcluster_router.core.apis.rewrite import parse_body
from pdcluster_router.core.clients.admission import Admission
from pdcluster_router.core.clients.model_admissions import ModelAdmissions
from pdcluster_router.core.engines.listing import read_listing
from pdcluster_router.core.engines.membership import Member
from pdcluster_router.core.engines.outage import Sign
from pdcluster_router.core.engines.placement import RequestFacts
from pdcluster_router.core.engines.policies.least_tokens import least_tokens
from pdcluster_router.core.requests.pairing import Retries
from pdcluster_router.engines.engine import Engine
from pdcluster_router.engines.model_terms import ModelTerms, size_queues
from pdcluster_router.engines.roster import Roster, Terms
from pdcluster_router.http.connections import PoolLimits
from pdcluster_router.requests.part import OnePrefill

pytestmark = pytest.mark.anyio

OLD, NEW = models_answer("llama", sql="/sql-1"), models_answer("llama", sql="/sql-2")
QWEN = models_answer("qwen", "other", sql="/sql-2")
MORE = models_answer("llama", sql="/sql-1", chat="/chat")
SILENCE = b"{}"
PREFILL, DECODE = Role.PREFILL, Role.DECODE


ALIASES = {"db": "sql", "fast": "llama"}


class Pool:
    """Engines and the terms of requests to them."""

    def __init__(self) -> None:
        self.roster = Roster(PoolLimits(4, 1.0, 1.0), least_tokens, self._forget, lambda _: None, lambda: 0.0)
        self.admissions: ModelAdmissions[str] = ModelAdmissions(
            lambda: Admission(engine_tokens=100, max_queued=3, queue_s=30.0)
        )
        terms = self.shared_terms = Terms(
            self.roster.place_decode, self.roster.place_prefill, Retries(3, 3, recomputes=True), self.admissions.shared
        )
        self.terms = ModelTerms(self.roster, terms, self.admissions, refuses_unknown=True, aliases=ALIASES)
        self.members: list[Member] = []

    def _forget(self) -> None:
        if hasattr(self, "terms"):
            self.terms.forget()
            size_queues(self.admissions, self.roster)

    def add(self, role: Role, said: bytes, revision: str = "") -> Engine:
        """A healthy engine of this role and revision, which has said this."""
        self.members.append(Member(f"http://127.0.0.1:{len(self.members) + 1}", role, revision=revision))
        self.roster.update(self.members)
        engine = self.roster.engines[role][-1]
        engine.found(Sign.WELL, most_s=1.0)
        self.says(engine, said)
        return engine

    def says(self, engine: Engine, said: bytes) -> None:
        self.roster.listed(engine, read_listing(said))
        self.roster.refresh()


@asynccontextmanager
async def pool_of(*said: tuple[Role, bytes] | tuple[Role, bytes, str]) -> AsyncIterator[tuple[Pool, list[Engine]]]:
    pool = Pool()
    yield pool, [pool.add(*one) for one in said]
    await pool.roster.close()


class Asked:
    """A request that has come, and its steps from now on."""

    def __init__(self, pool: Pool, name: str, *, is_pooling: bool = False) -> None:
        parse = parse_pooling if is_pooling else parse_body
        body = parse(b'{"model":"%b","prompt":"a"}' % name.encode())
        self._pool = pool
        terms = pool.terms.find(body)
        assert terms is not None
        self._request, self._terms = RequestFacts(b"/v1/completions", b"", body, ""), terms
        self._of_parts = OnePrefill(terms).terms

    @property
    def queue(self) -> str:
        assert self._terms.admissions is self._pool.admissions.find(self._terms.queue)
        return self._terms.queue

    @property
    def decodes(self) -> set[Engine]:
        """All decode engines that it may come to, try after try."""
        tried: list[Engine] = []
        while (engine := self._terms.place_decode(self._request, tried)) is not None:
            tried.append(engine)
        return set(tried)

    @property
    def prefill_of_parts(self) -> Engine | None:
        """The engine for the next part of it, at its first try."""
        return self._of_parts.place_prefill(self._request, [], "")

    @property
    def prefills(self) -> set[Engine]:
        tried: list[Engine] = []
        while (engine := self._terms.place_prefill(self._request, tried, "")) is not None:
            tried.append(engine)
        return set(tried)


@pytest.mark.parametrize("others", [OLD, QWEN], ids=["one model before", "several models before"])
@pytest.mark.parametrize("new", [NEW, QWEN])
async def test_an_engine_on_which_the_name_is_another_thing_now_may_not_follow(others: bytes, new: bytes) -> None:
    said = [(PREFILL, OLD), (PREFILL, OLD), (DECODE, OLD), (DECODE, OLD), (PREFILL, others), (DECODE, others)]
    async with pool_of(*said) as (pool, (prefill, prefill_2, decode, decode_2, *more)):
        asked = Asked(pool, "sql")
        theirs = set(more) if others is OLD else set()
        assert (asked.prefills, asked.decodes) == (
            {prefill, prefill_2, *theirs} - {more[1]},
            {decode, decode_2, *theirs} - {more[0]},
        )
        for engine in (prefill_2, decode_2):
            pool.says(engine, new)
        assert (asked.prefills, asked.decodes) == ({prefill, *theirs} - {more[1]}, {decode, *theirs} - {more[0]})


@pytest.mark.parametrize("name", ["", "llama"])
async def test_a_request_keeps_its_model_when_all_engines_of_one_role_serve_another(name: str) -> None:
    async with pool_of((PREFILL, OLD), (DECODE, OLD)) as (pool, (prefill, decode)):
        asked = Asked(pool, name)
        pool.says(prefill, QWEN)
        assert (asked.prefills, asked.decodes) == (set(), set()), "decode does not compute a base model's prompts alone"
        pool.says(decode, QWEN)
        assert (asked.prefills, asked.decodes) == (set(), set())
        assert Asked(pool, "qwen").decodes == {decode}


async def test_what_a_name_was_on_an_engine_that_leaves_holds_for_the_requests_that_it_has() -> None:
    async with pool_of((PREFILL, OLD), (DECODE, OLD)) as (pool, engines):
        asked = Asked(pool, "sql")
        for engine in engines:
            engine.take(1)
        pool.members = [replace(one, is_terminating=True, is_serving=False) for one in pool.members]
        pool.add(PREFILL, NEW), pool.add(DECODE, NEW)
        assert asked.prefills | asked.decodes == set()
        for engine in engines:
            engine.give_back(1)


async def test_a_request_that_waits_gets_engines_that_have_loaded_one_more_adapter() -> None:
    said = [(PREFILL, OLD), (DECODE, OLD), (PREFILL, QWEN), (DECODE, QWEN)]
    async with pool_of(*said) as (pool, (prefill, decode, *_)):
        asked = Asked(pool, "llama")
        pool.says(prefill, MORE)
        assert (asked.prefills, asked.decodes) == ({prefill}, {decode})
        pool.says(decode, MORE)
        assert (asked.prefills, asked.decodes) == ({prefill}, {decode})


@pytest.mark.parametrize("model", ["llama", "sql", ""])
async def test_a_request_that_waits_gets_engines_that_come_meanwhile(model: str) -> None:
    said = [(PREFILL, OLD), (DECODE, OLD), (PREFILL, QWEN), (DECODE, QWEN)]
    async with pool_of(*said) as (pool, (prefill, decode, *_)):
        asked = Asked(pool, model)
        new = pool.add(PREFILL, OLD), pool.add(DECODE, OLD)
        assert (asked.prefills, asked.decodes) == ({prefill, new[0]}, {decode, new[1]})
        newer = pool.add(PREFILL, OLD), pool.add(DECODE, OLD)
        assert (asked.prefills, asked.decodes) == ({prefill, new[0], newer[0]}, {decode, new[1], newer[1]})


async def test_a_request_keeps_its_model_while_no_decode_engine_says_what_it_serves() -> None:
    async with pool_of((PREFILL, OLD), (DECODE, SILENCE)) as (pool, (prefill, decode)):
        asked = Asked(pool, "llama")
        assert (asked.prefills, asked.decodes) == ({prefill}, {decode})
        pool.says(prefill, QWEN)
        assert asked.prefills == set()


async def test_an_engine_that_has_prefilled_a_part_gets_no_further_one_once_the_name_is_another_thing_there() -> None:
    async with pool_of((PREFILL, OLD), (PREFILL, OLD), (DECODE, OLD)) as (pool, (prefill, prefill_2, _)):
        asked = Asked(pool, "sql")
        first = asked.prefill_of_parts
        assert first is not None
        assert asked.prefill_of_parts is first
        pool.says(first, NEW)
        assert asked.prefill_of_parts is ({prefill, prefill_2} - {first}).pop()


async def test_an_alias_has_the_terms_of_its_model_and_an_adapter_one_number_by_whatever_name() -> None:
    async with pool_of((PREFILL, OLD), (DECODE, OLD), (PREFILL, QWEN), (DECODE, QWEN)) as (pool, (prefill, decode, *_)):
        found = {name: pool.terms.find(parse_body(b'{"model":"%b"}' % name.encode())) for name in ("db", "sql", "fast")}
        adapters = {name: terms.adapter for name, terms in found.items() if terms is not None}
        assert adapters == {"db": crc32(b"sql"), "sql": crc32(b"sql"), "fast": None}
        names = {name: terms.engines_name for name, terms in found.items() if terms is not None}
        assert names == {"db": b'"sql"', "sql": b"", "fast": b'"llama"'}
        assert (Asked(pool, "fast").prefills, Asked(pool, "fast").decodes) == ({prefill}, {decode})


async def test_models_of_different_bases_have_queues_of_their_own_and_their_adapters_are_in_them() -> None:
    async with pool_of((PREFILL, MORE), (DECODE, MORE), (PREFILL, QWEN), (DECODE, QWEN)) as (pool, _):
        queues = {name: Asked(pool, name).queue for name in ("llama", "fast", "chat", "qwen", "other")}
        assert queues == {"llama": "llama", "fast": "llama", "chat": "llama", "qwen": "other", "other": "other"}


async def test_models_of_one_base_share_the_queue_whatever_adapters_engines_have() -> None:
    async with pool_of((PREFILL, MORE), (DECODE, MORE), (PREFILL, OLD), (DECODE, OLD)) as (pool, _):
        assert {Asked(pool, name).queue for name in ("llama", "chat", "sql")} == {""}


E5 = models_answer("e5")
MIXED = (PREFILL, OLD), (DECODE, OLD), (DECODE, E5), (DECODE, E5)


async def test_a_pooling_request_is_placed_on_decode_engines_that_no_prefill_engine_is_beside() -> None:
    async with pool_of(*MIXED) as (pool, (_, decode, one, other)):
        pooled = Asked(pool, "e5", is_pooling=True)
        assert (pooled.decodes, pooled.queue) == ({one, other}, "e5")
        assert Asked(pool, "e5").decodes == set(), "a chat needs a pair"
        assert Asked(pool, "llama", is_pooling=True).decodes == {decode}
        assert Asked(pool, "llama").decodes == {decode}
        one.is_healthy = False
        pool.roster.refresh()
        request = RequestFacts(b"/v1/embeddings", b"", parse_pooling(b'{"model":"e5"}'), "")
        terms = pool.terms.find(request.body)
        assert terms is not None
        assert [terms.place_decode(request, ()) for _ in range(4)] == [other] * 4


async def test_a_pooling_request_that_waits_goes_where_its_model_has_gone() -> None:
    async with pool_of(*MIXED) as (pool, (_, decode, one, other)):
        asked = Asked(pool, "e5", is_pooling=True)
        pool.says(one, QWEN)
        assert asked.decodes == {other}
        pool.says(decode, E5)
        assert asked.decodes == {decode, other}


async def test_the_queue_of_a_pooling_model_has_the_room_of_all_its_engines() -> None:
    async with pool_of(*MIXED) as (pool, _):
        own = pool.admissions.find("e5")
        assert own is not None
        assert [own[DECODE].enter(25) for _ in range(9)] == [True] * 8 + [False]


async def test_an_alias_of_a_pooling_model_is_kept_apart_from_the_same_name_elsewhere() -> None:
    async with pool_of(*MIXED) as (pool, _):
        pooled, paired = (pool.terms.find(parse(b'{"model":"fast"}')) for parse in (parse_pooling, parse_body))
        assert pooled is not None
        assert paired is not None
        assert (pooled.engines_name, pooled.has_prefill, paired.has_prefill) == (b'"llama"', False, True)
        assert (pool.terms.unpaired, pool.terms.known) == ({b'"fast"': pooled}, {b'"fast"': paired})
        pool.terms.forget()
        assert not pool.terms.unpaired


async def test_an_engine_without_a_list_is_neither_asked_nor_counted_for_a_pooling_model_that_others_have_told() -> (
    None
):
    silent = (PREFILL, SILENCE, "b"), (DECODE, SILENCE, "b")
    said = (PREFILL, OLD, "a"), (DECODE, OLD, "a"), *silent, *[(DECODE, E5, "c")] * 8
    async with pool_of(*said) as (pool, (_, decode, _, _, *alone)):
        assert Asked(pool, "e5", is_pooling=True).decodes == set(alone)
        own = pool.admissions.find("e5")
        assert own is not None
        assert [own[DECODE].enter(50) for _ in range(17)] == [True] * 16 + [False]
        paired = pool.admissions.find("llama")
        assert paired is not None
        assert [paired[DECODE].enter(50) for _ in range(3)] == [True, True, False]
        assert Asked(pool, "llama", is_pooling=True).decodes == {decode}


async def test_a_pool_of_pooling_engines_alone_has_the_room_of_all() -> None:
    async with pool_of(*[(DECODE, E5)] * 3) as (pool, engines):
        assert Asked(pool, "e5", is_pooling=True).decodes == set(engines)
        assert [pool.admissions.shared[DECODE].enter(50) for _ in range(7)] == [True] * 6 + [False]


async def test_a_question_about_a_pooling_model_goes_to_its_engines() -> None:
    said = (PREFILL, OLD, "a"), (DECODE, OLD, "a"), (PREFILL, SILENCE, "b"), (DECODE, SILENCE, "b"), (DECODE, E5, "c")
    async with pool_of(*said) as (pool, (_, decode, _, _, alone)):
        found = pool.terms.candidates("e5")
        assert found is not None
        assert (found.other_decode(()), found.other_decode((alone,))) == (alone, None)
        of_pair = pool.terms.candidates("llama")
        assert of_pair is not None
        assert of_pair.other_decode(()) is decode


async def test_a_question_that_names_no_model_goes_to_an_engine_that_has_a_pair() -> None:
    async with pool_of((DECODE, E5), (PREFILL, OLD), (DECODE, OLD)) as (pool, (_, _, decode)):
        assert pool.roster.whole.other_decode(()) in pool.roster.engines[DECODE]
        found = pool.terms.candidates("")
        assert found is not None
        assert found.other_decode(()) is decode


async def test_a_pooling_request_for_a_model_that_no_engine_lists_may_come_to_a_revision_without_a_pair() -> None:
    async with pool_of((PREFILL, OLD, "a"), (DECODE, OLD, "a"), (DECODE, E5, "c")) as (pool, (_, decode, alone)):
        pool.terms.apply_settings(pool.shared_terms, refuses_unknown=False, aliases={}, now_unix_s=0.0)
        body = parse_pooling(b'{"model":"mistral"}')
        terms, request = pool.terms.find(body), RequestFacts(b"/v1/embeddings", b"", body, "")
        assert terms is not None
        assert {terms.place_decode(request, tried) for tried in ((alone,), (decode,))} == {alone, decode}
        assert not terms.has_prefill
