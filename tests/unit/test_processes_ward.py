"""What the warden asks of the kernel."""

from __future__ import annotations

import os
import selectors

from multienv.processes.ward import dispatch


def test_a_number_that_is_given_anew_is_not_taken_for_the_one_that_was_ready():
    """Two pipes are ready; whoever comes first closes the other, and what is opened next has its number."""
    selector, called = selectors.DefaultSelector(), []
    ends = [os.pipe(), os.pipe()]

    def replace(mine: int, other: int) -> None:
        called.append("ready")
        selector.unregister(other)
        os.close(other)
        read, write = os.pipe()
        assert read == other
        selector.register(read, selectors.EVENT_READ, lambda: called.append("not ready"))
        ends.append((read, write))

    (one, _), (two, _) = ends
    selector.register(one, selectors.EVENT_READ, lambda: replace(one, two))
    selector.register(two, selectors.EVENT_READ, lambda: replace(two, one))
    for _, write in ends[:2]:
        os.write(write, b"x")
    dispatch(selector, 0.0)
    assert called == ["ready"]
    selector.close()
    for descriptor in {end for pair in ends for end in pair}:
        os.close(descriptor)
