"""Stage 2 for mlx-lm: the patch of its attention, and caches that need it.

install_pion_attention_patch()
pc = PionPromptCache(model, stage2=True)
pc.get_or_prefill(prefix_ids, namespace=ns)
cache = make_pion_prompt_cache(model, ns, pc, len(prefix_ids))
generate(model, tokenizer, prompt=suffix, prompt_cache=cache)
"""

from __future__ import annotations

from collections.abc import Sequence

from pion_vllm_mlx.attention.hook import (
    install_pion_attention_patch,
    pion_scaled_dot_product_attention,
    uninstall_pion_attention_patch,
)
from pion_vllm_mlx.attention.sparse import Sparse
from pion_vllm_mlx.model import Cache, Model
from pion_vllm_mlx.prompt_cache import PionPromptCache

__all__ = [
    "install_pion_attention_patch",
    "make_pion_prompt_cache",
    "pion_scaled_dot_product_attention",
    "uninstall_pion_attention_patch",
]


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
