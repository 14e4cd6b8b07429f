"""The request that proves a target: who is asked, how it is signed, and what each answer means."""

from __future__ import annotations

import asyncio
import ssl
import time
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import pytest

from fakes.api_server import ApiServer
from fakes.certificates import Authority
from fakes.operator_rig import KEY, SECRET, FakeRouter, running_router, strangers_session
from fakes.router import until
from patience import EDGE_S
from pdcluster_kube.access import KubeAccess
from pdcluster_kube.session import open_session
from pdcluster_operator.caches import Key
from pdcluster_operator.core.seen.observed import VerificationResult
from pdcluster_operator.core.status.pool_status import Verification
from pdcluster_operator.http_kube import HttpKube
from pdcluster_operator.kinds import SECRET as SECRET_KIND
from pdcluster_operator.kinds import Ref
from pdcluster_operator.pool_secrets import PoolSecrets
from pdcluster_operator.verify import MAX_ANSWER_BYTES, MAX_PODS, RouterTrust, TargetVerifier, ToVerify
from pdcluster_protocol.secret import make_secret
from pdcluster_protocol.verify import VERIFY_PATH, VerifyOrder

pytestmark = pytest.mark.anyio

TEXT = "0123456789abcdef0123456789abcdef"
REF = Ref(SECRET_KIND, SECRET[1], SECRET[2])


@dataclass
class Bench:
    api: ApiServer
    router: FakeRouter
    verifier: TargetVerifier
    secrets: PoolSecrets
    told: list[Key]

    def order(self, target: str = "r-p-d", port: int | None = None, key: str = "secret") -> ToVerify:
        url = f"http://pool-router.default.svc:{port or self.router.port}"
        return ToVerify(target, "r", ("p0",), ("d0", "d1"), url, REF, key)

    async def ask(self, order: ToVerify | None = None) -> VerificationResult | None:
        """One request, and what is said after it."""
        before = len(self.told)
        order = order or self.order()
        self.verifier.ask(KEY, order)
        await until(lambda: len(self.told) > before)
        return self.verifier.results(KEY).get(order.target)


@asynccontextmanager
async def bench(
    *answers: tuple[int, str], text: str = TEXT, context: ssl.SSLContext | None = None, ca: str = ""
) -> AsyncIterator[Bench]:
    """``context``: the router has TLS. ``ca``: authorities in the Secret."""
    api, told = ApiServer(), list[Key]()
    await api.start()
    data = {"secret": b64encode(text.encode()).decode(), "ca.crt": b64encode(ca.encode()).decode()}
    owners = [{"uid": "pool-uid"}]
    api.store.create(
        SECRET, {"apiVersion": "v1", "kind": "Secret", "metadata": {"ownerReferences": owners}, "data": data}
    )
    async with (
        running_router(*answers, context=context) as router,
        open_session(KubeAccess(api.url)) as session,
        strangers_session() as strangers,
    ):
        secrets = PoolSecrets(HttpKube(session, api.url, timeout_s=20.0, fence=None), believe_s=60)
        verifier = TargetVerifier(strangers, secrets, timeout_s=5.0, on_result=told.append)
        task = asyncio.create_task(verifier.run())
        await asyncio.sleep(0)
        yield Bench(api, router, verifier, secrets, told)
        task.cancel()
        await asyncio.wait({task})
    await api.stop()


async def test_a_pass_is_told_and_the_order_is_one_that_a_router_takes() -> None:
    async with bench() as it:
        assert await it.ask() == VerificationResult(Verification.PASSED)
        assert it.told == [KEY]
        [order] = it.router.orders
        assert order == VerifyOrder("r", ("p0",), ("d0", "d1"), 5.0)
        shown = it.router.passes[0].removeprefix("Bearer ")
        make_secret(TEXT).check_pass(shown, it.router.bodies[0], now_s=time.time())


async def test_an_answer_that_is_too_long_for_a_routers_is_not_read_to_its_end() -> None:
    async with bench((400, "x" * MAX_ANSWER_BYTES)) as it:
        result = await it.ask()
        assert result is not None
        assert result.outcome is Verification.FAILED
        assert f"more than {MAX_ANSWER_BYTES} bytes" in result.error


