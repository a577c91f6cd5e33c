"""The proof by the compilers: its gates catch what they are for, and the subset of every change passes."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import stat
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxspec.runtime.sharding import Placement
from pallas_kernels import compilers
from pallas_kernels.aot import __main__ as command
from pallas_kernels.aot import ptx, targets, worker
from pallas_kernels.aot.collectives import collectives
from pallas_kernels.aot.programs import Program, known, provider
from pallas_kernels.aot.table import Outcome, header, line
from pallas_kernels.aot.targets import TARGETS, Target
from pallas_kernels.tree_attention.cases import POOL_BYTES

#: Operations that the gate leaves to `make aot` and `make test-all`.
LATER = {"quantised_round", "experts_round", "placed_round"}
#: And those of which the gate compiles GPUs' alone: there XLA's simplifications come before it partitions.
GPUS_FIRST = {"sharded_round", "mixed_round"}
ROOT = Path(__file__).resolve().parent.parent.parent
#: An environment beside the tests', made by `make test`.
COMPILERS = ROOT / ".venv" / "aot" / "bin" / "python"
HERE = Target("here", "tpu", "tpu", "", ())
POOL = jax.ShapeDtypeStruct((256, 1024), jnp.float32)
PASSED = Outcome("h100", "op", "case", "FAIL", temp_bytes=100, alias_bytes=4096, spill_bytes=8)
LIMITED = Program("op", "case", lambda: None, max_temp_bytes=100, limit="rows", in_place_bytes=4096, kernels=("k",))

#: What ptxas -v of CUDA 12.9 prints of two kernels.
REPORT = """\
ptxas info    : 11 bytes gmem
ptxas info    : Compiling entry function 'rejection_sampling' for 'sm_90a'
ptxas info    : Function properties for rejection_sampling
    24 bytes stack frame, 36 bytes spill stores, 40 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 24 bytes cumulative stack size
ptxas info    : Compile time = 4210.334 ms
ptxas info    : Compiling entry function 'loop_add_fusion' for 'sm_90a'
ptxas info    : Function properties for loop_add_fusion
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 0 barriers
"""


def program(function: Callable[..., Any], limit: int, in_place: int = 0, **options: Any) -> Program:
    """A program for the CPU's compiler."""
    lower = lambda: jax.jit(function, **options).trace(POOL).lower()
    return Program("op", "case", lower, max_temp_bytes=limit, limit="a row", in_place_bytes=in_place)


# Gates.


@pytest.mark.parametrize(
    ("changed", "kernels", "message"),
    [
        ({}, ["k", "other"], None),
        (dict(temp_bytes=101), ["k"], "101 temp bytes, allowed are 100 (rows)"),
        (dict(vmem_bytes=101), ["k"], "an array of 101 bytes in VMEM, allowed are 100 (rows)"),
        (dict(alias_bytes=4095), ["k"], "4095 bytes are updated in place, donated are 4096"),
        (dict(spill_bytes=worker.MAX_SPILL_BYTES + 1), ["k"], "401 bytes of spills, allowed are 400"),
        ({}, ["other"], "the executable holds no kernel k"),
    ],
)
def test_each_fault_fails_with_both_values(changed: dict[str, int], kernels: list[str], message: str | None):
    found = worker.faults(LIMITED, dataclasses.replace(PASSED, **changed), kernels)
    assert found == ([message] if message else [])


