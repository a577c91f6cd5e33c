"""The import rules: what each part may know, read from the sources, and what an import costs."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jaxspec.drafters import registry

ROOT = Path(__file__).resolve().parent.parent
DEVICE_LIBRARIES = {"jax", "jaxlib", "flax", "optax", "orbax", "numpy", "ml_dtypes", "safetensors", "torch"}
HOST_PURE = {
    "names",
    "config",
    "request",
    "tier",
    "sizes",
    "events",
    "stats",
    "adaptive",
    "scheduling",
    "traffic",
    "laps",
}
#: Host-pure parts that may use NumPy: what is asked of every row, once a step, is asked of arrays.
COUNTS_IN_ARRAYS = {"scheduling", "adaptive"}
#: Parts of jaxspec (modules or packages) and the other parts that they may import.
EVERYONE = {"config", "request", "tier", "sizes", "names"}
ALLOWED = {
    "tier": set(),
    "sizes": set(),
    "names": set(),
    "request": {"names"},
    "config": {"tier", "adaptive", "names"},
    "traffic": {"request"},
    "remembered": set(),
    "ringfiles": set(),
    "rowfile": set(),
    "clusters": set(),
    "writer": EVERYONE | {"adaptive", "assemble", "clusters", "drafters", "events"},
    "adaptive": {"tier", "names"},
    "scheduling": {"request", "sizes"},
    "models": set(),
    "cache": {"models"},
    "speculation": {"tier", "sizes", "models", "cache"},
    "laps": set(),
    "runtime": EVERYONE | {"adaptive", "scheduling", "models", "speculation", "cache", "laps"},
    "checkpointing": {"models", "speculation"},
    "drafters": EVERYONE | {"models", "speculation", "checkpointing"},
    "hybrids": {"config", "speculation"},
    "text": {"checkpointing", "names"},
    "events": {"request"},
    "stats": set(),
    "facts": {"request", "sizes", "text"},
    "output": {"request", "facts", "text"},
    "reader": {"request", "tier", "facts", "output", "runtime", "laps"},
    "live": EVERYONE | {"adaptive", "facts", "output", "scheduling", "text"},
    "watch": {"adaptive", "runtime", "scheduling", "tier"},
    "warming": {"adaptive", "runtime"},
    "deciding": {"adaptive", "runtime"},
    "swapping": {"adaptive", "runtime", "tier"},
    "engine": EVERYONE
    | {"adaptive", "scheduling", "runtime", "text", "traffic", "events", "stats", "facts", "output", "reader"}
    | {"live", "watch", "warming", "laps", "remembered", "swapping", "deciding"},
    "train": EVERYONE
    | {"models", "speculation", "checkpointing", "drafters", "cache", "text", "cli", "ringfiles"}
    | {"clusters", "rowfile", "resolve"},
    "cli": {"names"},
    "fitting": EVERYONE | {"models", "speculation"},
    "defaults": EVERYONE | {"models", "scheduling", "speculation", "fitting"},
    "resolve": {"checkpointing", "drafters", "names"},
    "choosing": EVERYONE | {"adaptive", "defaults", "drafters", "models"},
    "alike": {"config", "runtime"},
    "loading": EVERYONE | {"models", "speculation", "drafters", "fitting", "runtime"},
    "assemble": EVERYONE
    | {"adaptive", "scheduling", "runtime", "models", "speculation", "checkpointing", "drafters", "text"}
    | {"facts", "engine", "defaults", "fitting", "hybrids", "remembered", "ringfiles"}
    | {"resolve", "choosing", "loading", "alike"},
    "shared": EVERYONE | {"engine", "events"},
    "prompts": {"request", "names"},
    "arguments": {"adaptive", "config", "drafters", "names", "request"},
    "prepared": {"engine", "prompts", "request", "text"},
    "llm": EVERYONE
    | {"adaptive", "arguments", "assemble", "engine", "events", "prepared", "prompts", "shared", "stats", "text"},
    "async_llm": EVERYONE | {"engine", "events", "llm", "prepared", "prompts", "shared", "text"},
    "chat": {"events", "llm", "request", "text"},
}
FRONTS = {"generate", "batch", "quantize", "bench", "__init__", "__main__"}
#: Rooms of serve (packages, and the modules on top) and the other rooms that they may import.
SERVE = {
    "config": set(),
    "proto": set(),
    "client": {"proto"},
    "core": {"config"},
    "telemetry": {"core"},
    "api": {"config", "core", "telemetry", "proto"},
    "vllm": {"config", "core", "api"},
    "checks": {"config"},
    "ports": set(),
    "app": {"checks", "ports", "config", "core", "telemetry", "api", "vllm", "proto"},
    "follower": {"checks", "ports", "config", "telemetry", "api", "app"},
    "__main__": {"ports", "config", "core", "telemetry", "app", "follower"},
    "openai": {"config", "ports", "__main__"},
    "learn": {"client"},
}
ENGINE_PARTS = (
    "jaxspec.assemble", "jaxspec.llm", "jaxspec.engine", "jaxspec.events", "jaxspec.adaptive", "jaxspec.writer",
)  # fmt: skip
#: Commands of training that run the engine; no other module of training may.
ENGINE_COMMANDS = {"train/data/regenerate.py", "train/run/evaluate.py"}


def part_of(path: Path) -> str:
    relative = path.relative_to(ROOT / "jaxspec")
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


@functools.cache
def imports(path: Path) -> list[str]:
    """Every module that a file imports, at whatever depth of its code; relative imports are refused."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            # `from jaxspec.models import registry` names a module by its last part.
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def sources(package: str) -> list[Path]:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, package
    return files


