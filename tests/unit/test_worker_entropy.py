"""What numpy asks when a generator is made without a seed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from multienv.worker import entropy, generators
from multienv.worker.entropy import Entropy


class Place:
    here = 0

    def __call__(self) -> int:
        return self.here


@pytest.fixture
def place() -> Iterator[Place]:
    place, before = Place(), np.random.bit_generator.randbits  # type: ignore[attr-defined]
    source = Entropy(11, place)
    source.install()
    try:
        yield place
    finally:
        source.remove()
        assert np.random.bit_generator.randbits is before or before == np.random.bit_generator.randbits  # type: ignore[attr-defined]


def draws(number: int = 3) -> list[float]:
    return [float(np.random.default_rng().random()) for _ in range(number)]


def test_the_same_seed_gives_the_same_and_another_another(place):
    first = draws()
    assert len(set(first)) == 3
    again = Entropy(11, place)
    again.install()
    assert draws() == first
    other = Entropy(12, place)
    other.install()
    assert not set(draws()) & set(first)
    other.remove()
    again.remove()


def test_each_place_has_a_stream_of_its_own(place):
    alone = draws()
    place.here = 1
    other = draws()
    assert not set(alone) & set(other)
    entropy.restore({})
    mixed = {0: [], 1: []}
    for here in (1, 0, 0, 1, 1, 0):
        place.here = here
        mixed[here] += draws(1)
    assert mixed == {0: alone, 1: other}


def test_legacy_generators_and_spaces_ask_too(place):
    first = np.random.RandomState().random_sample()
    entropy.restore({})
    assert np.random.RandomState().random_sample() == first


@pytest.mark.parametrize("bits", [1, 31, 32, 33, 64, 128, 1000])
def test_so_many_bits(bits):
    source = Entropy(3, lambda: 0)
    seen = [source.draw(bits) for _ in range(200)]
    assert max(seen).bit_length() <= bits
    assert max(seen).bit_length() > bits - 7 or bits == 1
    assert len(set(seen)) > (1 if bits == 1 else 190)


def test_they_are_put_back_with_the_other_generators(place):
    import gymnasium

    env = gymnasium.make("CartPole-v1")
    draws()
    state = generators.capture(env)
    expected = draws()
    draws()
    generators.restore(env, state)
    assert draws() == expected


def test_where_there_is_none_nothing_is_put_back():
    assert entropy.capture() is None
    entropy.restore({0: 3})
    assert entropy.capture() is None


def test_once_removed_the_system_is_asked_again():
    source = Entropy(5, lambda: 0)
    source.install()
    source.remove()
    source.remove()
    draws()
    assert source.counts == {}
