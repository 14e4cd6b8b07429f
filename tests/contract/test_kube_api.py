"""What router and operator rely on of an API server: lists, watches, preconditions, field owners, errors.

One suite: the fake keeps the real one's contract.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import msgspec
import pytest

from contract.kube_ends import API_SERVERS, MARKS, ApiEnd
from control_plane.plane import ControlPlane
from fakes.api_server import SLICE
from fakes.slices import endpoint, slice_of
from patience import EDGE_S
from pdcluster_kube.reader import ApiStatusError, KubeReader, Lines
from pdcluster_kube.session import open_session
from pdcluster_operator.clock import micro_time
from pdcluster_operator.errors import Conflict, Exists, NotFound, OwnConflict, Refused, Taken
from pdcluster_operator.http_kube import HttpKube
from pdcluster_operator.kinds import DEPLOYMENT, LEADER_WORKER_SET, LEASE, SERVICE, SERVICE_ACCOUNT, Kind, Ref, ref_of
from pdcluster_protocol.errors import Unavailable
from pdcluster_router.core.engines.endpoint_slices import SliceCache
from pdcluster_router.engines.discovery import Source

pytestmark = pytest.mark.anyio

REAL: Final = "kube-apiserver"
LIMIT_S: Final = EDGE_S
NO_UID: Final = "00000000-0000-0000-0000-000000000000"


@dataclass
class End:
    """The router's client, the operator's, and another one with a name of its own."""

    api: ApiEnd
    reader: KubeReader
    kube: HttpKube
    session: aiohttp.ClientSession

    def manifest(self, kind: Kind, name: str = "x", **rest: Any) -> dict[str, Any]:
        metadata = {"name": name, "namespace": self.api.namespace, **rest.pop("metadata", {})}
        return {"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata, **rest}

    def service(self, port: int = 80, **metadata: Any) -> dict[str, Any]:
        ports = [{"name": "http", "port": port, "protocol": "TCP"}]
        return self.manifest(SERVICE, metadata=metadata, spec={"selector": {"app": "x"}, "ports": ports})

    def deployment(self, replicas: int = 1, deadline_s: int = 600, **metadata: Any) -> dict[str, Any]:
        pod = {"metadata": {"labels": {"app": "x"}}, "spec": {"containers": [{"name": "c", "image": "i:1"}]}}
        spec = {
            "replicas": replicas,
            "progressDeadlineSeconds": deadline_s,
            "selector": {"matchLabels": {"app": "x"}},
            "template": pod,
        }
        return self.manifest(DEPLOYMENT, metadata=metadata, spec=spec)

    async def edit(self, ref: Ref, patch: object, form: str = "merge-patch+json") -> None:
        """Somebody else's change."""
        url = f"{self.api.access.url}{ref.path()}?fieldManager=kubectl-edit"
        headers = {"Content-Type": f"application/{form}"}
        async with self.session.patch(url, data=json.dumps(patch), headers=headers) as response:
            assert response.status in (200, 201), await response.text()

    async def put(self, one: dict[str, Any]) -> None:
        """Make or replace a slice. It is stored when this returns."""
        whole = {"apiVersion": SLICE.api_version, "kind": SLICE.name, **one}
        await self.edit(Ref(SLICE, self.api.namespace, one["metadata"]["name"]), whole, "apply-patch+yaml")

    async def delete(self, name: str) -> None:
        """The slice goes."""
        url = self.api.access.url + Ref(SLICE, self.api.namespace, name).path()
        async with self.session.delete(url) as response:
            assert response.status == 200, await response.text()

    async def listed(self) -> SliceCache:
        """As the router lists them."""
        cache = SliceCache()
        cache.replace(await self.reader.read(Source(self.api.namespace, "c", 2).list_path))
        return cache

    def watched(self, since: SliceCache) -> AbstractAsyncContextManager[Lines]:
        """The router's watch, of two seconds, from where it knows."""
        path = Source(self.api.namespace, "c", 2).watch_path(since.resource_version)
        return self.reader.stream(path, limit_s=LIMIT_S)

    async def there(self, manifest: Mapping[str, Any]) -> Mapping[str, Any]:
        found = await self.kube.get(ref_of(manifest))
        assert found is not None
        return found


@pytest.fixture(scope="module")
def still_plane(control_plane: ControlPlane) -> Iterator[ControlPlane]:
    with control_plane.without_controllers():
        yield control_plane


@pytest.fixture(params=[pytest.param(name, marks=MARKS.get(name, ())) for name in API_SERVERS])
def opener(request: pytest.FixtureRequest) -> AbstractAsyncContextManager[ApiEnd]:
    return API_SERVERS[request.param](request)


