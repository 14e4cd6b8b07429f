"""Engine arguments: a map from an option's name to a string, and which options two roles share or may not set.

A map, because CEL compares a role's ``block-size`` with the other's by key; in a list ``--block-size=32``,
``--block-size`` ``32`` and ``--block_size 32`` would be three spellings of one thing. A map also merges by key in a
server-side apply, and no option can be given twice. Values are strings, as in ``env``, so that one rule of quoting
holds: ``"true"`` gives ``--name``, ``"false"`` gives ``--no-name`` (vLLM 0.32 makes both for each switch), anything
else ``--name=value``. Structures are JSON in a string.

vLLM 0.32 takes more than one spelling (``utils/argparse_utils.py``, and argparse below it): ``block_size``,
``hf-overrides.key``, ``no-name``, ``block-s``. Each would hide an option from rules that ask for it by name, so that
the roles' difference is found at the handshake, minutes later: the rules take one spelling only.

Block sizes that differ are refused here although the connector can push between some of them (0003): one revision is
one shape of KV, and the revision is what both roles share (0004).
"""

from __future__ import annotations

from typing import Final

from pdcluster_operator.api.base import Fault, Rule

MAX_ARGS: Final = 64
MAX_NAME_CHARACTERS: Final = 64
"""Of an option; vLLM's longest has 41. A key's length cannot be bounded by the schema."""
MAX_ARG_CHARACTERS: Final = 4096
"""Of one value: room for a JSON structure; bounded, or the API server refuses rules over it as too costly."""

MUST_AGREE: Final = (
    "anthropic-disabled-thinking-effort",
    "attention-backend",
    "attention-config",
    "block-size",
    "chat-template",
    "chat-template-content-format",
    "code-revision",
    "cohere-format",
    "config-format",
    "default-chat-template-kwargs",
    "default-mm-loras",
    "disable-hybrid-kv-cache-manager",
    "disable-sliding-window",
    "dtype",
    "enable-tower-connector-lora",
    "exclude-tools-when-tool-choice-none",
    "generation-config",
    "hf-config-path",
    "hf-overrides",
    "ignore-patterns",
    "interleave-mm-strings",
    "kv-cache-dtype",
    "kv-cache-dtype-skip-layers",
    "load-format",
    "lora-dtype",
    "lora-modules",
    "lora-target-modules",
    "mamba-block-size",
    "mamba-cache-dtype",
    "mamba-cache-mode",
    "mamba-ssm-cache-dtype",
    "max-model-len",
    "media-io-kwargs",
    "mm-device-do-normalize",
    "mm-encoder-attn-dtype",
    "mm-encoder-fp8-scale-path",
    "mm-processor-kwargs",
    "model-class-overrides",
    "model-impl",
    "model-loader-extra-config",
    "override-generation-config",
    "quantization",
    "quantization-config",
    "spec-method",
    "spec-model",
    "spec-tokens",
    "speculative-config",
    "tokenizer",
    "tokenizer-mode",
    "tokenizer-revision",
    "trust-remote-code",
    "trust-request-chat-template",
    "trust-request-mm-kwargs",
    "video-pruning-method",
    "video-pruning-rate",
)
"""Options that decide what a KV block's bytes mean and which tokens a prompt is. The handshake's fingerprint compares
them too; here a difference is found before any engine starts. An option that a role omits counts as different from
every value: vLLM then chooses, and no rule can know what. Two names of one thing (``spec-model`` is a key of
``speculative-config``) are both asked for. By ``max-model-len`` and the generation configuration vLLM chooses
LongRoPE's factors and Llama 4's attention temperature, and with them what a key is.

These, ``MAY_DIFFER`` and the model's revision make a revision of the pool (``core/revision.py``)."""

MAY_DIFFER: Final = ("enable-prefix-caching", "kv-sharing-fast-prefill")
"""Switches that belong to a revision, but leave most models' KV as it is and may be of use to one role. Where they do
not, the handshake says so. With prefix caching vLLM 0.32 chooses another block size for recurrent state."""

_NO_OFFLOADING: Final = "leave it out: it puts vLLM's own connector in the place of the one that hands KV over"
_TEXT: Final = "leave it out: clients send and get text"
_NO_TLS: Final = "leave it out: with spec.tls routers and engines speak TLS"

