"""TLS, mutual TLS and tokens: who may call, and that secrets stay secret."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from serve.api.auth import Tokens, is_local, read_tokens, server_credentials
from serve.app import Server
from serve.checks import is_loopback, warn_of_open_door
from serve.client import AsyncClient, Options, ServerError, misfits
from serve.config import ServerConfig

BASE: dict[str, Any] = dict(host="127.0.0.1", port=0, metrics_port=None, withdrawal_seconds=0.0)
GREEDY: Options = {"temperature": 0.0, "max_tokens": 4}


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA, a server's and a client's certificate of it, and a CA of nobody."""
    if shutil.which("openssl") is None:
        pytest.skip("certificates are made by the openssl command, which is not there")
    where = tmp_path_factory.mktemp("keys")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=where, check=True, capture_output=True, timeout=300)

    for ca in ("ca", "stranger"):
        openssl(
            "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
            "-subj", f"/CN=test {ca}", "-keyout", f"{ca}.key", "-out", f"{ca}.pem",
        )  # fmt: skip
    for name in ("server", "client"):
        (where / f"{name}.ext").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        openssl(
            "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}",
            "-keyout", f"{name}.key", "-out", f"{name}.csr",
        )  # fmt: skip
        openssl(
            "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2",
            "-extfile", f"{name}.ext", "-out", f"{name}.pem",
        )  # fmt: skip
    return where


async def refusal(call: Any) -> ServerError:
    with pytest.raises(ServerError) as caught:
        await call
    return caught.value


async def listed(stream: Any) -> list[Any]:
    return [event async for event in stream]


def test_tls(kit: Any, keys: Path):
    async def story() -> None:
        config = ServerConfig(**BASE, tls_cert=str(keys / "server.pem"), tls_key=str(keys / "server.key"))
        async with Server(config, build=kit.clean) as server:
            target = f"localhost:{server.port}"
            async with AsyncClient(target, tls_ca=str(keys / "ca.pem")) as client:
                assert (await client.generate("abc", **GREEDY)).token_ids
            for wrong in ({}, {"tls_ca": str(keys / "stranger.pem")}):
                async with AsyncClient(target, **wrong) as client:
                    error = await refusal(client.generate("abc", timeout=100.0, **GREEDY))
                    assert error.code is grpc.StatusCode.UNAVAILABLE
                    words = "of an authority that is not known here" if wrong else "speaks TLS: give --tls"
                    said = await asyncio.to_thread(misfits.told, error, target, bool(wrong))
                    assert said is not None and words in said

    kit.run(story())


def test_mutual_tls(kit: Any, keys: Path):
    async def story() -> None:
        config = ServerConfig(
            **BASE,
            tls_cert=str(keys / "server.pem"),
            tls_key=str(keys / "server.key"),
            tls_client_ca=str(keys / "ca.pem"),
        )
        async with Server(config, build=kit.clean) as server:
            target, ca = f"localhost:{server.port}", str(keys / "ca.pem")
            cert: dict[str, Any] = dict(tls_cert=str(keys / "client.pem"), tls_key=str(keys / "client.key"))
            async with AsyncClient(target, tls_ca=ca, **cert) as client:
                assert (await client.generate("abc", **GREEDY)).token_ids
            async with AsyncClient(target, tls_ca=ca) as client:
                error = await refusal(client.generate("abc", timeout=100.0, **GREEDY))
                assert error.code is grpc.StatusCode.UNAVAILABLE
                said = await asyncio.to_thread(misfits.told, error, target, True)
                assert said is not None and "asks for a client's certificate" in said

    kit.run(story())


def test_encryption_where_there_is_none(kit: Any, keys: Path):
    async def story() -> None:
        async with Server(ServerConfig(**BASE), build=kit.clean) as server:
            target = f"localhost:{server.port}"
            async with AsyncClient(target, tls_ca=str(keys / "ca.pem")) as client:
                error = await refusal(client.generate("abc", timeout=100.0, **GREEDY))
                said = misfits.told(error, target, True)
                assert said is not None and "speaks no TLS: leave --tls" in said

    kit.run(story())


