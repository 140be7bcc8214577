"""The frames of many envs in one picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from multienv.errors import UsageError

Frame = np.ndarray[Any, Any]


def tile_images(frames: Sequence[Frame]) -> Frame:
    """Put all frames into one image, as OpenAI's baselines do: a nearly square grid, row by row, black where empty.

    Args:
        frames: ``N`` arrays of one shape, ``(height, width, channels)`` or ``(height, width)``.

    Returns:
        An array with ``ceil(sqrt(N))`` rows of frames, and as many columns as that needs.

    Raises:
        UsageError: The list is empty, a frame is not an image, or the shapes or types of the frames differ.
    """
    pictures = [np.asarray(frame) for frame in frames]
    kinds = sorted({f"{picture.dtype}{list(picture.shape)}" for picture in pictures})
    if len(kinds) != 1 or pictures[0].ndim not in (2, 3):
        raise UsageError(
            f"tile_images(): the frames are {kinds or 'none'}; give pictures (height, width[, channels]) of one shape "
            "and dtype. Envs draw some with render_mode='rgb_array'."
        )
    first = pictures[0]
    height, width = first.shape[:2]
    rows = math.ceil(math.sqrt(len(pictures)))
    columns = math.ceil(len(pictures) / rows)
    whole = np.zeros((rows * height, columns * width, *first.shape[2:]), first.dtype)
    for index, picture in enumerate(pictures):
        row, column = divmod(index, columns)
        whole[row * height : (row + 1) * height, column * width : (column + 1) * width] = picture
    return whole
