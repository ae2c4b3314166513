"""A family of families.py as a folder that mlx_lm.load reads, with the tokenizer of another one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
from families import ARGUMENTS, FAMILIES, build
from mlx.utils import tree_flatten


def write_folder(family: str, tokenizer: Path, target: Path) -> None:
    """Random weights, but with the vocabulary of the model in the folder `tokenizer`."""
    words = json.loads((tokenizer / "config.json").read_text())
    vocabulary = {"vocab_size": words["vocab_size"]}
    arguments = {"model_type": family, **ARGUMENTS, **FAMILIES[family], **vocabulary}
    target.mkdir()
    for file in tokenizer.glob("tokenizer*"):
        shutil.copy(file, target)
    ids = {key: words[key] for key in ("bos_token_id", "eos_token_id")}
    (target / "config.json").write_text(json.dumps({**arguments, **ids}))
    weights = dict(tree_flatten(build(family, **vocabulary).parameters()))
    mx.save_safetensors(str(target / "model.safetensors"), weights, {"format": "mlx"})