JAXSPEC = sources("jaxspec")


def test_traced_code_lies_where_stored_executables_look():
    """A stored executable is found by a digest of these sources: what they import is one of them."""
    source = (ROOT / "jaxspec/runtime/executables.py").read_text()
    (line,) = [node for node in ast.parse(source).body if ast.unparse(node).startswith("SOURCES = ")]
    assert isinstance(line, ast.Assign)
    traced = ast.literal_eval(line.value)
    for name in traced:
        path = ROOT / name.replace(".", "/")
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]:
            for imported in imports(file):
                if imported.startswith(("jaxspec.", "pallas_kernels.")):
                    assert f"{imported}.".startswith(tuple(f"{root}." for root in traced)), (file, imported)


def test_imports_run_downward_only():
    wrong = []
    for path in JAXSPEC:
        part = part_of(path)
        if part in FRONTS:
            continue
        assert part in ALLOWED, f"{path} belongs to no part that this test knows: say what it may import"
        for name in imports(path):
            head, _, rest = name.partition(".")
            if path.relative_to(ROOT / "jaxspec").as_posix() in ENGINE_COMMANDS and name.startswith(ENGINE_PARTS):
                continue
            other = rest.split(".")[0] if head == "jaxspec" else head
            if head in ("jaxspec", "serve") and other != part and other not in ALLOWED[part]:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_nothing_but_fronts_imports_a_front():
    for path in JAXSPEC:
        for name in imports(path):
            fronts = ("jaxspec.bench", "jaxspec.generate", "jaxspec.batch", "serve")
            assert part_of(path) in FRONTS or not name.startswith(fronts), name


