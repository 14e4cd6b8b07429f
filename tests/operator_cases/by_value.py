"""Engine arguments of which one role may have some values alone, or no role may have some."""

from __future__ import annotations

from typing import Final

from operator_cases.objects import Accepted, D, P, Refused

ACCEPTED_BY_VALUE: Final = (
    *(
        Accepted(f"speculation by {said} on decode alone", {f"{D}.engineArgs": {"speculative-config": config}})
        for said, config in (
            ("prompt lookup", '{"method": "ngram", "num_speculative_tokens": 3}'),
            ("layers of the model", '{"num_speculative_tokens":1,"method":"mtp"}'),
            ("a head", '{"method" :\t"eagle", "model": "/models/eagle"}'),
            ("a draft model", '{"method": "draft_model", "model": "/models/small"}'),
        )
    ),
)

REFUSED_BY_VALUE: Final = (
    *(
        Refused(
            f"{said} on {role} alone",
            {f"{path}.engineArgs": {"speculative-config": config}},
            f"prefill has speculative-config {config if path == P else 'not set'}, decode has "
            f"{config if path == D else 'not set'}: give both roles the same engineArgs speculative-config, or decode "
            "alone one whose method is ngram, mtp, eagle or draft_model",
        )
        for said, role, path, config in (
            ("speculation", "prefill", P, '{"method": "ngram"}'),
            ("a method that is not proven", "decode", D, '{"method": "eagle3", "model": "m"}'),
            ("a method that vLLM would choose", "decode", D, '{"model": "mtp"}'),
        )
    ),
    Refused(
        "other speculation on each role",
        {
            f"{P}.engineArgs": {"speculative-config": '{"method": "ngram"}'},
            f"{D}.engineArgs": {"speculative-config": '{"method": "mtp"}'},
        },
        'prefill has speculative-config {"method": "ngram"}, decode has {"method": "mtp"}: give both roles the same',
    ),
    Refused(
        "Ray's executor",
        {f"{P}.engineArgs": {"distributed-executor-backend": "ray"}},
        "engineArgs has distributed-executor-backend = ray, which the connector refuses: leave it out, and use "
        "nodesPerInstance for several nodes",
    ),
    Refused(
        "Ray for data parallel engines",
        {f"{D}.engineArgs": {"data-parallel-backend": "ray"}},
        "engineArgs has data-parallel-backend = ray, which the connector refuses: leave it out",
    ),
)
