"""Engine arguments: a map from an option's name to a string, and which options two roles share or may not set.

A map, because CEL compares a role's ``block-size`` with the other's by key; in a list ``--block-size=32``,
``--block-size`` ``32`` and ``--block_size 32`` would be three spellings of one thing. A map also merges by key in a
server-side apply, and no option can be given twice. Values are strings, as in ``env``, so that one rule of quoting
holds: ``"true"`` gives ``--name``, ``"false"`` gives ``--no-name`` (vLLM 0.32 makes both for each switch), anything
else ``--name=value``. Structures are JSON in a string.

Block sizes that differ are refused here although the connector can push between some of them (0003): one revision is
one shape of KV, and the revision is what both roles share (0004).
"""

from __future__ import annotations

from typing import Final

from pdcluster_operator.api.base import Rule

MAX_ARGS: Final = 64
MAX_ARG_CHARACTERS: Final = 4096
"""Of one value: room for a JSON structure; bounded, or the API server refuses rules over it as too costly."""

MUST_AGREE: Final = (
    "attention-backend",
    "block-size",
    "chat-template",
    "dtype",
    "hf-overrides",
    "kv-cache-dtype",
    "mamba-cache-dtype",
    "mamba-ssm-cache-dtype",
    "quantization",
    "speculative-config",
    "tokenizer",
)
"""What decides what a KV block's bytes mean, as the handshake's fingerprint does, and which tokens a prompt is; here
it is found out before any engine starts. One that a role leaves out is vLLM's own choice, which no rule can know: it
differs from any value."""

SET_ELSEWHERE: Final[dict[str, str]] = {
    "model": "use spec.model",
    "served-model-name": "use spec.model.servedName",
    "revision": "use spec.model.revision",
    "tensor-parallel-size": "use parallelism.tensor",
    "pipeline-parallel-size": "use parallelism.pipeline",
    "data-parallel-size": "use parallelism.data",
    "kv-transfer-config": "use spec.transfer",
    "host": "leave it out",
    "port": "leave it out",
    "api-key": "leave it out: clients reach the router, not the engines",
    "disable-log-stats": "leave it out: by these statistics an engine that is to go is known to be done",
}
"""Option to cure. The operator sets these itself or relies on them, and a second value would win silently."""


# Python spells a list or a map of strings as CEL does, as long as there is no quote in them.
_UNDERSCORED: Final = {name.replace("-", "_"): name for name in (*MUST_AGREE, *SET_ELSEWHERE) if "-" in name}
_FIRST_UNDERSCORED: Final = f"{list(_UNDERSCORED)}.filter(name, name in self)[0]"
_FIRST_FORBIDDEN: Final = f"{list(SET_ELSEWHERE)}.filter(name, name in self)[0]"
_IS_DASHED: Final = "name == '' || name.startsWith('-')"
_IS_DOTTED: Final = " || ".join(
    f"name.startsWith('{name}.')" for name in ("hf-overrides", "kv-transfer-config", "speculative-config")
)
"""vLLM's way to give one key of a JSON structure, which would hide it from the rules. Asked by prefix: a search within
a key, whose length has no bound, is too costly for the API server."""

ARGS_RULES: Final = (
    Rule(
        holds=f"!self.exists(name, {_IS_DASHED})",
        says="engineArgs has %s: write the option without its leading dashes, like block-size",
        values=(f"self.filter(name, {_IS_DASHED})[0]",),
        short="engineArgs names an option with leading dashes: write it without them, like block-size",
    ),
    Rule(
        holds=f"!self.exists(name, {_IS_DOTTED})",
        says="engineArgs has %s: write the whole structure as JSON",
        values=(f"self.filter(name, {_IS_DOTTED})[0]",),
        short="engineArgs gives one key of a structure: write the whole structure as JSON",
    ),
    Rule(
        holds=f"!{list(_UNDERSCORED)}.exists(name, name in self)",
        says="engineArgs has %s: write it as %s",
        values=(_FIRST_UNDERSCORED, f"{_UNDERSCORED}[{_FIRST_UNDERSCORED}]"),
        short="engineArgs spells an option with underscores: write it with dashes",
    ),
    Rule(
        holds=f"!{list(SET_ELSEWHERE)}.exists(name, name in self)",
        says="engineArgs has %s = %s, which the operator sets itself: %s",
        values=(_FIRST_FORBIDDEN, f"self[{_FIRST_FORBIDDEN}]", f"{SET_ELSEWHERE}[{_FIRST_FORBIDDEN}]"),
        short="engineArgs has an option that the operator sets itself: leave it out",
    ),
)
"""Over one role's ``engineArgs``."""


def _value(role: str, name: str, otherwise: str) -> str:
    """A CEL expression: the option's value, or what stands for none."""
    args = f"self.{role}.engineArgs"
    return f"('{name}' in {args} ? {args}['{name}'] : '{otherwise}')"


def agreement_rule(name: str) -> Rule:
    """Over ``roles``: prefill and decode give the option alike, or both leave it out."""
    prefill, decode = (_value(role, name, "") for role in ("prefill", "decode"))
    return Rule(
        holds=f"{prefill} == {decode}",
        says=f"prefill has {name} %s, decode has %s: give both roles the same engineArgs {name}",
        values=(_value("prefill", name, "not set"), _value("decode", name, "not set")),
        short=f"prefill and decode differ in {name}: give both roles the same engineArgs {name}",
        path=".decode.engineArgs",
    )
