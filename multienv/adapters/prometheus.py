"""What happens to the envs, as metrics for Prometheus."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from multienv.errors import MultienvError
from multienv.events import COUNTERS, Event, Loss, Recovery, flat_statistics

try:
    from prometheus_client import REGISTRY, Counter, Histogram
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
except ImportError as missing:
    raise ImportError(
        f'multienv.adapters.prometheus needs {missing.name}: pip install -e ".[prometheus]" in a checkout of multienv.',
        name=missing.name,
    ) from None

# Seconds; a snapshot brings an env back in some milliseconds, a slow simulator takes minutes.
_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class PrometheusExporter:
    """Has metrics of envs for Prometheus; a hook, and a collector of its registry.

    ::

        exporter = PrometheusExporter()
        envs = SubprocessVectorEnv(env_fns, hooks=[exporter])
        exporter.watch(envs)
        prometheus_client.start_http_server(9000)

    ``multienv_<name>``, with a label ``envs``, is a number of :func:`~multienv.flat_statistics`, read when it is asked
    for; names of those that only grow end in ``_total``. Of events there are ``multienv_losses_by_cause_total``, with a
    label ``cause``, and the histogram ``multienv_recovery_duration_seconds``, with a label ``outcome``.

    Args:
        registry: Of ``prometheus_client``; one exporter each.
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
        """Read ``envs.statistics()`` whenever metrics are asked for, as long as somebody else holds ``envs``.

        Args:
            envs: Of any class.
            name: Value of the label ``envs``: ``"train"``, say.
        """
        self._watched[name] = weakref.ref(envs)

    def __call__(self, event: Event) -> None:
        """Count a loss, and the seconds of a recovery."""
        if isinstance(event, Loss):
            self._losses.labels(event.cause).inc()
        elif isinstance(event, Recovery):
            self._seconds.labels(event.outcome).observe(event.seconds)

    def collect(self) -> Iterator[Any]:
        """Return the statistics of what is watched; called by the registry, from the thread of its server."""
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