def test_collectives_are_counted_and_bounded():
    hlo = """\
  %all-reduce.1 = f32[2,4,128]{2,1,0} all-reduce(%x), channel_id=1, to_apply=%add
  %all-gather-start = ((f32[1]{0}, s32[64]{0}), (f32[2]{0}, s32[128]{0})) all-gather-start(%a, %b), channel_id=5
  %all-gather-done = (f32[2]{0}, s32[128]{0}) all-gather-done(%all-gather-start)
  %permute = bf16[3,5]{1,0} collective-permute(%y), source_target_pairs={{0,1}}
  %mask = pred[7]{0} all-gather(%z), dimensions={0}
  %two = (f32[2,2]{1,0}, f32[4]{0}) all-reduce-start(%a, %b), channel_id=6, to_apply=%add
  %newer = ((f32[2,2]{1,0}), f32[2,2]{1,0}) all-reduce-start(%a), channel_id=7, to_apply=%add"""
    found = collectives(hlo)
    assert [one.num_bytes for one in found] == [4096, 8 + 512, 30, 7, 16 + 16, 16]
    kinds = ["all-reduce", "all-gather", "collective-permute", "all-gather", "all-reduce", "all-reduce"]
    assert [one.kind for one in found] == kinds
    assert found[1].shapes == ((2,), (128,))
    bound = dataclasses.replace(LIMITED, max_collective_bytes=4096, max_collectives=1)
    assert worker.faults(bound, PASSED, ["k"], found[:1]) == []
    several = ["4103 bytes of collectives, allowed are 4096", "2 collectives, allowed are 1"]
    assert worker.faults(bound, PASSED, ["k"], [found[0], found[3]]) == several


def test_arrays_that_a_tpu_brings_into_vmem_are_found():
    hlo = """\
  %logits = f32[16,5,128256]{2,0,1:T(8,128)} parameter(0), sharding={replicated}
  %copy-start = (f32[16,5,128256]{2,0,1:T(8,128)S(1)}, f32[16,5,128256]{2,0,1:T(8,128)}, u32[]{:S(2)}) copy-start(%x)
  %small = bf16[64,8,128]{2,1,0:T(8,128)(2,1)S(1)} fusion(%q), kind=kLoop
  %mask = pred[16,5,128256]{2,1,0:T(8,128)(4,1)S(1)} fusion(%logits), kind=kLoop"""
    assert worker.largest_in_vmem(hlo) == 16 * 5 * 128256 * 4
    assert worker.largest_in_vmem("\n".join(hlo.splitlines()[2:3])) == 64 * 8 * 128 * 2
    assert worker.largest_in_vmem(hlo.splitlines()[0]) == 0


def test_an_update_in_place_passes():
    update = lambda pool: pool.at[3].set(1.0)
    outcome = worker.examine(program(update, 4096, in_place=1 << 20, donate_argnums=0), HERE)
    assert outcome.verdict == "PASS" and outcome.reason == "", outcome
    assert outcome.alias_bytes == 1 << 20 and outcome.temp_bytes is not None and outcome.temp_bytes < 4096


def test_a_pool_that_is_not_donated_fails():
    outcome = worker.examine(program(lambda pool: pool.at[3].set(1.0), 4096, in_place=1 << 20), HERE)
    assert outcome.verdict == "FAIL" and "0 bytes are updated in place, donated are 1048576" in outcome.reason


def test_a_copy_of_the_pool_fails():
    twice = lambda pool: (jnp.sort(pool, axis=0) @ pool.T).sum()
    outcome = worker.examine(program(twice, 1 << 18), HERE)
    assert outcome.verdict == "FAIL" and outcome.reason.endswith("temp bytes, allowed are 262144 (a row)")


def test_what_does_not_compile_fails_with_the_error():
    def broken() -> Any:
        raise ValueError("an alignment of 8 is\n   needed, got 5")

    outcome = worker.examine(dataclasses.replace(LIMITED, lower=broken), HERE)
    assert (outcome.verdict, outcome.reason) == ("FAIL", "ValueError: an alignment of 8 is needed, got 5")


def test_a_refused_case_is_not_compiled():
    def never() -> Any:
        raise AssertionError

    outcome = worker.examine(dataclasses.replace(LIMITED, lower=never, refusal="at most 4 nodes, got 5"), HERE)
    assert (outcome.verdict, outcome.reason) == ("REFUSED", "at most 4 nodes, got 5")