@pytest.fixture
async def end(opener: AbstractAsyncContextManager[ApiEnd]) -> AsyncIterator[End]:
    async with opener as api, open_session(api.access) as session:
        reader = KubeReader(api.router_access, timeout_s=LIMIT_S)
        yield End(api, reader, HttpKube(session, api.access.url, timeout_s=LIMIT_S, fence=None), session)


# Lists and watches.


def urls(cache: SliceCache) -> list[str]:
    return [member.url for member in cache.picture.members]


async def next_event(lines: Lines) -> dict[str, Any]:
    """The next one that is no bookmark."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            line = await lines.next()
            assert line is not None, "the watch has ended"
            event: dict[str, Any] = msgspec.json.decode(line)
            if event["type"] != "BOOKMARK":
                return event


def decode(name: str, host: str, **changes: Any) -> dict[str, Any]:
    return slice_of(name, "decode", endpoint(host), **changes)


async def test_a_list_holds_the_slices_that_fit_the_selector_and_no_others(end: End) -> None:
    await end.put(decode("a", "10.0.0.1"))
    await end.put(decode("b", "10.0.0.2", cluster="another"))
    await end.put(slice_of("r", "router", endpoint("10.0.0.3")))
    cache = await end.listed()
    assert urls(cache) == ["http://10.0.0.1:8000"]
    assert cache.resource_version


async def test_an_empty_list_has_a_version_to_watch_from(end: End) -> None:
    cache = await end.listed()
    assert (urls(cache), cache.resource_version.isdecimal()) == ([], True)
    async with end.watched(cache) as lines:
        await end.put(decode("a", "10.0.0.1"))
        assert (await next_event(lines))["type"] == "ADDED"


async def test_a_watch_tells_all_that_came_after_its_version_in_order(end: End) -> None:
    await end.put(decode("a", "10.0.0.1"))
    cache = await end.listed()
    await end.put(decode("b", "10.0.0.2"))
    await end.delete("a")
    async with end.watched(cache) as lines:
        await end.put(decode("b", "10.0.0.3"))
        events = [await next_event(lines) for _ in range(3)]
    told = [(event["type"], event["object"]["metadata"]["name"]) for event in events]
    assert told == [("ADDED", "b"), ("DELETED", "a"), ("MODIFIED", "b")]
    versions = [int(event["object"]["metadata"]["resourceVersion"]) for event in events]
    assert versions == sorted(set(versions))
    assert versions[0] > int(cache.resource_version)
    for event in events:
        assert cache.apply(msgspec.json.encode(event))
    assert urls(cache) == urls(await end.listed()) == ["http://10.0.0.3:8000"]


async def test_a_slice_that_fits_the_selector_no_longer_is_deleted_for_its_watch(end: End) -> None:
    await end.put(decode("a", "10.0.0.1"))
    cache = await end.listed()
    async with end.watched(cache) as lines:
        await end.put(decode("a", "10.0.0.1", cluster="another"))
        event = await next_event(lines)
    assert event["type"] == "DELETED"
    assert cache.apply(msgspec.json.encode(event))
    assert urls(cache) == []


async def test_a_watch_ends_by_itself_when_its_time_is_over(end: End) -> None:
    cache = await end.listed()
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with end.watched(cache) as lines:
        while (line := await lines.next()) is not None:
            assert not cache.apply(line)
    assert 1.5 < loop.time() - began < LIMIT_S


async def test_a_version_from_before_its_history_is_a_410(end: End) -> None:
    cache = await end.listed()
    await end.put(decode("a", "10.0.0.1"))
    end.api.forget_history()

    async def watch() -> None:
        """As an event of a watch that began, or as the status of one that did not."""
        async with end.watched(cache) as lines:
            cache.apply(await lines.next() or b"")

    with pytest.raises(Unavailable, match="410"):
        await watch()


async def test_conditions_come_back_as_they_were_written(end: End) -> None:
    conditions: list[dict[str, bool | None]] = [{}, {"ready": False, "serving": True, "terminating": True}]
    endpoints = [endpoint(f"10.0.0.{index}", "", **given) for index, given in enumerate(conditions, 1)]
    await end.put(slice_of("a", "decode", *endpoints))
    members = (await end.listed()).picture.members
    assert [member.state.value for member in members] == ["serving", "finishing"]


async def test_what_an_api_server_does_not_serve_is_refused_with_a_status(end: End) -> None:
    with pytest.raises(ApiStatusError) as refused:
        await end.reader.read("/apis/discovery.k8s.io/v0/nothing")
    assert refused.value.status in (403, 404)


# Writes.


async def test_an_apply_makes_an_object_and_the_same_again_changes_nothing(end: End) -> None:
    first = await end.kube.apply(end.service())
    second = await end.kube.apply(end.service())
    assert first["metadata"]["resourceVersion"] == second["metadata"]["resourceVersion"]
    assert first["spec"]["ports"][0]["port"] == 80


async def test_a_status_is_stored_only_for_the_state_that_was_seen(end: End) -> None:
    made = await end.kube.apply(end.deployment())
    ref, uid, seen = ref_of(made), made["metadata"]["uid"], made["metadata"]["resourceVersion"]
    stored = await end.kube.apply_status(ref, uid, {"replicas": 1}, resource_version=seen)
    assert stored["status"]["replicas"] == 1
    with pytest.raises(Conflict):
        await end.kube.apply_status(ref, uid, {"replicas": 2}, resource_version=seen)
    assert (await end.there(made))["status"]["replicas"] == 1


async def test_a_field_that_we_apply_no_longer_goes(end: End) -> None:
    await end.kube.apply(end.service(annotations={"a": "b"}))
    await end.kube.apply(end.service())
    assert not (await end.there(end.service()))["metadata"].get("annotations")


async def test_a_field_of_somebody_else_stays_theirs_unless_it_is_set_by_force(end: End) -> None:
    made = await end.kube.apply(end.service())
    ref, uid = ref_of(made), made["metadata"]["uid"]
    await end.edit(ref, {"metadata": {"annotations": {"theirs": "1"}}, "spec": {"selector": {"app": "theirs"}}})
    with pytest.raises(Taken) as taken:
        await end.kube.apply(end.service(uid=uid))
    found = await end.there(made)
    assert (found["spec"]["selector"], found["metadata"]["annotations"]) == ({"app": "theirs"}, {"theirs": "1"})
    [field] = taken.value.fields
    assert field.startswith(".spec.selector")
    assert taken.value.by == ("kubectl-edit",)
    stored = await end.kube.apply(end.service(uid=uid), is_forced=True)
    assert stored["spec"]["selector"] == made["spec"]["selector"]
    assert stored["metadata"]["annotations"] == {"theirs": "1"}
    await end.kube.apply(end.service(uid=uid))


async def test_an_apply_to_another_object_than_the_one_that_was_seen_is_a_conflict(end: End) -> None:
    made = await end.kube.apply(end.service())
    for is_forced in (False, True):
        with pytest.raises(Conflict):
            await end.kube.apply(end.service(port=81, uid=NO_UID), is_forced=is_forced)
    await end.kube.delete(ref_of(end.service()), uid=made["metadata"]["uid"])
    with pytest.raises(Conflict):
        await end.kube.apply(end.service(uid=made["metadata"]["uid"]))
    assert await end.kube.get(ref_of(end.service())) is None


async def test_an_apply_to_an_old_picture_is_a_conflict(end: End) -> None:
    made = await end.kube.apply(end.deployment())
    await end.edit(ref_of(made), {"metadata": {"annotations": {"a": "b"}}})
    with pytest.raises(Conflict):
        await end.kube.apply(end.deployment(deadline_s=9, resourceVersion=made["metadata"]["resourceVersion"]))


async def test_what_is_only_asked_is_not_stored(end: End) -> None:
    await end.kube.ask_create(end.deployment())
    await end.kube.ask_apply(end.service())
    assert await end.kube.get(ref_of(end.deployment())) is None
    made = await end.kube.apply(end.service())
    await end.kube.ask_apply(end.service(port=81))
    assert await end.there(end.service()) == made


async def test_a_field_of_somebody_else_is_no_refusal_of_what_is_only_asked(end: End) -> None:
    """It would be taken back."""
    made = await end.kube.apply(end.service())
    await end.edit(ref_of(made), {"spec": {"selector": {"app": "theirs"}}})
    await end.kube.ask_apply(end.service(uid=made["metadata"]["uid"]))
    assert (await end.there(end.service()))["spec"]["selector"] == {"app": "theirs"}


async def test_what_is_only_asked_is_refused_as_what_is_to_be_stored(end: End) -> None:
    await end.kube.create(end.service())
    for create in (end.kube.create, end.kube.ask_create):
        with pytest.raises(Exists):
            await create(end.service())
    deployed = await end.kube.apply(end.deployment())
    with pytest.raises(Conflict):
        await end.kube.ask_apply(end.deployment(deadline_s=9, uid=NO_UID))
    assert await end.there(deployed) == deployed


@pytest.mark.parametrize("opener", [pytest.param(REAL, marks=MARKS[REAL])], indirect=True)
async def test_a_field_that_nobody_knows_is_refused_and_not_dropped(end: End) -> None:
    """As in a misspelled ``podOverrides``. The fake takes any field."""
    misspelled = end.deployment()
    misspelled["spec"]["template"]["spec"]["containers"][0]["imag"] = "x"
    for write in (end.kube.ask_create, end.kube.create):
        with pytest.raises(Refused, match=r'unknown field "spec\.template\.spec\.containers\[0\]\.imag"'):
            await write(misspelled)
    assert await end.kube.get(ref_of(misspelled)) is None


async def test_what_we_created_or_scaled_ourselves_does_not_stand_in_the_way_of_an_apply(end: End) -> None:
    made = await end.kube.create(end.deployment())
    ref = ref_of(made)
    version = await end.kube.scale(ref, 3, resource_version=made["metadata"]["resourceVersion"])
    with pytest.raises(OwnConflict):
        await end.kube.apply(end.deployment(replicas=3, deadline_s=700))  # Perhaps the picture was old.
    applied = await end.kube.apply(end.deployment(replicas=3, deadline_s=700, resourceVersion=version))
    assert applied["spec"]["progressDeadlineSeconds"] == 700
    assert applied["spec"]["replicas"] == 3


async def test_a_scale_that_was_decided_on_an_old_picture_is_a_conflict(end: End) -> None:
    made = await end.kube.create(end.deployment())
    ref, version = ref_of(made), made["metadata"]["resourceVersion"]
    after = await end.kube.scale(ref, 2, resource_version=version)
    assert after != version
    with pytest.raises(Conflict):
        await end.kube.scale(ref, 5, resource_version=version)
    found = await end.there(made)
    assert found["spec"]["replicas"] == 2
    assert found["metadata"]["resourceVersion"] == after


async def test_only_the_object_that_was_seen_is_deleted_and_none_is_no_error(end: End) -> None:
    made = await end.kube.apply(end.manifest(SERVICE_ACCOUNT))
    ref = ref_of(made)
    with pytest.raises(Conflict):
        await end.kube.delete(ref, uid=NO_UID)
    await end.edit(ref, {"metadata": {"labels": {"a": "b"}}})
    with pytest.raises(Conflict):
        await end.kube.delete(ref, uid=made["metadata"]["uid"], resource_version=made["metadata"]["resourceVersion"])
    assert await end.kube.get(ref) is not None
    await end.kube.delete(ref, uid=made["metadata"]["uid"])
    await end.kube.delete(ref, uid=made["metadata"]["uid"])
    assert await end.kube.get(ref) is None


async def test_of_two_who_replace_the_same_lease_one_wins(end: End) -> None:
    def lease(holder: str, **metadata: Any) -> dict[str, Any]:
        return end.manifest(LEASE, metadata=metadata, spec={"holderIdentity": holder, "renewTime": micro_time()})

    made = await end.kube.create(lease("a"))
    version = made["metadata"]["resourceVersion"]
    await end.kube.replace(lease("b", resourceVersion=version))
    with pytest.raises(Conflict):
        await end.kube.replace(lease("c", resourceVersion=version))
    assert (await end.there(made))["spec"]["holderIdentity"] == "b"


async def test_lists_show_metadata_of_what_a_selector_chooses(end: End, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdcluster_operator.http_kube.PAGE_OBJECTS", 1)
    for name, app in (("a", "x"), ("b", "y"), ("c", "x"), ("d", "x")):
        await end.kube.apply(end.manifest(SERVICE_ACCOUNT, name, metadata={"labels": {"app": app}}))
    first, *others = await end.kube.list_metadata(SERVICE_ACCOUNT, end.api.namespace, "app=x")
    there = await end.kube.get(Ref(SERVICE_ACCOUNT, end.api.namespace, "a"))
    assert there is not None
    assert (first.name, first.namespace, first.uid) == ("a", end.api.namespace, there["metadata"]["uid"])
    assert [one.name for one in others] == ["c", "d"]


async def test_it_says_which_kinds_there_are(end: End) -> None:
    assert await end.kube.serves(DEPLOYMENT)
    assert not await end.kube.serves(LEADER_WORKER_SET)


async def test_a_kind_that_is_not_there_is_not_found(end: End) -> None:
    with pytest.raises(NotFound):
        await end.kube.apply(end.manifest(LEADER_WORKER_SET, spec={}))
