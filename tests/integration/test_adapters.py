"""LoRA adapters on real engines: decode never uses KV that was computed with other weights than its own.

Both engines read an adapter from one folder, as pods read it from one volume. The weights in it change while the
engines run, and one engine reads them before the other. Prefix caches are off: vLLM keeps cached blocks of the old
weights itself (``docs/operations.md``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from tools.adapters import RANK, write_adapter

from integration.harness import (
    Harness,
    HttpError,
    Pool,
    Server,
    blocks_in_use,
    complete,
    eventually,
    metric,
    opened,
)
from integration.prompts import LONG, PROMPT
from pdcluster_cli.processes.parallelism import ParallelSizes

pytestmark = pytest.mark.engines

BASE, OLD, NEW, OTHER = range(4)
SERVED: Final = {"sql": OLD, "poem": OTHER}
NUM_TOKENS: Final = 12
ENV: Final = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
LORA: Final = ("--enable-lora", "--max-lora-rank", str(RANK), "--no-enable-prefix-caching")


@dataclass(frozen=True, slots=True)
class Scene:
    """A pool that serves the adapters of ``SERVED`` from folders of their own."""

    pool: Pool
    folder: Path
    model: Path

    def put(self, seed: int) -> None:
        """New weights are copied into the folder of ``sql``; no engine has read them."""
        write_adapter(self.folder / "sql", self.model, seed=seed)

    def reload(self, engine: Server) -> None:
        body = f'{{"lora_name": "sql", "lora_path": "{self.folder / "sql"}", "load_inplace": true}}'
        with opened(f"{engine.url}/v1/load_lora_adapter", "POST", body.encode(), 60) as response:
            response.read()

    def ask(self, url: str = "", model: str = "sql") -> tuple[int, ...]:
        return complete(url or self.pool.url, PROMPT, NUM_TOKENS, model=model).token_ids

    def num_pushed(self, at_least: int = 0) -> int:
        """Waits for ``at_least``: a line may come after the answer."""

        def received() -> int:
            return sum(line["outcome"] == "received" for line in self.pool.decode[0].read_trace("receive"))

        assert eventually(lambda: received() >= at_least), received()
        return received()


@contextmanager
def start_scene(
    harness: Harness, folder: Path, *, room: int, policy: str = "recompute", decode_tp: int = 1
) -> Iterator[Scene]:
    """``room``: how many adapters an engine holds. A request for one more evicts another."""
    modules = [f"{name}={write_adapter(folder / name, harness.model, seed=seed)}" for name, seed in SERVED.items()]
    args = (*LORA, "--max-loras", str(room), "--max-cpu-loras", str(room), "--lora-modules", *modules)
    on_decode = (*args, *ParallelSizes(tensor=decode_tp).argv())
    with harness.start_pool(prefill_args=args, decode_args=on_decode, env=ENV, load_failure_policy=policy) as pool:
        yield Scene(pool, folder, harness.model)
        assert eventually(lambda: blocks_in_use(*pool.engines) == 0)


@pytest.fixture(scope="module")
def wanted(harness: Harness, tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[int, ...]]:
    """By seed: what a single engine answers with these weights; by ``BASE``: without an adapter."""
    folder, seeds = tmp_path_factory.mktemp("single"), (OLD, NEW, OTHER)
    modules = [f"{seed}={write_adapter(folder / str(seed), harness.model, seed=seed)}" for seed in seeds]
    with harness.single_engine((*LORA, "--max-loras", "3", "--lora-modules", *modules)) as engine:
        said = {seed: complete(engine.url, PROMPT, NUM_TOKENS, model=str(seed)).token_ids for seed in seeds}
        said[BASE] = complete(engine.url, PROMPT, NUM_TOKENS).token_ids
    assert len(set(said.values())) == len(said), "each adapter changes the answer"
    return said


@pytest.mark.costly
def test_decode_never_uses_kv_of_weights_that_it_has_replaced(
    harness: Harness, tmp_path: Path, wanted: dict[int, tuple[int, ...]]
) -> None:
    with start_scene(harness, tmp_path, room=2) as scene:
        (prefill,), (decode,) = scene.pool.prefill, scene.pool.decode
        said = [scene.ask(), scene.ask(model="poem"), complete(scene.pool.url, PROMPT, NUM_TOKENS).token_ids]
        assert (said, scene.num_pushed(3)) == ([wanted[OLD], wanted[OTHER], wanted[BASE]], 3)
        scene.put(NEW)
        assert (scene.ask(), scene.num_pushed(4)) == (wanted[OLD], 4), "no engine has read the new files"
        scene.reload(decode)
        assert (scene.ask(prefill.url), scene.ask(decode.url)) == (wanted[OLD], wanted[NEW])
        assert (scene.ask(), scene.num_pushed(4)) == (wanted[NEW], 4), "decode computes the prompt itself"
        scene.reload(prefill)
        assert (scene.ask(), scene.num_pushed(5)) == (wanted[NEW], 5)


@pytest.mark.slow
def test_an_adapter_that_decode_must_read_again_is_judged_by_the_files_that_it_will_read(
    harness: Harness, tmp_path: Path, wanted: dict[int, tuple[int, ...]]
) -> None:
    with start_scene(harness, tmp_path, room=1) as scene:
        (prefill,), (decode,) = scene.pool.prefill, scene.pool.decode
        assert (scene.ask(), scene.num_pushed(1)) == (wanted[OLD], 1)
        assert scene.ask(decode.url, "poem") == wanted[OTHER], "decode has dropped the other adapter"
        scene.put(NEW)
        assert scene.ask(prefill.url) == wanted[OLD]
        assert (scene.ask(), scene.num_pushed(1)) == (wanted[NEW], 1)
        assert scene.ask(prefill.url, "poem") == wanted[OTHER], "now prefill has to read it again, too"
        assert (scene.ask(), scene.num_pushed(2)) == (wanted[NEW], 2)


@pytest.mark.slow
def test_where_requests_are_to_fail_the_error_names_both_engines_both_contents_and_the_cure(
    harness: Harness, tmp_path: Path, wanted: dict[int, tuple[int, ...]]
) -> None:
    with start_scene(harness, tmp_path, room=2, policy="fail") as scene:
        (prefill,), (decode,) = scene.pool.prefill, scene.pool.decode
        assert scene.ask() == wanted[OLD]
        scene.put(NEW)
        scene.reload(decode)
        with pytest.raises(HttpError) as told:
            scene.ask()
        print(told.value)
        assert eventually(lambda: "computes with LoRA adapter" in decode.log_path.read_text())
        (line, *_) = (one for one in decode.log_path.read_text().splitlines() if "computes with LoRA adapter" in one)
        assert f"prefill engine {prefill.name}" in line
        assert f"decode engine {decode.name}" in line
        assert len(set(re.findall(r"of content ([0-9a-f]{32})", line))) == 2
        assert "/v1/load_lora_adapter" in line


@pytest.mark.slow
@pytest.mark.parametrize("decode_tp", [1, 2])
def test_files_that_change_while_a_request_with_its_kv_waits_for_room_never_mix_with_that_kv(
    harness: Harness, tmp_path: Path, decode_tp: int
) -> None:
    """Decode has room for one adapter, and another request keeps the place until its answer is whole."""
    with (
        start_scene(harness, tmp_path, room=1, policy="fail", decode_tp=decode_tp) as scene,
        ThreadPoolExecutor(2) as threads,
    ):
        (prefill,), (decode,) = scene.pool.prefill, scene.pool.decode
        assert complete(prefill.url, LONG, NUM_TOKENS, model="sql").token_ids
        asked = threads.submit(complete, scene.pool.url, LONG, NUM_TOKENS, model="sql", timeout_s=400)
        assert eventually(lambda: metric(decode.url, "vllm:num_requests_waiting") >= 1, poll_s=0.05)
        poem = threads.submit(complete, decode.url, [7, 8, 9], 300, model="poem", ignore_eos=True, timeout_s=400)
        assert eventually(lambda: scene.num_pushed() == decode_tp), "all ranks have judged it"
        scene.put(NEW)
        assert not poem.done()
        assert not asked.done()
        with pytest.raises(HttpError) as told:
            asked.result()
        print(told.value)
        assert poem.result().token_ids
        assert "kind=adapter_changed" in decode.log_path.read_text()
        assert metric(decode.url, "pdcluster:failures_total", 'kind="adapter_changed"') == decode_tp, "each rank"
        scene.reload(prefill)
        new = complete(decode.url, LONG, NUM_TOKENS, model="sql").token_ids
        assert complete(scene.pool.url, LONG, NUM_TOKENS, model="sql").token_ids == new, "both have the new files"