# What is compiled.


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meshes of this machine's virtual devices in place of absent ones."""
    mesh = lambda _, devices=1, axis="x": Mesh(np.asarray(jax.devices()[:devices]), (axis,))
    monkeypatch.setattr(Target, "mesh", mesh)
    monkeypatch.setattr(type(jax.devices()[0]), "num_cores", 2, raising=False)


@pytest.mark.parametrize("target", ["h100", "v5p"])
@pytest.mark.parametrize("op", known())
@pytest.mark.usefixtures("devices")
def test_every_operation_describes_its_programs(op: str, target: str):
    described = list(provider(op)(TARGETS[target]))
    names = [p.name for p in described]
    assert names and len(set(names)) == len(names) and {p.op for p in described} == {op}
    quick = op not in LATER and (target == "h100" or op not in GPUS_FIRST)
    assert any(p.quick for p in described) == quick and not all(p.quick for p in described)
    for p in described:
        assert p.refusal is None, f"{p.name}: {p.refusal}"
        assert p.kernels or op == "kv_commit"
        # Nothing near a copy of the pool fits below the limit; of experts of many rows logits are half of that, and of
        # NVFP4 weights are expanded, some at a time.
        least = 8 if op == "experts_round" or "nvfp4" in p.name else 16
        assert 0 < p.max_temp_bytes < (p.in_place_bytes or POOL_BYTES) / least
        assert p.in_place_bytes > 4e9 or op not in ("kv_commit", "round")
        assert p.max_vmem_bytes is None or op in LATER


def test_an_unknown_operation():
    with pytest.raises(ValueError, match=r"op must be one of \('tree_attention', .*, got 'attention'"):
        provider("attention")
    with pytest.raises(ValueError, match="op 'no.such:thing': no.such:thing cannot be imported"):
        provider("no.such:thing")


# ptxas.


def test_registers_and_spills_are_read():
    assert ptx.parse(REPORT) == [("rejection_sampling", 255, 76), ("loop_add_fusion", 12, 0)]


@pytest.mark.parametrize(
    ("entry", "belongs"),
    [
        ("tree_attention", True),
        ("tree_attention_3", True),
        ("tree_attention_merge", True),
        ("loop_tree_attention", False),
    ],
)
def test_entries_of_a_kernel(entry: str, belongs: bool):
    assert ptx.belongs(entry, "tree_attention") is belongs


