"""python -m jaxspec.quantize: a checkpoint's linear maps in 8 or 4 bits, and what that does to the model.

Writes compressed-tensors' layout, which vLLM, SGLang, transformers and this project read, from the weights alone. Then
both models read the same texts: perplexity, and how often the most likely token is the same.
"""

from __future__ import annotations

from jaxspec import cli

with cli.starting(__name__):
    import argparse
    import dataclasses
    import json
    import shutil
    import sys
    from collections.abc import Iterable, Sequence
    from pathlib import Path
    from typing import Any

    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    from jaxspec.bench.offline import prompts
    from jaxspec.checkpointing import hf
    from jaxspec.checkpointing.quantised import config_of
    from jaxspec.checkpointing.rounding import FORMATS, Format
    from jaxspec.checkpointing.tensors import (
        FLOATS,
        INDEX,
        INTEGERS,
        WEIGHTS,
        read_json,
        read_tensors,
        replace_directory,
        write_json,
        write_safetensors,
    )
    from jaxspec.llm import LLM
    from jaxspec.models import registry
    from jaxspec.models.layers import causal_attention
    from jaxspec.models.layouts import column_blocks
    from jaxspec.names import Advice
    from jaxspec.request import SamplingParams
    from jaxspec.resolve import resolve_model
    from jaxspec.text.tokenizer import Tokenizer

#: Without texts: so many tokens that the model samples after each of so many built-in prompts of code and of prose.
_OWN_TOKENS, _OWN_PROMPTS = 192, 8
_PLACES = Advice("leave the flag out, MODEL comes first and OUT second")
#: What other projects call these flags.
_ELSEWHERE = {
    **dict.fromkeys(("bits", "wbits", "scheme", "quantization", "qformat", "dtype"), "format"),
    **dict.fromkeys(("model", "model_path", "out", "output", "output_dir", "save_path"), _PLACES),
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m jaxspec.quantize", description=(__doc__ or "").split("\n\n")[0], formatter_class=cli.Help
    )
    p.add_argument("model", help='"demo", a Hugging Face directory or a hub id, not quantised')
    p.add_argument("out", type=Path, help="a directory that is made, or that holds no model yet")
    p.add_argument("--overwrite", action="store_true", help="replace a model of one file in `out`")
    p.add_argument("--format", choices=list(FORMATS), required=True, help="int8 and fp8: a scale per output")
    p.add_argument("--output-layer", choices=list(FORMATS), help="that of lm_head (default: it stays as it is)")
    p.add_argument(
        "--ignore", nargs="*",
        help="modules that stay as they are, by their full name (default: lm_head, unless --output-layer is given)",
    )  # fmt: skip
    p.add_argument(
        "--texts", type=Path, nargs="+", help="files to compare on: plain, or JSONL with `text` (default: its own text)"
    )
    p.add_argument("--max-tokens", type=int, default=16384, help="of all texts together, to compare on; 0: no report")
    p.add_argument("--length", type=int, default=512, help="tokens that a model sees at once")
    p.add_argument("--json", type=Path, help="write the report there as well (default: print only)")
    return p


# Writing.


