"""Videos of episodes, from frames of the very trajectory the caller sees: a loss of the process leaves no gap."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from multienv.errors import MultienvError, UsageError

logger = logging.getLogger("multienv")


def video_writer() -> Callable[..., Any]:
    """What writes a film frame by frame: moviepy's, below its clips, whose clock skips and repeats frames.

    Raises:
        UsageError: What it needs is not installed.
    """
    try:
        return import_module("moviepy.video.io.ffmpeg_writer").FFMPEG_VideoWriter  # type: ignore[no-any-return]
    except ImportError as error:
        raise UsageError(f'Videos need moviepy: pip install "multienv[video]" ({error}).') from error


class EpisodeVideo:
    """Collects the frames of an episode of one env, and writes them when it ends.

    Args:
        folder: Where to; it is made if need be.
        index: The env's.
    """

    def __init__(self, folder: str, index: int) -> None:
        """Write nothing yet."""
        self._write = video_writer()
        self._folder = Path(folder)
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
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self._prefix}-episode-{self._episode}.mp4"
        height, width = np.shape(frames[0])[:2]
        writer = self._write(str(path), (width, height), self.fps)
        try:
            for frame in frames:
                writer.write_frame(np.ascontiguousarray(frame[:, :, :3], np.uint8))
        finally:
            writer.close()
