"""The wire format: the stubs are those of the .proto files, and every scalar that may be left out says so."""

from __future__ import annotations

import importlib.metadata
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor import FieldDescriptor, FileDescriptor

from serve.proto import admin_pb2, generation_pb2

ROOT = Path(__file__).resolve().parents[2]
PROTO = ROOT / "serve" / "proto"


def test_stubs_are_fresh(tmp_path: Path):
    pytest.importorskip("grpc_tools", reason="the stubs are compared where grpcio-tools is installed")
    made_by = next(
        line.split("'")[1]
        for line in (PROTO / "generation_pb2_grpc.py").read_text().splitlines()
        if line.startswith("GRPC_GENERATED_VERSION")
    )
    installed = importlib.metadata.version("grpcio-tools")
    if installed != made_by:
        pytest.skip(f"grpcio-tools is {installed}, the stubs were made by {made_by}")
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    files = sorted(str(path.relative_to(ROOT)) for path in PROTO.glob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, *files]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    fresh = {path.name: path.read_text() for path in (tmp_path / "serve" / "proto").iterdir()}
    assert {path.name for path in PROTO.glob("*_pb2*")} == set(fresh)
    for name, text in fresh.items():
        assert (PROTO / name).read_text() == text, f"{name} is stale: run `make proto`"


#: Messages of requests: what a client writes.
REQUESTS = {
    "GenerateRequest", "Chat", "Sampling", "Speculation", "Slo", "TokenizeRequest", "DetokenizeRequest",
    "DrainRequest",
}  # fmt: skip
#: Scalars of them that are never left out.
NEEDED = {"SetSpeculationRequest.policy"}


def test_scalars_of_requests_are_optional():
    for name in REQUESTS:
        module = generation_pb2 if hasattr(generation_pb2, name) else admin_pb2
        for field in getattr(module, name).DESCRIPTOR.fields:
            if field.type == FieldDescriptor.TYPE_MESSAGE or field.is_repeated or field.full_name in NEEDED:
                continue
            assert field.has_presence, f"{field.full_name} cannot tell zero from absent"


@pytest.mark.parametrize("name", ["generation.proto", "admin.proto"])
def test_services_and_messages_are_explained(name: str):
    lines = (PROTO / name).read_text().splitlines()
    for before, line in itertools.pairwise(lines):
        if line.strip().startswith("rpc "):
            assert before.strip().startswith("//"), f"{name}: {line.strip()} has no comment"


@pytest.mark.parametrize("file", [generation_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR])
def test_the_package(file: FileDescriptor):
    assert file.package == "jaxspec.v1"
