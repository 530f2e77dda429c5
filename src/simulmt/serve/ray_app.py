"""The application on a Ray cluster, scaled by the number of streams (extra `ray`).

    serve run simulmt.serve.ray_app:build models=en-zh streams_per_replica=100 most_replicas=8

Every replica is a whole server. A client that loses its connection may reach another replica, which does not know its
session; it then starts again and sends its messages again, as after a restart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ray import serve

from simulmt.config import build as build_config
from simulmt.config import require
from simulmt.runtime.bundle import default_names
from simulmt.serve.access import Limits
from simulmt.serve.app import Settings, create_app


@dataclass(frozen=True)
class ClusterConfig:
    """The arguments of `serve run`."""

    models: tuple[str, ...] = ()  # names or paths, separated by commas; empty for all shipped models
    streams_per_replica: int = 100  # target; above it Ray starts another replica
    least_replicas: int = 1
    most_replicas: int = 4
    cpus: int = 1  # of a replica

    def __post_init__(self) -> None:
        require(self.streams_per_replica >= 1, f"streams_per_replica must be 1 or more, got {self.streams_per_replica}")
        least, most = self.least_replicas, self.most_replicas
        require(1 <= least <= most, f"least_replicas must be in 1..most_replicas, got {least} and {most}")
        require(self.cpus >= 1, f"cpus must be 1 or more, got {self.cpus}")


def build(arguments: dict[str, str]) -> Any:
    """Build the application from the arguments of `serve run`."""
    names = [name for name in arguments.get("models", "").split(",") if name]
    numbers = {key: int(value) for key, value in arguments.items() if key != "models"}
    config = build_config(ClusterConfig, {"models": names, **numbers}, "serve run")
    deployment = serve.deployment(
        name="simulmt",
        # An open WebSocket is an ongoing request, so this scales by live streams.
        autoscaling_config={
            "min_replicas": config.least_replicas,
            "max_replicas": config.most_replicas,
            "target_ongoing_requests": config.streams_per_replica,
        },
        max_ongoing_requests=2 * config.streams_per_replica,
        ray_actor_options={"num_cpus": config.cpus},
        graceful_shutdown_timeout_s=Limits().drain_seconds,
        health_check_period_s=5,
    )
    return deployment(serve.ingress(lambda: _application(config))()).bind()


def _application(config: ClusterConfig) -> Any:
    limits = Limits(streams=2 * config.streams_per_replica, streams_per_address=2 * config.streams_per_replica)
    return create_app(Settings(config.models or tuple(default_names()), limits=limits, threads=config.cpus))
