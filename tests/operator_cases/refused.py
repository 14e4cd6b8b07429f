"""What the API server refuses, and the message it must show."""

from __future__ import annotations

from typing import Final

from operator_cases.objects import ABSENT, CUDA, By, D, P, Refused, both

ALIKE: Final = (
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
"""Written out: a name that the product forgets is to be missed here."""

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
    Refused(
        "dashes before an argument",
        {f"{P}.engineArgs": {"--enforce-eager": "true"}},
        "engineArgs has --enforce-eager: write the option without its leading dashes, like block-size",
    ),
    Refused(
        "underscores that would hide an argument",
        {f"{P}.engineArgs": {"block_size": "32"}},
        "engineArgs has block_size: write it as block-size",
    ),
    Refused(
        "a key of a structure that would hide it",
        {f"{P}.engineArgs": {"kv-transfer-config.kv_role": "kv_both"}},
        "engineArgs has kv-transfer-config.kv_role: write the whole structure as JSON",
    ),
    Refused(
        "an argument that is a field",
        {f"{P}.engineArgs": {"tensor-parallel-size": "4"}},
        "engineArgs has tensor-parallel-size = 4, which the operator sets itself: use parallelism.tensor",
    ),
    Refused(
        "an argument by which drain would never end",
        {f"{P}.engineArgs": {"disable-log-stats": "true"}},
        "engineArgs has disable-log-stats = true, which the operator sets itself: leave it out: by these statistics an "
        "engine that is to go is known to be done",
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
        "ascend's protocol elsewhere",
        {"spec.transfer.protocol": "ascend"},
        "transfer.protocol is ascend and device.kind is cpu: use tcp or rdma, or leave protocol out",
    ),
    Refused(
        "a name with a dot",
        {"metadata.name": "my.pool"},
        "metadata.name is my.pool, 7 characters: Services are named after it, so use at most 63 of a-z, 0-9 and -, "
        "a letter first and no - at the end",
    ),
    Refused("a name of 64 characters", {"metadata.name": "a" * 64}, "64 characters: Services are named after it"),
)

UPDATES: Final = (
    Refused(
        "another served name",
        {"spec.model": {"name": "tiny", "servedName": "b"}},
        "the name that clients ask for cannot change from a to b: keep model.servedName a, "
        "or make another PDCluster and move the clients to it",
        before={"spec.model": {"name": "tiny", "servedName": "a"}},
    ),
    Refused(
        "another model without keeping its name",
        {"spec.model": {"name": "large"}},
        "the name that clients ask for cannot change from tiny to large: keep model.servedName tiny, "
        "or make another PDCluster and move the clients to it",
        before={},
    ),
    Refused(
        "another kind of device",
        CUDA,
        "device.kind cannot change from cpu to cuda: old and new engines could not hand over KV, "
        "so make another PDCluster and move the clients to it",
        before={},
    ),
    Refused(
        "another secret",
        {"spec.auth.secretRef": {"name": "b"}},
        "auth.secretRef cannot change from a/secret to b/secret: make another PDCluster and move the clients to it",
        before={"spec.auth.secretRef": {"name": "a"}},
    ),
    Refused(
        "a secret of one's own too late",
        {"spec.auth.secretRef": {"name": "b"}},
        "auth.secretRef cannot change from the made one to b/secret",
        before={},
    ),
    Refused(
        "no own secret any more",
        {},
        "auth.secretRef cannot change from a/secret to a made one",
        before={"spec.auth.secretRef": {"name": "a"}},
    ),
)

SCHEMA: Final = (
    Refused("a misspelled field", {"spec.role": {}}, 'unknown field "spec.role"', By.SCHEMA),
    Refused("no image", {"spec.image": ABSENT}, "spec.image: Required value", By.SCHEMA),
    Refused("no decode", {D: ABSENT}, "spec.roles.decode: Required value", By.SCHEMA),
    Refused("no kind of device", {f"{P}.device": {}}, "spec.roles.prefill.device.kind: Required value", By.SCHEMA),
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
    Refused("an unknown policy", {"spec.router.policy": "Fastest"}, 'Unsupported value: "Fastest"', By.SCHEMA),
)

REFUSED: Final = (*RULES, *UPDATES, *SCHEMA)

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
