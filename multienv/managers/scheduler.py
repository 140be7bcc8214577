"""The envs of a launched manager: the state of each, the answers taken up, and the requests that follow from them.

Requests and answers are kept by the endless round of a fan-out, which sends, waits and recovers. Everything else about
an env is in its record. A record is replaced, never changed, together with the request that it names; what a call hands
over is removed by one assignment that nothing follows but the return. So an exception of a signal handler (Ctrl-C)
finds an answer either taken up or not, and a timestep either still there or handed over.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from multienv.cores import spread
from multienv.errors import ClosedError, EnvError, EnvsFailedError, RestartBudgetExceeded, UsageError, WorkerLostError
from multienv.fanout import FanOut, InThread
from multienv.managers.config import EnvManagerConfig, EnvState, Timestep
from multienv.recovery.hot_path import MISSING
from multienv.recovery.state_machine import Episode
from multienv.recovery.supervisor import Supervisor
from multienv.threads import Task, close_at_once
from multienv.wire.codecs import Transition
from multienv.wire.messages import Message, reset_of_one

_ADVICE = "Reset those that are in EnvState.ERROR: reset({id: None})."
_OTHERS = "What others have returned is in `results`; what they have still to return, the next step() gives."


class Record(NamedTuple):
    """Holds the state of one env, as its manager knows it.

    Attributes:
        state: The state that the caller sees.
        episodes: Whole episodes so far, without the abnormal ones.
        resets: Resets since the env's seed was given: the number of the next episode's seed.
        asked: The request under way: ``"step"``, with the reset in place after it; ``"reset"``; or another call's name.
        timestep: The one that is not handed over yet; while ``asked`` is ``"step"``, it is not complete yet.
        failure: The error that is not raised yet.
        observation: The one to act on next.
        info: The info that came with that observation.
    """

    state: EnvState = EnvState.INIT
    episodes: int = 0
    resets: int = 0
    asked: str = ""
    timestep: Timestep | None = None
    failure: BaseException | None = None
    observation: Any = None
    info: Any = None

    @property
    def is_idle(self) -> bool:
        """Tell whether an episode runs and no request is under way."""
        return self.state is EnvState.RUN and not self.asked

    @property
    def is_ready(self) -> bool:
        """Tell whether the env can be stepped: it is idle, and its last timestep is handed over."""
        return self.state is EnvState.RUN and not self.asked and self.timestep is None


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
        self._closing = Task(bool)  # its end also ends the waiting between two tries of a reset
        spread(supervisors)
        self._fan = FanOut(supervisors, name="multienv-manager")
        self._round = self._fan.begin_endless()

    # --- the state of the envs --------------------------------------------------------------------

    def ready(self) -> list[int]:
        """Return the ids of the envs that can be stepped."""
        return [index for index, record in enumerate(self.records) if record.is_ready]

    def stepping(self) -> int:
        """Return how many steps are under way."""
        return sum(record.asked == "step" for record in self.records)

    def news(self) -> dict[int, Timestep]:
        """Return the timesteps that are complete and not handed over, by id."""
        return {
            index: record.timestep
            for index, record in enumerate(self.records)
            if record.timestep is not None and record.asked != "step"
        }

    def failures(self) -> dict[int, BaseException]:
        """Return the errors that are not raised yet, by id."""
        return {index: record.failure for index, record in enumerate(self.records) if record.failure is not None}

    def is_busy(self) -> bool:
        """Tell whether a request is under way, a timestep not handed over or an error not raised."""
        return any(record.asked or record.timestep or record.failure is not None for record in self.records)

    def done(self) -> bool:
        """Tell whether all envs have run their episodes and all timesteps are handed over."""
        return all(record.state is EnvState.DONE and record.timestep is None for record in self.records)

    def observation(self, index: int) -> Any:
        """Return the observation of an env to act on next; a copy, if the config says so."""
        return self._kept(self.records[index].observation)

    # --- asking -----------------------------------------------------------------------------------

    def step(self, actions: Mapping[int, Any]) -> None:
        """Send these steps: all of them, or none if an interruption comes meanwhile."""
        self._ask("step", actions, {index: self.records[index]._replace(asked="step") for index in actions})

    def reset(self, chosen: Sequence[int]) -> None:
        """Reset these envs and wait until they are reset; steps under way are given up.

        Raises:
            EnvsFailedError: Some could not be reset; its ``results`` has the observations of the others.
        """
        self.finish_calls()
        self.records = [
            record._replace(state=EnvState.NEED_RESET) if index in chosen and record.asked else record
            for index, record in enumerate(self.records)
        ]
        self._until_idle(chosen)
        begun: dict[int, Record] = {}
        for index in chosen:
            record = self.records[index]
            episodes = 0 if record.state is EnvState.DONE else record.episodes
            begun[index] = record._replace(asked="reset", episodes=episodes, timestep=None, failure=None)
        self._begin_episodes(begun)
        self._until_idle(chosen)
        self._fan.call_hooks()
        ready = {index: self.observation(index) for index in self.ready() if index in begun}
        self.tell_failures("reset()", ready, of=begun)

    def call(self, what: str, name: str, messages: Mapping[int, Message]) -> dict[int, Any]:
        """Send each env a request other than step and reset, once the env is idle; wait for the answers, return them.

        Raises:
            EnvsFailedError: Some raised; the others answered.
        """
        self.finish_calls()
        self._until_idle(messages)
        self._ask(name, messages, {index: self.records[index]._replace(asked=name) for index in messages})
        self._until_idle(messages)
        self._fan.call_hooks()
        failures = {index: error for index, error in self._round.failures.items() if index in messages}
        if failures:
            every = [answer if index in messages else None for index, answer in enumerate(self._round.answers)]
            raise EnvsFailedError.collect(what, failures, every, "All episodes go on.", "The others answered.")
        return {index: self._round.answers[index] for index in messages}

    def finish_calls(self) -> None:
        """Wait for the requests of an interrupted :meth:`call`, and drop their answers."""
        while any(record.asked not in ("", "step", "reset") for record in self.records):
            self.turn(None)

    def count_resets_anew(self, chosen: Iterable[int]) -> None:
        """Count resets of these envs from 0 again: the seed of an episode depends on that number."""
        self.records = [
            record._replace(resets=0) if index in chosen else record for index, record in enumerate(self.records)
        ]

    def fail(self, failures: Mapping[int, BaseException]) -> None:
        """Note errors that the manager has found, by id: these envs have failed."""
        self.records = [
            record._replace(state=EnvState.ERROR, failure=failures[index]) if index in failures else record
            for index, record in enumerate(self.records)
        ]

    def close(self) -> None:
        """End all processes side by side; a call that waits raises ClosedError. A second call does nothing."""
        self.closed = True
        self._closing.run()
        close_at_once([one.close for one in self.supervisors])
        self._fan.close()

    def _begin_episodes(self, records: Mapping[int, Record]) -> None:
        """Send resets to envs; put ``records`` in place of theirs, in the state RESET and with one reset more."""
        messages = {}
        for index, record in records.items():
            param = self.params.get(index, {})
            seed = param.get("seed")
            messages[index] = reset_of_one(
                self._seed_of(index, record.resets) if seed is None else seed, param.get("options")
            )
        begun = {
            index: record._replace(state=EnvState.RESET, resets=record.resets + 1) for index, record in records.items()
        }
        self._ask("reset", messages, begun)

    def _ask(self, name: str, requests: Mapping[int, Any], asked: Mapping[int, Record]) -> None:
        """Send requests, and put the records ``asked`` that name them in place; both, or neither."""
        contents = {index: self._content(index, name, request) for index, request in requests.items()}
        records = [asked.get(index, record) for index, record in enumerate(self.records)]
        self._fan.send_some(name, contents)
        self.records, self._round.sending = records, ()  # adjacent stores: no signal handler comes in between
        self._fan.start()

    def _content(self, index: int, name: str, request: Any) -> Any:
        """Return the request, or an ``InThread`` that sends it from a thread if that may take long."""
        supervisor, config = self.supervisors[index], self._config
        maintenance, is_reset = supervisor.maintenance, name == "reset"
        # The env's process is to be replaced by plan first, or the reset is to be tried again if it fails.
        if maintenance.is_due or (is_reset and (maintenance.recycling_due or config.max_retry > 1)):
            return InThread(partial(_ask_patiently, supervisor, name, request, config, self._closing))
        return request

    # --- waiting ----------------------------------------------------------------------------------

    def turn(self, patience: float | None) -> None:
        """Take up the answers that are there; if there are none, wait for one, at most ``patience`` seconds."""
        self._refuse_if_closed()
        answered = self._answered()
        if not answered:  # else a request was refused when sent, or an interruption came before its answer was taken up
            self._fan.take(patience)
            answered = self._answered()
        for index in answered:
            self._refuse_if_closed()
            self._take_up(index, self.records[index])
        self._refuse_if_closed()

    def _answered(self) -> list[int]:
        """Return the ids of the envs that have answered or failed, and whose answer is not taken up."""
        answers = self._round.answers
        return [index for index, record in enumerate(self.records) if record.asked and answers[index] is not MISSING]

    def until(self, satisfied: Callable[[], Any]) -> None:
        """Take up the answers that are there, then wait for more until ``satisfied()`` is true."""
        self.turn(0.0)
        while not satisfied():
            self.turn(None)

    def until_some_are_ready(self) -> None:
        """Wait until an env can be stepped, has failed or has a timestep, or no reset is under way."""
        self.until(
            lambda: (
                self.ready()
                or self.news()
                or self.failures()
                or not any(record.asked not in ("", "step") for record in self.records)
            )
        )
        self._fan.call_hooks()

    def until_stepped(self, wanted: float, patience: float | None) -> None:
        """Wait for ``wanted`` timesteps and ``patience`` seconds, or for all timesteps; ``None``: for all."""
        begin = time.monotonic()
        wanted = min(wanted, self.stepping() + len(self.news()))
        while self.stepping():
            left = None
            if patience is not None:
                failed = len(self.failures())
                if len(self.news()) + failed >= wanted:
                    left = max(0.0, begin + patience - time.monotonic())
                    # Not before an env can be stepped, or the caller would have nothing to do but to call again.
                    if not left and (failed or any(record.is_idle for record in self.records)):
                        return
            self.turn(left or None)

    # --- handing over -----------------------------------------------------------------------------

    def hand_over(self, what: str, shape: Callable[[dict[int, Timestep]], Any]) -> Any:
        """Return what ``shape`` makes of the complete timesteps, by id; they are handed over with that.

        Raises:
            EnvsFailedError: Envs have failed; its ``results`` has the timesteps.
        """
        self._fan.call_hooks()  # before anything is handed over that Ctrl-C in a hook could lose
        steps = self.news()
        self.tell_failures(what, steps, timesteps=steps)
        shaped = shape(steps)
        # The last line but the return: a signal handler finds the timesteps handed over, or not.
        self._forget((), steps)
        return shaped

    def tell_failures(
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
            self._forget(failures, timesteps)
            raise error

    def _forget(self, failures: Iterable[int], timesteps: Iterable[int]) -> None:
        """Remove the errors and timesteps of these ids from the records: the caller gets them."""
        records = list(self.records)
        for index in failures:
            records[index] = records[index]._replace(failure=None)
        for index in timesteps:
            records[index] = records[index]._replace(timestep=None)
        self.records = records

    # --- effects of an answer ---------------------------------------------------------------------

    def _take_up(self, index: int, record: Record) -> None:
        """Replace the record of an env that has answered, or failed."""
        error, answer = self._round.failures.get(index), self._round.answers[index]
        if record.asked not in ("step", "reset") or record.state is EnvState.NEED_RESET:
            # A call, which finds the answer in the round; or a request that was given up for a reset.
            self.records[index] = record._replace(asked="")
        elif error is not None:
            self.records[index] = self._failed(index, record, error)
        elif record.state is EnvState.RESET:
            observation, info = answer
            timestep = record.timestep
            if timestep is not None and record.asked == "step":
                timestep = timestep._replace(observation=observation)
            self.records[index] = record._replace(
                state=EnvState.RUN, asked="", observation=self._kept(observation), info=info, timestep=timestep
            )
        else:
            self._stepped(index, record, answer)

    def _stepped(self, index: int, record: Record, transition: Transition) -> None:
        config = self._config
        observation, reward, terminated, truncated, info = transition
        told = info if isinstance(info, dict) else {}  # the env may have returned anything
        ours = told.get("multienv")
        if isinstance(ours, dict) and ours.get("recovery") == "truncated":
            info = told = {**told, "abnormal": True}
        timestep = Timestep(index, observation, reward, terminated, truncated, info)
        if not timestep.done:
            kept = self._kept(observation)
            self.records[index] = record._replace(asked="", timestep=timestep, observation=kept, info=info)
            return
        episodes = record.episodes + (not _is_abnormal(told))
        if config.reset_inplace:
            timestep = timestep._replace(info={**told, "final_obs": observation})
        record = record._replace(episodes=episodes, timestep=timestep)
        if episodes >= config.episode_num:
            self.records[index] = record._replace(state=EnvState.DONE, asked="")
        elif not config.auto_reset:
            self.records[index] = record._replace(state=EnvState.NEED_RESET, asked="")
        else:
            self._begin_episodes({index: record._replace(asked="step" if config.reset_inplace else "reset")})

    def _failed(self, index: int, record: Record, error: BaseException) -> Record:
        """Return the record after a failure; it keeps the timestep, which the caller gets even if the reset failed."""
        state = EnvState.ERROR
        if record.state is EnvState.RUN and isinstance(error, UsageError):
            episode = self.supervisors[index].state.episode
            state = EnvState.RUN if episode in (Episode.RUNNING, Episode.TRUNCATED) else state  # nothing was sent
        return record._replace(state=state, asked="", failure=error)

    # --- helpers ----------------------------------------------------------------------------------

    def _until_idle(self, chosen: Iterable[int]) -> None:
        self.until(lambda: not any(self.records[index].asked for index in chosen))

    def _refuse_if_closed(self) -> None:
        if self.closed:
            raise ClosedError("The manager was closed in the middle of the call. Call launch() first.")

    def _kept(self, observation: Any) -> Any:
        if not self._config.copy_on_get:
            return observation
        return (
            observation.copy()
            if type(observation) is np.ndarray and not observation.dtype.hasobject
            else copy.deepcopy(observation)
        )


def _ask_patiently(supervisor: Supervisor, name: str, content: Any, config: EnvManagerConfig, closing: Task) -> None:
    """Send a request and wait for the answer, which the supervisor keeps; try a reset that fails again."""
    tries_left = config.max_retry if name == "reset" else 1
    while True:
        try:
            if name == "step":
                supervisor.send_step(content, False)
            else:
                supervisor.send(name, content, False)
            supervisor.resume()
            return
        except (EnvError, WorkerLostError) as error:  # not the caller's failure
            tries_left -= 1
            if not tries_left or isinstance(error, RestartBudgetExceeded) or closing.wait(config.retry_waiting_time):
                raise
        if config.retry_type == "renew":
            supervisor.discard()


def _is_abnormal(info: dict[str, Any]) -> bool:
    try:
        return bool(info.get("abnormal", False))
    except Exception:  # an array, for instance
        return True
