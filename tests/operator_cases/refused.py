"""What the API server refuses, and the message it must show."""

from __future__ import annotations

from typing import Final

from operator_cases.aliases import REFUSED_ALIASES
from operator_cases.by_value import REFUSED_BY_VALUE
from operator_cases.objects import ABSENT, CUDA, By, D, P, Refused, both
from operator_cases.proxies import REFUSED_PROXIES
from operator_cases.tokens import REFUSED_TOKENS
from operator_cases.updates import REFUSED_UPDATES

ALIKE: Final = (
    # The shape of KV and its bytes.
    "attention-backend", "attention-config", "block-size", "disable-hybrid-kv-cache-manager",
    "disable-sliding-window", "dtype", "kv-cache-dtype", "generation-config", "max-model-len",
    "override-generation-config",
    "kv-cache-dtype-skip-layers", "mamba-block-size", "mamba-cache-dtype", "mamba-cache-mode", "mamba-ssm-cache-dtype",
    # The weights.
    "code-revision", "config-format", "default-mm-loras", "hf-config-path", "hf-overrides", "ignore-patterns",
    "load-format", "lora-dtype", "lora-modules", "lora-target-modules", "model-class-overrides", "model-impl",
    "model-loader-extra-config", "quantization", "quantization-config", "spec-method", "spec-model", "spec-tokens",
    "speculative-config", "trust-remote-code",
    # The tokens.
    "anthropic-disabled-thinking-effort", "chat-template", "chat-template-content-format", "cohere-format",
    "default-chat-template-kwargs", "exclude-tools-when-tool-choice-none", "tokenizer", "tokenizer-mode",
    "tokenizer-revision", "trust-request-chat-template",
    # What an image or a video becomes: its tokens are placeholders, alike whatever they stand for.
    "enable-tower-connector-lora", "interleave-mm-strings", "media-io-kwargs", "mm-device-do-normalize",
    "mm-encoder-attn-dtype", "mm-encoder-fp8-scale-path", "mm-processor-kwargs", "trust-request-mm-kwargs",
    "video-pruning-method", "video-pruning-rate",
)  # fmt: skip
"""Written out: a name that the product forgets is to be missed here."""

_NO_OFFLOADING: Final = "leave it out: it puts vLLM's own connector in the place of the one that hands KV over"
_TLS: Final = (
    "ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "ssl-cert-reqs", "ssl-ciphers", "enable-ssl-refresh",
)  # fmt: skip
NOT_YOURS: Final = (
    # The operator writes these itself.
    ("tensor-parallel-size", "4", "use parallelism.tensor"),
    ("nnodes", "2", "use nodesPerInstance"),
    ("node-rank", "1", "leave it out: each pod of an instance gets its own"),
    ("master-addr", "x", "leave it out: it is the first pod of an instance"),
    ("master-port", "1", "leave it out: each pod has an address of its own, so no two instances meet on one"),
    ("headless", "true", "leave it out: each pod of an instance but the first gets it"),
    # KV would not be handed over.
    ("use-replayssm", "true", "leave it out: vLLM refuses it in engines that hand KV over"),
    ("kv-offloading-size", "4", _NO_OFFLOADING),
    ("kv-offloading-backend", "native", _NO_OFFLOADING),
    # Routers and probes would not reach the engine.
    ("uds", "/tmp/x", "leave it out: routers and probes reach engines by TCP"),
    ("api-server-count", "2", "leave it out: an engine has one API server"),
    ("grpc", "true", "leave it out: routers and probes speak HTTP with engines"),
    ("tokens-only", "true", "leave it out: clients send and get text"),
    ("skip-tokenizer-init", "true", "leave it out: clients send and get text"),
    ("data-parallel-multi-port-external-lb", "true", "leave it out: an engine answers on one port"),
    ("root-path", "/x", "leave it out: routers and probes ask for paths without a prefix"),
    *((name, "x", "leave it out: with spec.tls routers and engines speak TLS") for name in _TLS),
    # An engine that is to go would never be done.
    ("disable-log-stats", "true", "leave it out: by these statistics an engine that is to go is known to be done"),
)
"""An option, a value, and who sets it or what to do instead. Written out, as above."""

