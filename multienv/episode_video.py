"""Videos of episodes, from frames of the very trajectory the caller sees: a loss of the process leaves no gap."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from multienv.errors import MultienvError, UsageError

logger = logging.getLogger("multienv")


def video_writer() -> Callable[..., None]:
    """Gymnasium's function that writes frames to a file.

    Raises:
        UsageError: What it needs is not installed.
    """
    try:
        from gymnasium.utils.save_video import save_video
    except ImportError as error:  # gymnasium's DependencyNotInstalled is one
        raise UsageError(f'Videos need moviepy: pip install "multienv[video]" ({error}).') from error
    return save_video


class EpisodeVideo:
    """Collects the frames of an episode of one env, and writes them when it ends.

    Args:
        folder: Where to; it is made if need be.
        index: The env's.
    """

    def __init__(self, folder: str, index: int) -> None:
        """Write nothing yet."""
        self._write = video_writer()
        self._folder = str(Path(folder))
        self._prefix = f"env-{index}"
        self._episode = 0
        self._frames: list[Any] = []
        self.fps = 30

    def begin(self, render: Callable[[], Any]) -> None:
        """An episode begins; what there was of the last one is not written."""
        self._frames = []
        self.add(render, ended=False)

    def add(self, render: Callable[[], Any] | None, *, ended: bool) -> None:
        """The frame after a step, if there is one; with the last one the video is written."""
        try:
            self._frames += [] if render is None else [render()]
        except MultienvError:
            logger.warning("A frame of %s is missing.", self._prefix, exc_info=True)
        if ended and self._frames:
            frames, self._frames = self._frames, []
            try:
                self._save(frames)
            except Exception:  # a full disk, a codec: not worth a timestep
                logger.exception("The video of episode %d of %s was not written.", self._episode, self._prefix)
            self._episode += 1

    def _save(self, frames: list[Any]) -> None:
        self._write(
            [*frames, frames[-1]],  # moviepy leaves one out where the length of the film is rounded so
            self._folder,
            episode_trigger=lambda _: True,
            episode_index=self._episode,
            name_prefix=self._prefix,
            fps=self.fps,
        )
