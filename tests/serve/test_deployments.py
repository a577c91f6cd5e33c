"""docs/deploy: what is written there is what the server's command takes, and ports lead where something listens."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve.__main__ import parser, resolve
from serve.config import ServerConfig

DEPLOY = Path(__file__).resolve().parents[2] / "docs" / "deploy"
FILES = sorted(DEPLOY.glob("*.yaml"))
#: What a platform puts in place of its variables.
VARIABLES = {"$(LWS_LEADER_ADDRESS)": "jaxspec-0.jaxspec", "$(LWS_GROUP_SIZE)": "2", "$(LWS_WORKER_INDEX)": "1"}


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


def served(command: list[str]) -> ServerConfig:
    """What a container's command starts."""
    assert command[:3] == ["python", "-m", "serve"], command
    given = [arg for arg in command[3:]]
    for variable, value in VARIABLES.items():
        given = [arg.replace(variable, value) for arg in given]
    assert not any("$" in arg for arg in given), given
    return resolve(vars(parser().parse_args(given)))


def pods(document: Any) -> Iterator[Any]:
    """The templates of pods in a document of Kubernetes."""
    if isinstance(document, dict):
        if "containers" in document:
            yield document
        for value in document.values():
            yield from pods(value)


def containers(path: Path) -> list[tuple[Any, Any, ServerConfig]]:
    """(pod, container, configuration) of every server."""
    found = []
    for document in documents(path):
        for pod in pods(document):
            for container in pod["containers"]:
                command = [*container["command"], *container.get("args", [])]
                if command[:3] == ["python", "-m", "serve"]:
                    found.append((pod, container, served(command)))
    return found


KUBERNETES = [path for path in FILES if "apiVersion" in documents(path)[0]]


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.name)
def test_manifests(path: Path):
    servers = containers(path)
    assert servers
    for pod, container, config in servers:
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports["grpc"] == config.port and ports["metrics"] == config.metrics_port
        if config.coordinator is not None:
            assert config.coordinator == f"jaxspec-0.jaxspec:{ports['coordinator']}"
        assert config.host == "0.0.0.0" and pod["terminationGracePeriodSeconds"] > config.drain_seconds
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["grpc"]["port"] == config.port
        assert container["livenessProbe"]["grpc"]["service"] == "liveness"
        mounted = {volume["name"] for volume in pod.get("volumes", [])}
        assert {mount["name"] for mount in container.get("volumeMounts", [])} <= mounted
        assert any(config.model.startswith(mount["mountPath"]) for mount in container["volumeMounts"])
    named = {name for _, container, _ in servers for name in (port["name"] for port in container["ports"])}
    for service in (document for document in documents(path) if document["kind"] == "Service"):
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in named | {"http"}, service


def test_a_group_over_several_hosts():
    group, service = documents(DEPLOY / "leaderworkerset.yaml")
    template = group["spec"]["leaderWorkerTemplate"]
    ((_, container, config),) = containers(DEPLOY / "leaderworkerset.yaml")
    assert template["size"] == config.num_processes and template["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert config.engine.tensor_parallel == template["size"] * container["resources"]["limits"]["nvidia.com/gpu"]
    selector = service["spec"]["selector"]
    assert selector["leaderworkerset.sigs.k8s.io/name"] == group["metadata"]["name"]
    assert selector["leaderworkerset.sigs.k8s.io/worker-index"] == "0"  # labels are strings


def gateway(command: list[str]) -> tuple[list[str], dict[str, str]]:
    """(workers, flags) of a gateway's command, every flag of which `smg launch` knows."""
    assert command[:2] == ["smg", "launch"]
    at = command.index("--worker-urls")
    workers = list(itertools.takewhile(lambda arg: not arg.startswith("--"), command[at + 1 :]))
    flags = dict(arg.split("=") for arg in command[at + 1 + len(workers) :])
    smg = str(Path(sys.executable).with_name("smg"))  # the environment's, also where it is not activated
    known = subprocess.run([smg, "launch", "--help"], capture_output=True, text=True, check=True, timeout=300).stdout
    assert all(re.search(rf"{flag}\b", known) for flag in (*flags, "--worker-urls"))
    return workers, flags


def test_replicas_of_one_host():
    """Compose's names are those the gateway asks for; every replica has a device and a page size of its own blocks."""
    (compose,) = documents(DEPLOY / "compose.yaml")
    services = compose["services"]
    workers, flags = gateway(services["gateway"]["command"])
    replicas = {name: service for name, service in services.items() if name != "gateway"}
    assert workers == [f"grpc://{name}:50051" for name in replicas] and services["gateway"]["depends_on"] == [*replicas]
    assert services["gateway"]["ports"] == [f"8000:{flags['--port']}"]
    devices = []
    for service in replicas.values():
        config = served(service["command"])
        assert (config.port, config.host, config.kv_events) == (50051, "0.0.0.0", True)
        assert str(config.engine.page_size) == flags["--block-size"] and flags["--policy"] == "cache_aware"
        assert int(service["stop_grace_period"].removesuffix("s")) > config.drain_seconds
        assert f"127.0.0.1:{config.metrics_port}/ready" in service["healthcheck"]["test"][-1]
        assert any(config.model.startswith(volume.split(":")[1]) for volume in service["volumes"])
        (reserved,) = service["deploy"]["resources"]["reservations"]["devices"]
        devices += reserved["device_ids"]
    assert len({*devices}) == len(replicas)


def test_replicas_of_a_cluster():
    by_kind = {(d["kind"], d["metadata"]["name"]): d for d in documents(DEPLOY / "replicas.yaml")}
    replicas, (_, _, config) = by_kind["StatefulSet", "jaxspec"]["spec"], containers(DEPLOY / "replicas.yaml")[0]
    front = by_kind["Deployment", "gateway"]["spec"]["template"]["spec"]["containers"][0]
    workers, flags = gateway([*front["command"], *front["args"]])
    names = [f"grpc://jaxspec-{i}.{replicas['serviceName']}:{config.port}" for i in range(replicas["replicas"])]
    assert workers == names and config.kv_events and str(config.engine.page_size) == flags["--block-size"]
    assert front["ports"] == [{"name": "http", "containerPort": int(flags["--port"])}]
    labels = replicas["template"]["metadata"]["labels"]
    assert by_kind["Service", "jaxspec"]["spec"]["selector"] == labels
    assert by_kind["PodDisruptionBudget", "jaxspec"]["spec"]["selector"]["matchLabels"] == labels
    assert by_kind["Service", "gateway"]["spec"]["ports"][0]["targetPort"] == front["ports"][0]["name"]