_SPELL: Final = (
    ": write an option in at most 64 small letters, digits and dashes, like block-size, and a structure whole, as JSON"
)
_SHORT: Final = ", the beginning of a longer one: write the whole name"
_NEGATED: Final = ": write the option without no-, and the value false"
_DASHED: Final = ": write the option without its leading dashes, like block-size"
SPELLINGS: Final = (
    ("underscores", "block_size", _SPELL),
    ("some underscores", "kv-cache_dtype", _SPELL),
    ("underscores in the operator's own", "kv_transfer_config", _SPELL),
    ("underscores in one that no rule names", "max_num_seqs", _SPELL),
    ("a key of a structure", "hf-overrides.a", _SPELL),
    ("a key of a structure with underscores", "speculative_config.model", _SPELL),
    ("a key of a shortened structure", "hf-over.a", _SPELL),
    ("an item of a structure's list", "speculative-config.a+", _SPELL),
    ("a key of the operator's own", "kv-transfer-config.kv_role", _SPELL),
    ("the value in the name", "block-size=32", _SPELL),
    ("a variable in the name", "$(NAME)", _SPELL),
    ("a space", "dtype ", _SPELL),
    ("capitals", "dTYPE", _SPELL),
    ("letters of elsewhere", "dtypé", _SPELL),
    ("65 characters", "a" * 65, _SPELL),
    ("the last of 64 characters", "a" * 63 + "_", _SPELL),
    ("a name cut short", "block-s", _SHORT),
    ("a name cut to one letter", "d", _SHORT),
    ("the operator's own cut short", "tensor-par", _SHORT),
    ("a switch that may differ, cut short", "enable-prefix", _SHORT),
    ("the last of the operator's own", "disable-log-stat", _SHORT),
    ("a switch turned off by its name", "no-disable-hybrid-kv-cache-manager", _NEGATED),
    ("the same, cut short", "no-disable-hyb", _NEGATED),
    ("dashes", "--enforce-eager", _DASHED),
    ("nothing", "", _DASHED),
)
"""What of a name is unusual, the name, and the cure. vLLM reads most of them as an option that a rule asks for."""

