"""What there is only one of."""

from __future__ import annotations

from typing import NoReturn, SupportsIndex

from multienv.errors import UsageError


class NotCopyableError(UsageError, TypeError):
    """A copy was wanted of what owns processes, threads or shared memory; a TypeError for pickle's callers too."""


class Unique:
    """Refuses to be copied and pickled: two of it would ask the same envs."""

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> NoReturn:
        """Refuse, and say what to do instead."""
        raise NotCopyableError(
            f"A {type(self).__name__} cannot be copied or pickled: it owns its envs. Build another one from the same "
            "env_fns where it is wanted. Of a SubprocessEnv, state_dict() can be pickled, snapshot() come back to."
        )
