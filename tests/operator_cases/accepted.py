"""What the API server takes, as new objects and as updates."""

from __future__ import annotations

from typing import Final

from operator_cases.aliases import ACCEPTED_ALIASES
from operator_cases.by_value import ACCEPTED_BY_VALUE
from operator_cases.objects import CUDA, Accepted, D, P, both

ACCEPTED: Final = (
    Accepted("the smallest object"),
    Accepted("all kinds of device", {**both("device", {"kind": "ascend", "resourceName": "huawei.com/Ascend910B"})}),
    Accepted("roles of different TP", {**CUDA, f"{P}.parallelism.tensor": 8, f"{D}.parallelism.tensor": 4}),
    Accepted(
        "devices that match parallelism over nodes",
        {
            **both("device", {"kind": "cuda", "count": 8}),
            **both("parallelism", {"tensor": 8, "pipeline": 2}),
            **both("nodesPerInstance", 2),
        },
    ),
    Accepted(
        "data parallel instances",
        {**both("device", {"kind": "cuda", "count": 4}), **both("parallelism", {"tensor": 2, "data": 2})},
    ),
    Accepted("cpu ranks without devices", both("parallelism", {"tensor": 2})),
    Accepted("a stopped pool", both("replicas", 0)),
    Accepted("a model in a folder", {"spec.model": {"path": "/models/tiny", "servedName": "tiny"}}),
    Accepted(
        "a model in a volume",
        {"spec.model": {"volume": {"source": {"persistentVolumeClaim": {"claimName": "m"}}}, "servedName": "tiny"}},
    ),
    Accepted("a model's revision", {"spec.model.revision": "v1.0"}),
    Accepted(
        "engine arguments", both("engineArgs", {"block-size": "32", "enforce-eager": "true", "dtype": "bfloat16"})
    ),
    Accepted("an executor on one node", {f"{P}.engineArgs": {"distributed-executor-backend": "uni"}}),
    Accepted("arguments of one role only", {f"{P}.engineArgs": {"max-num-batched-tokens": "8192"}}),
    Accepted("experts that one role alone spreads", {f"{D}.engineArgs": {"enable-expert-parallel": "true"}}),
    Accepted(
        "structures, and one name that another one begins with",
        both(
            "engineArgs",
            {
                "hf-overrides": '{"a_b.c": 1}',
                "tokenizer": "t",
                "tokenizer-mode": "hf",
                "kv-cache-dtype": "fp8",
                "kv-cache-dtype-skip-layers": "0",
                "quantization": "fp8",
                "speculative-config": '{"method": "ngram"}',
            },
        ),
    ),
    *ACCEPTED_BY_VALUE,
    Accepted(
        "switches of one role only",
        {f"{P}.engineArgs": {"enable-prefix-caching": "false", "kv-sharing-fast-prefill": "true"}},
    ),
    Accepted("an option that vLLM may have one day", {f"{P}.engineArgs": {"x" * 64: "1", "nova2": "1"}}),
    Accepted(
        "environment of both kinds",
        both(
            "env",
            [{"name": "A", "value": "1"}, {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
        ),
    ),
    Accepted("resources", both("resources", {"requests": {"cpu": 2, "memory": "8Gi"}, "limits": {"cpu": "2500m"}})),
    Accepted(
        "anything of a pod", both("podOverrides", {"spec": {"tolerations": [{"key": "npu", "operator": "Exists"}]}})
    ),
    Accepted("no surge", {"spec.rollout": {"maxSurge": 0, "maxUnavailable": 1}}),
    Accepted("a surge in percent", {"spec.rollout": {"maxSurge": "25%", "maxUnavailable": "0%"}}),
    Accepted("replicas within the ratio", {"spec.scaling.ratio": {"min": 0.5, "max": 2}, f"{D}.replicas": 2}),
    Accepted(
        "replicas exactly at a least ratio that no double is",
        {"spec.scaling.ratio": {"min": 0.07, "max": 2}, f"{P}.replicas": 7, f"{D}.replicas": 100},
    ),
    Accepted(
        "replicas exactly at a most ratio that no double is",
        {"spec.scaling.ratio": {"min": 0.01, "max": 0.29}, f"{P}.replicas": 29, f"{D}.replicas": 100},
    ),
    Accepted("side channels up to where engines answer", {"spec.transfer.port": 7998, f"{D}.parallelism.tensor": 2}),
    Accepted("side channels after where engines answer", {"spec.transfer.port": 8001, f"{P}.parallelism.tensor": 2}),
    Accepted(
        "a side channel before where engines answer, whatever prefill has",
        {"spec.transfer.port": 7999, f"{P}.parallelism.tensor": 2},
    ),
    Accepted(
        "replicas outside a ratio that others keep",
        {"spec.scaling": {"mode": "External", "ratio": {"min": 2, "max": 4}}},
    ),
    Accepted("a stopped pool with a ratio", {**both("replicas", 0), "spec.scaling.ratio": {"min": 0.5, "max": 2}}),
    Accepted("ascend's own protocol", {**both("device.kind", "ascend"), "spec.transfer.protocol": "ascend"}),
    Accepted("rdma", {**CUDA, "spec.transfer.protocol": "rdma"}),
    Accepted(
        "two cards of rdma", {**CUDA, "spec.transfer": {"protocol": "rdma", "devices": ["mlx5_0", "mlx5_bond.1"]}}
    ),
    Accepted("the most that decode may compute itself", {"spec.transfer.minPushTokens": 8192}),
    Accepted("a secret of one's own", {"spec.auth.secretRef": {"name": "mine"}}),
    Accepted("a name of 63 characters", {"metadata.name": "a" * 63}),
    Accepted("a router with TLS", {"spec.router": {"tls": {"secretName": "certificate"}, "service": {"port": 443}}}),
    Accepted("a router that gateways ask", {"spec.router.picker": {"gatewayNamespaces": ["gateways", "1-more"]}}),
    Accepted(
        "a router that gateways ask by mTLS",
        {
            "spec.router.picker": {
                "gatewayNamespaces": ["gateways"],
                "tls": {"secretName": "picker", "clientCertificates": True},
            }
        },
    ),
    Accepted(
        "a router that takes tokens, by keys of a URL",
        {"spec.router.tokens": {"issuer": "https://i", "audience": "a", "keySetUrl": "https://host:8443/jwks?a=b"}},
    ),
    Accepted(
        "a router that takes tokens, by keys of a Secret",
        {"spec.router.tokens": {"issuer": "i", "audience": "a", "keySetSecretRef": {"name": "keys"}}},
    ),
    Accepted("TLS inside", {"spec.tls": {"secretName": "inside", "serverName": "pool.team-a.svc"}}),
    Accepted(
        "a router behind proxies",
        {"spec.router.proxies": {"trusted": ["10.0.0.0/8", "192.0.2.7", "2001:db8::/32", "::1"]}},
    ),
    Accepted(
        "a router behind a load balancer",
        {
            "spec.router.proxies": {
                "trusted": ["10.0.0.0/8"],
                "forwardedHeader": "forwarded",
                "proxyProtocol": "required",
            }
        },
    ),
    Accepted(
        "as many proxies as may be", {"spec.router.proxies": {"trusted": [f"10.{one}.0.0/16" for one in range(32)]}}
    ),
    Accepted(
        "a router for the outside", {"spec.router": {"replicas": 3, "service": {"type": "LoadBalancer", "port": 443}}}
    ),
    Accepted("more replicas", {f"{P}.replicas": 3}, before={}),
    Accepted("another image", {"spec.image": "engine:2"}, before={}),
    Accepted("other blocks", both("engineArgs", {"block-size": "64"}), before=both("engineArgs", {"block-size": "32"})),
    Accepted("another TP", both("parallelism.tensor", 2), before={}),
    Accepted(
        "other weights under the same name",
        {"spec.model": {"path": "/models/2", "servedName": "tiny"}},
        before={"spec.model": {"name": "tiny"}},
    ),
    Accepted("the same secret", {"spec.auth.secretRef": {"name": "a"}}, before={"spec.auth.secretRef": {"name": "a"}}),
    *ACCEPTED_ALIASES,
)

SCALER_ACCEPTED: Final = (
    Accepted("the smallest scaler"),
    Accepted("no replicas", {"spec.replicas": 0}),
    Accepted("more of them", {"spec.replicas": 5}, before={}),
)
