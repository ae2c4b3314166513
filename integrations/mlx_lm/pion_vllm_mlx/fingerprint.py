"""What must be equal for a stored prefix to be usable, as hex sha256.

`model_fingerprint` covers the model: class, configuration, each module's scalar settings (rope,
scale, quantisation), and of every parameter its name, shape, dtype, the sum of each row's bit
patterns, and up to 64 evenly spaced elements. So one weight that changes is seen, such as those of
a token that was added and trained; what only trades places within a row may not be. All weights are
read once, about 0.1 s for each GB on two CPU cores. It is the same in any process and on any
machine with the same mlx-lm. `prefix_fingerprint` adds the layout of the rows and the token ids.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from pion_vllm_mlx.model import Model

# Another rule below, another number: what older versions wrote is then a mismatch, never a hit.
VERSION = "pion-mlx-2"
SAMPLES = 64
_BITS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}  # by the size of an element


def model_fingerprint(model: Model) -> str:
    """Hex sha256 of what decides the K/V that `model` computes. Load adapters before."""
    digest = hashlib.sha256(VERSION.encode())
    for part in (_class_name(model), _config(model), *_settings(model)):
        _add(digest, part.encode())
    parameters = cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))
    found = [(_sums(value), _sample(value)) for _, value in parameters]
    mx.eval(found)
    for (name, value), arrays in zip(parameters, found, strict=True):
        _add(digest, f"{name} {value.shape} {value.dtype}".encode())
        for array in arrays:
            _add(digest, np.asarray(array).tobytes())
    return digest.hexdigest()


def prefix_fingerprint(model: str, layout: Iterable[str], token_ids: Sequence[int]) -> str:
    """Hex sha256 of the fingerprint `model`, the words of `layout`, and the ids as int64 LE."""
    digest = hashlib.sha256(VERSION.encode())
    for part in (model, *layout):
        _add(digest, part.encode())
    _add(digest, hashlib.sha256(np.asarray(token_ids, dtype="<i8").tobytes()).digest())
    return digest.hexdigest()


def _add(digest: Any, part: bytes) -> None:
    """With its length in front, so that no two sequences of parts read alike."""
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)


def _class_name(value: object) -> str:
    cls = value.__class__  # not type(value): the model may come as a weak proxy
    return f"{cls.__module__}.{cls.__qualname__}"


def _config(model: Model) -> str:
    """The model's arguments as canonical JSON; mlx-lm's models keep them in `args`."""
    args = getattr(model, "args", None) or getattr(model, "config", None)
    if dataclasses.is_dataclass(args) and not isinstance(args, type):
        args = dataclasses.asdict(args)
    elif hasattr(args, "__dict__"):
        args = vars(args)
    return json.dumps(args, sort_keys=True, default=repr)


def _settings(model: Model) -> list[str]:
    """Class and plain settings of every module: a rope base, a quantisation, an adapter's scale."""
    lines = []
    for name, module in sorted(model.named_modules()):
        plain = {
            key: value
            for key, value in vars(module).items()
            if not key.startswith("_") and isinstance(value, bool | int | float | str)
        }
        lines.append(f"{name} {type(module).__qualname__} {json.dumps(plain, sort_keys=True)}")
    return lines


def _sums(value: mx.array) -> mx.array:
    """The sum of each row's elements, taken as unsigned integers, modulo 2**32 or more."""
    rows = value if value.ndim else value.reshape(1)
    return mx.sum(rows.view(_BITS[value.dtype.size]), axis=-1)


def _sample(value: mx.array) -> mx.array:
    """Up to SAMPLES evenly spaced elements, as uint8."""
    flat = value.reshape(-1)
    if value.size > SAMPLES:
        flat = flat[mx.array(np.linspace(0, value.size - 1, SAMPLES, dtype=np.int64))]
    return flat.view(mx.uint8)
