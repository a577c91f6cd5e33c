"""Records what PyPI `speculators` computes for speculators_cases.py into vectors/. Run by hand, from the root:

    python -m pip install --editable ".[parity]"
    python tests/parity/record.py [CASE ...]

Run it when a case, an input or the fill of the weights changes, and commit the new vectors with that change. The live
tests of test_parity.py use its functions where speculators is installed. torch and speculators are imported by the
functions that need them, because importing this module must not need them.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

# In the tests conftest.py provides this module; here it is found beside the script.
from speculators_cases import (
    ALPHA,
    ANCHORS,
    BLOCK,
    BLOCKS,
    CASES,
    CE,
    DECAY,
    DEPTHS,
    GAMMA,
    MTP_WEIGHTS,
    SELECTED,
    SHAPE,
    STEPS,
    TV,
    VECTORS,
    VERSIONS,
    drafted_ids,
    inputs,
    weights,
)

from jaxspec.checkpointing.tensors import write_json


def build(case: str) -> Any:
    """speculators' model of a case, its weights drawn by `weights`, on the CPU in float32 with eager attention."""
    import torch
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig, Qwen3Config

    c = CASES[case]
    layer = {"llama": LlamaConfig, "qwen3": Qwen3Config}[c.family](**{**SHAPE, **c.layer})
    layer._attn_implementation = "eager"
    tokens = BLOCK if c.fields.get("sample_from_anchor", c.kind == "dspark") else len(MTP_WEIGHTS)
    wrapper = SpeculatorsConfig(
        algorithm=c.kind,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=tokens)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )
    model_class, config_class = _classes(c.kind)
    fields = dict(c.fields) if c.kind == "mtp" else {"draft_vocab_size": c.draft_vocab_size, **c.fields}
    model = model_class(config_class(transformer_layer_config=layer, speculators_config=wrapper, **fields))
    if c.kind == "mtp":
        model.load_verifier_weights()  # without a verifier it only drops the table that MTP has no use for
    drawn = weights(case, {n: tuple(p.shape) for n, p in model.named_parameters()})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(drawn[name]))
        if model.use_draft_vocab:
            ids = drafted_ids()
            model.d2t.copy_(torch.from_numpy(ids - np.arange(len(ids))))
            model.t2d.copy_(torch.from_numpy(np.isin(np.arange(len(model.t2d)), ids)))
    return model.eval()


def answers(case: str, model: Any) -> dict[str, np.ndarray]:
    """Inputs, logits of every step and losses of one case."""
    import torch
    from speculators.losses import resolve_loss_config

    c, given = CASES[case], inputs(case)
    batch = {name: torch.from_numpy(given[name]) for name in ("hidden_states", "input_ids", "loss_mask")}
    logits: list[Any] = []
    hook = model.lm_head.register_forward_hook(lambda module, args, out: logits.append(out.detach().numpy()))
    record = dict(given)
    with torch.no_grad():
        if c.kind == "mtp":
            _, loss, _ = model(**batch, step_weights=list(MTP_WEIGHTS))
            record |= {"loss_ce": loss.numpy(), "embed_tokens": _array(model.embed_tokens.weight)}
            record["lm_head"] = _array(model.lm_head.weight)
        else:
            # The verifier's logits are an input of the case: its norm and output layer pass them on.
            model.verifier_norm = torch.nn.Identity()
            model.verifier_lm_head = torch.nn.Identity()
            batch |= {
                "document_ids": torch.from_numpy(given["document_ids"]),
                "verifier_last_hidden_states": torch.from_numpy(given["targets"]),
                "loss_mask": batch["loss_mask"].bool() if c.kind == "eagle3" else batch["loss_mask"],
            }
            losses = [("loss_kl", "kl_div"), ("loss_ce", "ce")]
            if c.kind in BLOCKS:  # the verifier's tables, which are not saved
                record["embed_tokens"] = _array(model.embed_tokens.weight)
                record |= {} if model.use_draft_vocab else {"lm_head": _array(model.lm_head.weight)}
            if c.kind in ("dspark", "dflash2"):
                losses = []
                record |= (_walked if c.kind == "dspark" else _selected)(model, batch)
            for name, loss_name in losses + ([("loss_dpace", "ce")] if c.kind == "dflash" else []):
                logits.clear()
                config = resolve_loss_config(loss_name, "eager")
                if c.kind == "eagle3":
                    batch["loss_mask"] = torch.from_numpy(given["loss_mask"]).bool()
                    _, loss, _ = model(**batch, ttt_steps=STEPS, ttt_step_loss_decay=DECAY, loss_config=config)
                elif c.kind == "dflash":
                    weights = dict(per_position_loss_weight="dpace", dpace_alpha=ALPHA) if "dpace" in name else {}
                    options = dict(gamma=GAMMA, max_anchors=ANCHORS, loss_config=config, **weights)
                    sample, loss = _anchored(model, {**batch, **options})
                    record |= sample
                    if not model.config.sample_from_anchor:  # the anchor's own place predicts nothing
                        size = model.block_size
                        logits[0] = np.delete(logits[0], np.arange(0, logits[0].shape[1], size), axis=1)
                else:
                    sample, loss = _sampled(model, {**batch, "num_depths": DEPTHS, "loss_config": config})
                    record |= sample
                record[name] = loss.numpy()
    hook.remove()
    if c.kind in ("dspark", "dflash2"):  # those of the output layer lack what the token before adds
        return record
    return record | {f"logits_{i}": step for i, step in enumerate(logits)}


