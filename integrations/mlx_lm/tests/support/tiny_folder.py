"""A family of families.py as a folder that mlx_lm.load reads, with the tokenizer of another one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
from families import ARGUMENTS, FAMILIES, build
from mlx.utils import tree_flatten
from tokenizers import AddedToken, Tokenizer

THINKING = ["<think>", "</think>"]
# As thinking models have it: tools come first, thoughts of earlier turns go, and a prompt ends with
# an opened one.
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def write_folder(family: str, tokenizer: Path, target: Path, thinking: bool = False) -> None:
    """Random weights, but with the vocabulary of the model in the folder `tokenizer`, and with the
    tokens and the template of a thinking model where one is wanted."""
    target.mkdir()
    for file in tokenizer.glob("tokenizer*"):
        shutil.copy(file, target)
    words = json.loads((tokenizer / "config.json").read_text())
    vocabulary = {"vocab_size": words["vocab_size"] + len(THINKING) * thinking}
    if thinking:
        _think(target)
    ids = {key: words[key] for key in ("bos_token_id", "eos_token_id")}
    arguments = {"model_type": family, **ARGUMENTS, **FAMILIES[family], **vocabulary, **ids}
    (target / "config.json").write_text(json.dumps(arguments))
    weights = dict(tree_flatten(build(family, **vocabulary).parameters()))
    mx.save_safetensors(str(target / "model.safetensors"), weights, {"format": "mlx"})


def _think(folder: Path) -> None:
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in THINKING])
    tokenizer.save(path)
    config = folder / "tokenizer_config.json"
    settings = {**json.loads(config.read_text()), "chat_template": TEMPLATE}
    config.write_text(json.dumps(settings))