NAME = "pool-router-internal.default.svc"


def over_tls(it: Bench, name: str = NAME) -> ToVerify:
    """The order to a router with TLS."""
    order = it.order()
    return replace(order, url=order.url.replace("http:", "https:"), trust=RouterTrust(REF, "ca.crt", name))


async def test_a_router_with_tls_must_have_the_name_and_the_authority_of_its_pool(tmp_path: Path) -> None:
    """It is called by the name of a Service, and its certificate may have another one."""
    authority, other = Authority(tmp_path / "ca.crt"), Authority(tmp_path / "other.crt", "other")
    context = authority.issue(names=(NAME,)).server(tmp_path / "router")
    async with bench(context=context, ca=authority.ca.read_text()) as it:
        assert await it.ask(over_tls(it)) == VerificationResult(Verification.PASSED)
        assert len(it.router.orders) == 1
    async with bench(context=context, ca=authority.ca.read_text()) as it:
        assert await it.ask(over_tls(it, "elsewhere.svc")) is None
        assert it.router.orders == []
    async with bench(context=context, ca=other.ca.read_text()) as it:
        assert await it.ask(over_tls(it)) is None
        assert it.router.orders == []


async def test_why_a_router_is_not_trusted_is_logged_with_the_cure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path / "ca.crt")
    context = authority.issue(names=("elsewhere.svc",)).server(tmp_path / "router")
    with caplog.at_level("INFO"):
        async with bench(context=context, ca=authority.ca.read_text()) as it:
            await it.ask(over_tls(it))
    assert f"its certificate must have the name {NAME}, and be signed by ca.crt of Secret default/pool-s" in caplog.text


async def test_a_router_with_tls_is_never_asked_in_the_clear(tmp_path: Path) -> None:
    async with bench(ca=Authority(tmp_path / "ca.crt").ca.read_text()) as it:
        assert await it.ask(over_tls(it)) is None
        assert it.router.orders == []


async def test_authorities_that_are_none_are_told() -> None:
    async with bench(ca="nonsense") as it:
        found = await it.ask(over_tls(it))
        assert found is not None
        assert found.outcome is Verification.FAILED
        assert found.error.startswith("Secret default/pool-secret, key ca.crt: ")
        assert found.error.endswith(": give certificates in PEM")


async def test_authorities_may_have_words_of_any_language_between_them(tmp_path: Path) -> None:
    """Files of many authorities have; engines and routers read such a file as it is."""
    authority = Authority(tmp_path / "ca.crt")
    context = authority.issue(names=(NAME,)).server(tmp_path / "router")
    async with bench(context=context, ca=f"# Főtanúsítvány\n{authority.ca.read_text()}") as it:
        assert await it.ask(over_tls(it)) == VerificationResult(Verification.PASSED)


async def test_a_router_sends_no_order_to_another_place(tmp_path: Path) -> None:
    """Not in the clear either, if the router has TLS."""
    authority = Authority(tmp_path / "ca.crt")
    context = authority.issue(names=(NAME,)).server(tmp_path / "router")
    async with running_router() as elsewhere:
        place = f"http://elsewhere.svc:{elsewhere.port}{VERIFY_PATH}"
        async with bench((307, place), context=context, ca=authority.ca.read_text()) as it:
            found = await it.ask(over_tls(it))
    assert elsewhere.orders == []
    assert found == VerificationResult(Verification.FAILED, place)


async def test_a_bug_in_one_request_ends_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async with bench() as it:
        broken = replace(it.order(), trust=cast("RouterTrust", object()))
        assert await it.ask(broken) is None
        assert "verification broke target=" in caplog.text
        assert await it.ask(it.order("r-p2-d")) == VerificationResult(Verification.PASSED)


