"""Makes a tiny Llama with a tokenizer: a real model that writes nonsense, for demos, tests and benchmarks.

Decides the model's shape, weights and folder. Uses numpy, safetensors and tokenizers: to import torch and
transformers would take seconds. Weights are larger than usual: with the usual initialisation a tiny model repeats one
token, and equal outputs of two engines would prove nothing.

    $PDCLUSTER_CACHE, else $XDG_CACHE_HOME/pdcluster, else ~/.cache/pdcluster
      tiny-<layers>x<hidden>-<digest of the shape and this file>/   config.json model.safetensors tokenizer.json ...
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

SPECIAL_TOKENS: Final = ("<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>")
CHAT_TEMPLATE: Final = (
    "<|begin|>{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CORPUS: Final = """
One engine reads the prompt and another one writes the answer. The first is called prefill and the second decode.
Prefill computes every layer of the prompt at once, and what it leaves behind is the cache of keys and values. Decode
needs that cache before it can say a word, so each layer is pushed over the wire while the next layer is computed. When
the last layer has arrived the answer begins. The router stands in front: it asks decode to reserve blocks of memory,
tells prefill where they are, and then relays the words as they come. If a machine fails in the middle, nobody waits
for ever and nobody reads what was never written. A small model like this one has no meaning in its words, but it has
the same shape as a large one: attention with grouped heads, a table of blocks, a queue of requests and a clock that
runs out. Ask it about the weather, the sea, the mountains, a river in spring, a town with seven bridges, the colour of
the evening sky, the price of bread, a letter from an old friend, or the way home through the snow, and it will answer
with great confidence. Please do not believe it. Hello, what can you do for me today? Tell me a story about two engines
and one long road. Why is the sky blue? How many layers are there? Where does the time go? Who are you? Thank you!
"""
"""The text from which the tokenizer learns its words."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a Llama. KV bytes per token = 2 * layers * KV heads * head_dim * bytes per element.

    Example: 8 layers, 2 KV heads, head_dim 32, float32 → 2 * 8 * 2 * 32 * 4 = 4,096 bytes per token.
    """

    num_layers: int = 8
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 32
    hidden: int = 256
    intermediate: int = 512
    vocab: int = 1024
    max_positions: int = 32768
    weight_std: float = 0.09
    seed: int = 7


TINY: Final = ModelShape()


def cache_root(env: Mapping[str, str]) -> Path:
    """The folder with everything that pdcluster makes once and keeps."""
    if own := env.get("PDCLUSTER_CACHE"):
        return Path(own)
    if xdg := env.get("XDG_CACHE_HOME"):
        return Path(xdg) / "pdcluster"
    return Path.home() / ".cache" / "pdcluster"


def ensure_tiny_model(shape: ModelShape = TINY, root: Path | None = None) -> Path:
    """The model's folder in the cache. Makes the model if it is not there."""
    target = (root or cache_root(os.environ)) / model_folder_name(shape)
    return ensure_folder(target, lambda folder: _write_model(shape, folder))


def ensure_folder(target: Path, write: Callable[[Path], None]) -> Path:
    """``target``, which ``write`` fills if it is not there. Several processes may do so at once: one copy wins."""
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=".making-", dir=target.parent))
    try:
        write(making)
        making.chmod(0o755)
        making.rename(target)
    except OSError:
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return target


def model_folder_name(shape: ModelShape) -> str:
    """The folder's name. Another shape, or another version of this file, gives another name."""
    digest = hashlib.sha256(repr(shape).encode() + Path(__file__).read_bytes()).hexdigest()
    return f"tiny-{shape.num_layers}x{shape.hidden}-{digest[:12]}"


def _write_model(shape: ModelShape, folder: Path) -> None:
    from safetensors.numpy import save_file

    silent_ids = _write_tokenizer(shape, folder)
    _write_json(folder / "config.json", _config(shape))
    _write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1, "do_sample": False})
    weights = folder / "model.safetensors"
    save_file(dict(_tensors(shape, silent_ids)), weights, metadata={"format": "pt"})
    # safetensors lets only the owner read the file, but an engine in a pod is another user: follow the umask instead.
    weights.chmod((folder / "config.json").stat().st_mode)


def _config(shape: ModelShape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": "float32",
        "pdcluster_shape": asdict(shape),
    }


def _tensors(shape: ModelShape, silent_ids: list[int]) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Weights by name. ``silent_ids`` get a logit of 0, far below the best one, so no answer has them."""
    random = np.random.default_rng(shape.seed)

    def normal(std: float, *sizes: int) -> npt.NDArray[np.float32]:
        return random.standard_normal(sizes, dtype=np.float32) * np.float32(std)

    query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    lm_head = normal(0.3, shape.vocab, shape.hidden)
    lm_head[silent_ids] = 0
    yield "model.embed_tokens.weight", normal(1.0, shape.vocab, shape.hidden)
    yield "lm_head.weight", lm_head
    yield "model.norm.weight", np.ones(shape.hidden, np.float32)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        for name, rows, columns in (
            ("self_attn.q_proj", query, shape.hidden),
            ("self_attn.k_proj", kv, shape.hidden),
            ("self_attn.v_proj", kv, shape.hidden),
            ("self_attn.o_proj", shape.hidden, query),
            ("mlp.gate_proj", shape.intermediate, shape.hidden),
            ("mlp.up_proj", shape.intermediate, shape.hidden),
            ("mlp.down_proj", shape.hidden, shape.intermediate),
        ):
            yield f"{prefix}.{name}.weight", normal(shape.weight_std, rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{name}.weight", np.ones(shape.hidden, np.float32)


def _write_tokenizer(shape: ModelShape, folder: Path) -> list[int]:
    """Write a byte-level BPE, trained on ``CORPUS``. Returns the ids that are not readable words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=shape.vocab,
        show_progress=False,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL_TOKENS[0],
            "eos_token": SPECIAL_TOKENS[1],
            "model_max_length": shape.max_positions,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return [token for token in range(shape.vocab) if not _is_word(tokenizer.decode([token], skip_special_tokens=True))]


def _is_word(text: str) -> bool:
    return len(text.strip()) > 1 and text.isprintable() and text.isascii()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
