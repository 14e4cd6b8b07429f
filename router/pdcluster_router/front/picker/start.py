"""Starts the picker, in a router whose settings ask for it.

Only then are the packages of ``pdcluster[picker]`` imported: 0.2 s of CPU that other routers save.
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pdcluster_protocol.errors import ConfigError
from pdcluster_router.core.requests.gateway_headers import endpoint_of
from pdcluster_router.front.router import Router
from pdcluster_router.settings.router_settings import Settings

_PACKAGES = ("grpc", "google.protobuf", "cryptography")


def check_picker(settings: Settings) -> None:
    """Raises: ConfigError: A package is missing, or a decode engine is named by a name."""
    if not settings.picker_port:
        return
    for package in _PACKAGES:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ConfigError(f"--picker-port: {error}: pip install 'pdcluster[router,picker]'") from error
    check_endpoints(settings)


def check_endpoints(settings: Settings) -> None:
    """Raises: ConfigError: Gateways are answered, and a decode engine is named by a name."""
    if not settings.picker_port:
        return
    if named := [url for url in settings.decode_urls if not endpoint_of(url)]:
        raise ConfigError(f"--decode {named[0]}: gateways take addresses only (--picker-port): name its IP address")


@asynccontextmanager
async def running_picker(router: Router) -> AsyncIterator[None]:
    """The picker answers until the context ends, if the settings ask for one."""
    if not router.settings.picker_port:
        yield
        return
    from pdcluster_router.front.picker.server import Picker

    picker = Picker(router)
    await picker.start()
    try:
        yield
    finally:
        await picker.stop()