def record_case(case: str, directory: Path) -> None:
    """Writes what speculators saves and answers to `directory`/case, which is replaced."""
    out = directory / case
    shutil.rmtree(out, ignore_errors=True)
    model = build(case)
    model.save_pretrained(out)
    for file in out.glob("*.py"):  # transformers adds the sources of classes that it does not have
        file.unlink()
    arrays = {n: np.ascontiguousarray(a) for n, a in answers(case, model).items()}
    save_file(arrays, out / "record.safetensors")


def read_back(kind: str, directory: Path) -> Any:
    """The model that speculators' own from_pretrained makes of a directory, with eager attention."""
    model_class, config_class = _classes(kind)
    config = config_class.from_pretrained(directory)
    config.transformer_layer_config._attn_implementation = "eager"
    return model_class.from_pretrained(directory, config=config).eval()


def _array(parameter: Any) -> np.ndarray:
    return parameter.detach().numpy().copy()


def _classes(kind: str) -> tuple[Any, Any]:
    if kind == "mtp":
        from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig

        return MTPDraftModel, MTPSpeculatorConfig
    if kind == "dflash":
        from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig

        return DFlashDraftModel, DFlashSpeculatorConfig
    if kind == "dspark":
        from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig

        return DSparkDraftModel, DSparkSpeculatorConfig
    if kind == "dflash2":
        from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig

        return DFlash2DraftModel, DFlash2SpeculatorConfig
    if kind == "peagle":
        from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig

        return PEagleDraftModel, PEagleSpeculatorConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    return Eagle3DraftModel, Eagle3SpeculatorConfig


def _sampled(model: Any, batch: dict[str, Any]) -> tuple[dict[str, np.ndarray], Any]:
    """P-EAGLE's forward with the positions and depths that it drew, the same for every call."""
    import torch
    from speculators.models.peagle import core

    drawn: dict[str, np.ndarray] = {}
    original = core.generate_cod_sample_indices

    def watched(*args: Any, **kwargs: Any) -> Any:
        anchor_pos, depth = original(*args, **kwargs)
        drawn.update(anchor_pos=anchor_pos.numpy(), depth=depth.numpy())
        return anchor_pos, depth

    core.generate_cod_sample_indices = watched
    try:
        torch.manual_seed(0)
        _, loss, _ = model(**batch)
    finally:
        core.generate_cod_sample_indices = original
    return drawn, loss


