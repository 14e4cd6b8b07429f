"""The client where things go wrong: deadlines, retries, and the fence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fakes.api_server import ApiServer, Asked, Broken, Fault
from patience import EDGE_S, PATIENCE_S
from pdcluster_kube.access import KubeAccess
from pdcluster_kube.session import open_session
from pdcluster_operator.errors import ApiUnavailable, Forbidden, NotLeader
from pdcluster_operator.http_kube import ApiCall, HttpKube
from pdcluster_operator.kinds import SERVICE_ACCOUNT, Ref

pytestmark = pytest.mark.anyio

MANIFEST: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "ServiceAccount",
    "metadata": {"name": "x", "namespace": "default"},
}
REF = Ref(SERVICE_ACCOUNT, "default", "x")


def every(_: Asked) -> bool:
    return True


async def test_a_list_whose_next_page_is_itself_ends() -> None:
    page = b'{"kind": "PartialObjectMetadataList", "metadata": {"continue": "same"}, "items": []}'
    async with client() as (api, kube):
        api.faults.append(Fault(every, page, times=9))
        with pytest.raises(ApiUnavailable, match="the next page of the list is the same one again"):
            await kube.list_metadata(SERVICE_ACCOUNT, "default")
        assert len(api.asked) == 2


@dataclass
class Leave:
    """A fence as a test says."""

    seconds: float

    def left_s(self) -> float:
        return self.seconds


@dataclass
class Heard:
    calls: list[tuple[str, int]] = field(default_factory=list)

    def hear(self, call: ApiCall, status: int) -> None:
        self.calls.append((call.verb, status))


@asynccontextmanager
async def client(
    timeout_s: float = EDGE_S, fence: Leave | None = None, heard: Heard | None = None, token: Path | None = None
) -> AsyncIterator[tuple[ApiServer, HttpKube]]:
    api = ApiServer()
    await api.start()
    async with open_session(KubeAccess(api.url, token_file=token)) as session:
        on_answer = heard.hear if heard else None
        yield api, HttpKube(session, api.url, timeout_s=timeout_s, fence=fence, on_answer=on_answer)
    await api.stop()


@pytest.mark.parametrize("status", [429, 500, 503, 504])
async def test_a_hiccup_of_the_server_is_tried_again(status: int) -> None:
    heard = Heard()
    async with client(heard=heard) as (api, kube):
        api.faults.append(Fault(every, status, times=2))
        await kube.apply(MANIFEST)
        assert heard.calls == [("patch", status), ("patch", status), ("patch", 200)]


async def test_a_server_that_goes_on_failing_is_not_asked_for_ever() -> None:
    async with client() as (api, kube):
        api.faults.append(Fault(every, 500, times=99))
        with pytest.raises(ApiUnavailable):
            await kube.apply(MANIFEST)
        assert len(api.asked) == 4


async def test_a_server_that_wants_more_time_than_a_call_has_gets_it_from_the_caller() -> None:
    async with client(timeout_s=5.0) as (api, kube):
        api.faults.append(Fault(every, 429, headers={"Retry-After": "30"}))
        with pytest.raises(ApiUnavailable) as caught:
            await kube.apply(MANIFEST)
        assert caught.value.retry_after_s == 30
        assert len(api.asked) == 1


async def test_an_answer_that_is_nested_too_deep_is_none() -> None:
    async with client() as (api, kube):
        api.faults.append(Fault(every, b'{"a":' * 100_000, times=99))
        with pytest.raises(ApiUnavailable):
            await kube.get(REF)


async def test_a_refusal_is_not_tried_again() -> None:
    async with client() as (api, kube):
        api.faults.append(Fault(every, 403, times=99))
        with pytest.raises(Forbidden, match="PATCH /api/v1/namespaces/default/serviceaccounts/x: 403"):
            await kube.apply(MANIFEST)
        assert len(api.asked) == 1


async def test_a_server_that_says_nothing_is_not_waited_for_beyond_the_deadline() -> None:
    async with client(timeout_s=0.2) as (api, kube):
        api.faults.append(Fault(every, Broken.HANG, times=99))
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(ApiUnavailable, match="no answer in time"):
                await kube.get(REF)


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    async with client(timeout_s=EDGE_S) as (api, kube):
        await api.stop()
        with pytest.raises(ApiUnavailable, match="Cannot connect"):
            await kube.get(REF)
        await api.start()


async def test_who_does_not_lead_sends_no_write_and_may_read() -> None:
    async with client(fence=Leave(0.0)) as (api, kube):
        assert await kube.get(REF) is None
        api.asked.clear()
        for write in (
            kube.apply(MANIFEST),
            kube.create(MANIFEST),
            kube.replace(MANIFEST),
            kube.delete(REF, uid="u"),
            kube.scale(REF, 1, resource_version="1"),
            kube.apply_status(REF, "u", {}, resource_version="1"),
        ):
            with pytest.raises(NotLeader):
                await write
        assert api.asked == []


async def test_a_write_is_not_waited_for_longer_than_we_lead() -> None:
    leave = Leave(0.1)

    def extends(_: Asked) -> bool:
        leave.seconds = 5.0  # The second try has all the time.
        return True

    async with client(fence=leave) as (api, kube):
        api.faults.append(Fault(extends, Broken.HANG, times=1))
        async with asyncio.timeout(PATIENCE_S):
            await kube.apply(MANIFEST)
        assert len(api.asked) == 2


async def test_a_token_that_kubernetes_renewed_is_shown(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    async with client(token=token) as (api, kube):
        await kube.get(REF)
        token.write_text("second\n")
        await kube.get(REF)
        assert [one.authorization for one in api.asked] == ["Bearer first", "Bearer second"]
