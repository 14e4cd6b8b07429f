"""Makes a tiny model of any architecture that transformers can configure. Decides weights and where they are kept.

The folder's name holds a digest of the recipe and of this file, so a second run finds it. The tokenizer is the tiny
Llama's. Sizes of weights matter: with the usual initialisation a tiny model repeats one token, and equal outputs of two
engines would prove nothing. 1-D parameters (norms, biases, decays of recurrent layers) keep their own initialisation.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pdcluster_cli.models.tiny_model import cache_root, ensure_folder, ensure_tiny_model

VOCAB: Final = 1024
"""The tiny Llama's; its tokenizer is ours."""
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class Recipe:
    """One tiny model. ``config`` are keywords of the class ``config_class`` of transformers."""

    name: str
    config_class: str
    config: Mapping[str, Any] = field(hash=False)
    weight_std: float = 0.09
    embedding_std: float = 1.0
    head_std: float = 0.3
    mtp_layers: int = 0
    """Layers for multi-token prediction, which transformers leaves out: of DeepSeek and of Qwen3-Next."""
    special_words: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Words behind the tokenizer's own, by the keyword of the config that has their token: of images, as a rule."""
    image_processor: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """What ``preprocessor_config.json`` says, of a model that sees."""
    is_eagle_head: bool = False
    """The layers guess for another model, from what it has computed and with its embeddings and head."""
    seed: int = 7


def ensure_model(recipe: Recipe) -> Path:
    """The model is in the cache; made there if it was not (a few seconds)."""
    target = cache_root(os.environ) / f"zoo-{recipe.name}-{_digest(recipe)}"
    return ensure_folder(target, lambda folder: _write_model(recipe, folder))


def _digest(recipe: Recipe) -> str:
    return hashlib.sha256(repr(recipe).encode() + Path(__file__).read_bytes()).hexdigest()[:12]


def _write_model(recipe: Recipe, folder: Path) -> None:
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    words = _write_tokenizer(recipe, folder)
    config = getattr(transformers, recipe.config_class)(
        **{"vocab_size": VOCAB, "dtype": "float32", **recipe.config, **words}
    )
    torch.manual_seed(recipe.seed)
    kind = transformers.AutoModelForImageTextToText if recipe.image_processor else transformers.AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (std := _std_of(recipe, name, parameter.dim())) is not None:
                parameter.normal_(0.0, std)
    model.save_pretrained(folder)
    shutil.copy(ensure_tiny_model() / "generation_config.json", folder)  # In place of what transformers wrote.
    if recipe.mtp_layers:
        _add_mtp_layers(recipe, folder)
    if recipe.is_eagle_head:
        _make_eagle_head(recipe, folder)


def _write_tokenizer(recipe: Recipe, folder: Path) -> dict[str, int]:
    """The tiny Llama's, with the special words; their tokens."""
    tiny = ensure_tiny_model()
    for file in _TOKENIZER_FILES:
        shutil.copy(tiny / file, folder / file)
    if recipe.image_processor:
        (folder / "preprocessor_config.json").write_text(json.dumps(dict(recipe.image_processor), indent=1))
    if not recipe.special_words:
        return {}
    tokenizers = importlib.import_module("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([tokenizers.AddedToken(word, special=True) for word in recipe.special_words.values()])
    tokenizer.save(str(folder / "tokenizer.json"))
    return {name: tokenizer.token_to_id(word) for name, word in recipe.special_words.items()}


def _std_of(recipe: Recipe, name: str, num_dims: int) -> float | None:
    """Standard deviation of one parameter; None keeps its own initialisation."""
    if num_dims == 1 or "conv1d" in name:
        return None
    if "embed" in name:
        return recipe.embedding_std
    return recipe.head_std if name.startswith("lm_head") else recipe.weight_std


def _make_eagle_head(recipe: Recipe, folder: Path) -> None:
    """As vLLM 0.32 ``models/llama_eagle.py`` reads one: the layers, and what brings token and hidden state together."""
    safetensors, torch = importlib.import_module("safetensors.torch"), importlib.import_module("torch")
    file, hidden = folder / "model.safetensors", recipe.config["hidden_size"]
    tensors = {
        name.removeprefix("model."): tensor
        for name, tensor in safetensors.load_file(file).items()
        if ".layers." in name and not name.endswith("layers.0.input_layernorm.weight")
    }
    tensors["fc.weight"] = torch.randn(hidden, 2 * hidden) * recipe.weight_std
    safetensors.save_file(tensors, file, metadata={"format": "pt"})


def _add_mtp_layers(recipe: Recipe, folder: Path) -> None:
    """Layers of the last one's shape, as vLLM 0.32 reads them; ``config.json`` says how many.

    Their weights are random, so few of their guesses are taken.
    """
    safetensors, torch = importlib.import_module("safetensors.torch"), importlib.import_module("torch")
    tensors = safetensors.load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    new: Callable[..., Any] = lambda *shape: torch.randn(*shape) * recipe.weight_std  # noqa: E731
    add = _add_to_qwen3_next if recipe.config_class == "Qwen3NextConfig" else _add_to_deepseek
    for layer in range(recipe.mtp_layers):
        add(tensors, layer, config, new)
    safetensors.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": recipe.mtp_layers}, indent=1))


def _add_to_deepseek(tensors: dict[str, Any], layer: int, config: Mapping[str, Any], new: Callable[..., Any]) -> None:
    """As ``models/deepseek_mtp.py`` reads them: numbered after the model's own."""
    num_layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    prefix = f"model.layers.{num_layers + layer}."
    _copy_layer(tensors, f"model.layers.{num_layers - 1}.", prefix, new)
    tensors[prefix + "eh_proj.weight"] = new(hidden, 2 * hidden)
    tensors[prefix + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[prefix + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{prefix}{norm}.weight"] = tensors["model.norm.weight"].clone()


def _add_to_qwen3_next(tensors: dict[str, Any], layer: int, config: Mapping[str, Any], new: Callable[..., Any]) -> None:
    """As ``models/qwen3_next_mtp.py`` reads them: a model of their own, which shares words and head."""
    hidden = config["hidden_size"]
    _copy_layer(tensors, f"model.layers.{config['num_hidden_layers'] - 1}.", f"mtp.layers.{layer}.", new)
    tensors["mtp.fc.weight"] = new(hidden, 2 * hidden)
    for norm in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        tensors[f"mtp.{norm}.weight"] = tensors["model.norm.weight"].clone()


def _copy_layer(tensors: dict[str, Any], source: str, target: str, new: Callable[..., Any]) -> None:
    for name, tensor in list(tensors.items()):
        if name.startswith(source):
            tensors[target + name.removeprefix(source)] = new(*tensor.shape) if tensor.dim() > 1 else tensor.clone()
