"""`python -m jaxspec.train medusa`: Medusa heads on a frozen target (Cai et al. 2024, Medusa-1).

The heads read the target's last hidden states only, so a step costs little more than the target's own forward pass.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.models.base import TargetModel
from jaxspec.models.layers import Shared
from jaxspec.models.quantised import Quantised
from jaxspec.speculation.drafters.medusa_head import MedusaConfig, MedusaHeads
from jaxspec.train.data.batch import Batch, ahead
from jaxspec.train.drafters import drafts, starts
from jaxspec.train.drafters.recipe import TargetStates
from jaxspec.train.objective.chunks import best_tokens, mixed_cross_entropy, text_cross_entropy
from jaxspec.train.objective.loss import masked_mean
from jaxspec.train.run import command

GEOMETRY = {"heads": 4, "blocks": 1}


@dataclasses.dataclass(frozen=True)
class MedusaRecipe:
    """Sum over the heads k of decay**k times the cross entropy of the token that the head is about.

    Attributes:
      num_heads: heads of the module.
      decay: weight of each further head (Medusa's own: 0.8).
      soft: the labels are the target's distributions instead of the text's tokens.
    """

    num_heads: int
    decay: float = 0.8
    soft: bool = False
    aux_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0.0 < self.decay <= 1.0:
            raise ValueError(f"decay must lie in (0, 1], got {self.decay}")

    @property
    def depth(self) -> int:
        """A chain takes the first choice of every head."""
        return self.num_heads

    def loss(
        self, module: MedusaHeads, target: TargetModel, batch: Batch, states: TargetStates, key: jax.Array
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """See Recipe. Head k at position n is about token n + 2 + k."""
        kept = batch.tokens_BT.shape[1] - 1 - self.num_heads
        best_BT = None if self.soft else best_tokens(target, states.hidden_BTE)
        loss, matches, metrics = jnp.float32(0.0), [], {}
        for k in range(self.num_heads):
            logits = functools.partial(module.logits, head=k)
            labels_BT = ahead(batch.tokens_BT, k + 2)
            if best_BT is None:
                theirs_BTE = ahead(states.hidden_BTE, k + 1)
                found = mixed_cross_entropy(logits, target, states.hidden_BTE, theirs_BTE, labels_BT, 0.0)
            else:
                best = ahead(best_BT, k + 1)
                found = text_cross_entropy(logits, states.hidden_BTE, labels_BT, best, module.config.vocab_size)
            entropy = masked_mean(found[0], batch.learned_ahead(k + 2))
            loss = loss + self.decay**k * entropy
            matches.append(found[1][:, :kept])
            metrics[f"loss_{k + 1}"] = entropy
        return loss, jnp.stack(matches, axis=-1), metrics


def new_heads(cfg: MedusaConfig, target: TargetModel, *, freeze_lm_heads: bool = False) -> MedusaHeads:
    """Heads whose blocks pass the hidden state on and whose output layers are copies of the target's.

    So each starts as the target's own guess of the next token.

    Args:
      freeze_lm_heads: the output layers stay the target's: one Shared kernel instead of a trained copy a head.
    """
    module = MedusaHeads(cfg)  # placeholders are zero, as new blocks are
    kernel_EV = target.embedding[...].T if target.lm_head is None else target.lm_head.kernel[...]
    shared = Shared(kernel_EV)
    wide_EV = kernel_EV.dequantised() if isinstance(kernel_EV, Quantised) else kernel_EV
    for head in module.heads:
        kernel = shared if freeze_lm_heads else nnx.Param(jnp.array(wide_EV, jnp.float32, copy=True))
        head.lm_head.kernel = kernel  # pyright: ignore[reportAttributeAccessIssue]
    return module


def chain(module: MedusaHeads, batch: Batch, aux_BTA: jax.Array | None, depth: int) -> drafts.Chain:
    """See drafts.Trainer."""
    assert aux_BTA is not None
    logits = [functools.partial(module.logits, head=i) for i in range(depth)]
    hidden_BNE = drafts.with_room(aux_BTA, batch, depth)
    return drafts.Chain([hidden_BNE] * depth, logits, None, module.config.vocab_size, one_pass=True)


def add_arguments(p: argparse.ArgumentParser) -> None:
    """What only Medusa heads have."""
    command.add_common_arguments(p)
    p.add_argument("--heads", type=int, help=f"tokens that can be drafted (default: {GEOMETRY['heads']})")
    p.add_argument("--blocks", type=int, help=f"residual blocks a head (default: {GEOMETRY['blocks']})")
    p.add_argument("--decay", type=float, default=0.8, help="weight of each further head's loss")
    p.add_argument("--soft", action="store_true", help="learn the target's distributions instead of the texts' tokens")
    p.add_argument("--freeze-lm-heads", action="store_true", help="train the blocks only, not the output layers")
    p.set_defaults(lr=1e-3)


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Trains, writes args.out and returns the record.

    Raises:
      ValueError: options out of range or that exclude each other, rows too short for the heads, or --init-from that
        holds another drafter.
    """
    starts.check_layout("medusa", args.layout)
    shape = starts.geometry(args, GEOMETRY)
    MedusaRecipe(shape["heads"], decay=args.decay)
    setup = command.prepare(args)
    target = setup.target
    if args.init_from is not None:
        module = starts.load_initial("medusa", args.init_from, target)
        if args.freeze_lm_heads:
            for head in module.heads:
                head.lm_head.kernel = Shared(head.lm_head.kernel[...].astype(target.embedding[...].dtype))
    else:
        cfg = MedusaConfig(
            num_heads=shape["heads"],
            hidden_size=target.config.hidden_size,
            vocab_size=target.config.vocab_size,
            target_layers=target.config.num_layers,
            num_layers=shape["blocks"],
        )
        module = new_heads(cfg, target, freeze_lm_heads=args.freeze_lm_heads)
    cfg = module.config
    starts.check_length(setup.rows.length, cfg.num_heads)
    output = 0 if args.freeze_lm_heads else cfg.num_heads * cfg.hidden_size * cfg.vocab_size
    print(f"of the trained parameters {output:,} are {cfg.num_heads} output layers", flush=True)
    recipe = MedusaRecipe(cfg.num_heads, decay=args.decay, soft=args.soft)
    extra = {"decay": args.decay, "soft": args.soft, "freeze_lm_heads": args.freeze_lm_heads}
    return command.fit(setup, recipe, module, kind="medusa", extra_record=extra)
