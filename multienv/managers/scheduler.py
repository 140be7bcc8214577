"""The envs of a launched manager: the state of each, the answers taken up, and the requests that follow from them.

A ``Stream`` keeps requests and answers. Everything else about an env is in its record.
Records are replaced, never changed, together with the answers that they take up; what a call hands over is removed by
one assignment that nothing follows but the return. So an exception of a signal handler (Ctrl-C) finds an answer either
taken up or not, and a timestep either still there or handed over. A reset that a record says is due is asked then, or
by the next call.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from multienv._engine import interrupts
from multienv._engine.asking.fanout import FanOut
from multienv._engine.asking.in_flight import Result
from multienv._engine.asking.members import Requests
from multienv._engine.asking.stream import Stream
from multienv._engine.cores import spread
from multienv._engine.processes.endings import close_together
from multienv._engine.recovery.state_machine import Episode
from multienv._engine.recovery.supervisor import Supervisor
from multienv._engine.wire.actions import own_copy
from multienv._engine.wire.codecs import Transition
from multienv._engine.wire.messages import Message, reset_of_one
from multienv.errors import ClosedError, EnvError, EnvsFailedError, RestartBudgetExceeded, UsageError, WorkerLostError
from multienv.managers.config import EnvManagerConfig, EnvState, Timestep

_ADVICE = "Reset those that are in EnvState.ERROR: reset({id: None})."
_OTHERS = "What others have returned is in `results`; what they have still to return, the next step() gives."


class Record(NamedTuple):
    """Holds the state of one env, as its manager knows it.

    Attributes:
        state: The state that the caller sees.
        episodes: Whole episodes so far, without the abnormal ones.
        resets: Resets since the env's seed was given: the number of the next episode's seed.
        timestep: The one that is not handed over yet. With ``reset_inplace`` it is complete after the reset.
        failure: The error that is not raised yet.
        observation: The one to act on next.
        info: The info that came with that observation.
        tries: How often the reset that is due has failed.
        due: When to ask for it, by ``time.monotonic()``.
    """

    state: EnvState = EnvState.INIT
    episodes: int = 0
    resets: int = 0
    timestep: Timestep | None = None
    failure: BaseException | None = None
    observation: Any = None
    info: Any = None
    tries: int = 0
    due: float = 0.0


class Scheduler:
    """Asks the envs of a manager and takes up what they answer.

    Args:
        supervisors: Of the envs, which are built.
        config: The manager's.
        seed_of: Gives the seed for the reset of an env with a number, or ``None``.

    Attributes:
        records: One for each env.
        params: Seed and options for the resets of each env, as the caller gave them.
    """

    def __init__(
        self, supervisors: list[Supervisor], config: EnvManagerConfig, seed_of: Callable[[int, int], int | None]
    ) -> None:
        self.supervisors = supervisors
        self.records = [Record()] * len(supervisors)
        self.params: dict[int, dict[str, Any]] = {}
        self.closed = False
        self._config = config
        self._seed_of = seed_of
        spread(supervisors)
        self._fan = FanOut(supervisors)
        self._stream = Stream(self._fan).start("launch")

    # --- the state of the envs --------------------------------------------------------------------

    def ready(self) -> list[int]:
        """Return the ids of the envs that can be stepped."""
        return [index for index, record in enumerate(self.records) if self.is_idle(index) and record.timestep is None]

    def is_idle(self, index: int) -> bool:
        """Tell whether an episode of the env runs and no request is under way."""
        return self.records[index].state is EnvState.RUN and not self.asked(index)

    def asked(self, index: int) -> str:
        """Return the name of the env's request that is under way, ``""`` for none; for a reset in place ``"step"``."""
        asked = self._stream.under_way.get(index) or self._stream.ready.get(index)
        record = self.records[index]
        if record.state is EnvState.RESET:
            return "step" if self._config.reset_inplace and record.timestep is not None else "reset"
        return "" if asked is None else asked.name

    def stepping(self) -> int:
        """Return how many steps are under way."""
        return sum(self.asked(index) == "step" for index in range(len(self.records)))

    def undelivered(self) -> dict[int, Timestep]:
        """Return the timesteps that are complete and not handed over, by id."""
        return {
            index: record.timestep
            for index, record in enumerate(self.records)
            if record.timestep is not None and self.asked(index) != "step"
        }

    def failures(self) -> dict[int, BaseException]:
        """Return the errors that are not raised yet, by id."""
        return {index: record.failure for index, record in enumerate(self.records) if record.failure is not None}

    def is_busy(self) -> bool:
        """Tell whether a request is under way, a timestep not handed over or an error not raised."""
        return not self._stream.is_idle or any(
            record.state is EnvState.RESET or record.timestep or record.failure is not None for record in self.records
        )

    def done(self) -> bool:
        """Tell whether all envs have run their episodes and all timesteps are handed over."""
        return all(record.state is EnvState.DONE and record.timestep is None for record in self.records)

    def observation(self, index: int) -> Any:
        """Return the observation of an env to act on next; a copy, if the config says so."""
        return self._kept(self.records[index].observation)

    # --- asking -----------------------------------------------------------------------------------

    def step(self, actions: Mapping[int, Any]) -> None:
        """Send these steps: all of them, or none if an interruption comes meanwhile."""
        self._stream.send("step", list(actions), own_copy(list(actions.values()), "step()"))

    def reset(self, chosen: Sequence[int]) -> None:
        """Reset these envs and wait until they are reset; steps under way are given up.

        Raises:
            EnvsFailedError: Some could not be reset; its ``results`` has the observations of the others.
        """
        self.finish_calls()
        self.update_records([index for index in chosen if self.asked(index)], state=EnvState.NEED_RESET)
        self._until_idle(chosen)
        records = list(self.records)
        for index in chosen:
            episodes = 0 if records[index].state is EnvState.DONE else records[index].episodes
            records[index] = _resetting(records[index])._replace(episodes=episodes, timestep=None, failure=None)
        self.records = records
        self._until_idle(chosen)
        self._fan.members.call_hooks()
        ready = {index: self.observation(index) for index in self.ready() if index in chosen}
        self.raise_failures("reset()", ready, of=chosen)

    def call(self, what: str, name: str, messages: Mapping[int, Message]) -> dict[int, Any]:
        """Send each env a request other than step and reset, once the env is idle; wait for the answers, return them.

        Raises:
            EnvsFailedError: Some raised; the others answered.
        """
        self.finish_calls()
        self._until_idle(messages)
        self._stream.send(name, messages, list(messages.values()))
        self.until(lambda: messages.keys() <= self._stream.ready.keys())
        self._fan.members.call_hooks()
        answers = {index: self._stream.ready[index] for index in messages}
        failures = {index: one.error for index, one in answers.items() if one.error is not None}
        self._stream.deliver(messages)
        if failures:
            every = [answers[index].answer if index in answers else None for index in range(len(self.records))]
            raise EnvsFailedError.collect(what, failures, every, "All episodes go on.", "The others answered.")
        return {index: one.answer for index, one in answers.items()}

    def finish_calls(self) -> None:
        """Wait for the requests of an interrupted :meth:`call`, and drop their answers."""
        stream = self._stream
        self.until(lambda: not any(_is_call(one) for one in stream.under_way.values()))
        stream.deliver([index for index, one in stream.ready.items() if _is_call(one)])

    def close(self) -> None:
        """End all processes side by side; a call that waits raises ClosedError. A second call does nothing."""
        self.closed = True
        with interrupts.Held(self):
            close_together(self.supervisors, [one.close for one in self.supervisors])
            self._fan.close()

    def _begin_episodes(self) -> float:
        """Send the resets that are due; return when the next one is."""
        given, ready, now, messages, later = self._stream.under_way, self._stream.ready, time.monotonic(), {}, math.inf
        for index, record in enumerate(self.records):
            if record.state is not EnvState.RESET or index in given or index in ready:
                continue
            if record.due > now:  # it has failed a moment ago
                later = min(later, record.due)
                continue
            param = self.params.get(index, {})
            seed = param.get("seed")
            seed = self._seed_of(index, record.resets - 1) if seed is None else seed
            messages[index] = reset_of_one(seed, param.get("options"))
        if messages:
            self._stream.send("reset", messages, list(messages.values()))
        return later

    # --- waiting ----------------------------------------------------------------------------------

    def take_up_answers(self, until: float) -> None:
        """Take up the answers that are there; if there are none, wait for one, by ``time.monotonic()`` until then."""
        self._refuse_if_closed()
        until = min(until, self._begin_episodes())
        self._stream.collect(-math.inf if any(not _is_call(one) for one in self._stream.ready.values()) else until)
        self._refuse_if_closed()
        ready, records = self._stream.ready, list(self.records)
        left = {index: one for index, one in ready.items() if _is_call(one)}
        for index, one in ready.items():
            if index not in left:
                records[index] = self._after_answer(index, records[index], one)
        taken_up = self._stream.delivery([index for index in ready if index not in left])
        self.records, self._stream.pending_change = records, taken_up
        self._begin_episodes()
        self._refuse_if_closed()

    def until(self, satisfied: Callable[[], Any]) -> None:
        """Take up the answers that are there, then wait for more until ``satisfied()`` is true."""
        self.take_up_answers(0.0)
        while not satisfied():
            self.take_up_answers(math.inf)

    def until_some_are_ready(self) -> None:
        """Wait until an env can be stepped, has failed or has a timestep, or no reset is under way."""
        self.until(
            lambda: (
                self.ready()
                or self.undelivered()
                or self.failures()
                or not any(self.asked(index) not in ("", "step") for index in range(len(self.records)))
            )
        )
        self._fan.members.call_hooks()

    def until_stepped(self, wanted: float, patience: float | None) -> None:
        """Wait for ``wanted`` timesteps and ``patience`` seconds, or for all timesteps; ``None``: for all."""
        over = math.inf if patience is None else time.monotonic() + patience
        wanted = min(wanted, self.stepping() + len(self.undelivered()))
        while self.stepping():
            failed = len(self.failures())
            until = over if len(self.undelivered()) + failed >= wanted else math.inf
            if time.monotonic() >= until:
                # Not before an env can be stepped, or the caller would have nothing to do but to call again.
                if failed or any(map(self.is_idle, range(len(self.records)))):
                    return
                until = math.inf
            self.take_up_answers(until)

    # --- handing over -----------------------------------------------------------------------------

    def deliver_timesteps(self, what: str, shape: Callable[[dict[int, Timestep]], Any]) -> Any:
        """Return what ``shape`` makes of the complete timesteps, by id; they are handed over with that.

        Raises:
            EnvsFailedError: Envs have failed; its ``results`` has the timesteps.
        """
        self._fan.members.call_hooks()  # before anything is handed over that Ctrl-C in a hook could lose
        steps = self.undelivered()
        self.raise_failures(what, steps, timesteps=steps)
        shaped = shape(steps)
        if interrupts.noted is not None:
            interrupts.raise_noted()
        # The last line but the return: a signal handler finds the timesteps handed over, or not.
        self.update_records(steps, timestep=None)
        return shaped

    def raise_failures(
        self, what: str, results: Mapping[int, Any], *, timesteps: Iterable[int] = (), of: Collection[int] | None = None
    ) -> None:
        """Raise EnvsFailedError if envs have failed; their errors are handed over with that.

        Args:
            what: The call.
            results: Results of the other envs, by id.
            timesteps: Ids of the envs whose timesteps are in ``results``, and are handed over so.
            of: The envs to look at; ``None``: all.
        """
        failures = {index: error for index, error in self.failures().items() if of is None or index in of}
        if failures:
            every = [results.get(index) for index in range(len(self.supervisors))]
            error = EnvsFailedError.collect(what, failures, every, _ADVICE, _OTHERS)
            self.update_records(failures, failure=None)
            self.update_records(timesteps, timestep=None)
            raise error

    def update_records(self, indices: Iterable[int], **changes: Any) -> None:
        """Make these changes in the records of some envs, by one assignment."""
        records = list(self.records)
        for index in indices:
            records[index] = records[index]._replace(**changes)
        self.records = records

    # --- effects of an answer ---------------------------------------------------------------------

    def _after_answer(self, index: int, record: Record, result: Result) -> Record:
        """Return the record of an env that has answered a step or a reset, or failed."""
        if record.state is EnvState.NEED_RESET:  # that request was given up for a reset
            return record
        if result.error is not None:
            return self._to_be_retried(index, record, result.error) or self._failed(index, record, result.error)
        if record.state is not EnvState.RESET:
            return self._stepped(index, record, result.answer)
        observation, info = result.answer
        timestep = record.timestep
        if timestep is not None and self._config.reset_inplace:
            timestep = timestep._replace(observation=observation)
        return record._replace(state=EnvState.RUN, observation=self._kept(observation), info=info, timestep=timestep)

    def _to_be_retried(self, index: int, record: Record, error: BaseException) -> Record | None:
        """Return the record with a reset that has failed and is tried again; ``None``: it is not."""
        config, is_of_env = self._config, isinstance(error, EnvError | WorkerLostError)  # else it is the caller's
        if record.state is not EnvState.RESET or not is_of_env or isinstance(error, RestartBudgetExceeded):
            return None
        if record.tries + 1 >= config.max_retry:
            return None
        if config.retry_type == "renew":
            self.supervisors[index].discard()
        return record._replace(tries=record.tries + 1, due=time.monotonic() + config.retry_waiting_time)

    def _stepped(self, index: int, record: Record, transition: Transition) -> Record:
        config = self._config
        observation, reward, terminated, truncated, info = transition
        known = info if isinstance(info, dict) else {}  # the env may have returned anything
        ours = known.get("multienv")
        if isinstance(ours, dict) and ours.get("recovery") == "truncated":
            info = known = {**known, "abnormal": True}
        timestep = Timestep(index, observation, reward, terminated, truncated, info)
        if not timestep.done:
            return record._replace(timestep=timestep, observation=self._kept(observation), info=info)
        episodes = record.episodes + (not _is_abnormal(known))
        if config.reset_inplace:
            timestep = timestep._replace(info={**known, "final_obs": observation})
        record = record._replace(episodes=episodes, timestep=timestep)
        if episodes >= config.episode_num:
            return record._replace(state=EnvState.DONE)
        return _resetting(record) if config.auto_reset else record._replace(state=EnvState.NEED_RESET)

    def _failed(self, index: int, record: Record, error: BaseException) -> Record:
        """Return the record after a failure; it keeps the timestep, which the caller gets even if the reset failed."""
        state = EnvState.ERROR
        if record.state is EnvState.RUN and isinstance(error, UsageError):
            episode = self.supervisors[index].state.episode
            state = EnvState.RUN if episode in (Episode.RUNNING, Episode.TRUNCATED) else state  # nothing was sent
        return record._replace(state=state, failure=error)

    # --- helpers ----------------------------------------------------------------------------------

    def _until_idle(self, chosen: Iterable[int]) -> None:
        self.until(lambda: not any(map(self.asked, chosen)))

    def _refuse_if_closed(self) -> None:
        if self.closed:
            raise ClosedError("The manager was closed in the middle of the call. Call launch() first.")

    def _kept(self, observation: Any) -> Any:
        return copy.deepcopy(observation) if self._config.copy_on_get else observation


def _resetting(record: Record) -> Record:
    """Return the record with a reset that is due."""
    return record._replace(state=EnvState.RESET, resets=record.resets + 1, tries=0, due=0.0)


def _is_call(one: Requests | Result) -> bool:
    """Tell whether something is neither a step nor a reset."""
    return one.name not in ("step", "reset")


def _is_abnormal(info: dict[str, Any]) -> bool:
    try:
        return bool(info.get("abnormal", False))
    except Exception:  # an array, for instance
        return True
