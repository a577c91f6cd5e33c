"""A whole cycle of the loop that trains a server's drafter: server, trainer and loop as their commands start them."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxspec.checkpointing import hf
from jaxspec.drafters.directories import save_drafter
from jaxspec.speculation.drafters.eagle3_head import Eagle3Config, Eagle3Head
from serve.client import Client

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive("a server that learns; test_learn.py has the loop's decisions")]

ROOT = Path(__file__).resolve().parents[2]


def new_head(target_dir: Path, out: Path) -> None:
    """A random head over the whole vocabulary."""
    target = hf.load_model(target_dir)
    cfg = target.config
    head = Eagle3Head(
        Eagle3Config(
            hidden_size=32, target_hidden_size=cfg.hidden_size, intermediate_size=48, num_heads=4, num_kv_heads=2,
            head_dim=8, vocab_size=cfg.vocab_size, draft_vocab_size=cfg.vocab_size, aux_layer_ids=(0, 1, 2),
            fc_norm=True, norm_output=True,
        ),
        rngs=nnx.Rngs(0),
    )  # fmt: skip
    head.embedding.set_value(jax.random.normal(jax.random.key(1), head.embedding.shape))
    head.lm_head.kernel.set_value(0.2 * jax.random.normal(jax.random.key(2), head.lm_head.kernel.shape))
    save_drafter(head, out, target=target, dtype=jnp.float32)


def test_a_server_learns_from_what_it_serves(tiny_directory: Path, tmp_path: Path, environment: dict[str, str]):
    """Gathered, trained, through the gate, on trial, served; each prompt has one answer throughout."""
    head, ring, log = tmp_path / "head", tmp_path / "ring", tmp_path / "log"
    new_head(tiny_directory, head)
    flags = [
        "--model", str(tiny_directory), "--drafter", str(head), "--port", "0", "--metrics-port", "none", "--host",
        "127.0.0.1", "--policy", "static", "--depth", "2", "--max-batch-size", "4", "--max-seq-len", "128",
        "--batch-buckets", "4", "--variants", "sampled", "--prefill-chunk", "16", "--feature-ring", str(ring),
        "--feature-ring-mib", "1", "--withdrawal-seconds", "0",
    ]  # fmt: skip
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "serve", *flags], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors,
            text=True,
        )  # fmt: skip
    done, answers = threading.Event(), dict[str, set[str]]()
    try:
        assert process.stdout is not None
        found = re.search(r":(\d+)", process.stdout.readline())
        assert found is not None, log.read_text()[-2000:]
        address = f"127.0.0.1:{found[1]}"
        assert process.stdout.readline().startswith("serving "), log.read_text()[-2000:]

        def ask(first: int) -> None:
            """Endless traffic: temperature 0 and, with a seed of its own, 0.9."""
            with Client(address) as client:
                for number in itertools.count(first, 4):
                    if done.is_set():
                        return
                    prompt = "".join("abcdefghijkl"[(number * step) % 12] for step in (1, 5, 7))
                    heat = 0.9 * (number % 2)
                    text = client.generate(
                        prompt, temperature=heat, seed=1, max_tokens=60, ignore_eos=True, timeout=60
                    ).text
                    answers.setdefault(f"{prompt} {heat}", set()).add(text)

        with ThreadPoolExecutor(4) as pool:
            traffic = [pool.submit(ask, first) for first in range(4)]
            try:
                loop = subprocess.run([
                    sys.executable, "-m", "serve.learn", "--target", str(tiny_directory), "--drafter", str(head),
                    "--ring", str(ring), "--out", str(tmp_path / "heads"), "--server", address, "--grown-mib", "3",
                    "--trainer", "eagle3", "--cycles", "1", "--trial-seconds", "300", "--", "--steps", "80",
                    "--length", "64", "--batch", "8", "--lr", "5e-3", "--ttt-steps", "2", "--eval-share", "0.2",
                ], cwd=ROOT, env=environment, capture_output=True, text=True)  # fmt: skip
                said = loop.stdout + loop.stderr
                assert loop.returncode == 0 and "head-0001: version 2 is served" in said, said
                with Client(address) as client:
                    info = client.server_info()
                assert (info.drafter_version, info.drafter_trial, info.drafter_rollbacks) == (2, False, 0)
            finally:
                done.set()
            for asked in traffic:
                asked.result()
    finally:
        process.kill()
        process.communicate()
    assert len(answers) >= 12 and {len(texts) for texts in answers.values()} == {1}
