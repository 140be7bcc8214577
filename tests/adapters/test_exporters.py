"""The exporters beside the real libraries: what is read back from TensorBoard's files and Prometheus' metrics."""

from __future__ import annotations

import os
import signal
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kit import CounterEnv
from multienv import (
    AsyncSubprocessEnvManager,
    MultiEnv,
    RestartPolicy,
    SubprocessVectorEnv,
    create_subprocess_envs,
    flat_statistics,
)
from multienv.events import Event, Recovery

ENDLESS = partial(CounterEnv, horizon=None)


def envs_with_two_losses(*hooks: Any) -> SubprocessVectorEnv:
    """Envs in two workers, one of which has been lost twice: recovered, and truncated."""
    envs = SubprocessVectorEnv(
        [ENDLESS] * 4, envs_per_worker=2, hooks=hooks, restart=RestartPolicy(on_timeout="truncate"), reports=""
    )
    envs.reset(seed=0)
    for number in (signal.SIGKILL, signal.SIGTERM):
        os.kill(envs.statistics()[0].pid or 0, number)
        envs.step(np.ones(4, np.int64))
    return envs


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["directory", "SummaryWriter"])
def test_tensorboard_has_the_statistics_and_each_recovery(kind: str, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    from multienv.adapters.tensorboard import TensorBoardExporter

    writer: Any = tmp_path
    if kind == "SummaryWriter":
        writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter(tmp_path)
    exporter = TensorBoardExporter(writer)
    envs = envs_with_two_losses(exporter)
    expected = flat_statistics(envs.statistics())
    exporter.log(envs.statistics(), 700)
    envs.close()
    exporter.writer.close()

    found = EventAccumulator(str(tmp_path)).Reload()
    tags = found.Tags()
    curves: dict[str, list[tuple[int, float]]] = {}
    for tag in tags["scalars"]:
        curves[tag] = [(event.step, event.value) for event in found.Scalars(tag)]
    for tag in tags["tensors"]:
        curves[tag] = [(event.step, float(make_ndarray(event.tensor_proto))) for event in found.Tensors(tag)]
    assert len(curves.pop("multienv/recovery_seconds/exact")) == 2
    assert set(curves) == {f"multienv/{name}" for name in expected}
    assert curves["multienv/losses"] == [(700, 2.0)]
    assert curves["multienv/steps"] == [(700, 4.0)]
    assert curves["multienv/replayed_steps"] == [(700, expected["replayed_steps"])]
    assert curves["multienv/rss_bytes"][0][1] > 2**20


@pytest.mark.ci
def test_prometheus_has_the_statistics_when_they_are_asked_for_and_each_loss() -> None:
    import prometheus_client
    from prometheus_client.openmetrics.exposition import generate_latest
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    from multienv.adapters.prometheus import PrometheusExporter

    registry = prometheus_client.CollectorRegistry(auto_describe=True)
    exporter = PrometheusExporter(registry)
    events: list[Event] = []
    envs = envs_with_two_losses(exporter, events.append)
    exporter.watch(envs, "train")
    manager = AsyncSubprocessEnvManager([ENDLESS])
    exporter.watch(manager, "not launched")
    value = registry.get_sample_value
    train = {"envs": "train"}
    assert value("multienv_losses_total", train) == 2
    assert value("multienv_steps_total", train) == 4
    assert value("multienv_workers", train) == 2
    replayed = sum(event.replayed for event in events if isinstance(event, Recovery))
    assert value("multienv_replayed_steps_total", train) == replayed > 0
    assert value("multienv_losses_by_cause_total", {"cause": "died"}) == 2
    assert value("multienv_recovery_duration_seconds_count", {"outcome": "exact"}) == 2
    envs.step(np.ones(4, np.int64))
    assert value("multienv_steps_total", train) == 6

    server, thread = prometheus_client.start_http_server(0, addr="127.0.0.1", registry=registry)
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics") as page:
        assert 'multienv_steps_total{envs="train"} 6.0' in page.read().decode()
    server.shutdown()
    server.server_close()
    thread.join()
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    assert len({family.name for family in families}) == len(families) > 15

    envs.close()
    assert value("multienv_workers", train) == 0
    assert value("multienv_losses_total", train) == 2
    del envs
    assert value("multienv_losses_total", train) is None


def test_flat_statistics_are_numbers_of_any_face() -> None:
    envs = envs_with_two_losses()
    found = flat_statistics(envs.statistics())
    envs.close()
    assert {type(value) for value in found.values()} <= {int, float}
    assert (found["workers"], found["steps"], found["episodes"], found["losses"]) == (2, 4, 4, 2)
    assert (found["exact_recoveries"], found["restarts"]) == (2, 2)
    assert 0 < found["recovery_seconds_mean"] <= found["recovery_seconds_max"]
    assert 2**20 < found["rss_bytes_max"] < found["rss_bytes"]
    with MultiEnv([*create_subprocess_envs([ENDLESS]), CounterEnv()]) as several:  # one that keeps none
        several.reset(seed=0)
        of_one = flat_statistics(several.envs[0].statistics())  # type: ignore[attr-defined]
        assert flat_statistics(several.statistics()) == {
            **of_one,
            "rss_bytes": pytest.approx(of_one["rss_bytes"], rel=0.1),
        }
        assert set(of_one) == set(found) == set(flat_statistics([]))