def test_only_a_kernels_own_modules_are_assembled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module = ".version 8.8\n.target {arch}\n.visible .entry {entry}(\n  .param .u64 x\n)"
    for i, (entry, arch) in enumerate([("k", "sm_90a"), ("loop_fusion", "sm_90a"), ("k_2", "sm_80")]):
        (tmp_path / f"module_0001.jit_f.{i}.ptx").write_text(module.format(entry=entry, arch=arch))
    (tmp_path / "module_0001.jit_f.9.ptx").write_text("")
    log, assembler = tmp_path / "calls", tmp_path / "ptxas"
    assembler.write_text(
        f'#!/bin/sh\necho "$*" >> {log}\nprintf 12345678 > "$5"\n'
        "name=$(sed -n 's/.*entry \\(.*\\)(/\\1/p' \"$3\")\n"
        "echo \"ptxas info : Compiling entry function '$name' for 'x'\" >&2\n"
        'echo "8 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads" >&2\n'
        'echo "ptxas info : Used 64 registers" >&2\n'
    )
    assembler.chmod(assembler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(ptx, "find_ptxas", lambda: str(assembler))
    assert ptx.usage(tmp_path, ["k"]) == [ptx.Usage("k", 64, 12, 8), ptx.Usage("k_2", 64, 12, 8)]
    assert [call.split()[1] for call in log.read_text().splitlines()] == ["-arch=sm_90a", "-arch=sm_80"]
    assembler.write_text("#!/bin/sh\necho 'ptxas fatal : no such thing' >&2\nexit 255\n")
    with pytest.raises(RuntimeError, match=r"ptxas refuses module_0001.jit_f.0.ptx: ptxas fatal : no such thing"):
        ptx.usage(tmp_path, ["k"])


# The command.


def test_missing_compilers_name_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(targets, "_installed", lambda module: module == "jax_cuda12_plugin")
    assert command.main(["--target", "v5e", "--target", "h100"]) == 2
    errors = capsys.readouterr().err
    assert "libtpu is not installed, which holds a part of the compiler for v5e" in errors
    assert "nvidia-cuda-nvcc-cu12 is not installed" in errors and "jax-cuda12-plugin is" not in errors
    assert 'pip install -e ".[aot]"' in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "h300"], "invalid choice: 'h300'"),
        (["--op", "attention"], "--op must be one of tree_attention, .* got 'attention'"),
        (["--case", "("], r"--case must be a regular expression, got '\('"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        command.main(arguments)
    assert caught.value.code == 2 and re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(("verdicts", "status"), [(["PASS"], 0), (["PASS", "FAIL"], 1), (["REFUSED"], 1), ([], 1)])
def test_the_exit_status(verdicts: list[str], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = [dataclasses.asdict(dataclasses.replace(PASSED, verdict=verdict)) for verdict in verdicts]
    monkeypatch.setattr(targets, "_installed", lambda _: True)
    monkeypatch.setattr(command, "compile_for", lambda *_: rows)
    written = tmp_path / "proof.json"
    assert command.main(["--target", "h100", "--json", str(written)]) == status
    assert json.loads(written.read_text())["outcomes"] == rows


def test_a_line_of_the_table():
    outcome = dataclasses.replace(PASSED, lower_seconds=0.25, compile_seconds=12.5, temp_bytes=3 << 19, registers=168)
    cells = line(dataclasses.replace(outcome, reason="because")).split()
    assert cells == ["op", "case", "0.25", "12.50", "1.5M", "-", "-", "4.0K", "-", "168", "8", "FAIL", "because"]
    assert len(header().split()) == 15  # "lower s", "compile s" and "in place" are two words each


# With the compilers.


def run(target: str, *arguments: str, **environment: str) -> tuple[int, str]:
    """Runs the command in a process of its own; skips where the target's compiler is not installed."""
    python = COMPILERS if COMPILERS.exists() else sys.executable
    if python is not COMPILERS and (missing := TARGETS[target].missing()):
        pytest.skip(f"{', '.join(missing)}: not installed; `make test` runs this, with the extra 'aot' in {COMPILERS}")
    done = subprocess.run(
        [python, "-m", "pallas_kernels.aot", "--target", target, *arguments],
        cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=3600,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


#: What is compiled for a target: all, or each mode of the kernels and one round. A TPU's is of four devices and long
#: page tables, which TPUs hold in scalar memory; a GPU's holds both kernels, beside a plain round of two devices. A
#: GPU's compiler takes for rejection half as long as for all the rest.
ALL: tuple[str, ...] = ()
OTHERS = ("1b-short", "8b-128k-short|chain4-b16-rejection")
TPU, GPU = (("--subset", "ci", "--case", f"^(?!8b-tp4|{other})") for other in OTHERS)
EVERY = [pytest.param(t, ALL, marks=pytest.mark.exhaustive("every program")) for t in ("v5e", "v6e", "h100")]


@pytest.mark.timeout(3700)
@pytest.mark.parametrize(("target", "cases"), [("v5e", TPU), ("h100", GPU), *EVERY])
def test_every_operation_compiles(target: str, cases: tuple[str, ...], tmp_path: Path):
    written = tmp_path / "proof.json"
    status, printed = run(target, *cases, "--json", str(written))
    assert status == 0, printed
    outcomes = json.loads(written.read_text())["outcomes"]
    later = LATER if target == "h100" else LATER | GPUS_FIRST
    assert {o["op"] for o in outcomes} == set(known()) - (later if cases else set()) and {
        o["verdict"] for o in outcomes
    } == {"PASS"}
    if target == "h100":
        assert all(0 < o["registers"] <= 255 for o in outcomes if o["op"] != "kv_commit"), printed
    else:
        assert all(o["code_bytes"] > 0 for o in outcomes), printed


@pytest.mark.exhaustive("a compiler more")
def test_no_loop_copies_weights_on_a_tpu_v7x(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Without what `compilers` tells XLA it does, all experts of a layer before a loop over some of them."""
    case = "--op", "experts_round", "--case", "^30b-a3b-b1$"
    status, printed = run("tpu7x", *case)
    assert status == 0, printed
    (tmp_path / "sitecustomize.py").write_text(
        "from pallas_kernels import compilers\ncompilers.options = lambda *_: {}\n"
    )  # fmt: skip
    path = os.pathsep.join([str(tmp_path), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    status, printed = run("tpu7x", *case, PYTHONPATH=path)
    assert status == 1 and "(a sixteenth of a layer's experts in bfloat16)" in printed, printed


def test_a_devices_own_options_come_with_those_of_a_placement():
    mesh = lambda kind: types.SimpleNamespace(
        devices=np.asarray([types.SimpleNamespace(platform="tpu", device_kind=kind)], object)
    )
    more = ("xla_more", True)
    for kind, own in (("TPU7x", [*compilers.options("tpu", "TPU7x").items()]), ("TPU v6 lite", [])):
        placement = Placement(mesh(kind), options=(more,))  # pyright: ignore[reportArgumentType]
        assert placement.compiler_options == (*own, more) and bool(own) == (kind == "TPU7x")


BAD = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from pallas_kernels.aot.programs import Program, lowering

def programs(target):
    mesh = target.mesh()
    placed = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    pool, new = placed(1 << 19, 512), placed(8, 512)
    shift = lambda pool, new: (jnp.roll(pool, 1, axis=1).at[:8].set(new), pool.sum())
    write = lambda pool, new: pool.at[jnp.arange(8) * 7].set(new)
    for name, function in (("copies", shift), ("in-place", write)):
        lower = lowering(function, (pool, new), target, mesh, donate_argnums=0)
        yield Program("own", name, lower, 1 << 20, "the new rows", in_place_bytes=1 << 30)
    little = placed(1 << 13, 512)
    twice = lambda pool: jax.lax.optimization_barrier(jnp.roll(pool, 1, axis=1)) @ pool[:512].T
    yield Program("own", "copies-little", lowering(twice, (little,), target, mesh), 1 << 20, "the new rows")
    yield Program("own", "no-kernel", lower, 1 << 20, "the new rows", kernels=("tree_attention",))
"""


@pytest.mark.parametrize("target", ["v5e", "h100"])
def test_the_compilers_show_a_copy_and_a_missing_kernel(target: str, tmp_path: Path):
    """A provider from elsewhere: what it should not do fails by name, what it may do passes."""
    (tmp_path / "own_programs.py").write_text(BAD)
    written = tmp_path / "proof.json"
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    status, printed = run(target, "--op", "own_programs:programs", "--json", str(written), PYTHONPATH=path)
    assert status == 1, printed
    found = {o["case"]: o for o in json.loads(written.read_text())["outcomes"]}
    assert {name: o["verdict"] for name, o in found.items()} == {
        "copies": "FAIL", "in-place": "PASS", "copies-little": "FAIL", "no-kernel": "FAIL",
    }, printed  # fmt: skip
    assert "temp bytes, allowed are 1048576 (the new rows)" in found["copies"]["reason"]
    assert "allowed are 1048576 (the new rows)" in found["copies-little"]["reason"]
    assert found["no-kernel"]["reason"] == "the executable holds no kernel tree_attention"
