"""Runs an exec plugin of a kubeconfig. A plugin gets no more time, output or memory than an answer needs.

At the deadline a plugin is killed with all that it started, unless it may talk to its user: then it keeps our terminal,
and only the plugin itself is killed. A helper that outlives a plugin's answer is left alone, as kubectl leaves it.

Source of truth: Kubernetes' page "Authenticating", "client-go credential plugins".
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

MAX_BYTES: Final = 1 << 20
"""The most bytes of stdout, and of stderr: a credential has some thousand."""
_HELD_S: Final = 0.5
"""Seconds to wait for the end of an ended plugin's output, which a helper of the plugin's may hold open."""
_REAP_S: Final = 5.0
"""Seconds to wait for a plugin that was killed."""
_MAX_QUOTED: Final = 2000


async def run_plugin(plugin: Mapping[str, Any]) -> dict[str, Any]:
    """The ``status`` that an exec plugin prints. Waits for the plugin, and kills it if the wait is cancelled.

    Raises:
        ValueError: The plugin cannot be run, fails, writes too much, or prints no ExecCredential.
    """
    command, version = str(plugin["command"]), plugin["apiVersion"]
    output = await _output_of(command, plugin)
    if output.is_too_much:
        raise ValueError(f"its exec plugin {command} was ended, for it wrote more than {MAX_BYTES} bytes")
    if output.status:
        said = output.stderr.decode("utf-8", "replace").strip()[-_MAX_QUOTED:]
        raise ValueError(f"its exec plugin {command} ended with status {output.status}: {said}")
    return _status_of(command, version, bytes(output.stdout))


class _Output(asyncio.SubprocessProtocol):
    """The output of a plugin, up to ``MAX_BYTES`` of each stream. Event loop only."""

    def __init__(self) -> None:
        self.stdout = bytearray()
        self.stderr = bytearray()
        self.is_too_much = False
        self.status = 0
        self.answered = asyncio.Event()
        """The plugin has ended or wrote too much."""
        self.closed = asyncio.Event()
        """The plugin has ended, and so has its output."""

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        stream = self.stdout if fd == 1 else self.stderr
        if len(stream) + len(data) <= MAX_BYTES:
            stream += data
        else:
            self.is_too_much = True
            self.answered.set()

    def process_exited(self) -> None:
        self.answered.set()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - as asyncio has it
        self.closed.set()


async def _output_of(command: str, plugin: Mapping[str, Any]) -> _Output:
    is_interactive = sys.stdin.isatty() and sys.stderr.isatty()
    has_session = not is_interactive and not _has_terminal()
    transport, output = await _start(command, plugin, is_interactive=is_interactive, has_session=has_session)
    try:
        await output.answered.wait()
        if not output.is_too_much:
            await _wait_for_end(output, _HELD_S)
    finally:
        if transport.get_returncode() is None and has_session:
            with suppress(ProcessLookupError):
                os.killpg(transport.get_pid(), signal.SIGKILL)
        transport.close()  # kills a plugin that still runs
        await _wait_for_end(output, _REAP_S)
    output.status = transport.get_returncode() or 0
    return output


def _has_terminal() -> bool:
    """Whether a plugin could ask a person, by the terminal itself, though stdin or stderr is redirected. In a session
    of its own it could not."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


async def _wait_for_end(output: _Output, limit_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await output.closed.wait()


async def _start(
    command: str, plugin: Mapping[str, Any], *, is_interactive: bool, has_session: bool
) -> tuple[asyncio.SubprocessTransport, _Output]:
    info = {"apiVersion": plugin["apiVersion"], "kind": "ExecCredential", "spec": {"interactive": is_interactive}}
    own = {one["name"]: one["value"] for one in plugin.get("env") or ()}
    try:
        return await asyncio.get_running_loop().subprocess_exec(
            _Output,
            command,
            *(plugin.get("args") or ()),
            env={**os.environ, **own, "KUBERNETES_EXEC_INFO": json.dumps(info)},
            stdin=None if is_interactive else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=None if is_interactive else asyncio.subprocess.PIPE,
            start_new_session=has_session,
        )
    except OSError as error:
        raise ValueError(f"its exec plugin {command} cannot be run: {error.strerror}") from error


def _status_of(command: str, version: str, told: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(told)
    except ValueError as error:
        raise ValueError(f"its exec plugin {command} printed no ExecCredential: {error}") from error
    status = answer.get("status") if isinstance(answer, dict) else None
    if not isinstance(status, dict) or answer.get("apiVersion") != version:
        raise ValueError(f"its exec plugin {command} printed no ExecCredential of {version} with a status")
    return status