def _anchored(model: Any, batch: dict[str, Any]) -> tuple[dict[str, np.ndarray], Any]:
    """DFlash's forward with the anchors that it drew, the same for every call."""
    import torch
    from speculators.models.dflash import core

    drawn: dict[str, np.ndarray] = {}
    original = core.select_anchors

    def watched(*args: Any, **kwargs: Any) -> Any:
        anchors, valid = original(*args, **kwargs)
        assert bool(valid.all())
        drawn.update(anchor_positions=anchors.numpy())
        return anchors, valid

    core.select_anchors = watched
    try:
        torch.manual_seed(0)
        _, loss, _ = model(**batch)
    finally:
        core.select_anchors = original
    return drawn, loss


def _walked(model: Any, batch: dict[str, Any]) -> dict[str, np.ndarray]:
    """DSpark's logits and confidences at the places that predict, its anchors, and its loss without and with both."""
    from speculators.losses import resolve_loss_config
    from speculators.models.dspark import core

    record: dict[str, np.ndarray] = {}
    original = core.compute_metrics

    def watched(logits: Any, targets: Any, confidence: Any, *args: Any, **kwargs: Any) -> Any:
        drafted = np.arange(logits.shape[1]) % model.block_size >= (not model.config.sample_from_anchor)
        record.update(logits_0=logits.numpy()[:, drafted], confidence=confidence.numpy()[:, drafted])
        return original(logits, targets, confidence, *args, **kwargs)

    core.compute_metrics = watched
    config = resolve_loss_config(json.dumps({"ce": CE, "tv": TV}), "eager")
    options = dict(gamma=GAMMA, max_anchors=ANCHORS, loss_config=config, tv_loss_fn=config["tv"][0])
    try:
        for name, alpha in (("loss_draft", 0.0), ("loss_whole", 1.0)):
            sample, loss = _anchored(model, {**batch, **options, "confidence_head_alpha": alpha})
            record |= {**sample, name: loss.numpy()}
    finally:
        core.compute_metrics = original
    return record


def _selected(model: Any, batch: dict[str, Any]) -> dict[str, np.ndarray]:
    """DFlash 2's logits, candidates and scores at the places that predict, its anchors and its losses."""
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash2 import core

    record: dict[str, np.ndarray] = {}
    original = core.compute_metrics

    def watched(**kwargs: Any) -> Any:
        places = np.arange(kwargs["loss_mask"].shape[1]) % model.block_size
        drafted = places >= (not model.config.sample_from_anchor)
        names = {"unary_logits": "logits_0", "candidate_logits": "logits_1", "training_candidate_ids": "candidates"}
        record.update({ours: kwargs[theirs].numpy()[:, drafted] for theirs, ours in names.items()})
        return original(**kwargs)

    core.compute_metrics = watched
    weights = dict(per_position_loss_weight="dpace", dpace_alpha=ALPHA)
    try:
        for name, loss, options in (("loss_kl", "kl_div", {}), ("loss_ce", "ce", {}), ("loss_dpace", "ce", weights)):
            settings = dict(gamma=GAMMA, max_anchors=ANCHORS, loss_config=resolve_loss_config(loss, "eager"))
            settings["tv_loss_fn"] = resolve_loss_config("tv", "eager")["tv"][0]
            sample, value = _anchored(model, {**batch, **settings, **options, "selector_loss_alpha": SELECTED})
            record |= {**sample, name: value.numpy()}
    finally:
        core.compute_metrics = original
    return record


def main() -> None:
    """Records every case, or those that are named, then writes the versions."""
    import torch

    torch.set_num_threads(1)
    for case in sys.argv[1:] or CASES:
        record_case(case, VECTORS)
    names = ("speculators", "torch", "transformers")
    write_json(VERSIONS, {name: importlib.metadata.version(name) for name in names})
    size = sum(p.stat().st_size for p in VECTORS.rglob("*") if p.is_file()) / 1000
    print(f"{VECTORS}: {len(CASES)} cases, {size:.0f} kB, {json.dumps(json.loads(VERSIONS.read_text()))}")


if __name__ == "__main__":
    main()
