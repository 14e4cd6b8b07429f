"""Greedy questions to an engine or the router, by token ids."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPException
from typing import Final, TypeAlias

from pdcluster_cli.processes.engines import LOOPBACK

Answer: TypeAlias = tuple[int, ...]
"""The token ids of an answer."""
ANSWER_TOKENS: Final = 32
ANSWER_S: Final = 120.0


def answer_of(port: int, prompt: Sequence[int], num_tokens: int = ANSWER_TOKENS, *, model: str = "") -> Answer:
    """The answer to ``prompt``. Waits at most ``ANSWER_S`` for each part of it. Empty ``model``: the model served.

    Raises:
        OSError, HTTPException: There is no answer, or it is an error.
    """
    asked = {"max_tokens": num_tokens, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    body = {"prompt": list(prompt), **asked, **({"model": model} if model else {})}
    request = urllib.request.Request(
        f"http://{LOOPBACK}:{port}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=ANSWER_S) as response:  # noqa: S310 - an engine of ours
        return tuple(json.loads(response.read())["choices"][0]["token_ids"])


def answers_at_once(port: int, prompts: Sequence[list[int]], number: int) -> list[Answer]:
    """The answers to all prompts. ``number``: how many requests run at the same time."""
    with ThreadPoolExecutor(number) as threads:
        return list(threads.map(partial(answer_of, port), prompts))


def end_of(port: int, prompt: Sequence[int], num_tokens: int) -> str:
    """How a request ended: ``whole``, ``torn`` if tokens are missing, or the error in a word."""
    try:
        answer = answer_of(port, prompt, num_tokens)
    except urllib.error.HTTPError as error:
        return str(error.code)
    except (OSError, HTTPException) as error:
        return type(error).__name__
    return "whole" if len(answer) == num_tokens else "torn"


def metric(port: int, name: str) -> float:
    """The sum of an engine's metric over its labels.

    Raises:
        OSError: The engine does not answer, or has no such metric.
    """
    with urllib.request.urlopen(f"http://{LOOPBACK}:{port}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{")]
    if not values:
        raise OSError(f"the engine at port {port} has no metric {name}")
    return sum(values)
