"""A kernel is a folder and a line of the registry: tests, bench and compile proofs find it there."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import pallas_kernels
from pallas_kernels import bench, registry
from pallas_kernels.aot import worker
from pallas_kernels.aot.programs import known, provider
from pallas_kernels.aot.targets import TARGETS, Target
from pallas_kernels.dispatch import Implementation, Operation, static
from pallas_kernels.registry import OPERATIONS, Case, Device, Proof, Suite

LIBRARY = Path(pallas_kernels.__file__).parent


# What every operation is held to, whatever it computes.


def leaves(tree: Any) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def check_cases(suite: Suite) -> None:
    """Cases have names of their own, and draw what they say: other values for another seed, of the same shapes."""
    cases: list[Case[Any, Any]] = [*suite.serving, *suite.coverage, *suite.small]
    names = [case.name for case in cases]
    assert len(set(names)) == len(names) and suite.serving and suite.small
    for case in suite.small[:2]:
        shapes, args, again, other = case.shapes(), case.draw(1), case.draw(1), case.draw(2)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), args) == jax.tree.map(lambda x: (x.shape, x.dtype), shapes)
        same = [np.array_equal(x, y) for x, y in zip(leaves(args), leaves(again), strict=True)]
        assert all(same) and not all(np.array_equal(x, y) for x, y in zip(leaves(args), leaves(other), strict=True))
        assert case.min_bytes(args) > 0


def check_implementations(suite: Suite) -> None:
    """None takes the reference on a CPU, bit for bit; each kernel serves the case; what runs here agrees with it."""
    case = suite.small[0]
    args, ways = case.draw(3), suite.operation.implementations
    run = lambda name: case.specified(jax.jit(lambda args: suite.operation(args, name))(args))
    want = run("reference")
    for got, expected in zip(leaves(run(None)), leaves(want), strict=True):
        np.testing.assert_array_equal(got, expected)
    for name in {"reference", "tpu", "gpu", "interpret"} & set(ways):
        assert suite.operation.resolve(args, name) == name
    if "interpret" in ways:
        for got, expected in zip(leaves(run("interpret")), leaves(want), strict=True):
            np.testing.assert_allclose(got, expected, rtol=3e-5, atol=5e-6)


@pytest.mark.parametrize("name", OPERATIONS)
def test_cases_draw_what_they_say(name: str):
    check_cases(registry.suite(name))


@pytest.mark.parametrize("name", OPERATIONS)
def test_implementations_agree(name: str):
    check_implementations(registry.suite(name))


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_a_folder_and_a_line(name: str):
    folder = LIBRARY / name
    assert {"api.py", "reference.py", "tpu.py", "gpu.py", "cases.py"} <= {path.name for path in folder.glob("*.py")}
    elsewhere = [path for path in LIBRARY.rglob("*.py") if folder not in path.parents]
    naming = {p.name for p in elsewhere if {f'"{name}"', f"pallas_kernels.{name}"} & set(words(p.read_text()))}
    assert naming == {"registry.py"}


def words(text: str) -> list[str]:
    """Quoted words, and imported packages of this library."""
    quoted = [f'"{word}"' for word in text.split('"')[1::2]]
    return [*quoted, *(".".join(word.split(".")[:2]) for word in text.split() if word.startswith("pallas_kernels."))]


# A new operation, known to this module only.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScaleArgs:
    x_N: jax.Array
    times: int = static(default=2)


@dataclasses.dataclass(frozen=True)
class ScaleCase(Case[ScaleArgs, jax.Array]):
    size: int

    def shapes(self) -> ScaleArgs:
        x: Any = jax.ShapeDtypeStruct((self.size,), jnp.float32)
        return ScaleArgs(x, times=3)

    def draw(self, seed: int = 0) -> ScaleArgs:
        return ScaleArgs(jax.random.normal(jax.random.key(seed), (self.size,)), times=3)

    def min_bytes(self, args: ScaleArgs) -> float:
        return 2 * args.x_N.nbytes

    def proof(self, kind: Literal["tpu", "gpu"], device: Device) -> Proof[ScaleArgs]:
        return Proof(self.shapes(), max_temp_bytes=1 << 10, limit="nothing")


SUITE = Suite(
    Operation("scale", {"reference": Implementation(lambda args: args.times * args.x_N)}),
    serving=[ScaleCase("large", 4096, quick=True)],
    coverage=[ScaleCase("odd", 333)],
    small=[ScaleCase("small", 5)],
)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operation in the registry, and this machine's devices in place of absent ones."""
    monkeypatch.setitem(OPERATIONS, "scale", __name__)
    monkeypatch.setattr(Target, "mesh", lambda _: Mesh(np.asarray(jax.devices()[:1]), ("x",)))


@pytest.mark.usefixtures("registered")
def test_a_new_operation_is_held_to_the_same():
    check_cases(registry.suite("scale"))
    check_implementations(registry.suite("scale"))


@pytest.mark.usefixtures("registered")
def test_bench_finds_a_new_operation(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    written = tmp_path / "rows.json"
    command = ["--op", "scale", "--repeats", "1", "--bandwidth", "1", "--json", str(written)]
    assert bench.main(command) == 0
    assert "large" in capsys.readouterr().out
    rows = json.loads(written.read_text())["rows"]
    assert [(row["op"], row["case"], row["implementation"]) for row in rows] == [("scale", "large", "reference")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--case", "("], "--case must be a regular expression, got '('"),
        (["--case", "small"], "--case 'small' matches none of ['large']"),
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--bandwidth", "-1"], "--bandwidth must be above 0, got -1"),
        (["--implementation", "cuda"], "--implementation must be of ['reference'"),
        (["--json", "/no/such/rows.json"], "--json '/no/such/rows.json': its directory does not exist"),
    ],
)
@pytest.mark.usefixtures("registered")
def test_bench_refuses_what_it_cannot_measure_before_it_does(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        bench.main(["--op", "scale", *arguments])
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "") and message in err and err.count("\n") == 1


@pytest.mark.usefixtures("registered")
def test_compile_proofs_find_a_new_operation():
    assert known()[:3] == ("tree_attention", "rejection_sampling", "scale") and "round" in known()[3:]
    for target in ("v5e", "h100"):
        described = list(provider("scale")(TARGETS[target]))
        assert [(p.op, p.name, p.quick, p.kernels) for p in described] == [
            ("scale", "large", True, ()), ("scale", "odd", False, ()),
        ]  # fmt: skip
    platform: Any = "cpu"
    here = Target("here", "tpu", platform, "", ())
    assert {worker.examine(p, here).verdict for p in provider("scale")(here)} == {"PASS"}
