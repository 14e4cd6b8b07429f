"""Two sequences of one transfer (n 2, beam search) at a prefill engine: the second is refused, and no lane ends."""

from __future__ import annotations

import numpy as np

from integration.ranks import BLOCK_SIZE, LIFE, SECRET, Pair, make_pair
from patience import PATIENCE_S
from pdcluster_connector.core.watermark import KvGroup
from pdcluster_connector.scheduler.prefill import PrefillEngine, PrefillScheduler, Scheduled
from pdcluster_connector.settings import PushTiming, Settings
from pdcluster_protocol.ids import Attempt, EngineId, RequestId, TransferId
from pdcluster_protocol.params import Reservation, sealed, to_wire
from pdcluster_protocol.prompt_digest import digest_prompt

PATIENT = Settings(quarantine_s=30, hold_s=30, lease_s=60, handshake_timeout_s=60)
TOKENS = list(range(2 * BLOCK_SIZE))
FIRST, SECOND = RequestId("first"), RequestId("second")


def reservation(pair: Pair) -> Reservation:
    """Of decode's blocks 5 and 6, for transfer "a"."""
    address = pair.decode.address
    return Reservation(
        request_id="r", remote_block_ids=((5, 6),), remote_block_size=BLOCK_SIZE, remote_engine_id=EngineId("decode"),
        remote_host=address.host, remote_port=address.port, remote_tp_size=1, remote_cached_tokens=0,
        transfer_id=TransferId("a"), attempt=Attempt(1), deadline_ms=60_000,
        token=SECRET.mint(TransferId("a"), Attempt(1), 60_000), remote_boot_id=address.boot_id,
        remote_side_channels=(address,), num_prompt_tokens=len(TOKENS), prompt_digest=digest_prompt(TOKENS),
    )  # fmt: skip


def compute(pair: Pair, scheduler: PrefillScheduler, request_id: RequestId, blocks: list[int]) -> None:
    """One forward pass over the whole prompt."""
    step = scheduler.step([Scheduled(request_id, len(TOKENS))], (), lambda _: (blocks,), now=1.0)
    pair.forward(*step.slices)


def test_a_second_sequence_is_refused_and_what_its_lane_pushes_goes_on() -> None:
    with make_pair(settings=PATIENT) as pair:
        scheduler = PrefillScheduler(
            PrefillEngine(1, (pair.source.shape.kv_heads,), (KvGroup(BLOCK_SIZE),)), PushTiming.LAYERWISE, SECRET, LIFE
        )
        pair.forward(pair.slice_of("another tenant", [3], [9]))  # waits for its grant on the same lane
        scheduler.add(FIRST, to_wire(sealed(reservation(pair), SECRET)), TOKENS, now=0.0)
        compute(pair, scheduler, FIRST, [1, 2])
        scheduler.finish(FIRST)
        scheduler.add(SECOND, to_wire(sealed(reservation(pair), SECRET)), TOKENS, now=0.0)
        compute(pair, scheduler, SECOND, [7, 8])
        is_held, said = scheduler.finish(SECOND)
        assert not is_held
        assert "has a sequence here already" in str(said)
        pair.expect("a", 2)
        pair.expect("another tenant", 1)
        assert pair.step_until(lambda: len(pair.ended) == 2, timeout_s=PATIENCE_S)
        assert pair.ended == {"a": True, "another tenant": True}
        assert np.array_equal(pair.source.layers[:, [1, 2, 3]], pair.target.layers[:, [5, 6, 9]])
