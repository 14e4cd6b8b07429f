"""Starts the check of tokens, in a router whose settings ask for it.

Only then are the packages of ``pdcluster[jwt]`` imported: 0.1 s of CPU and some MB that other routers save.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pdcluster_protocol.errors import ConfigError
from pdcluster_router.core.clients.tokens.claims import TokenRules
from pdcluster_router.files.reading import read_file
from pdcluster_router.files.watch import FileWatch
from pdcluster_router.http.handshakes import Handshakes
from pdcluster_router.settings.router_settings import Settings
from pdcluster_router.settings.token_settings import is_url

if TYPE_CHECKING:
    from pdcluster_router.front.tokens.check import TokenCheck

START_S: Final = 5.0
"""The most that a start waits for the first answer of the key set's URL. Then the router goes on without keys."""
_FLAG: Final = "--jwt-key-set"
_PACKAGES: Final = ("jwt", "cryptography")


def token_check_of(settings: Settings, unix_now: Callable[[], float]) -> TokenCheck | None:
    """The check that ``settings`` ask for; None: they ask for none. Keys of a URL come later.

    Raises:
        ConfigError: A package is missing, or the file is no key set.
    """
    place, issuer, audience = settings.jwt_key_set, settings.jwt_issuer, settings.jwt_audience
    if place is None or issuer is None or audience is None:
        return None
    for package in _PACKAGES:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ConfigError(f"{_FLAG}: {error}: pip install 'pdcluster[router,jwt]'") from error
    from pdcluster_router.front.tokens.check import TokenCheck

    check = TokenCheck(TokenRules(issuer, audience, settings.jwt_client_claim), unix_now)
    if is_url(place):
        check.url = place
        return check
    read = partial(_read, check, Path(place))
    check.watch = FileWatch("token keys", [Path(place)], settings.api_key_interval_s, read)
    read()
    return check


def _read(check: TokenCheck, path: Path) -> None:
    """Raises: ConfigError: The file cannot be read, or is no key set; the old keys stay."""
    document = read_file(path, _FLAG)
    try:
        check.take(document)
    except ConfigError as error:
        raise ConfigError(f"{_FLAG} {path}: {error}") from error


@asynccontextmanager
async def running_key_server(
    check: TokenCheck | None, settings: Settings, handshakes: Handshakes
) -> AsyncIterator[None]:
    """The key set is read from its URL until the context ends, if ``check`` has one. Waits for the first answer."""
    if check is None or not check.url:
        yield
        return
    from pdcluster_router.front.tokens.key_server import KeyServer

    server = KeyServer(check.url, settings.jwt_interval_s, check.take, handshakes.row())
    check.on_unknown_key = server.want
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(server.run(), name="router: token keys")
        with suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                await server.has_asked.wait()
        yield
        task.cancel()
