"""An EAGLE-3 head at the cost of one as wide as a grown target: it drafts what the small one does.

As `grow` does it with targets: new channels stay zero, and what is computed from random weights is never used. The
draft vocabulary stays the small head's. Must not know targets beyond their geometry.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.bench.offline.grow import Grower, Size
from jaxspec.speculation.drafters.eagle3_head import Eagle3Head


def widen_head(head: Eagle3Head, size: Size) -> Eagle3Head:
    """The head with the layer of a target of that geometry.

    Args:
      head: as `grow_head` returns it, so that it reads the grown target already.

    Raises:
      ValueError: heads with what is not grown here; names it.
    """
    cfg, dtype = head.config, head.fc.kernel[...].dtype
    if cfg.num_layers > 1 or cfg.mask_token_id is not None or cfg.qk_norm or size.head_dim % cfg.head_dim:
        raise ValueError(
            f"only EAGLE-3 heads of one layer without norms of heads, whose head_dim divides {size.head_dim}, can be "
            f"widened, got {cfg}"
        )
    wide = dataclasses.replace(
        cfg, hidden_size=size.hidden_size, intermediate_size=size.intermediate_size, num_heads=size.num_heads,
        num_kv_heads=size.num_kv_heads, head_dim=size.head_dim,
        rms_norm_eps=cfg.rms_norm_eps * cfg.hidden_size / size.hidden_size,
    )  # fmt: skip
    out = nnx.eval_shape(lambda: Eagle3Head(wide, dtype=dtype))
    write = Grower(cfg.layer, size, dtype, 0)
    hidden, all_of = write.at.hidden, lambda x, axis: np.arange(x.shape[axis])
    table, kernel = head.embedding[...], head.fc.kernel[...]
    write.put(out.embedding, table, [all_of(table, 0), hidden], jnp.zeros(out.embedding.shape, dtype))
    write.put(out.fc.kernel, kernel, [all_of(kernel, 0), hidden], jnp.zeros(out.fc.kernel.shape, dtype))
    out.fc_in_norm, out.fc_norms, out.target_ids = head.fc_in_norm, head.fc_norms, head.target_ids
    for name in ("input_norm", "hidden_norm", "mlp_norm", "norm"):
        write.norm(getattr(out, name), getattr(head, name))
    # It reads the token's embedding and the feature, one behind the other.
    write.attention(out.attn, head.attn, np.concatenate([hidden, size.hidden_size + hidden]))
    write.linear(out.mlp.gate_up, head.mlp.gate_up, hidden, write.at.gate_up)
    write.linear(out.mlp.down, head.mlp.down, write.at.inner, hidden, writes=True)
    write.linear(out.lm_head, head.lm_head, hidden, all_of(head.lm_head.kernel[...], 1))
    return out
