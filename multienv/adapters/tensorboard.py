"""Statistics of the envs as curves in TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from multienv.adapters import extra_needed
from multienv.events import Event, Recovery, Statistics, flat_statistics


class TensorBoardExporter:
    """Writes statistics and recoveries to TensorBoard; it is a hook.

    ::

        exporter = TensorBoardExporter(writer)  # the SummaryWriter that your trainer has anyway; or a directory
        envs = SubprocessVectorEnv(env_fns, hooks=[exporter])
        ...
        exporter.log(envs.statistics(), global_step)

    The tags are ``multienv/`` plus a name of :func:`~multienv.flat_statistics`. Each recovery also writes
    ``multienv/recovery_seconds/`` plus its outcome, at the step that was logged last.

    Args:
        writer: An object with ``add_scalar(tag, value, step)``, such as the ``SummaryWriter`` of torch; or the
            directory for a new writer, which needs the extra ``tensorboard``.
    """

    def __init__(self, writer: Any) -> None:
        if isinstance(writer, str | os.PathLike):
            try:
                from tensorboard.summary import Writer
            except ImportError as missing:
                raise extra_needed(f"TensorBoardExporter({writer!r})", "tensorboard", missing) from None
            writer = Writer(os.fspath(writer))
        self.writer = writer
        self._step = 0

    def log(self, statistics: Statistics | Iterable[Statistics | None], step: int) -> None:
        """Write the result of ``statistics()`` of an env class, at this step of the trainer."""
        self._step = step
        for name, value in flat_statistics(statistics).items():
            self.writer.add_scalar(f"multienv/{name}", value, step)

    def __call__(self, event: Event) -> None:
        """Write how long a recovery took."""
        if isinstance(event, Recovery):
            self.writer.add_scalar(f"multienv/recovery_seconds/{event.outcome}", event.seconds, self._step)
