"""The envs of a launched manager: where each stands, what has come back, and what follows from that.

What is asked of the envs lies in the endless round of a fan-out, which sends, waits and heals. All else that is known
of an env is a record. A record is replaced, never changed, and together with what it asks of the env; what a call hands
over is taken out by one assignment that nothing follows but the return. So an exception of a signal handler (Ctrl-C)
finds an answer not taken up or taken up, and a timestep still there or handed over.
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
from multienv.fanout import MISSING, FanOut, InThread
from multienv.managers.config import EnvManagerConfig, EnvState, Timestep
from multienv.recovery.state_machine import Episode
from multienv.recovery.supervisor import Supervisor
from multienv.threads import Task, close_at_once
from multienv.wire.codecs import Transition
from multienv.wire.messages import Message, reset_of_one

_ADVICE = "Reset those that are in EnvState.ERROR: reset({id: None})."
_OTHERS = "What others have returned is in `results`; what they have still to return, the next step() gives."


class Record(NamedTuple):
    """What is known of one env.

    Attributes:
        state: Where it stands.
        episodes: Whole ones, of those that count.
        resets: Begun since its seed was given; the number of the next episode's seed.
        asked: What is under way: ``"step"``, with the reset in place that follows it; ``"reset"``; another call's name.
        timestep: Not handed over yet; while ``asked`` is ``"step"``, not complete yet.
        failure: Not told yet.
        observation: To act on next.
        info: What came with it.
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
        """Tell whether an episode runs and nothing is under way."""
        return self.state is EnvState.RUN and not self.asked

    @property
    def is_ready(self) -> bool:
        """Tell whether the env can be stepped: its last timestep is handed over, too."""
        return self.state is EnvState.RUN and not self.asked and self.timestep is None


