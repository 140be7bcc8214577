"""RayOptions and the faces' arguments: what makes no sense is refused by name, before anything is started."""

from __future__ import annotations

import re
import sys

import pytest

from multienv import AsyncSubprocessEnvManager, RayEnv, RayOptions
from multienv.errors import UsageError

WRONG = {
    "hosts": [0, -1, 1.5, True],
    "cpus_per_host": [0, "4"],
    "suspect_after": [0, -1.0, None, "10"],
    "placement_timeout": [0, None],
    "placement": ["near"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_an_option_that_makes_no_sense_is_refused_by_name(name, value):
    with pytest.raises(UsageError, match=name):
        RayOptions(**{name: value})


def test_only_what_was_chosen_is_shown():
    assert repr(RayOptions(hosts=2, placement="pack")) == "RayOptions(hosts=2, placement='pack')"


@pytest.mark.parametrize("options", [{"backend": "dask"}, {"ray": RayOptions()}])
def test_a_manager_refuses_an_unknown_backend_and_ray_options_without_ray(options):
    with pytest.raises(UsageError, match="backend"):
        AsyncSubprocessEnvManager([dict], **options)


def test_without_the_extra_there_is_one_clear_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    line = 'Envs on a Ray cluster need the extra "ray": pip install "multienv-rl[ray]"'
    with pytest.raises(UsageError, match=f"^{re.escape(line)}$"):
        RayEnv(dict)
