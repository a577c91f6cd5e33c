"""The services of the .proto files for gRPC, made from their descriptors: what protoc would write for each of their
methods says nothing more. Servers and channels may be those of grpc or of grpc.aio.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from serve.proto import admin_pb2, generation_pb2

GENERATION: ServiceDescriptor = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]
ADMIN: ServiceDescriptor = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]


class Stub:
    """The calls of a service over a channel, by the names of its methods: `stub.Generate(request, timeout=1.0)`."""

    def __init__(self, service: ServiceDescriptor, channel: grpc.Channel | grpc.aio.Channel) -> None:
        for method in service.methods:
            make = channel.unary_stream if method.server_streaming else channel.unary_unary
            call = make(
                f"/{service.full_name}/{method.name}",
                request_serializer=GetMessageClass(method.input_type).SerializeToString,
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            setattr(self, method.name, call)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(f"the service has no method {name!r}")


def add_to(server: grpc.Server | grpc.aio.Server, service: ServiceDescriptor, servicer: object) -> None:
    """Registers a servicer, whose methods have the service's names. Those that it lacks are UNIMPLEMENTED."""
    handlers: dict[str, grpc.RpcMethodHandler] = {}
    for method in service.methods:
        if hasattr(servicer, method.name):
            stream = method.server_streaming
            make = grpc.unary_stream_rpc_method_handler if stream else grpc.unary_unary_rpc_method_handler
            handlers[method.name] = make(
                getattr(servicer, method.name),
                request_deserializer=GetMessageClass(method.input_type).FromString,
                response_serializer=GetMessageClass(method.output_type).SerializeToString,
            )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
