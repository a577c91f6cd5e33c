"""Batch work over the machines of a Ray cluster: items go to actors, and of each item one result comes back.

Ray Data brings what that takes: actors that live for the whole run, placement, back-pressure, and retries where one is
lost. Owns its use and the flags of commands. Must not know what is computed. Ray is an optional extra, imported when
it is asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import os
import pickle
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
#: The address of a cluster of this machine alone, which lives as long as the run.
LOCAL = "local"
#: In which a cluster must answer.
_REACH_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Where batch work runs.

    Attributes:
      address: "local", or a cluster's as `ray.init` takes it: "auto", "10.0.0.1:6379", "ray://10.0.0.1:10001".
      workers: actors.
      resources: that each actor takes, by Ray's names; None: a GPU where the cluster has any, else a CPU.

    Raises:
      ValueError: no address, no worker, or a resource that is no positive number.
    """

    address: str = LOCAL
    workers: int = 1
    resources: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        if not self.address:
            raise ValueError(f"address of a cluster must be 'local' or Ray's, got {self.address!r}")
        if self.workers < 1:
            raise ValueError(f"workers must be at least 1, got {self.workers}")
        for name, amount in (self.resources or {}).items():
            if not amount > 0:
                raise ValueError(f"a worker's resource {name!r} must be positive, got {amount}")


def add_arguments(p: argparse.ArgumentParser) -> None:
    """What a command takes that can run on a cluster."""
    add = p.add_argument_group("cluster").add_argument
    add("--ray", metavar="ADDRESS", help="run on the workers of a Ray cluster: its address, or 'local' for one of this "
        "machine (default: in this process)")  # fmt: skip
    add("--workers", type=int, metavar="N", help="actors of the cluster, each with an engine (default: 1)")
    add("--worker-resources", type=resources, metavar="NAME=N,...", help="what each takes, such as GPU=1 or TPU=4 "
        "(default: GPU=1 where the cluster has GPUs, else CPU=1)")  # fmt: skip


def resources(text: str) -> dict[str, float]:
    """Amounts by name from "GPU=1,CPU=4"."""
    try:
        return {name.strip(): float(amount) for name, amount in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be NAME=NUMBER separated by commas, got {text!r}") from None


def of(args: argparse.Namespace) -> Cluster | None:
    """The cluster that a command asks for; None: it runs in this process.

    Raises:
      ValueError: workers without a cluster, what `Cluster` refuses, or Ray is not installed.
    """
    if args.ray is None:
        for name in ("workers", "worker_resources"):
            if getattr(args, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} needs --ray")
        return None
    cluster = Cluster(args.ray, 1 if args.workers is None else args.workers, args.worker_resources)
    _ray()
    return cluster


def spread(
    make: Callable[[], Callable[[Sequence[_Item]], Iterable[_Result]]], items: Sequence[_Item], cluster: Cluster,
    block: int,
) -> Iterator[tuple[int, _Result]]:  # fmt: skip
    """Yields (number of the item, its result), each item once, in the order in which they are done.

    An actor that is lost is started again, and does again what it had not delivered.

    Args:
      make: makes, in every actor, what turns items into as many results. It, items and results are pickled.
      block: most items that an actor is given at a time; of few items all actors get some.

    Raises:
      ValueError: no cluster at the address.
      Exception: what `make`, or what it made, raised.
    """
    _, data = _ray()
    size = max(1, min(block, -(-len(items) // (4 * cluster.workers))))
    with joined(cluster) as ray:
        data.DataContext.get_current().enable_progress_bars = False
        rows = [{"number": number, "item": pickle.dumps(item)} for number, item in enumerate(items)]
        done = data.from_items(rows, override_num_blocks=-(-len(rows) // size)).map_batches(
            _Actor,
            fn_constructor_args=(make,),
            batch_size=size,
            compute=data.ActorPoolStrategy(size=cluster.workers),
            **_options(ray, cluster),
        )
        came: set[int] = set()
        for row in done.iter_rows():
            number = int(row["number"])
            if number not in came:
                came.add(number)
                result = pickle.loads(row["result"])
                if isinstance(result, _Failed):
                    raise result.error
                yield number, result
        if missing := len(items) - len(came):
            raise RuntimeError(f"of {len(items)} items {missing} did not come back from the cluster")


@contextlib.contextmanager
def joined(cluster: Cluster) -> Iterator[Any]:
    """Within it this process belongs to a cluster, whatever is spread there; gives Ray.

    Raises:
      ValueError: no cluster at the address.
    """
    ray, _ = _ray()
    if ray.is_initialized():
        yield ray
        return
    _join(ray, cluster)
    try:
        yield ray
    finally:
        ray.shutdown()


@dataclasses.dataclass(frozen=True)
class _Failed:
    """In place of a result: what was raised. Ray would start an actor that raises again and again."""

    error: Exception


class _Actor:
    """What Ray holds in an actor's process."""

    def __init__(self, make: Callable[[], Callable[[Sequence[Any]], Iterable[Any]]]):
        self._make = make
        self._run: Callable[[Sequence[Any]], Iterable[Any]] | None = None

    def __call__(self, rows: Mapping[str, Any]) -> dict[str, list[Any]]:
        try:
            if self._run is None:
                self._run = self._make()
            results = list(self._run([pickle.loads(item) for item in rows["item"]]))
        except Exception as error:  # whatever it is, the command hears it
            results = [_Failed(error)] * len(rows["item"])
        return {"number": list(rows["number"]), "result": [pickle.dumps(result) for result in results]}


def _options(ray: Any, cluster: Cluster) -> dict[str, Any]:
    """What an actor takes, in `map_batches`' terms."""
    asked = dict(cluster.resources or ({"GPU": 1} if ray.cluster_resources().get("GPU") else {"CPU": 1}))
    named = {"num_cpus": asked.pop("CPU", None), "num_gpus": asked.pop("GPU", None), "resources": asked or None}
    return {name: amount for name, amount in named.items() if amount is not None}


def _join(ray: Any, cluster: Cluster) -> None:
    if cluster.address == LOCAL:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray's own cluster would report home
        ray.init(address=LOCAL, num_cpus=max(os.cpu_count() or 1, cluster.workers + 1), include_dashboard=False)
        return
    host, _, port = cluster.address.rpartition("://")[2].rpartition(":")
    try:
        if port.isdecimal():  # Ray would try for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_SECONDS).close()
        ray.init(address=cluster.address)
    except OSError as e:
        raise ValueError(f"--ray {cluster.address!r}: no cluster is there: {e}") from e


def _ray() -> tuple[Any, Any]:
    """(ray, ray.data).

    Raises:
      ValueError: Ray is not installed.
    """
    try:
        return importlib.import_module("ray"), importlib.import_module("ray.data")
    except ImportError as e:
        raise ValueError(f"--ray needs Ray Data (pip install -e '.[ray]'): {e}") from e