def test_files_that_are_no_keys(keys: Path, tmp_path: Path):
    nothing = tmp_path / "nothing.pem"
    nothing.write_text("no key")
    for fields, message in (
        ({"tls_cert": str(nothing), "tls_key": str(keys / "server.key")}, "tls_cert: .* PEM file with a CERTIFICATE"),
        ({"tls_cert": str(keys / "server.pem"), "tls_key": str(nothing)}, "tls_key: .* PEM file with a PRIVATE KEY"),
        ({"tls_cert": str(keys / "none"), "tls_key": str(keys / "server.key")}, "tls_cert: cannot read|tls_key"),
        (
            {
                "tls_cert": str(keys / "server.pem"),
                "tls_key": str(keys / "server.key"),
                "tls_client_ca": str(nothing),
            },
            "tls_client_ca: ",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            server_credentials(ServerConfig(**fields))
    assert server_credentials(ServerConfig()) is None


def test_tokens_over_the_wire(kit: Any, tmp_path: Path):
    tokens = tmp_path / "tokens"
    tokens.write_text("first-token\n\nsecond-token\n")

    async def story() -> None:
        config = ServerConfig(**BASE, auth_token_file=str(tokens), reflection=True)
        async with Server(config, build=kit.clean) as server:
            target = f"127.0.0.1:{server.port}"
            for token in ("first-token", "second-token"):
                async with AsyncClient(target, token=token) as client:
                    assert (await client.generate("abc", **GREEDY)).token_ids
                    assert await listed(client.stream("abc", **GREEDY))
            for token in (None, "wrong", "first-toke", "first-token2", "FIRST-TOKEN"):
                async with AsyncClient(target, token=token) as client:
                    for call in (
                        client.generate("abc", **GREEDY), listed(client.stream("abc", **GREEDY)), client.server_info(),
                        client.drain(),
                    ):  # fmt: skip
                        error = await refusal(call)
                        assert error.code is grpc.StatusCode.UNAUTHENTICATED
                        assert "token" in error.message and "first" not in error.message
            value = server.metrics.registry.get_sample_value(
                "jaxspec:refused_requests_total",
                {"model_name": "demo", "engine": "0", "code": "UNAUTHENTICATED", "reason": "token"},
            )
            assert value == 20
            async with grpc.aio.insecure_channel(target) as channel:
                health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
                assert health.status == health_pb2.HealthCheckResponse.SERVING
                asked = reflection_pb2.ServerReflectionRequest(list_services="")
                stub = reflection_pb2_grpc.ServerReflectionStub(channel)
                with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
                    await listed(stub.ServerReflectionInfo(iter([asked])))
                metadata = [("authorization", "bearer first-token")]
                answers = await listed(stub.ServerReflectionInfo(iter([asked]), metadata=metadata))
                names = {service.name for service in answers[0].list_services_response.service}
                assert {"jaxspec.v1.GenerationService", "jaxspec.v1.AdminService", "grpc.health.v1.Health"} <= names

    kit.run(story())


def test_reflection_is_off_unless_asked_for(kit: Any):
    async def story() -> None:
        async with (
            Server(ServerConfig(**BASE), build=kit.clean) as server,
            grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
        ):
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            asked = reflection_pb2.ServerReflectionRequest(list_services="")
            with pytest.raises(grpc.RpcError, match="UNIMPLEMENTED"):
                await listed(stub.ServerReflectionInfo(iter([asked])))

    kit.run(story())


def test_which_metadata_carry_a_token():
    guard = Tokens(["a-token"])
    assert guard.among([("x", "y"), ("authorization", "Bearer a-token")])
    assert guard.among([("Authorization", "bearer a-token")])
    for metadata in (
        None, [], [("authorization", "a-token")], [("authorization", "Basic a-token")], [("authorization", "Bearer")],
        [("authorization", "Bearer a-token x")], [("authorization-bin", b"Bearer a-token")],
        [("token", "Bearer a-token")],
    ):  # fmt: skip
        assert not guard.among(metadata)


@pytest.mark.parametrize(
    ("peer", "local"),
    [
        ("ipv4:127.0.0.1:50051", True),
        ("ipv4:127.8.9.1:1", True),
        ("ipv6:[::1]:50051", True),
        ("ipv6:%5B::1%5D:50051", True),
        ("ipv6:%5B::ffff:127.0.0.1%5D:4", True),
        ("unix:", True),
        ("unix:/run/serve.sock", True),
        ("unix-abstract:serve", True),
        ("ipv4:10.0.0.7:127", False),
        ("ipv4:0.0.0.0:1", False),
        ("ipv6:%5B2001:db8::1%5D:1", False),
        ("ipv6:%5B::ffff:10.0.0.7%5D:4", False),
        ("vsock:2:5", False),
        ("ipv4:localhost:1", False),
        ("", False),
    ],
)
def test_which_peers_are_on_this_host(peer: str, local: bool):
    assert is_local(peer) is local


async def admin_calls(client: AsyncClient) -> list[str]:
    """How the calls end that change a server, after it was seen that looks are free; the last ends it where it may."""
    assert (await client.server_info()).state == "serving"
    assert (await client.loads()).max_running_requests == 4
    codes = []
    for call in (client.flush_cache(), client.set_speculation("off"), client.drain(0.0)):
        try:
            await call
            codes.append("OK")
        except ServerError as e:
            assert "changes the server for everybody; it can only be called " in e.message
            assert "admin_token_file" in e.message and "secret" not in e.message
            codes.append(e.code.name)
    return codes


@pytest.mark.parametrize("local", [True, False])
def test_without_admin_tokens_this_host_administrates(kit: Any, monkeypatch: pytest.MonkeyPatch, local: bool):
    monkeypatch.setattr("serve.api.auth.is_local", lambda peer: local and peer.startswith("ipv4:127.0.0.1:"))

    async def story() -> None:
        async with (
            Server(ServerConfig(**BASE), build=kit.clean) as server,
            AsyncClient(f"127.0.0.1:{server.port}", token="any") as client,
        ):
            assert await admin_calls(client) == (["OK"] * 3 if local else ["PERMISSION_DENIED"] * 3)
            if local:
                await server.wait()
                return
            assert server.lifecycle.state == "serving" and (await client.generate("abc", **GREEDY)).token_ids
            value = server.metrics.registry.get_sample_value(
                "jaxspec:refused_requests_total",
                {"model_name": "demo", "engine": "0", "code": "PERMISSION_DENIED", "reason": "admin"},
            )
            assert value == 3

    kit.run(story())


@pytest.mark.parametrize("guarded", [True, False])
def test_with_admin_tokens_their_bearers_administrate_from_wherever(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guarded: bool
):
    (tmp_path / "admins").write_text("secret-admin\n")
    (tmp_path / "users").write_text("secret-user\n")
    files = {"admin_token_file": str(tmp_path / "admins")}
    if guarded:
        files["auth_token_file"] = str(tmp_path / "users")

    async def story() -> None:
        async with Server(ServerConfig(**BASE, **files), build=kit.clean) as server:
            target = f"127.0.0.1:{server.port}"
            # Also from this host, where a proxy may stand for anybody.
            async with AsyncClient(target, token="secret-user") as client:
                assert await admin_calls(client) == ["PERMISSION_DENIED"] * 3
            monkeypatch.setattr("serve.api.auth.is_local", lambda peer: False)
            async with AsyncClient(target, token="secret-admin") as client:
                assert (await client.generate("abc", **GREEDY)).token_ids
                assert await admin_calls(client) == ["OK"] * 3
            await server.wait()

    kit.run(story())


def test_the_cache_of_a_gateway_s_protocol_is_guarded_too(kit: Any, monkeypatch: pytest.MonkeyPatch):
    pb = pytest.importorskip("smg_grpc_proto.generated.common_pb2")
    from smg_grpc_proto import vllm_engine_pb2_grpc as rpc

    async def story() -> None:
        async with (
            Server(ServerConfig(**BASE), build=kit.clean) as server,
            grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
        ):
            stub = rpc.VllmEngineStub(channel)
            assert (await stub.FlushCache(pb.FlushCacheRequest())).success
            monkeypatch.setattr("serve.api.auth.is_local", lambda peer: False)
            with pytest.raises(grpc.RpcError, match="PERMISSION_DENIED"):
                await stub.FlushCache(pb.FlushCacheRequest())

    kit.run(story())


def test_token_files(tmp_path: Path):
    path = tmp_path / "tokens"
    path.write_text("  one \n\ntwo\n")
    assert read_tokens(str(path)) == ["one", "two"]
    for text, message in (
        ("", "must hold at least one token"),
        ("\n \n", "must hold at least one token"),
        ("good\nsecret phrase\n", "line 2: a token must be printable ASCII without spaces"),
        ("sécret\n", "line 1: "),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=message) as wrong:
            read_tokens(str(path))
        assert "cret" not in str(wrong.value)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is not text"):
        read_tokens(str(path))
    with pytest.raises(ValueError, match="auth_token_file: cannot read"):
        read_tokens(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("[::1]", True), ("localhost", True),
        ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("models.example.org", False),
    ],
)  # fmt: skip
def test_a_server_that_anybody_may_use_says_so(host: str, loopback: bool, caplog: pytest.LogCaptureFixture):
    assert is_loopback(host) == loopback
    guards: list[dict[str, Any]] = [
        {}, {"admin_token_file": "admins"}, {"tls_cert": "c", "tls_key": "k"},
        {"auth_token_file": "tokens"}, {"tls_cert": "c", "tls_key": "k", "tls_client_ca": "ca"},
    ]  # fmt: skip
    for position, guard in enumerate(guards):
        caplog.clear()
        warn_of_open_door(ServerConfig(host=host, **guard), 1234)
        open_door = not loopback and position < 3
        assert [record.levelname for record in caplog.records] == ["WARNING"] * open_door
        if open_door:
            said = caplog.records[0].getMessage()
            assert all(word in said for word in (f"{host}:1234", "--auth-token-file", "--tls-client-ca", "--host"))


def test_a_server_listens_on_loopback_unless_told_else(kit: Any, caplog: pytest.LogCaptureFixture):
    async def story() -> None:
        assert ServerConfig().host == "127.0.0.1"
        for host, warnings in (("127.0.0.1", 0), ("0.0.0.0", 1)):
            caplog.clear()
            async with Server(ServerConfig(**{**BASE, "host": host}), build=kit.clean):
                pass
            assert sum("ANYBODY" in record.getMessage() for record in caplog.records) == warnings

    kit.run(story())
