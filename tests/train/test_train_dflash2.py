"""DFlash 2's training: convolutions by their definition, the selector's candidates, the start from a DFlash head."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.checkpointing import hf
from jaxspec.drafters.directories import load_drafter, read_kind
from jaxspec.models.layers import Shared, Transformer, shared_lm_head
from jaxspec.models.tiny import tiny_config, tiny_target
from jaxspec.speculation.drafters.dflash2_head import BlockConvolution, Dflash2Config, Dflash2Head
from jaxspec.train.data.batch import Batch
from jaxspec.train.drafters import dflash, dflash2, drafts
from jaxspec.train.drafters.dflash2 import Dflash2Recipe
from jaxspec.train.drafters.walked import initial
from jaxspec.train.objective import chunks

AUX = (1, 2)
SIZES: dict[str, Any] = dict(conv_taps=3, conv_group=8, selector_rank=5, selector_top_k=4)


def new_head(target: Transformer, **fields: Any) -> Dflash2Head:
    """A head of one layer for the tiny target, every parameter random."""
    layer = tiny_config(num_layers=1, intermediate_size=40, qk_norm=True)
    cfg = Dflash2Config(layer, AUX, 4, 12, 13, **{**SIZES, **fields})
    head = Dflash2Head(cfg, Shared(target.embedding[...]), shared_lm_head(target), rngs=nnx.Rngs(params=0))
    for i, param in enumerate(jax.tree.leaves(nnx.state(head, nnx.Param), is_leaf=lambda x: isinstance(x, nnx.Param))):
        noise = np.asarray(jax.random.normal(jax.random.key(i), param.shape))
        param.set_value(jnp.asarray(np.asarray(param[...]) + 0.3 * noise))
    return head


def test_convolutions_are_their_definition() -> None:
    """out[i] = sum over taps of (base[tap] + own[i, tap, group]) * x[i - tap], nothing before a block's first place."""
    conv: Any = new_head(tiny_target()).layers[0].attn_conv  # type: ignore[union-attr]
    assert isinstance(conv, BlockConvolution)
    x, of = (np.asarray(jax.random.normal(jax.random.key(k), (2, 8, 32))) for k in (1, 2))
    weights = conv.weights(jnp.asarray(of))
    for side in range(2):
        out = conv.mixed(jnp.asarray(x), weights[side])
        own = (of @ np.asarray(conv.own.kernel[...])).reshape(2, 8, 2, 3, 4)[:, :, side]
        for b, n, c in np.ndindex(2, 8, 32):
            terms = [
                (float(conv.base[...][side, tap, c]) + own[b, n, tap, c // 8]) * x[b, n - tap, c]
                for tap in range(min(3, n % 4 + 1))
            ]
            assert float(out[b, n, c]) == pytest.approx(sum(terms), rel=1e-4, abs=1e-5)


def test_what_is_reported_is_the_selectors_choice(
    packed_batch: Batch, target_states: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best of the places' own best four, with what the text's token before adds; others cannot be drafted."""
    monkeypatch.setattr(chunks, "LIMIT", 5000)
    target = tiny_target()
    head, states = new_head(target), target_states(target, packed_batch, AUX)
    recipe = Dflash2Recipe(AUX, anchors=6, depth=2)

    def everything(states: Any) -> Any:
        chain = dflash2.chain(head, packed_batch, states.aux_BTA, 2)
        said = [logits(hidden) for logits, hidden in zip(chain.logits, chain.hidden, strict=True)]
        parts = [head.parts(hidden) for hidden in chain.hidden]
        loss = recipe.loss(head, target, packed_batch, states, jax.random.key(3))
        best = jnp.argmax(target.logits(states.hidden_BTE), axis=-1)
        return loss, said, parts, drafts.greedy_matches(chain, target, states.hidden_BTE), best

    (loss, matches, metrics), said, parts, greedy, best = jax.tree.map(np.asarray, jax.jit(everything)(states))
    np.testing.assert_array_equal(matches, greedy)
    assert float(loss) == pytest.approx(float(loss - metrics["selector"]) + float(metrics["selector"]))
    after, moved = np.asarray(head.selector.after[...]), 0
    for d in range(2):
        own, features = parts[d]
        for b, n in np.ndindex(*own.shape[:2]):
            listed = np.argsort(-own[b, n], kind="stable")[:4]
            scores = own[b, n, listed] + after[listed] @ features[b, n]
            np.testing.assert_allclose(said[d][b, n, listed], scores, rtol=1e-4, atol=1e-4)
            assert np.isneginf(np.delete(said[d][b, n], listed)).all()
            chosen = listed[scores.argmax()]
            moved += chosen != listed[0]
            assert matches[b, n, d] == (chosen == best[b, n + 1 + d])
    assert moved


def test_gradients_reach_every_parameter(packed_batch: Batch, target_states: Any, gradients: Any) -> None:
    target = tiny_target()
    recipe = Dflash2Recipe(AUX, anchors=6, depth=2, loss_kind="ce", weights="dpace")
    grads = gradients(recipe, new_head(target), target, packed_batch, target_states(target, packed_batch, AUX))
    assert any("conv" in path for path in grads) and any("selector" in path for path in grads)
    assert not any("target_ids" in path or "embedding" in path or "lm_head" in path for path in grads)
    assert all(largest > 0 for largest in grads.values()), grads


def test_the_command_goes_on_from_a_dflash_head(
    train_command: Any, tiny_files: Path, tmp_path: Path, packed_batch: Batch, target_states: Any
) -> None:
    target = hf.load_model(tiny_files / "target")
    sizes = ("--anchors", "6", "--depth", "2")
    shape = ("--layers", "1", "--head-dim", "8", "--block-size", "4", "--aux-layers", "1")
    train_command(dflash, tmp_path / "dflash", *sizes, *shape)
    before: Any = load_drafter("dflash", tmp_path / "dflash", target)
    setup: Any = SimpleNamespace(target=target, args=SimpleNamespace(seed=0, init_from=tmp_path / "dflash"))
    start = initial("dflash2", Dflash2Head, Dflash2Config, setup, SIZES, SIZES)
    assert start.config.dflash == before.config
    states = target_states(target, packed_batch, (1,))

    @jax.jit
    def chains(aux_BTA: jax.Array) -> list[list[jax.Array]]:
        each = (of.chain(head, packed_batch, aux_BTA, 2) for of, head in ((dflash, before), (dflash2, start)))
        return [[x.logits[d](x.hidden[d]).argmax(-1) for d in range(2)] for x in each]

    np.testing.assert_array_equal(*chains(states.aux_BTA))

    asked = ("--conv-taps", "3", "--conv-group", "8", "--selector-rank", "5", "--selector-top-k", "4")
    record = train_command(dflash2, tmp_path / "more", *sizes, *asked, "--init-from", str(tmp_path / "dflash"))
    assert record["kind"] == read_kind(tmp_path / "more") == "dflash2" and record["selector"] == 1.0
    later: Any = load_drafter("dflash2", tmp_path / "more", target)
    assert later.config == start.config and later.selector.after[...].any()
    assert later.layers[0].mlp_conv.own.kernel[...].any()
    with pytest.raises(ValueError, match="--conv-taps 1: the head of kind 'dflash2' in --init-from .* decides that"):
        train_command(dflash2, tmp_path / "no", "--init-from", str(tmp_path / "more"), "--conv-taps", "1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--draft-vocab-size", "9"], "draft_vocab_size must be vocab_size 13, got 9"),
        (["--conv-group", "5"], "conv_group must divide hidden_size 32, got 5"),
        (["--selector-top-k", "14"], "selector_top_k must be from 1 to vocab_size 13, got 14"),
        (["--selector", "-1"], "selector must be at least 0, got -1"),
        (["--layout", "zlab", "--sample-from-anchor"], "--layout zlab cannot say --sample-from-anchor"),
    ],
)
def test_impossible_arguments_are_refused(
    arguments: list[str], message: str, train_command: Any, tmp_path: Path
) -> None:
    sizes = () if "--selector-top-k" in arguments else ("--selector-top-k", "4")
    with pytest.raises(ValueError, match=message):
        train_command(dflash2, tmp_path / "out", "--layers", "1", *sizes, *arguments)
