"""What ``HostedVectorEnv.send`` and ``recv`` need: requests to the workers of some envs, and a batch of their answers.

``send`` and ``recv`` are in the manner of EnvPool's asynchronous mode (Weng et al., "EnvPool: A Highly Parallel
Reinforcement Learning Environment Execution Engine", 2022).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from multienv._engine.asking.in_flight import ReadyBatch, Result, Sharing
from multienv._engine.asking.members import Requests, Round, StepOfSome
from multienv._engine.wire.codecs import RowsReply
from multienv._engine.wire.infos import Extras
from multienv._engine.wire.messages import Reset
from multienv.vector.batching import Array, Rows, joined, listed_observations

_ERRORS = attrgetter("errors")


class SharedWorkers(Sharing):
    """Says what each worker is asked, whether envs share it (``is_shared``) or not.

    It is asked to reset some of its envs, or to step those that have an action.

    What is given for an env is the batch of its action alone, or seed and options of its reset.

    Args:
        slices: Which envs each worker has.
        space: Action space of one env.
    """

    def __init__(self, slices: Sequence[slice], space: Any) -> None:
        self._envs = [range(rows.start, rows.stop) for rows in slices]
        self._members = [member for member, envs in enumerate(self._envs) for _ in envs]
        super().__init__(len(self._members))
        self.is_shared = self.count > len(self._envs)
        self._space = space

    def member(self, env: int) -> int:
        """Return the worker that has an env."""
        return self._members[env]

    def next_request(self, member: int, under_way: Mapping[int, Requests]) -> Requests | None:
        """Return the request to a worker that is free; ``None`` if there is none."""
        envs = self._envs[member]
        first = under_way.get(envs.start)
        if not self.is_shared and (first is None or first.name == "step"):
            return first
        if first is not None and first.name == "step" and all(under_way.get(env) is first for env in envs):
            rows = first.rows(envs)
            if rows is not None:
                return Requests("step", [member], [rows])
        found = {env: under_way[env] for env in envs if env in under_way}
        resets = {env: request.content(env) for env, request in found.items() if request.name == "reset"}
        if resets:
            seeds, options = zip(*[resets.get(env, (None, None)) for env in envs], strict=True)
            return Requests("reset", [member], [Reset(seeds, options, _touched(envs, resets))])
        if not found:
            return None
        actions = {env: request.content(env) for env, request in found.items()}
        unused = next(iter(actions.values()))  # the batch has an action for each env, also for those left alone
        batch, touched = joined(self._space, [actions.get(env, unused) for env in envs]), _touched(envs, actions)
        return Requests("step", [member], [batch if touched is None else StepOfSome(batch, touched)])

    def envs(self, member: int, request: Requests) -> Iterable[int]:
        """Return the envs of a worker that a request concerns."""
        envs = self._envs[member]
        if request.is_whole_step(member):
            return envs
        message = request.content(member)
        return [env for slot, env in enumerate(envs) if message.touches(slot)]

    def results(self, current: Round) -> dict[int, Result]:
        """Return the result of each request that is answered, by env."""
        found = super().results(current)  # by member
        if self.is_shared:
            return {
                env: of_env
                for member, one in found.items()
                for env, of_env in self._of_envs(member, current.requests[member], one)
            }
        for env, (name, answer, _) in list(found.items()):
            if name != "step" and not self.envs(env, current.requests[env]):
                del found[env]
            elif answer is not None and answer.errors:
                found[env] = Result(name, answer, answer.errors[0])
        return found  # not copied: the worker is asked again after the caller has this

    def ready_batch(self, current: Round) -> ReadyBatch | None:
        """Return all that came, if no env has raised."""
        members, replies = list(current.answers), list(current.answers.values())
        if any(map(_ERRORS, replies)):
            return None
        if not self.is_shared:
            return ReadyBatch(members, replies, in_round=members)
        return ReadyBatch([env for member in members for env in self._envs[member]], replies, in_round=members)

    def _of_envs(self, member: int, request: Requests, result: Result) -> list[tuple[int, Result]]:
        """Return the result of a request to a worker, for each env that it concerned."""
        touched, start = self.envs(member, request), self._envs[member].start
        if result.error is not None:
            return [(env, result) for env in touched]
        slots, errors = [env - start for env in touched], result.answer.errors
        replies = zip(touched, slots, _one_each(result.answer, slots), strict=True)
        return [(env, Result(result.name, reply, errors.get(slot))) for env, slot, reply in replies]


def _touched(envs: Sequence[int], asked: Collection[int]) -> tuple[bool, ...] | None:
    """Return for each env of a worker whether it is among those asked; ``None``: all are."""
    return None if len(asked) == len(envs) else tuple(env in asked for env in envs)


def _one_each(reply: RowsReply, slots: Iterable[int]) -> list[RowsReply]:
    """Return a reply for each of these slots, in memory that no later request changes."""
    infos, listed = {} if reply.extras is None else dict(reply.extras.infos), listed_observations(reply)
    rewards, terminated, truncated = reply.rewards.copy(), reply.terminated.copy(), reply.truncated.copy()
    leaves, found = [leaf.copy() for leaf in reply.leaves], []
    for slot in slots:
        row, extras = slice(slot, slot + 1), None
        if slot in infos or listed:
            extras = Extras([(0, infos[slot])] if slot in infos else [], {}, [listed[slot]] if listed else None)
        one = [leaf[row] for leaf in leaves]
        found.append(RowsReply(one, rewards[row], terminated[row], truncated[row], extras))
    return found


def rows_of(ready: ReadyBatch, rows: Rows) -> tuple[Any, Array, Array, Array]:
    """Return observations, rewards, terminations and truncations of some envs, in new arrays."""
    found = rows.some(ready.answers)
    if ready.resets:
        steps = [env not in ready.resets for env in ready.envs]
        for values in found[1:]:
            values *= steps
    return found