RULES: Final = (
    Refused(
        "one role without replicas",
        {f"{P}.replicas": 0, f"{D}.replicas": 2},
        "prefill has 0 replicas, decode has 2: neither serves alone, so give both some, or both 0 to stop the pool",
    ),
    Refused(
        "unequal devices",
        {f"{P}.device.kind": "cuda"},
        "prefill has device.kind cuda, decode has cpu: KV of one means nothing on the other, so give both the same",
    ),
    Refused(
        "unequal blocks",
        {f"{P}.engineArgs": {"block-size": "32"}, f"{D}.engineArgs": {"block-size": "16"}},
        "prefill has block-size 32, decode has 16: give both roles the same engineArgs block-size",
    ),
    *(
        Refused(
            f"{name} of one role only",
            {f"{D}.engineArgs": {name: "x"}},
            f"prefill has {name} not set, decode has x: give both roles the same engineArgs {name}",
        )
        for name in ALIKE
    ),
    *REFUSED_BY_VALUE,
    Refused(
        "too many devices",
        {**both("device", {"kind": "cuda", "count": 8}), f"{P}.parallelism.tensor": 8, f"{D}.parallelism.tensor": 4},
        "device.count 8 on nodesPerInstance 1 makes 8 devices, tensor 4 x pipeline 1 x data 1 is 4 ranks: "
        "make them equal, or leave device.count out",
    ),
    Refused(
        "ranks that nodes do not divide",
        {**CUDA, f"{P}.parallelism.tensor": 3, f"{P}.nodesPerInstance": 2},
        "tensor 3 x pipeline 1 x data 1 is 3 ranks, which nodesPerInstance 2 does not divide: "
        "choose a nodesPerInstance that does",
    ),
    Refused(
        "a count on cpu",
        {f"{P}.device.count": 1},
        "device.kind is cpu and count is 1: leave count out, and ask for cores in resources",
    ),
    Refused(
        "a resource on cpu",
        {f"{P}.device.resourceName": "nvidia.com/gpu"},
        "device.kind is cpu and resourceName is nvidia.com/gpu: leave resourceName out, and ask for cores in resources",
    ),
    Refused(
        "two places for one model",
        {"spec.model": {"name": "tiny", "path": "/models/tiny"}},
        "model has name tiny, path /models/tiny and no volume: give exactly one of name, path and volume",
    ),
    Refused(
        "copies of the model over nodes",
        {**CUDA, f"{D}.parallelism": {"tensor": 2, "data": 2}, f"{D}.nodesPerInstance": 2},
        "nodesPerInstance is 2 and parallelism.data 2: an instance over several nodes has one copy of the model, "
        "so set parallelism.data to 1 and raise replicas",
    ),
    Refused(
        "another executor over nodes",
        {
            **CUDA,
            f"{D}.parallelism.tensor": 2,
            f"{D}.nodesPerInstance": 2,
            f"{D}.engineArgs": {"distributed-executor-backend": "uni"},
        },
        "engineArgs has distributed-executor-backend = uni and nodesPerInstance is 2: "
        "leave it out, over nodes it is mp",
    ),
    Refused(
        "a model that is nowhere",
        {"spec.model": {"servedName": "tiny"}},
        "model has no name, no path and no volume: give exactly one of name, path and volume",
    ),
    Refused(
        "a folder without a name",
        {"spec.model": {"path": "/models/tiny"}},
        "model.path /models/tiny has no name that clients could ask for: set model.servedName",
    ),
    Refused(
        "a revision of a folder",
        {"spec.model": {"path": "/models/tiny", "servedName": "tiny", "revision": "v1"}},
        "model.revision v1 names a revision on the model hub, and model.name is not set: "
        "leave revision out, or set name",
    ),
    *(
        Refused(f"{what} as an argument", {f"{P}.engineArgs": {name: "1"}}, f"engineArgs has {name}{cure}")
        for what, name, cure in SPELLINGS
    ),
    *(
        Refused(
            f"{name} as an argument",
            {f"{P}.engineArgs": {name: value}},
            f"engineArgs has {name} = {value}, which the operator sets itself or relies on: {cure}",
        )
        for name, value, cure in NOT_YOURS
    ),
    Refused(
        "two origins of a variable",
        {f"{P}.env": [{"name": "A", "value": "1", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]},
        "env A has both value and valueFrom: give one of them",
    ),
    Refused(
        "the pool's secret as a variable",
        {f"{P}.env": [{"name": "PDCLUSTER_SECRET", "value": "x"}]},
        "env PDCLUSTER_SECRET is set by the operator: name your own secret in auth.secretRef",
    ),
    Refused(
        "a rollout that cannot move",
        {"spec.rollout": {"maxSurge": 0, "maxUnavailable": "0%"}},
        "maxSurge is 0 and maxUnavailable is 0%: nothing could ever move, so give one of them 1 or more",
    ),
    Refused(
        "a ratio upside down",
        {"spec.scaling": {"mode": "External", "ratio": {"min": 2, "max": 0.5}}},
        "scaling.ratio.min 2 is above max 0.5: exchange them",
    ),
    Refused(
        "replicas outside the ratio",
        {"spec.scaling.ratio": {"min": 0.5, "max": 2}, f"{D}.replicas": 4},
        "prefill 1 to decode 4 replicas is outside scaling.ratio 0.5 to 2: change the replicas or the ratio",
    ),
    Refused(
        "replicas a hair outside the ratio",
        {"spec.scaling.ratio": {"min": 0.0700001, "max": 2}, f"{P}.replicas": 7, f"{D}.replicas": 100},
        "prefill 7 to decode 100 replicas is outside scaling.ratio 0.0700001 to 2: change the replicas or the ratio",
    ),
    Refused(
        "a side channel where engines answer",
        {"spec.transfer.port": 8000},
        "decode listens on ports 8000 to 8000 (transfer.port 8000, 1 ranks), and on 8000 engines answer: "
        "leave transfer.port out, or take one above 8000",
    ),
    Refused(
        "the last rank's side channel where engines answer",
        {"spec.transfer.port": 7993, f"{D}.parallelism": {"tensor": 2, "pipeline": 2, "data": 2}},
        "decode listens on ports 7993 to 8000 (transfer.port 7993, 8 ranks), and on 8000 engines answer: "
        "leave transfer.port out, or take one above 8000",
    ),
    Refused(
        "ascend's protocol elsewhere",
        {"spec.transfer.protocol": "ascend"},
        "transfer.protocol is ascend and device.kind is cpu: use tcp or rdma, or leave protocol out",
    ),
    Refused(
        "cards of rdma with another protocol",
        {**CUDA, "spec.transfer": {"protocol": "tcp", "devices": ["mlx5_0"]}},
        "transfer.devices names RDMA devices and transfer.protocol is tcp: set protocol rdma, or leave devices out",
    ),
    Refused(
        "cards of rdma without a protocol",
        {**CUDA, "spec.transfer": {"devices": ["mlx5_0"]}},
        "transfer.devices names RDMA devices and transfer.protocol is not set: set protocol rdma, or leave devices out",
    ),
    Refused(
        "a name with a dot",
        {"metadata.name": "my.pool"},
        "metadata.name is my.pool, 7 characters: Services are named after it, so use at most 63 of a-z, 0-9 and -, "
        "a letter first and no - at the end",
    ),
    Refused("a name of 64 characters", {"metadata.name": "a" * 64}, "64 characters: Services are named after it"),
)

SCHEMA: Final = (
    Refused("a misspelled field", {"spec.role": {}}, 'unknown field "spec.role"', By.SCHEMA),
    Refused("no image", {"spec.image": ABSENT}, "spec.image: Required value", By.SCHEMA),
    Refused("no decode", {D: ABSENT}, "spec.roles.decode: Required value", By.SCHEMA),
    Refused("no kind of device", {f"{P}.device": {}}, "spec.roles.prefill.device.kind: Required value", By.SCHEMA),
    Refused("TLS without a Secret", {"spec.router.tls": {}}, "spec.router.tls.secretName: Required value", By.SCHEMA),
    Refused(
        "gateways of no namespace",
        {"spec.router.picker": {}},
        "spec.router.picker.gatewayNamespaces: Required value",
        By.SCHEMA,
    ),
    Refused(
        "gateways of an empty list of namespaces",
        {"spec.router.picker": {"gatewayNamespaces": []}},
        "spec.router.picker.gatewayNamespaces in body should have at least 1 items",
        By.SCHEMA,
    ),
    Refused(
        "gateways of a namespace that cannot be",
        {"spec.router.picker": {"gatewayNamespaces": ["*"]}},
        "spec.router.picker.gatewayNamespaces[0] in body should match",
        By.SCHEMA,
    ),
    Refused(
        "TLS for gateways without a Secret",
        {"spec.router.picker": {"gatewayNamespaces": ["gateways"], "tls": {}}},
        "spec.router.picker.tls.secretName: Required value",
        By.SCHEMA,
    ),
    Refused("TLS inside without a Secret", {"spec.tls": {}}, "spec.tls.secretName: Required value", By.SCHEMA),
    Refused(
        "a certificate's name that no DNS has",
        {"spec.tls": {"secretName": "a", "serverName": "*.pool"}},
        "spec.tls.serverName in body should match",
        By.SCHEMA,
    ),
    Refused("a policy that there is not", {"spec.router.policy": "fastest"}, 'Unsupported value: "fastest"', By.SCHEMA),
    Refused(
        "an unknown device",
        {f"{P}.device.kind": "tpu"},
        'spec.roles.prefill.device.kind: Unsupported value: "tpu": supported values: "ascend", "cuda", "cpu"',
        By.SCHEMA,
    ),
    Refused(
        "less than no replicas",
        {f"{P}.replicas": -1},
        "spec.roles.prefill.replicas in body should be greater than or equal to 0",
        By.SCHEMA,
    ),
    Refused(
        "too many replicas",
        {f"{P}.replicas": 1001},
        "spec.roles.prefill.replicas in body should be less than or equal to 1000",
        By.SCHEMA,
    ),
    Refused(
        "an argument that is a number",
        {f"{P}.engineArgs": {"block-size": 32}},
        'spec.roles.prefill.engineArgs.block-size in body must be of type string: "integer"',
        By.SCHEMA,
    ),
    Refused(
        "an argument without a value",
        {f"{P}.engineArgs": {"chat-template": ""}},
        "spec.roles.prefill.engineArgs.chat-template in body should be at least 1 chars long",
        By.SCHEMA,
    ),
    Refused(
        "half an instance",
        {"spec.rollout.maxSurge": "half"},
        "spec.rollout.maxSurge in body should match",
        By.SCHEMA,
    ),
    Refused(
        "a surge below nothing",
        {"spec.rollout.maxSurge": -1},
        "spec.rollout.maxSurge in body should be greater than or equal to 0",
        By.SCHEMA,
    ),
    Refused(
        "memory in no unit",
        {f"{P}.resources": {"requests": {"memory": "8 gigabytes"}}},
        "spec.roles.prefill.resources.requests.memory in body should match",
        By.SCHEMA,
    ),
    Refused(
        "a ratio of nothing",
        {"spec.scaling.ratio": {"min": 0, "max": 1}},
        "spec.scaling.ratio.min in body should be greater than 0",
        By.SCHEMA,
    ),
    Refused(
        "two volumes in one",
        {"spec.model": {"volume": {"source": {"emptyDir": {}, "nfs": {}}}, "servedName": "tiny"}},
        "must have at most 1 item",
        By.SCHEMA,
    ),
    Refused(
        "a port of the kernel's",
        {"spec.transfer.port": 40000},
        "spec.transfer.port in body should be less than or equal to 31000",
        By.SCHEMA,
    ),
)

REFUSED: Final = (*RULES, *REFUSED_UPDATES, *SCHEMA, *REFUSED_TOKENS, *REFUSED_PROXIES, *REFUSED_ALIASES)

SCALER_REFUSED: Final = (
    Refused(
        "another role",
        {"spec.role": "decode"},
        "role cannot change from prefill to decode: make a PDRoleScaler of its own",
        before={},
    ),
    Refused(
        "another cluster",
        {"spec.clusterRef.name": "other"},
        "clusterRef cannot change from pool to other: make a PDRoleScaler of its own",
        before={},
    ),
    Refused("a role that there is not", {"spec.role": "router"}, 'Unsupported value: "router"', By.SCHEMA),
    Refused("no number", {"spec.replicas": ABSENT}, "spec.replicas: Required value", By.SCHEMA),
)
