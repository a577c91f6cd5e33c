"""The wire format: the stubs are those of the .proto files, and every scalar that may be left out says so."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor, FileDescriptor, ServiceDescriptor

from serve.api.admin import AdminServicer
from serve.api.generation import GenerationServicer
from serve.proto import admin_pb2, generation_pb2
from serve.proto.services import ADMIN, GENERATION, Stub, add_to

ROOT = Path(__file__).resolve().parents[2]
PROTO = ROOT / "serve" / "proto"


def test_stubs_are_fresh(tmp_path: Path):
    pytest.importorskip("grpc_tools", reason="the stubs are compared where grpcio-tools is installed")
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi")]
    files = sorted(str(path.relative_to(ROOT)) for path in PROTO.glob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, *files]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    fresh = {path.name: path.read_text() for path in (tmp_path / "serve" / "proto").iterdir()}
    assert {path.name for path in PROTO.glob("*_pb2*")} == set(fresh)
    made_by, installed = (
        re.findall(r"Protobuf Python Version: (.*)", text)
        for text in ((PROTO / "generation_pb2.py").read_text(), fresh["generation_pb2.py"])
    )
    if installed != made_by:
        pytest.skip(f"grpcio-tools writes protobuf {installed}, the stubs are {made_by}")
    for name, text in fresh.items():
        assert (PROTO / name).read_text() == text, f"{name} is stale: run `make proto`"


#: Messages of requests: what a client writes.
REQUESTS = {
    "GenerateRequest", "Chat", "Sampling", "Speculation", "Slo", "TokenizeRequest", "DetokenizeRequest",
    "DrainRequest", "UpdateDrafterRequest",
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


@pytest.mark.parametrize(
    ("service", "servicer"), [(GENERATION, GenerationServicer), (ADMIN, AdminServicer)], ids=["generation", "admin"]
)
def test_every_method_is_served_and_can_be_called(service: ServiceDescriptor, servicer: type):
    with grpc.insecure_channel("localhost:1") as channel:
        stub = Stub(service, channel)
    for method in service.methods:
        assert callable(getattr(servicer, method.name)) and callable(getattr(stub, method.name)), method.name
    with pytest.raises(AttributeError, match="no method 'Sleep'"):
        _ = stub.Sleep


def test_what_a_servicer_lacks_is_unimplemented():
    class Half:
        def Drain(self, request: admin_pb2.DrainRequest, context: grpc.ServicerContext) -> admin_pb2.DrainResponse:  # noqa: N802
            return admin_pb2.DrainResponse()

    server = grpc.server(futures.ThreadPoolExecutor(1))
    add_to(server, ADMIN, Half())
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = Stub(ADMIN, channel)
            assert stub.Drain(admin_pb2.DrainRequest(), timeout=100) == admin_pb2.DrainResponse()
            with pytest.raises(grpc.RpcError) as failed:
                stub.FlushCache(admin_pb2.FlushCacheRequest(), timeout=100)
        assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize("file", [generation_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR])
def test_the_package(file: FileDescriptor):
    assert file.package == "jaxspec.v1"
