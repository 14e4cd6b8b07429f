"""A pool with ``spec.tls``, by the flags and probes that the operator renders: a router and fake engines over TLS."""

from __future__ import annotations

import argparse
import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from fakes.certificates import Authority, Issued
from fakes.mounted_secret import MountedSecret
from fakes.operator_cluster import make_pool
from fakes.router import PROMPT, STREAM, Rig, post, running_rig, until
from integration.test_router_internal_tls import REACHED, reason_of
from patience import PATIENCE_S
from pdcluster_cli.cluster.routers import ask_routers
from pdcluster_cli.pod import ready
from pdcluster_cli.pod.mirror import Mirror, NotCopied
from pdcluster_connector.metaserver_tls import TlsFiles
from pdcluster_operator.core.manifests.command import PodPlace, transfer_config
from pdcluster_operator.core.manifests.pool_tls import COPY_FOLDER, FOLDER, server_name
from pdcluster_operator.core.manifests.probes import engine_probes
from pdcluster_operator.core.manifests.router import router_argv
from pdcluster_protocol.labels import Role
from pdcluster_protocol.pool_page import POOL_PATH
from pdcluster_router.__main__ import parse_settings

pytestmark = pytest.mark.anyio

POOL: Final = make_pool({"spec.tls": {"secretName": "inside"}})
FILES: Final = ("engine_ca", "engine_cert", "engine_key", "internal_tls_cert", "internal_tls_key")


@dataclass
class Mounted:
    """The pool's Secret on this machine, and the authority that has signed it."""

    authority: Authority
    secret: MountedSecret
    mirror: Mirror = field(init=False)
    """Beside the engine."""

    def __post_init__(self) -> None:
        self.mirror = Mirror(self.secret.folder, self.secret.folder.with_suffix(".copy"))
        self.mirror.target.mkdir()

    def here(self, word: str) -> str:
        """A word of a pod's command line, for this machine."""
        word = word.replace(FOLDER, str(self.secret.folder)).replace(COPY_FOLDER, str(self.mirror.target))
        return word.replace("$(POD_IP)", "127.0.0.1")

    def router_settings(self) -> dict[str, Any]:
        """The rendered settings of TLS, with engines that are found as tests find them."""
        words = [self.here(word) for word in router_argv(POOL)]
        told = parse_settings([*words, "--namespace=default", "--kube-api=https://10.0.0.1"])
        return {name: getattr(told, name) for name in (*FILES, "engine_tls_name")}

    def engine(self) -> ssl.SSLContext:
        """An engine's own, as vLLM makes it of the rendered flags."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self.secret.folder / "ca.crt")
        context.load_cert_chain(self.secret.folder / "tls.crt", self.secret.folder / "tls.key")
        context.verify_mode = ssl.CERT_REQUIRED
        return context

    @asynccontextmanager
    async def pool(self) -> AsyncIterator[Rig]:
        async with running_rig(engine_tls=self.engine(), tls_interval_s=0.01, **self.router_settings()) as rig:
            yield rig


def for_both_ends(authority: Authority, *names: str) -> Issued:
    """As cert-manager makes it: with both usages, or with none, which is each."""
    return authority.issue(usage=None, names=names or (server_name(POOL),))


@pytest.fixture
def mounted(authority: Authority, tmp_path: Path) -> Mounted:
    return Mounted(authority, MountedSecret(tmp_path / "inside", authority, for_both_ends(authority)))


async def probe(rig: Rig, mounted: Mounted, kind: str) -> int:
    """The exit status of the prefill engine's probe, after its mirror has looked."""
    with suppress(NotCopied):
        mounted.mirror.update()
    _, _, *words = map(mounted.here, engine_probes(POOL, Role.PREFILL)[f"{kind}Probe"]["exec"]["command"])
    words[words.index("--port") + 1] = rig.prefill.url.rpartition(":")[2]
    return await asyncio.to_thread(ready.main, [*words, "--host", "127.0.0.1"])


async def test_requests_are_served_and_every_part_asks_by_tls(mounted: Mounted) -> None:
    async with mounted.pool() as rig:
        assert [(await post(rig, body)).status for body in (PROMPT, STREAM)] == [200, 200]
        assert (rig.decode.seen[0].params or {})["metaserver"].startswith("https://127.0.0.1:")
        assert {engine.url[:8] for engine in (rig.prefill, rig.decode)} == {"https://"}
        assert [await probe(rig, mounted, kind) for kind in ("startup", "readiness", "liveness")] == [0, 0, 0]


async def test_decode_calls_the_router_with_the_rendered_settings(mounted: Mounted) -> None:
    settings = transfer_config(POOL, Role.DECODE, PodPlace.ALONE)["kv_connector_extra_config"]
    files = TlsFiles(ca=mounted.here(settings["metaserver_ca"]), name=settings["metaserver_tls_name"])
    async with mounted.pool() as rig:
        assert REACHED in await reason_of(rig, files)


async def test_top_asks_such_a_router(mounted: Mounted) -> None:
    ca = str(mounted.secret.folder / "ca.crt")
    async with mounted.pool() as rig:
        flags = {"tls_ca": ca, "tls_cert": "", "tls_key": "", "tls_name": server_name(POOL)}
        given = argparse.Namespace(cluster=None, url=[rig.internal_url], **flags)
        (page,) = (await asyncio.to_thread(ask_routers, given, POOL_PATH, PATIENCE_S)).values()
    assert isinstance(page, bytes)


async def test_a_renewed_secret_is_taken_by_the_router_and_by_the_next_probe(mounted: Mounted) -> None:
    async with mounted.pool() as rig:
        before = rig.router.internal_certificate
        assert before is not None
        contexts = [before.context]
        for _ in range(2):
            mounted.secret.publish(for_both_ends(mounted.authority))
            await until(lambda: before.context not in contexts)
            contexts.append(before.context)
            assert (await post(rig, PROMPT)).status == 200
            assert await probe(rig, mounted, "readiness") == 0


async def test_a_secret_that_is_broken_for_a_while_takes_no_engine_out_of_service(mounted: Mounted) -> None:
    """Router and engine get over it: they go on with the last pair that fits."""
    async with mounted.pool() as rig:
        assert await probe(rig, mounted, "readiness") == 0
        mounted.secret.publish(for_both_ends(mounted.authority), key=for_both_ends(mounted.authority))
        assert [await probe(rig, mounted, kind) for kind in ("readiness", "liveness")] == [0, 0]
        assert (await post(rig, PROMPT)).status == 200


async def test_an_engine_of_another_name_is_alive_and_not_ready(authority: Authority, tmp_path: Path) -> None:
    named = for_both_ends(authority, "elsewhere.svc")
    mounted = Mounted(authority, MountedSecret(tmp_path / "inside", authority, named))
    good = Mounted(authority, MountedSecret(tmp_path / "good", authority, for_both_ends(authority)))
    settings = mounted.router_settings() | {"engine_tls_name": "elsewhere.svc"}
    async with running_rig(engine_tls=mounted.engine(), **settings) as rig:
        assert [await probe(rig, good, kind) for kind in ("readiness", "liveness")] == [1, 0]