SET_ELSEWHERE: Final[dict[str, str]] = {
    "model": "use spec.model",
    "served-model-name": "use spec.model.servedName",
    "revision": "use spec.model.revision",
    "tensor-parallel-size": "use parallelism.tensor",
    "pipeline-parallel-size": "use parallelism.pipeline",
    "data-parallel-size": "use parallelism.data",
    "kv-transfer-config": "use spec.transfer",
    "kv-offloading-size": _NO_OFFLOADING,
    "kv-offloading-backend": _NO_OFFLOADING,
    "nnodes": "use nodesPerInstance",
    "node-rank": "leave it out: each pod of an instance gets its own",
    "master-addr": "leave it out: it is the first pod of an instance",
    "master-port": "leave it out: each pod has an address of its own, so no two instances meet on one",
    "headless": "leave it out: each pod of an instance but the first gets it",
    "config": "write the file's options here",
    "host": "leave it out",
    "port": "leave it out",
    "uds": "leave it out: routers and probes reach engines by TCP",
    "api-server-count": "leave it out: an engine has one API server",
    "grpc": "leave it out: routers and probes speak HTTP with engines",
    "tokens-only": _TEXT,
    "skip-tokenizer-init": _TEXT,
    "data-parallel-multi-port-external-lb": "leave it out: an engine answers on one port",
    "root-path": "leave it out: routers and probes ask for paths without a prefix",
    "ssl-keyfile": _NO_TLS,
    "ssl-certfile": _NO_TLS,
    "ssl-ca-certs": _NO_TLS,
    "ssl-cert-reqs": _NO_TLS,
    "ssl-ciphers": _NO_TLS,
    "enable-ssl-refresh": _NO_TLS,
    "api-key": "leave it out: clients reach the router, not the engines",
    "use-replayssm": "leave it out: vLLM refuses it in engines that hand KV over",
    "disable-log-stats": "leave it out: by these statistics an engine that is to go is known to be done",
}
"""Option to cure. The operator sets these itself or relies on them, and a second value would win silently.

``kv-offloading-size`` replaces the connector (vLLM 0.32 ``config/vllm.py``, ``_post_init_kv_transfer_config``)."""


ON_ONE_NODE: Final = "distributed-executor-backend"
"""Over several nodes the operator sets it; on one it is the user's choice, but for Ray, which the connector refuses."""
OF_REPLICAS: Final = "data-parallel-backend"
"""The starter of the engines of one pod that are data parallel: vLLM itself (``mp``) or Ray."""

SPECULATION: Final = "speculative-config"
_ALONE: Final = ("ngram", "mtp", "eagle", "draft_model")
"""Methods of speculation that decode may have alone. The connector says why, and by a fingerprint that names the method
it refuses others (``pdcluster_protocol/fingerprint.py``)."""
_MAY_BE_ALONE: Final = rf"""matches('"method"\\s*:\\s*"({"|".join(_ALONE)})"')"""

# Python spells a list or a map of strings, and a list of numbers, as CEL does, as long as no string has both quotes.
_FIRST_FORBIDDEN: Final = f"{list(SET_ELSEWHERE)}.filter(name, name in self)[0]"
_IS_DASHED: Final = "name == '' || name.startsWith('-')"
_IS_NEGATED: Final = "name.startsWith('no-')"
_IS_OUR_LETTER: Final = "(c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-'"
_IS_MISSPELLED: Final = (
    f"name.size() > {MAX_NAME_CHARACTERS} || "
    f"{list(range(MAX_NAME_CHARACTERS))}.exists(i, i < name.size() && ![name.charAt(i)].all(c, {_IS_OUR_LETTER}))"
)
"""Asked letter by letter: a search within a key, whose length has no bound, is too costly for the API server."""
_NAMES: Final = (*MUST_AGREE, *MAY_DIFFER, *SET_ELSEWHERE, ON_ONE_NODE, OF_REPLICAS)
_BEGINS_ONE: Final = " || ".join(
    f"(name.size() < {len(whole)} && '{whole}'.substring(0, name.size()) == name)" for whole in _NAMES
)
"""CEL charges unbounded strings at the highest cost, so a part of a constant, which has a bound, is compared. Neither
``startsWith`` nor the items of a list have one."""
_ALSO_BEGINNINGS: Final = [name for name in _NAMES if any(whole.startswith(f"{name}-") for whole in _NAMES)]
"""Options that another one begins with, like tokenizer."""
_IS_SHORT: Final = f"name != '' && !(name in {_ALSO_BEGINNINGS}) && ({_BEGINS_ONE})"