def quantise_directory(
    source: Path, out: Path, form: Format, ignore: Sequence[str] | None = None, output: Format | None = None, *,
    overwrite: bool = False,
) -> tuple[int, int]:  # fmt: skip
    """Writes `source` with its linear maps rounded; returns the bytes of both's tensors.

    Every other tensor and file is the same. The embedding is none of the linear maps.

    Args:
      ignore: modules that stay as they are; None: lm_head, unless `output` says how it is rounded.
      output: how lm_head is rounded.
      overwrite: whether a model of one file in `out` is replaced.

    Raises:
      ValueError: a model that cannot be read or is quantised already, `out` holds a model that is not to be replaced,
        a module to ignore or an output layer that the model lacks, or both of one, or a module that groups do not
        divide.
    """
    config = read_json(source / "config.json")
    if found := config_of(source, config):
        method = found.get("quant_method")
        raise ValueError(f"{source} is quantised already ({method}); start from the checkpoint that it was made of")
    if registry.wraps_text(config):
        raise ValueError(
            f"{source} holds more than a model for text ({config.get('architectures')}), and those are not quantised "
            "here: it can be served as it is"
        )
    _check_out(source, out, overwrite)
    if ignore is None:
        ignore = () if output else ("lm_head",)
    elif output is not None and "lm_head" in ignore:
        raise ValueError("lm_head is to stay as it is (ignore) and to be rounded (output layer); give one of both")
    cfg = hf.load_config(source)
    shapes: dict[str, tuple[int, ...]] = {}
    linear: set[str] = set()
    for weight in registry.weights(nnx.eval_shape(lambda: registry.build(cfg))):
        shapes |= dict(zip(weight.names, weight.shapes, strict=True))
        linear |= set(weight.names) if weight.linear else set()
    if unknown := [name for name in ignore if f"{name}.weight" not in linear | {"lm_head.weight"}]:
        some = [name.removesuffix(".weight") for name in sorted(linear)[:3]]
        raise ValueError(f"ignore names modules that the model lacks: {unknown}; it has e.g. {some}")
    forms = {} if output is None else {"lm_head": output}
    if unknown := [module for module in forms if f"{module}.weight" not in linear]:
        raise ValueError(f"{source} has no {unknown[0]}: its output layer is its embedding, which stays as it is")
    written: dict[str, np.ndarray] = {}
    left, before = [module for module in ignore if module not in forms], 0
    kept = tuple(left)
    with read_tensors(source) as reader, replace_directory(out) as staging:
        for name in reader.names:
            shape = reader.shape(name)
            tensor = reader.get(name, shapes.get(name, shape), (*FLOATS, *INTEGERS))
            before += tensor.nbytes
            module = name.removesuffix(".weight")
            if name in linear and module not in kept:
                written |= forms.get(module, form).tensors(module, tensor)
                continue
            written[name] = tensor
            plain = name not in linear and not name.endswith("embed_tokens.weight")
            if plain and name.endswith(".weight") and len(shape) == 2 and module not in left:
                left.append(module)  # a router, or of a module that rides along: readers shall not look for scales
        for file in sorted(source.iterdir()):
            if file.is_file() and file.name not in (INDEX, WEIGHTS) and file.suffix != ".safetensors":
                shutil.copy(file, staging / file.name)
        write_json(staging / "config.json", {**config, "quantization_config": form.config(left, forms)})
        write_safetensors(staging / WEIGHTS, written)
    return before, sum(tensor.nbytes for tensor in written.values())


def _check_out(source: Path, out: Path, overwrite: bool) -> None:
    """Refuses a directory that would not be found, or that holds weights which are not to be replaced."""
    if str(out) == "demo":
        raise ValueError("'demo' is the built-in model wherever one is loaded; name another directory")
    if out.resolve() == source.resolve():
        raise ValueError(f"{out} is the model itself; name another directory")
    held = sorted(file.name for file in out.glob("*") if file.name == INDEX or file.suffix in (".safetensors", ".bin"))
    if held and not overwrite:
        raise ValueError(f"{out} holds a model already ({held[0]}); name another directory, or give --overwrite")
    if others := [name for name in held if name != WEIGHTS]:  # they would stay, and be read
        raise ValueError(f"{out} holds a model in other files than {WEIGHTS} ({others[0]}); name another directory")


