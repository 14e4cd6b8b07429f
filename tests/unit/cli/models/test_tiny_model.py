"""The tiny model: the same shape is the same folder and the same bytes, everywhere and always."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from pdcluster_cli.models.tiny_model import (
    SPECIAL_TOKENS,
    TINY,
    ModelShape,
    cache_root,
    ensure_folder,
    ensure_tiny_model,
    model_folder_name,
)

SMALL = ModelShape(num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, hidden=16, intermediate=32, vocab=400)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_tiny_model(SMALL, tmp_path_factory.mktemp("cache"))


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


@pytest.mark.parametrize(
    ("env", "root"),
    [
        ({"PDCLUSTER_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"}, Path("/own")),
        ({"XDG_CACHE_HOME": "/xdg"}, Path("/xdg/pdcluster")),
        ({"PDCLUSTER_CACHE": "", "XDG_CACHE_HOME": ""}, Path.home() / ".cache/pdcluster"),
        ({}, Path.home() / ".cache/pdcluster"),
    ],
)
def test_the_cache_is_where_the_user_says(env: dict[str, str], root: Path) -> None:
    assert cache_root(env) == root


def test_each_field_of_a_shape_makes_another_folder() -> None:
    names = {model_folder_name(TINY)}
    for field in dataclasses.fields(ModelShape):
        names.add(model_folder_name(dataclasses.replace(TINY, **{field.name: getattr(TINY, field.name) + 1})))
    assert len(names) == 1 + len(dataclasses.fields(ModelShape))


def test_equal_shapes_share_a_folder_whose_name_says_the_size() -> None:
    assert model_folder_name(ModelShape()) == model_folder_name(TINY)
    assert model_folder_name(TINY).startswith("tiny-8x256-")
    assert model_folder_name(ModelShape(num_layers=16, hidden=512)).startswith("tiny-16x512-")


def test_two_makings_are_equal_byte_for_byte(model: Path, tmp_path: Path) -> None:
    again = ensure_tiny_model(SMALL, tmp_path)
    assert again != model
    assert again.name == model.name
    assert digests(again) == digests(model)


def test_another_seed_gives_other_weights_and_the_same_tokenizer(model: Path, tmp_path: Path) -> None:
    other = digests(ensure_tiny_model(dataclasses.replace(SMALL, seed=8), tmp_path))
    assert other["model.safetensors"] != digests(model)["model.safetensors"]
    assert other["tokenizer.json"] == digests(model)["tokenizer.json"]


def test_a_model_that_is_there_is_not_made_again(model: Path) -> None:
    (model / "kept").write_text("by the user")
    try:
        assert ensure_tiny_model(SMALL, model.parent) == model
        assert (model / "kept").exists()
    finally:
        (model / "kept").unlink()


def test_nothing_half_made_is_left(model: Path) -> None:
    assert [folder.name for folder in model.parent.iterdir()] == [model.name]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_who_may_read_it_is_what_the_umask_says(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        folder = ensure_tiny_model(SMALL, tmp_path)
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in folder.iterdir()}
    assert set(modes.values()) == {mode}, modes
    assert folder.stat().st_mode & 0o777 == 0o755


def test_a_folder_that_is_kept_has_the_modes_that_it_was_made_with(tmp_path: Path) -> None:
    """A root folder for pods has programs, and links that mean other files on this machine than in the pod."""
    outside = tmp_path / "program"
    outside.touch(mode=0o700)

    def write(folder: Path) -> None:
        (folder / "run").touch(mode=0o700)
        (folder / "link").symlink_to(outside)

    kept = ensure_folder(tmp_path / "kept", write)
    assert {file.stat().st_mode & 0o777 for file in (kept / "run", outside)} == {0o700}


def test_the_weights_have_the_shapes_that_the_config_says(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"]) == (2, 1, 8)
    assert ModelShape(**config["pdcluster_shape"]) == SMALL
    with safe_open(model / "model.safetensors", framework="numpy") as weights:
        shapes = {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
    assert len(shapes) == 3 + 9 * SMALL.num_layers
    assert shapes["lm_head.weight"] == (400, 16)
    for layer in range(SMALL.num_layers):
        prefix = f"model.layers.{layer}.self_attn"
        assert shapes[f"{prefix}.q_proj.weight"] == (16, 16)
        assert shapes[f"{prefix}.k_proj.weight"] == shapes[f"{prefix}.v_proj.weight"] == (8, 16)


def test_tokens_that_are_no_words_are_never_said(model: Path) -> None:
    with safe_open(model / "model.safetensors", framework="numpy") as weights:
        lm_head = weights.get_tensor("lm_head.weight")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    said = [token for token in range(SMALL.vocab) if lm_head[token].any()]
    assert 20 < len(said) < SMALL.vocab - len(SPECIAL_TOKENS)
    assert all(tokenizer.decode([token]).strip().isprintable() for token in said)
    assert not lm_head[: len(SPECIAL_TOKENS)].any()


def test_the_tokenizer_gives_back_any_text(model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    for text in ("Why is the sky blue?", "naïve 数字 🙂\n\ttabs", ""):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
