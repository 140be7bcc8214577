"""Metrics of the envs for Prometheus."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from multienv.adapters import extra_needed
from multienv.errors import MultienvError
from multienv.events import COUNTERS, Event, Loss, Recovery, flat_statistics

try:
    from prometheus_client import REGISTRY, Counter, Histogram
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
except ImportError as missing:
    raise extra_needed(__name__, "prometheus", missing) from None

# Seconds; a snapshot recovers an env in some milliseconds, a slow simulator takes minutes.
_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class PrometheusExporter:
    """Exports metrics of envs to Prometheus; it is a hook, and a collector of its registry.

    ::

        exporter = PrometheusExporter()
        envs = SubprocessVectorEnv(env_fns, hooks=[exporter])
        exporter.watch(envs)
        prometheus_client.start_http_server(9000)

    ``multienv_<name>``, with a label ``envs``, is a number of :func:`~multienv.flat_statistics`, read at each scrape;
    the name of a number that only grows ends in ``_total``. Two metrics count events:
    ``multienv_losses_by_cause_total``, with a label ``cause``, and the histogram
    ``multienv_recovery_duration_seconds``, with a label ``outcome``.

    Args:
        registry: A registry of ``prometheus_client``; one exporter for each registry.
    """

    def __init__(self, registry: Any = REGISTRY) -> None:
        self._watched: dict[str, Any] = {}
        self._losses = Counter("multienv_losses_by_cause", "Workers lost", ["cause"], registry=registry)
        self._seconds = Histogram(
            "multienv_recovery_duration_seconds",
            "From a loss to the answer",
            ["outcome"],
            registry=registry,
            buckets=_BUCKETS,
        )
        registry.register(self)

    def watch(self, envs: Any, name: str = "envs") -> None:
        """Read ``envs.statistics()`` at each scrape, as long as your program keeps a reference to ``envs``.

        Args:
            envs: An env, batch or manager of any class of multienv.
            name: Value of the label ``envs``, for example ``"train"``.
        """
        self._watched[name] = weakref.ref(envs)

    def __call__(self, event: Event) -> None:
        """Count a loss, or the seconds of a recovery."""
        if isinstance(event, Loss):
            self._losses.labels(event.cause).inc()
        elif isinstance(event, Recovery):
            self._seconds.labels(event.outcome).observe(event.seconds)

    def collect(self) -> Iterator[Any]:
        """Yield the statistics of all watched envs; the registry calls it, in the thread of its server."""
        families: dict[str, Any] = {}
        for label, reference in list(self._watched.items()):
            envs = reference()
            try:
                numbers = {} if envs is None else flat_statistics(envs.statistics())
            except MultienvError:  # a manager that is not launched
                continue
            for name, value in numbers.items():
                kind = CounterMetricFamily if name in COUNTERS else GaugeMetricFamily
                family = families.setdefault(
                    name, kind(f"multienv_{name}", "See multienv.flat_statistics()", labels=["envs"])
                )
                family.add_metric([label], value)
        yield from families.values()