class Rollout:
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
        self._closing = Task(bool)  # its end is that of the waiting between two tries
        spread(supervisors)
        self._fan = FanOut(supervisors, name="multienv-manager")
        self._round = self._fan.begin_endless()

    # --- how they stand ---------------------------------------------------------------------------

    def ready(self) -> list[int]:
        """Return which envs can be stepped."""
        return [index for index, record in enumerate(self.records) if record.is_ready]

    def stepping(self) -> int:
        """Count the timesteps under way."""
        return sum(record.asked == "step" for record in self.records)

    def news(self) -> dict[int, Timestep]:
        """Return the timesteps that are not handed over."""
        return {
            index: record.timestep
            for index, record in enumerate(self.records)
            if record.timestep is not None and record.asked != "step"
        }

    def failures(self) -> dict[int, BaseException]:
        """Return the failures that are not told."""
        return {index: record.failure for index, record in enumerate(self.records) if record.failure is not None}

    def is_busy(self) -> bool:
        """Tell whether something is under way, or not handed over."""
        return any(record.asked or record.timestep or record.failure is not None for record in self.records)

    def done(self) -> bool:
        """Tell whether all envs have run their episodes, and every timestep is handed over."""
        return all(record.state is EnvState.DONE and record.timestep is None for record in self.records)

    def observation(self, index: int) -> Any:
        """Return the observation to act on next."""
        return self._kept(self.records[index].observation)

    # --- asking -----------------------------------------------------------------------------------

    def step(self, actions: Mapping[int, Any]) -> None:
        """Send these steps: all of them, or none if this is interrupted before they are noted."""
        self._ask("step", actions, {index: self.records[index]._replace(asked="step") for index in actions})

    def reset(self, chosen: Sequence[int]) -> None:
        """Reset these envs, and wait for that; what they were doing is given up.

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
        """Ask envs for something else, each once it is doing nothing else, and wait for the answers.

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
        """Wait for what an interrupted :meth:`call` has asked; nobody wants the answer."""
        while any(record.asked not in ("", "step", "reset") for record in self.records):
            self.turn(None)

    def count_resets_anew(self, chosen: Iterable[int]) -> None:
        """Have the next reset of these envs be the first, as far as seeds are concerned."""
        self.records = [
            record._replace(resets=0) if index in chosen else record for index, record in enumerate(self.records)
        ]

    def fail(self, failures: Mapping[int, BaseException]) -> None:
        """Note that these envs have failed, for a reason of the manager's."""
        self.records = [
            record._replace(state=EnvState.ERROR, failure=failures[index]) if index in failures else record
            for index, record in enumerate(self.records)
        ]

    def close(self) -> None:
        """End all processes side by side; a call that waits raises ClosedError. Again does nothing."""
        self.closed = True
        self._closing.run()
        close_at_once([one.close for one in self.supervisors])
        self._fan.close()

    def _begin_episodes(self, records: Mapping[int, Record]) -> None:
        """Reset envs, whose records say what for."""
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
        """Note requests together with the records that say so, and send them."""
        contents = {index: self._content(index, name, request) for index, request in requests.items()}
        records = [asked.get(index, record) for index, record in enumerate(self.records)]
        # Adjacent stores: no signal handler comes in between.
        self.records, self._round.answers = records, self._fan.note(name, contents)
        self._fan.send_noted(contents)

    def _content(self, index: int, name: str, request: Any) -> Any:
        """Return a request, to be sent in a thread where that may take a while."""
        supervisor, config = self.supervisors[index], self._config
        maintenance, is_reset = supervisor.maintenance, name == "reset"
        # Its process is to be replaced by plan first, or it is to be tried again if it fails.
        if maintenance.is_due or (is_reset and (maintenance.recycling_due or config.max_retry > 1)):
            return InThread(partial(_ask_patiently, supervisor, name, request, config, self._closing))
        return request

    # --- waiting ----------------------------------------------------------------------------------

    def turn(self, patience: float | None) -> None:
        """Take up what has come; if nothing has, wait for something, at most ``patience`` seconds."""
        self._refuse_if_closed()
        answered = self._answered()
        if not answered:  # else it was refused when it was sent, or an interruption came before it was taken up
            self._fan.take(patience)
            answered = self._answered()
        for index in answered:
            self._refuse_if_closed()
            self._take_up(index, self.records[index])
        self._refuse_if_closed()

    def _answered(self) -> list[int]:
        """Return whose answers, or failures, are there and not taken up."""
        answers = self._round.answers
        return [index for index, record in enumerate(self.records) if record.asked and answers[index] is not MISSING]

    def until(self, satisfied: Callable[[], Any]) -> None:
        """Take up what comes until this is so; at least what is there."""
        self.turn(0.0)
        while not satisfied():
            self.turn(None)

    def until_some_are_ready(self) -> None:
        """Wait until an env can be stepped, unless none will be without being asked."""
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
        """Wait for ``wanted`` timesteps and until ``patience`` is over, or for all; ``None``: for all."""
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
        """Return the timesteps that have come, in the shape that is wanted.

        Raises:
            EnvsFailedError: Envs have failed; its ``results`` has the timesteps.
        """
        self._fan.call_hooks()  # while nothing is handed over that Ctrl-C in one could lose
        steps = self.news()
        self.tell_failures(what, steps, timesteps=steps)
        shaped = shape(steps)
        # The last but the return: a signal handler finds them handed over, or not.
        self._forget((), steps)
        return shaped

    def tell_failures(
        self, what: str, results: Mapping[int, Any], *, timesteps: Iterable[int] = (), of: Collection[int] | None = None
    ) -> None:
        """Raise what has failed, if anything.

        Args:
            what: The call.
            results: Of the others, by id.
            timesteps: The results are these, which are handed over so.
            of: The envs to look at; ``None``: all.
        """
        failures = {index: error for index, error in self.failures().items() if of is None or index in of}
        if failures:
            every = [results.get(index) for index in range(len(self.supervisors))]
            error = EnvsFailedError.collect(what, failures, every, _ADVICE, _OTHERS)
            self._forget(failures, timesteps)
            raise error

    def _forget(self, failures: Iterable[int], timesteps: Iterable[int]) -> None:
        """Take out of the records what is handed to the caller."""
        records = list(self.records)
        for index in failures:
            records[index] = records[index]._replace(failure=None)
        for index in timesteps:
            records[index] = records[index]._replace(timestep=None)
        self.records = records

    # --- what follows from an answer --------------------------------------------------------------

    def _take_up(self, index: int, record: Record) -> None:
        """Replace the record of an env that has answered, or failed."""
        error, answer = self._round.failures.get(index), self._round.answers[index]
        if record.asked not in ("step", "reset") or record.state is EnvState.NEED_RESET:
            # A call, which finds the answer in the round; or what was given up for a reset.
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
        """Return the record after a failure; the timestep before a reset that failed is the caller's all the same."""
        state = EnvState.ERROR
        if record.state is EnvState.RUN and isinstance(error, UsageError):
            episode = self.supervisors[index].state.episode
            state = EnvState.RUN if episode in (Episode.RUNNING, Episode.OWED) else state  # nothing was sent
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
    """Ask, and wait for the answer, which stays with the supervisor; a reset that fails is tried again."""
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