def _without_ray(name: str, instead: str = "") -> Rule:
    return Rule(
        holds=f"!('{name}' in self) || self['{name}'] != 'ray'",
        says=f"engineArgs has {name} = %s, which the connector refuses: leave it out{instead}",
        values=(f"self['{name}']",),
        short=f"engineArgs has {name} ray, which the connector refuses: leave it out",
        fault=Fault.FORBIDDEN,
    )


ARGS_RULES: Final = (
    Rule(
        holds=f"!self.exists(name, {_IS_DASHED})",
        says="engineArgs has %s: write the option without its leading dashes, like block-size",
        values=(f"self.filter(name, {_IS_DASHED})[0]",),
        short="engineArgs names an option with leading dashes: write it without them, like block-size",
    ),
    Rule(
        holds=f"!self.exists(name, {_IS_NEGATED})",
        says="engineArgs has %s: write the option without no-, and the value false",
        values=(f"self.filter(name, {_IS_NEGATED})[0]",),
        short="engineArgs turns an option off by its name: write it without no-, and the value false",
    ),
    Rule(
        holds=f"!self.exists(name, {_IS_MISSPELLED})",
        says=f"engineArgs has %s: write an option in at most {MAX_NAME_CHARACTERS} small letters, digits and dashes, "
        "like block-size, and a structure whole, as JSON",
        values=(f"self.filter(name, {_IS_MISSPELLED})[0]",),
        short="engineArgs misspells an option: write it in small letters and dashes, and a structure whole, as JSON",
    ),
    Rule(
        holds=f"!self.exists(name, {_IS_SHORT})",
        says="engineArgs has %s, the beginning of a longer one: write the whole name",
        values=(f"self.filter(name, {_IS_SHORT})[0]",),
        short="engineArgs shortens the name of an option: write the whole name",
    ),
    Rule(
        holds=f"!{list(SET_ELSEWHERE)}.exists(name, name in self)",
        says="engineArgs has %s = %s, which the operator sets itself or relies on: %s",
        values=(_FIRST_FORBIDDEN, f"self[{_FIRST_FORBIDDEN}]", f"{SET_ELSEWHERE}[{_FIRST_FORBIDDEN}]"),
        short="engineArgs has an option that the operator sets itself or relies on: leave it out",
    ),
    _without_ray(ON_ONE_NODE, ", and use nodesPerInstance for several nodes"),
    _without_ray(OF_REPLICAS),
)
"""Over one role's ``engineArgs``."""


def _value(role: str, name: str, otherwise: str) -> str:
    """A CEL expression: the option's value, or what stands for none."""
    args = f"self.{role}.engineArgs"
    return f"('{name}' in {args} ? {args}['{name}'] : '{otherwise}')"


def agreement_rule(name: str) -> Rule:
    """Over ``roles``: prefill and decode give the option alike, or both leave it out. Some speculation decode may have
    alone."""
    prefill, decode = (_value(role, name, "") for role in ("prefill", "decode"))
    or_alone, cure = "", f"give both roles the same engineArgs {name}"
    if name == SPECULATION:
        or_alone = f" || ({prefill} == '' && {decode}.{_MAY_BE_ALONE})"
        cure += f", or decode alone one whose method is {', '.join(_ALONE[:-1])} or {_ALONE[-1]}"
    return Rule(
        holds=f"{prefill} == {decode}{or_alone}",
        says=f"prefill has {name} %s, decode has %s: {cure}",
        values=(_value("prefill", name, "not set"), _value("decode", name, "not set")),
        short=f"prefill and decode differ in {name}: give both roles the same engineArgs {name}",
        path=".decode.engineArgs",
    )