async def test_of_a_large_pool_some_pods_are_named() -> None:
    """Any of them will do, and a router takes no list of any length."""
    async with bench() as it:
        many = tuple(f"p{number}" for number in range(MAX_PODS + 1))
        assert await it.ask(replace(it.order(), prefill_pods=many, decode_pods=many)) is not None
        [order] = it.router.orders
        assert (len(order.prefill_pods or ()), len(order.decode_pods or ())) == (MAX_PODS, MAX_PODS)


@pytest.mark.parametrize(("status", "message"), [(409, "KV was not pushed"), (401, "the pass is not valid here")])
async def test_what_the_router_found_is_told_in_its_words(status: int, message: str) -> None:
    async with bench((status, message)) as it:
        assert await it.ask() == VerificationResult(Verification.FAILED, message)


@pytest.mark.parametrize("status", [429, 503, 500])
async def test_a_router_that_cannot_do_it_now_says_nothing_of_the_target(status: int) -> None:
    async with bench((status, "later")) as it:
        assert await it.ask() is None
        assert it.verifier.ask(KEY, it.order()) is not None  # Not at once, but soon.


async def test_a_router_that_is_not_there_says_nothing_of_the_target() -> None:
    async with bench() as it:
        assert await it.ask(it.order(port=1)) is None


async def test_a_router_that_never_answers_is_not_waited_for_longer_than_told() -> None:
    async def take(*_: object) -> None:
        await asyncio.Event().wait()

    silent = await asyncio.start_server(take, "127.0.0.1", 0)
    async with silent, bench() as it:
        it.verifier.ask(KEY, it.order(port=silent.sockets[0].getsockname()[1]))
        async with asyncio.timeout(EDGE_S):  # 5 s for the request, 5 s for the way, and room
            while it.verifier.num_running:
                await asyncio.sleep(0.1)
        assert it.told == [KEY]
        assert it.verifier.results(KEY) == {}


async def test_a_secret_that_is_too_short_is_told() -> None:
    async with bench(text="short") as it:
        found = await it.ask()
        assert found is not None
        assert found.outcome is Verification.FAILED
        assert "Secret default/pool-secret, key secret: PDCLUSTER_SECRET has 5 bytes" in found.error
        assert it.router.orders == []


async def test_a_secret_that_is_not_there_is_waited_for() -> None:
    async with bench() as it:
        assert await it.ask(it.order(key="other")) is None
        assert it.router.orders == []


async def test_a_result_of_a_target_that_nobody_wants_any_more_is_dropped() -> None:
    async with bench((409, "no"), (200, "")) as it:
        it.verifier.ask(KEY, it.order("old-p-d"))
        assert await it.ask(it.order("new-p-d")) is not None
        assert it.verifier.results(KEY).keys() == {"new-p-d"}


async def test_what_was_asked_before_a_stop_proves_nothing_after_it() -> None:
    async with bench((200, ""), (409, "no")) as it:
        it.router.is_open.clear()
        for number in (1, 2):
            it.verifier.forget(KEY)
            it.verifier.ask(KEY, it.order())
            await until(lambda number=number: len(it.router.orders) == number)  # type: ignore[misc]
        it.router.is_open.set()
        await until(lambda: not [one for one in asyncio.all_tasks() if one.get_name().startswith("verify ")])
        assert it.told == [KEY]  # Of the second one.
        assert it.verifier.results(KEY) == {"r-p-d": VerificationResult(Verification.FAILED, "no")}


async def test_one_request_is_under_way_however_often_it_is_asked_for() -> None:
    async with bench() as it:
        for _ in range(5):
            assert it.verifier.ask(KEY, it.order()) in (None, 0.0)
        await until(lambda: bool(it.told))
        assert len(it.router.orders) == 1


async def test_a_secret_that_was_there_is_believed_to_be_for_a_while() -> None:
    async with bench() as it:
        assert not await it.secrets.is_there(REF, "another-owner")
        assert await it.secrets.is_there(REF, "pool-uid")
        it.api.asked.clear()
        assert await it.secrets.is_there(REF, "pool-uid")
        assert it.api.asked == []
        it.api.store.delete(SECRET)
        assert not await it.secrets.is_there(REF, "another-owner")
        assert not await it.secrets.is_there(REF, "pool-uid")