def test_nothing_but_studies_imports_a_study():
    """They are left out of the wheel."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["exclude"] == ["jaxspec/bench/studies"]
    # Type checkers of others look for it.
    assert all(
        (ROOT / name / "py.typed").exists()
        for name in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    )
    for path in (*JAXSPEC, *sources("serve"), *sources("pallas_kernels")):
        inside = path.is_relative_to(ROOT / "jaxspec/bench/studies")
        assert inside or not any(name.startswith("jaxspec.bench.studies") for name in imports(path)), path


def test_host_pure_parts_use_the_standard_library_only():
    wrong = []
    for path in JAXSPEC:
        if part_of(path) not in HOST_PURE:
            continue
        allowed = {"numpy"} if part_of(path) in COUNTS_IN_ARRAYS else set()
        for name in imports(path):
            head = name.split(".")[0]
            if head != "jaxspec" and head not in sys.stdlib_module_names | allowed:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
            if head == "jaxspec":
                assert name.split(".")[1] in HOST_PURE, f"{path} imports {name}"
    assert not wrong, "\n".join(wrong)


def test_drafters_see_no_family():
    for path in sources("jaxspec/speculation"):
        for name in imports(path):
            if name.startswith("jaxspec.models"):
                parts = tuple(
                    f"jaxspec.models.{name}." for name in ("base", "experts", "latent", "layers", "rope", "sharded")
                )
                assert name.startswith(parts), f"{path} imports {name}"
                outside_heads = path.name != "cores.py" and not path.name.endswith("_head.py")
                assert not (outside_heads and "layers" in name), f"{path} imports {name}"


def test_kinds_of_drafters_know_no_other_kind():
    """But the one that they are a variant of; the registry names them all, and imports none before it is asked."""
    variants = {"jaxspec.drafters.peagle": {"jaxspec.drafters.eagle3"}}
    kinds = set(registry.MODULES.values())
    for path in sources("jaxspec/drafters"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        named = {kind for name in imports(path) for kind in kinds if f"{name}.".startswith(f"{kind}.")}
        assert named <= variants.get(module, set()) | {module}, (path, named)


def test_round_and_verifier_know_no_drafter():
    for path in sources("jaxspec/speculation"):
        if path.parent.name != "drafters":
            assert not any(name.startswith("jaxspec.speculation.drafters") for name in imports(path)), path


def test_kernels_know_nothing_of_jaxspec():
    for path in sources("pallas_kernels"):
        allowed = {"jax", "jaxlib", "numpy", "pallas_kernels"} | set(sys.stdlib_module_names)
        for name in imports(path):
            assert name.split(".")[0] in allowed, f"{path}: {name}"


def test_importing_the_kernels_loads_nothing_of_jaxspec():
    """Names of jaxspec's functions (pallas_kernels.aot.programs.known) are imported when they are asked for."""
    paths = [path.relative_to(ROOT).with_suffix("") for path in sources("pallas_kernels") if path.name != "__main__.py"]
    modules = ", ".join(".".join(path.parts).removesuffix(".__init__") for path in paths)
    check = f"import sys, {modules}; print([m for m in sys.modules if m.split('.')[0] == 'jaxspec'])"
    out = subprocess.run(
        [sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    )
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("package", ["jaxspec", "serve"])
def test_no_import_cycle_between_modules(package: str):
    graph: dict[str, set[str]] = {}
    paths = sources(package)
    modules = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for p in paths}
    for path in paths:
        me = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if me == package:
            continue
        named = {name if name in modules else name.rpartition(".")[0] for name in imports(path)}
        graph[me] = {name for name in named if name in modules and name != me and not me.startswith(name + ".")}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join([*trail, module])
        if module not in done:
            for other in graph.get(module, ()):
                visit(other, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_the_rooms_of_the_server():
    """Types that are only named count too. Where a request is run, no protocol is known, nor how it is told."""
    wrong = []
    for path in sources("serve"):
        parts = path.relative_to(ROOT / "serve").parts
        room = parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        assert room in SERVE, f"{path} belongs to no room that this test knows: say what it may import"
        for name in imports(path):
            other = name.split(".")[1] if name.startswith("serve.") else room
            if other != room and other not in SERVE[room]:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
            assert room != "core" or name.split(".")[0] not in ("prometheus_client", "opentelemetry"), (path, name)
            assert room != "client" or not name.startswith("jaxspec."), f"{path} imports {name}: clients need no engine"
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "statement",
    [
        "import jaxspec; jaxspec.SamplingParams(); jaxspec.EngineConfig(); jaxspec.SpeculationConfig(depth=3)",
        "import jaxspec.adaptive, jaxspec.adaptive.goodput",
        "from jaxspec.drafters import registry; registry.names()",
    ],
)
def test_host_pure_imports_load_no_device_library(statement: str):
    check = f"import sys; {statement}; print([m for m in {sorted(DEVICE_LIBRARIES - {'numpy'})} if m in sys.modules])"
    out = subprocess.run(
        [sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    )
    assert out.stdout.strip() == "[]"


def test_the_public_face():
    import jaxspec

    assert set(jaxspec.__all__) <= set(dir(jaxspec))
    for name in jaxspec.__all__:
        assert getattr(jaxspec, name).__name__ == name
    with pytest.raises(AttributeError, match="module 'jaxspec' has no attribute 'nothing'"):
        _ = jaxspec.nothing
