"""Starts the check of tokens, in a router whose settings ask for it.

Only then are the packages of ``pdcluster[jwt]`` imported: 0.1 s of CPU and some MB that other routers save.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pdcluster_protocol.errors import ConfigError
from pdcluster_router.core.clients.tokens.claims import TokenRules
from pdcluster_router.core.clients.tokens.jwks import MAX_DOCUMENT_BYTES
from pdcluster_router.files.reading import read_file
from pdcluster_router.files.watch import FileWatch
from pdcluster_router.processes.siblings import write_whole
from pdcluster_router.services import Services
from pdcluster_router.settings.router_settings import Settings
from pdcluster_router.settings.token_settings import is_url

if TYPE_CHECKING:
    from pdcluster_router.front.tokens.check import TokenCheck

logger = logging.getLogger(__name__)

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
    check: TokenCheck | None, settings: Settings, services: Services, folder: Path | None
) -> AsyncIterator[None]:
    """The key set is read from its URL until the context ends, if ``check`` has one. Waits for the first answer.

    ``folder``: that of all processes of this router. A process that starts while the URL fails has the keys that
    another one has read last from the same URL. None: there is no other process.
    """
    if check is None or not check.url:
        yield
        return
    from pdcluster_router.front.tokens.key_server import KeyServer

    services.metrics.watch_token_keys(check.age_s)
    take = check.take
    if folder is not None:
        kept = folder / f"{sha256(check.url.encode()).hexdigest()}.keys"
        _recall(check, kept)
        take = partial(_take_and_keep, check, kept)
    server = KeyServer(check.url, settings.jwt_interval_s, take, check.age_s, services.handshakes.row())
    check.on_unknown_key = server.want
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(server.run(), name="router: token keys")
        with suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                await server.has_asked.wait()
        yield
        task.cancel()


def _recall(check: TokenCheck, kept: Path) -> None:
    """Takes the keys that another process has kept, if there are any, with the time at which that one read them."""
    try:
        read_at, document = _own_file(kept)
        check.take(document)
    except FileNotFoundError:
        return
    except (OSError, ConfigError) as error:
        logger.warning("token keys of another process not taken reason=%s", error)
        return
    check.read_at = read_at


def _own_file(path: Path) -> tuple[float, bytes]:
    """When it was written (Unix seconds), and what it holds. Keys decide who is let in: another user's are not taken.

    Raises:
        OSError: It cannot be read, is a link, or this user does not own it and its folder alone.
    """
    folder = path.parent.lstat()
    if folder.st_uid != os.geteuid() or folder.st_mode & 0o022:
        raise PermissionError(f"{path.parent} is not this user's alone")
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        told = os.fstat(file.fileno())
        if told.st_uid != os.geteuid() or not stat.S_ISREG(told.st_mode):
            raise PermissionError(f"{path} is not this user's own file")
        return told.st_mtime, file.read(MAX_DOCUMENT_BYTES + 1)


def _take_and_keep(check: TokenCheck, kept: Path, document: bytes) -> None:
    """As ``check.take``, for later processes too.

    Raises:
        ConfigError: It is no key set; nothing is kept of it.
    """
    check.take(document)
    try:
        write_whole(kept, document)
    except OSError as error:
        logger.warning("token keys not kept for processes that start later reason=%s", error)
