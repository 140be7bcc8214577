"""A descriptor of the trainer's is closed once, whoever has its number by then."""

from __future__ import annotations

import os

from multienv.processes import descriptors


def test_closed_once_whatever_became_of_the_number() -> None:
    first, second = os.pipe()
    tokens = descriptors.own(first), descriptors.own(second)
    descriptors.close(*tokens)
    assert not any(map(descriptors.holds, tokens))
    others = os.pipe()
    try:
        assert {first, second} == set(others), "the numbers are not given out again"
        descriptors.close(*tokens)
        assert all(map(os.fstat, others))
    finally:
        for one in others:
            os.close(one)


def test_of_none() -> None:
    descriptors.close(None, object())
    assert not descriptors.holds(None)


def test_a_forked_child_lets_go_of_all_but_what_it_keeps() -> None:
    ends = os.pipe()
    tokens = [descriptors.own(end) for end in ends]
    child = os.fork()
    if child == 0:
        code = 1
        try:
            descriptors.close_inherited({ends[1]})
            os.fstat(ends[1])
            try:
                os.fstat(ends[0])
            except OSError:
                code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert all(map(descriptors.holds, tokens))
    descriptors.close(*tokens)