# Comparing.


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a model makes of texts: for every token but each piece's first.

    Attributes:
      losses: negative log-likelihoods in nats. best: the token that it finds most likely.
    """

    losses: np.ndarray
    best: np.ndarray

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.losses.mean()))


def read(directory: Path, pieces: Iterable[np.ndarray], length: int) -> Reading:
    """Runs a model over pieces of at most `length` tokens, each alone."""
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    model = hf.load_model(directory, dtype)
    graph, state = nnx.split(column_blocks(model) if jax.default_backend() == "cpu" else model)

    @jax.jit
    def run(state: Any, tokens_N: jax.Array) -> tuple[jax.Array, jax.Array]:
        merged, positions_1N = nnx.merge(graph, state), jnp.arange(length)[None]
        logits_NV = merged.logits(merged(tokens_N[None], positions_1N, causal_attention)[0])[0]
        likely_N = jnp.take_along_axis(jax.nn.log_softmax(logits_NV[:-1]), tokens_N[1:, None], axis=1)[:, 0]
        return -likely_N, jnp.argmax(logits_NV[:-1], axis=-1)

    parts = []
    for piece in pieces:
        losses, best = run(state, jnp.asarray(np.pad(piece, (0, length - len(piece)))))
        parts.append((np.asarray(losses)[: len(piece) - 1], np.asarray(best)[: len(piece) - 1]))
    return Reading(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def own_text(model: Path) -> list[list[int]]:
    """What a model samples after built-in prompts, the prompts included: of this no other model expects more."""
    starts = [*prompts.CODE[:_OWN_PROMPTS], *prompts.PROSE[:_OWN_PROMPTS]]
    sizes: dict[str, Any] = dict(max_batch_size=len(starts), batch_buckets=(len(starts),), variants=("sampled",))
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=_OWN_TOKENS, ignore_eos=True) for i in range(len(starts))
    ]
    with LLM(model, "none", {"policy": "off"}, progress=False, **sizes) as llm:
        return [[*o.prompt_token_ids, *o.token_ids] for o in llm.generate(starts, params, use_tqdm=False)]


def read_texts(paths: Sequence[Path]) -> list[str]:
    """The texts of files.

    Raises:
      ValueError: an unreadable file, or a line of JSONL without `text`; names it.
    """
    found: list[str] = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        if path.suffix != ".jsonl":
            found.append(text)
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: not valid JSON: {error}") from error
            if not isinstance(row, dict) or not isinstance(row.get("text"), str):
                raise ValueError(f"{path}, line {number}: must be an object with a 'text', got {line[:80]}")
            found.append(row["text"])
    return found


def pieces_of(texts: Iterable[Sequence[int]], length: int, most: int) -> list[np.ndarray]:
    """Texts in pieces of at least 2 and at most `length` tokens, until they are `most` tokens.

    Raises:
      ValueError: there is none.
    """
    cut = [np.asarray(ids[i : i + length], np.int32) for ids in texts for i in range(0, len(ids), length)]
    found: list[np.ndarray] = []
    for piece in cut:
        piece = piece[: most - sum(map(len, found))]
        if len(piece) > 1:
            found.append(piece)
    if not found:
        raise ValueError(f"the texts must have at least 2 tokens together, of at most {most}")
    return found


def compare(model: Path, out: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The report of both directories."""
    if args.texts is None:
        texts = own_text(model)
    else:
        tokenizer = Tokenizer.from_directory(model)
        texts = [tokenizer.encode(text) for text in read_texts(args.texts)]
    length = min(args.length, hf.load_config(model).max_position_embeddings)
    pieces = pieces_of(texts, length, args.max_tokens)
    one, other = read(model, pieces, length), read(out, pieces, length)
    return {
        "tokens": len(one.losses),
        "perplexity": one.perplexity,
        "perplexity_quantised": other.perplexity,
        "greedy_agreement": float((one.best == other.best).mean()),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    args = cli.parse(parser(), argv, _ELSEWHERE)
    try:
        model = resolve_model(args.model)
        # Before anything is written: whether the report can be made, and kept.
        if args.length < 2:
            raise ValueError(
                f"--length must be at least 2 tokens, the first of which nothing predicts, got {args.length}"
            )
        if args.json is not None and not args.json.absolute().parent.is_dir():
            raise ValueError(
                f"--json {args.json} cannot be written: there is no directory {args.json.absolute().parent}"
            )
        if args.texts is not None:
            read_texts(args.texts)
        output = None if args.output_layer is None else FORMATS[args.output_layer]
        before, after = quantise_directory(
            model, args.out, FORMATS[args.format], args.ignore, output, overwrite=args.overwrite
        )
        report: dict[str, Any] = {
            "format": args.format,
            "output_layer": args.output_layer,
            "bytes": before,
            "bytes_quantised": after,
        }
        whole, share = before / 1e6, after / before
        print(f"{args.out}: {after / 1e6:.1f} MB of tensors, {share:.1%} of the {whole:.1f} MB before", flush=True)
        if args.max_tokens > 0:
            what = "each on text that the first one writes" if args.texts is None else "each on the same texts"
            print(f"comparing both models, {what} (--max-tokens 0 leaves it out) ...", file=sys.stderr, flush=True)
            report |= compare(model, args.out, args)
            texts = "its own text" if args.texts is None else "these texts"
            print(
                f"on {report['tokens']} tokens of {texts}: perplexity {report['perplexity_quantised']:.4f}, before "
                f"{report['perplexity']:.4f}; the most likely token is the same "
                f"{100 * report['greedy_agreement']:.2f}% of the time"
            )
        if args.json is not None:
            write_json(args.json, report)
    except (ValueError, OSError) as e:
        print(f"error: {'cannot read or write: ' * isinstance(e, OSError)}{e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    cli.run(main)
