"""What a connector learns of vLLM's adapters: what a request asks for, and each load of a worker."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager, WorkerLoRAManager

from patience import PATIENCE_S
from pdcluster_connector.adapter_files import CONFIG, WEIGHTS, files_of
from pdcluster_connector.adapter_loads import AdapterLoads
from pdcluster_connector.vllm import adapters
from pdcluster_connector.vllm.adapters import adapter_of, unwatch, watch_loads

LORA: Any = SimpleNamespace(
    target_modules=["v_proj", "k_proj"],
    lora_dtype="float32",
    enable_tower_connector_lora=False,
    enable_mixed_moe_lora_format=False,
)


@pytest.fixture
def loads() -> Iterator[AdapterLoads]:
    made = watch_loads(LORA)
    assert made is not None
    yield made
    end(made)


def end(loads: AdapterLoads) -> None:
    unwatch(loads)
    assert loads.close(time.monotonic() + PATIENCE_S)


def test_a_request_asks_for_a_number_a_name_a_path_and_a_use() -> None:
    asked = adapter_of(LoRARequest("sql", 3, "/adapters/sql"), LORA)
    assert (asked.number, asked.name, asked.path, asked.problem) == (3, "sql", "/adapters/sql", "")
    assert asked.use == (
        "--lora-dtype float32, --lora-target-modules k_proj,v_proj, --enable-tower-connector-lora False, "
        "--enable-mixed-moe-lora-format False, 3D weights False"
    )
    assert not asked.is_read_each_step
    assert adapter_of(LoRARequest("sql", 3, "/adapters/sql", load_inplace=True), LORA).is_read_each_step


def test_an_adapter_that_tensorizer_reads_has_no_known_content() -> None:
    request: Any = SimpleNamespace(
        lora_int_id=3, lora_name="sql", lora_path="/a", load_inplace=False, is_3d_lora_weight=False,
        tensorizer_config_dict={"tensorizer_dir": "s3://elsewhere"},
    )  # fmt: skip
    assert "tensorizer" in adapter_of(request, LORA).problem


def test_an_engine_without_adapters_watches_nothing() -> None:
    assert watch_loads(None) is None


def test_ours_stands_around_the_method_of_both_of_vllms_managers_once(loads: AdapterLoads) -> None:
    again = watch_loads(LORA)
    assert again is not None
    end(again)
    (inner,) = adapters._INNER
    assert WorkerLoRAManager._load_adapter is LRUCacheWorkerLoRAManager._load_adapter
    assert WorkerLoRAManager._load_adapter.__wrapped__ is inner


def test_a_load_is_noted_with_its_files_and_whether_the_worker_still_holds_it(
    loads: AdapterLoads, tmp_path: Path
) -> None:
    for name in (CONFIG, WEIGHTS[0]):
        (tmp_path / name).write_bytes(b"{}")
    held, request = {3}, LoRARequest("sql", 3, str(tmp_path))
    manager: Any = SimpleNamespace(list_adapters=lambda: held)
    load = adapters._watched(lambda _, asked: asked.lora_int_id)
    assert load(manager, request) == 3
    asked = adapter_of(request, LORA)
    assert loads.in_step(asked).files == files_of(str(tmp_path)) is not None
    (tmp_path / WEIGHTS[0]).write_bytes(b"other")
    assert loads.at_hand(asked) == loads.in_step(asked)
    held.clear()
    assert loads.at_hand(asked).files == files_of(str(tmp_path)) != loads.in_step(asked).files


def test_files_that_change_while_vllm_reads_them_have_no_known_content(loads: AdapterLoads, tmp_path: Path) -> None:
    for name in (CONFIG, WEIGHTS[0]):
        (tmp_path / name).write_bytes(b"{}")

    def read(_: object, asked: LoRARequest) -> Any:
        (tmp_path / WEIGHTS[0]).write_bytes(b"other")
        return asked

    request, manager = LoRARequest("sql", 3, str(tmp_path)), SimpleNamespace(list_adapters=lambda: {3})
    adapters._watched(read)(manager, request)
    assert "changed while vLLM read them" in loads.in_step(adapter_of(request, LORA)).problem


def test_what_modelscope_provides_has_no_known_content(
    loads: AdapterLoads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (CONFIG, WEIGHTS[0]):
        (tmp_path / name).write_bytes(b"of Hugging Face")
    monkeypatch.setattr(adapters, "snapshot_download", lambda *_, **__: str(tmp_path))
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "true")
    request, manager = LoRARequest("sql", 3, "org/sql"), SimpleNamespace(list_adapters=lambda: {3})
    adapters._watched(lambda _, one: one.lora_path)(manager, request)
    assert loads.in_step(adapter_of(request, LORA)).problem


def test_a_load_that_vllm_refuses_leaves_what_was_noted_before(loads: AdapterLoads) -> None:
    def fails(_: object, asked: object) -> Any:
        raise ValueError(asked)

    with pytest.raises(ValueError, match="sql"):
        adapters._watched(fails)(SimpleNamespace(), LoRARequest("sql", 3, "/a"))
    assert "before the connector" in loads.in_step(adapter_of(LoRARequest("sql", 3, "/a"), LORA)).problem


@pytest.mark.parametrize("error", [KeyError(7), RuntimeError("dictionary changed size during iteration")])
def test_a_list_that_vllm_changes_while_it_is_copied_is_copied_again(error: Exception) -> None:
    """vLLM's workers change it in the forward thread, and a receiver or a lane looks."""
    errors = [error, error]

    def list_adapters() -> dict[int, str]:
        if errors:
            raise errors.pop()
        return {3: "an adapter"}

    manager: Any = SimpleNamespace(list_adapters=list_adapters)
    assert adapters._is_resident(manager, 3)
