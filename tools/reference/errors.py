"""The table of a router's own errors, made from ``openai_errors``: each function there makes one error."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Final, get_args

from pdcluster_router.core.apis import openai_errors
from pdcluster_router.core.apis.openai_errors import ApiError

HEAD: Final = """
## Errors

In OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`. On `/v1/messages` and below it in Anthropic's:
`{"type": "error", "error": {"type", "message", "code"}}`, with Anthropic's type for the status. An engine's
own error is passed on as it is, or has the code `engine_error`. A stream that has begun ends with such an error as its
last event, and is cut off. Words in capitals stand for values.

| status | code | type | `Retry-After` | message |
|---|---|---|---|---|
"""


class Blank(float):
    """A number that is shown in a message as its parameter's name."""

    name: str

    def __format__(self, _: str) -> str:
        return self.name


def section() -> str:
    """The section of the router's page: errors by status and code."""
    codes = ", ".join(f"`{code}`" for code in get_args(openai_errors.BadRequest))
    errors = sorted((_made(function) for function in _functions()), key=lambda error: (error.status, error.code))
    return "\n".join([HEAD + f"| 400 | {codes} | `invalid_request_error` |  | what is wrong |", *map(_row, errors), ""])


def _functions() -> list[Callable[..., ApiError]]:
    found = (value for value in vars(openai_errors).values() if inspect.isfunction(value))
    public = (function for function in found if not function.__name__.startswith("_"))
    makers = [function for function in public if inspect.signature(function).return_annotation == "ApiError"]
    return [function for function in makers if function is not openai_errors.bad_request]


def _made(function: Callable[..., ApiError]) -> ApiError:
    parameters = inspect.signature(function).parameters.values()
    return function(**{parameter.name: _sample(parameter) for parameter in parameters})


def _sample(parameter: inspect.Parameter) -> object:
    if parameter.annotation == "bool":
        return False
    if parameter.annotation == "str":
        return parameter.name.upper()
    number = Blank(1)
    number.name = parameter.name.upper()
    return number


def _row(error: ApiError) -> str:
    retry = "" if error.retry_after_s is None else f"{error.retry_after_s} s"
    return f"| {error.status} | `{error.code}` | `{error.type}` | {retry} | {error.message} |"
