"""Memory that several processes map."""

from __future__ import annotations

import os
import threading

import gymnasium
import numpy as np

from multienv.wire.memory import Block, anonymous_file
from multienv.wire.observations import INLINE_LIMIT, Placement, array_views


def test_users_that_disagree_on_the_size_cut_nothing_off():
    """Each finds all of what it asked for, whoever comes first, or in between."""
    small, large = 4096, 64 * 4096
    for _ in range(300):
        descriptor = anonymous_file()
        try:
            barrier = threading.Barrier(3)
            errors: list[ValueError] = []

            def come(
                size: int, descriptor: int = descriptor, barrier: threading.Barrier = barrier, errors: list = errors
            ) -> None:
                barrier.wait()
                try:
                    Block.sized(descriptor, size).close()
                except ValueError as error:
                    errors.append(error)

            users = [threading.Thread(target=come, args=(size,)) for size in (small, large, small)]
            for user in users:
                user.start()
            for user in users:
                user.join()
            assert not errors
            assert os.fstat(descriptor).st_size >= large
        finally:
            os.close(descriptor)


def test_to_come_later_changes_no_content():
    descriptor = anonymous_file()
    try:
        first = Block.sized(descriptor, 8192)
        first.view[:] = b"\xab" * 8192
        second = Block.sized(descriptor, 8192)
        assert bytes(second.view) == b"\xab" * 8192
        second.view[8191] = 1
        assert first.view[8191] == 1
        first.close()
        second.close()
    finally:
        os.close(descriptor)


def test_who_copies_an_observation_while_another_thread_closes_the_env_finds_it_mapped():
    space = gymnasium.spaces.Box(0, 255, (64, 64, 3), np.uint8)
    placement = Placement.of(space, INLINE_LIMIT)
    block = Block.private(placement.block_size)
    block.view[:] = b"\x07" * placement.block_size
    views = array_views(space, placement, block, bytearray(64))
    assert views is not None
    block.close()
    for view in views:
        assert view.copy().tolist() == np.full((64, 64, 3), 7).tolist()
