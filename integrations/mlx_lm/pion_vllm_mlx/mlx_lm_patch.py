"""The patch of mlx-lm's attention, and caches that need it.

    install_pion_attention_patch()
    pc = PionPromptCache(model, stage2=True)
    pc.get_or_prefill(prefix_ids, namespace=ns)
    cache = make_pion_prompt_cache(model, ns, pc, len(prefix_ids))
    generate(model, tokenizer, prompt=suffix, prompt_cache=cache)

mlx-lm's models import `scaled_dot_product_attention` by name, so it is replaced in every module of
mlx_lm.models that has it; in `base` as well, where modules that are loaded later find it. What is
called with another cache than ours goes on to mlx-lm's own, in any thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models import base

from pion_vllm_mlx.attention.sparse import Sparse
from pion_vllm_mlx.attention.suffix import Mask, Query, SuffixCache
from pion_vllm_mlx.model import Cache, Model

if TYPE_CHECKING:
    from pion_vllm_mlx.prompt_cache import PionPromptCache

NAME = "scaled_dot_product_attention"
_original: Callable[..., mx.array] | None = None  # mlx-lm's, from the first time on


def pion_scaled_dot_product_attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Mask,
    sinks: mx.array | None = None,
) -> mx.array:
    """In the place of mlx-lm's function of that name, with its parameters."""
    if isinstance(cache, SuffixCache):
        return cache.attend(Query(queries, keys, values, mask, scale, sinks))
    assert _original is not None  # else nobody would call this
    return _original(queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks)


def install_pion_attention_patch() -> None:
    """Replace mlx-lm's attention function in all of its models. To do it again changes nothing."""
    global _original
    if _original is None:
        _original = getattr(base, NAME)
    _rebind(_original, pion_scaled_dot_product_attention)


def uninstall_pion_attention_patch() -> None:
    """Put mlx-lm's attention function back everywhere."""
    if _original is not None:
        _rebind(pion_scaled_dot_product_attention, _original)


def is_installed() -> bool:
    """Whether the patch is in place."""
    return getattr(base, NAME) is pion_scaled_dot_product_attention


def make_pion_prompt_cache(
    model: Model,
    namespace: str,
    pc: PionPromptCache,
    tokens: int | Sequence[int],
    *,
    sparse: Sparse | None = None,
) -> list[Cache]:
    """Caches that continue the prefix that `pc` knows as `namespace`, for mlx-lm's `prompt_cache`;
    to be used for one sequence. `tokens` is how many tokens it has; or, better, which ones: then
    they are checked, and can be prefilled again.

    A prefix that `pc` holds in this process is continued in it, as fast as any KVCache. Another one
    stays at the server, which computes attention over it: one question a layer and step, once all
    layers are warm. That, and any `sparse` attention, needs the patch. With `sparse`, a query sees
    only those blocks of the prefix that fit it best.

    If the server fails in the midst of an answer, `pc` fetches the prefix, or prefills it again,
    where `tokens` or get_or_prefill said what it is; else PrefixUnavailableError comes out of the
    model.

    Raises ValueError where `pc` is of another model, or without `stage2`; RuntimeError without the
    patch; UnsupportedAttentionError for a model that it does not reach; PrefixUnavailableError
    where neither this process nor the server has the prefix, or has another one of that name.
    """
    if not pc.serves(model):
        raise ValueError("this PionPromptCache is one of another model")
    return pc.continued(namespace, tokens, sparse)


def _rebind(old: object, new: object) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and getattr(module, NAME, None) is old:
            setattr(module, NAME, new)
