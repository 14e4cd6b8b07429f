"""``pdcluster mirror``: starts an engine beside a copy of its certificate that follows the Secret.

    mounted Secret, links that are replaced --a child process--> files that are written in place --inotify--> vLLM

vLLM's ``--enable-ssl-refresh`` (0.32, ``entrypoints/launchers/utils/ssl.py``) watches files by inotify, which follows a
file and not its name. In a mounted Secret it sees only the first renewal, which deletes the watched files. It sees each
write to a file in place. The engine takes the place of this process (exec), so that it gets the pod's signals.
"""

from __future__ import annotations

import argparse
import os
import signal
import ssl
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pdcluster_cli import numbers
from pdcluster_cli.commands import SUBCOMMANDS
from pdcluster_protocol.pem_files import client_context, no_password

DEFAULT_INTERVAL_S: Final = 3.0
CERT: Final = "tls.crt"
KEY: Final = "tls.key"
CA: Final = "ca.crt"
_PUBLISHED: Final = "..data"
"""Kubernetes' link to the current folder of a mounted Secret. When the link changes, all files change at once."""
_LOOKS: Final = 3
"""The most looks at a Secret that is renewed while it is read."""
_STEPS: Final = 5
"""The most steps of each end in a handshake in memory, which needs two."""


class NotCopied(Exception):
    """The folder's files are no certificate for a server, or their copy cannot be written. The message says which."""


@dataclass(slots=True)
class Mirror:
    """Keeps a copy of three files as they were when they were last usable. One owner.

    ``_copied``: what the copy holds; empty if that is unknown.
    """

    source: Path
    target: Path
    _copied: dict[str, bytes] = field(default_factory=dict)

    def update(self) -> bool:
        """Write the copy if the source has changed. Returns whether it was written.

        Raises:
            NotCopied: A file cannot be read, the key does not fit, or peers would refuse the certificate: the copy is
                not touched. Or the copy cannot be written: the next look writes it again.
        """
        for _ in range(_LOOKS):
            folder = self._published()
            try:
                return self._update_from(folder)
            except OSError as error:  # ssl.SSLError is one.
                failure = error
            if self._published() == folder:
                break  # Else a renewal took the folder away meanwhile.
        raise NotCopied(f"the certificate in {self.source} cannot be used: {failure}") from failure

    def _published(self) -> Path:
        link = self.source / _PUBLISHED
        return link.resolve() if link.is_symlink() else self.source

    def _update_from(self, folder: Path) -> bool:
        found = {name: (folder / name).read_bytes() for name in (KEY, CERT, CA)}
        if found == self._copied:
            return False
        _check(folder)
        self._copied = {}
        try:
            for name, content in found.items():
                _write_in_place(self.target / name, content)
        except OSError as error:
            raise NotCopied(f"the copy in {self.target} cannot be written: {error}") from error
        self._copied = found
        return True


def main(words: Sequence[str]) -> int:
    """Does not return if the engine starts. Exit status 2: its certificate or program cannot be used."""
    given = make_parser().parse_args(words)
    mirror = Mirror(given.source, given.target)
    try:
        mirror.update()
    except NotCopied as error:
        _print_line(str(error))
        return 2
    return _start(mirror, given.command, given.interval_s)


def _start(mirror: Mirror, command: list[str], interval_s: float) -> int:
    """Start the engine in this process, and what follows the Secret in a child. Returns 2 if either cannot be."""
    engine, follower = os.getpid(), 0
    try:
        follower = os.fork()
        if follower == 0:
            _follow(mirror, engine, interval_s)
        os.execvp(command[0], command)  # noqa: S606 - it is what this command is for
    except OSError as error:
        _print_line(f"{command[0]} cannot be started: {error.strerror}")
        _end(follower)
    return 2


def _end(follower: int) -> None:
    """``follower``: 0 if there is none."""
    with suppress(ProcessLookupError, ChildProcessError):  # The system may have taken it, where nobody waits for it.
        if follower:
            os.kill(follower, signal.SIGKILL)
            os.waitpid(follower, 0)


def make_parser() -> argparse.ArgumentParser:
    """The parser. Running pods have its options in their templates: to rename an option would restart every engine."""
    parser = argparse.ArgumentParser(prog="pdcluster mirror", description=SUBCOMMANDS["mirror"].help)
    add = parser.add_argument
    add("--source", type=Path, required=True, metavar="FOLDER", help=f"with {CERT}, {KEY} and {CA}: a mounted Secret")
    add("--target", type=Path, required=True, metavar="FOLDER", help="for the copy: one in memory, for it has the key")
    told = f"seconds between two looks at the source (default: {DEFAULT_INTERVAL_S:g})"
    add("--interval-s", type=numbers.seconds(0.01, 3600), default=DEFAULT_INTERVAL_S, help=told)
    add("command", nargs="+", metavar="COMMAND", help="the engine's command line, behind --")
    return parser


def _follow(mirror: Mirror, engine: int, interval_s: float) -> None:
    """The child process: update the copy until the engine has ended. Does not return."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    told = ""
    while os.getppid() == engine:
        time.sleep(interval_s)
        try:
            if mirror.update():
                _print_line("the certificate has changed, and its copy too")
            told = ""
        except NotCopied as error:
            if str(error) != told:
                _print_line(f"{error}; the engine keeps the one that it has")
            told = str(error)
    os._exit(0)


def _check(folder: Path) -> None:
    """Check the certificate by a handshake in memory, as routers check the same certificate before they use it.

    Raises:
        OSError: OpenSSL does not take the files, or a peer that trusts these authorities would refuse the certificate.
    """
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), client_context()
    server.load_cert_chain(folder / CERT, folder / KEY, password=no_password)
    client.check_hostname = False  # The name is not known here.
    client.load_verify_locations(folder / CA)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)
    for end in ends * _STEPS:
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()


def _write_in_place(path: Path, content: bytes) -> None:
    """The file has this content, and is the same file as before. Only its owner may read it."""
    if not path.exists():
        path.touch(mode=0o600)
    with path.open("r+b") as file:
        file.write(content)
        file.truncate()


def _print_line(line: str) -> None:
    """Print the line. If stderr is closed, go on without it: the engine still needs renewals."""
    with suppress(OSError):
        print(f"pdcluster mirror: {line}", file=sys.stderr, flush=True)
