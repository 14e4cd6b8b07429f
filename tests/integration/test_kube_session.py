"""A session with the API server that lives for weeks: its authorities are renewed while it is open."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fakes.api_server import ApiServer
from integration.authorities import make_authority
from pdcluster_kube.access import KubeAccess
from pdcluster_kube.session import open_session
from pdcluster_operator.errors import ApiUnavailable
from pdcluster_operator.http_kube import HttpKube
from pdcluster_operator.kinds import POD

pytestmark = pytest.mark.anyio


async def test_an_open_session_trusts_the_authorities_that_the_file_has_now(tmp_path: Path) -> None:
    old_file, old = make_authority(tmp_path, "old")
    new_file, new = make_authority(tmp_path, "new")
    ca_file = tmp_path / "ca.crt"
    write(ca_file, old_file.read_text(), 1)
    api = ApiServer()
    await api.start(old)
    try:
        async with open_session(KubeAccess(api.url, ca_file)) as session:
            kube = HttpKube(session, api.url, timeout_s=30, fence=None)
            await kube.list_metadata(POD, "n")
            await api.stop()
            await api.start(new)
            with pytest.raises(ApiUnavailable, match="certificate verify failed"):
                await kube.list_metadata(POD, "n")
            write(ca_file, "no certificate", 2)
            with pytest.raises(ApiUnavailable, match="certificate verify failed"):
                await kube.list_metadata(POD, "n")
            write(ca_file, new_file.read_text(), 3)
            assert await kube.list_metadata(POD, "n") == []
            await api.stop()
            await api.start(old)
            with pytest.raises(ApiUnavailable, match="certificate verify failed"):
                await kube.list_metadata(POD, "n")
    finally:
        await api.stop()


def write(file: Path, text: str, changed_s: int) -> None:
    """``changed_s``: the file's mtime, so that no two have the same."""
    file.write_text(text)
    os.utime(file, (changed_s, changed_s))
