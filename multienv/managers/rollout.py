"""The envs of a launched manager: what is asked of each, what has come back, and what follows from that.

All that is known of the envs is one tuple of records. A record is replaced, never changed. What a call hands over is
taken out by one assignment that nothing follows but the return. So an exception of a signal handler (Ctrl-C) finds an
answer not taken up or taken up, and a timestep still there or handed over. Whether the request in a record was
not sent yet, waits for its answer, or was answered without the record having it, is read off its supervisor: the next
turn goes on with it, whichever call that is in.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from multienv.cores import Turns, spread
from multienv.errors import (
    ClosedError,
    EnvError,
    EnvsFailedError,
    MultienvError,
    RestartBudgetExceeded,
    UsageError,
    WorkerLostError,
)
from multienv.fanout import FanOut
from multienv.managers.config import EnvManagerConfig, EnvState, Timestep
from multienv.processes.channel import Channel, wait_any
from multienv.recovery.state_machine import Episode
from multienv.recovery.supervisor import HealingDue, Supervisor
from multienv.threads import Task, close_at_once
from multienv.wire.codecs import Transition
from multienv.wire.messages import Message, Reset

# Seconds after which an answer is awaited by a thread of its own. That is where deadlines are watched, a silent hang is
# told of, and a request is published again that an interruption may have kept from being.
_PATIENCE = 0.1
# Seconds between two looks at those threads.
_LOOK = 0.002

_ADVICE = (
    "Reset those that are in EnvState.ERROR: reset({id: None}). What others have returned is in `results`; "
    "what they have still to return, the next step() gives."
)


class Request(NamedTuple):
    """What is asked of an env and not taken up yet.

    Attributes:
        name: ``"step"`` or ``"reset"``.
        content: The action, or the message.
        mark: The supervisor's number before; a higher one means that this is answered.
        sent: When it was sent, or, in the future, is to be; by ``time.monotonic()``.
        tries: How often it was tried before; only resets are tried again.
        dropped: A reset of the caller's follows: the answer is of no interest.
        task: The thread that waits for the answer, if one does. The supervisor keeps the answer.
    """

    name: str
    content: Any
    mark: int
    sent: float
    tries: int = 0
    dropped: bool = False
    task: Task | None = None


class Record(NamedTuple):
    """What is known of one env.

    Attributes:
        state: Where it stands.
        episodes: Whole ones, of those that count.
        resets: Begun since its seed was given; the number of the next episode's seed.
        request: What is under way.
        timestep: Not handed over yet.
        failure: Not told yet.
        ended: The timestep that ended an episode, while the reset in place is under way.
        observation: To act on next.
        info: What came with it.
    """

    state: EnvState = EnvState.INIT
    episodes: int = 0
    resets: int = 0
    request: Request | None = None
    timestep: Timestep | None = None
    failure: BaseException | None = None
    ended: Timestep | None = None
    observation: Any = None
    info: Any = None

    @property
    def is_stepping(self) -> bool:
        """Tell whether a timestep is under way."""
        return self.request is not None and (self.request.name == "step" or self.ended is not None)

    @property
    def is_idle(self) -> bool:
        """Tell whether an episode runs and nothing is under way."""
        return self.state is EnvState.RUN and self.request is None

    @property
    def is_ready(self) -> bool:
        """Tell whether the env can be stepped: its last timestep is handed over, too."""
        return self.state is EnvState.RUN and self.request is None and self.timestep is None


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
        self.records: tuple[Record, ...] = (Record(),) * len(supervisors)
        self.params: dict[int, dict[str, Any]] = {}
        self.closed = False
        self._config = config
        self._seed_of = seed_of
        spread(self.supervisors)
        self._turns = Turns({index: supervisor.core for index, supervisor in enumerate(self.supervisors)})
        self._fanout = FanOut(self.supervisors, name="multienv-manager")

    # --- how they stand ---------------------------------------------------------------------------

    def ready(self) -> list[int]:
        """Return which envs can be stepped."""
        return [index for index, record in enumerate(self.records) if record.is_ready]

    def stepping(self) -> int:
        """Count the timesteps under way."""
        return sum(record.is_stepping for record in self.records)

    def news(self) -> int:
        """Count the timesteps that are not handed over."""
        return sum(record.timestep is not None for record in self.records)

    def failures(self) -> dict[int, BaseException]:
        """Return the failures that are not told."""
        return {index: record.failure for index, record in enumerate(self.records) if record.failure is not None}

    def is_busy(self) -> bool:
        """Tell whether something is under way, or not handed over."""
        return any(record.request or record.timestep or record.failure is not None for record in self.records)

    def done(self) -> bool:
        """Tell whether all envs have run their episodes, and every timestep is handed over."""
        return all(record.state is EnvState.DONE and record.timestep is None for record in self.records)

    def observation(self, index: int) -> Any:
        """Return the observation to act on next."""
        return self._kept(self.records[index].observation)

    # --- asking -----------------------------------------------------------------------------------

    def step(self, actions: Mapping[int, Any]) -> None:
        """Send these steps: all of them, or none if this is interrupted before they are noted."""
        now = time.monotonic()
        requests = {
            index: Request("step", action, self.supervisors[index].number, now) for index, action in actions.items()
        }
        self._ask({index: self.records[index]._replace(request=request) for index, request in requests.items()})

    def reset(self, chosen: Sequence[int]) -> None:
        """Reset these envs, and wait for that; what they were doing is given up.

        Raises:
            EnvsFailedError: Some could not be reset; its ``results`` has the observations of the others.
        """
        self.finish_calls()
        records = list(self.records)
        for index in chosen:
            request = records[index].request
            if request is not None:
                records[index] = records[index]._replace(request=request._replace(dropped=True))
                if request.sent > time.monotonic():  # it waits for its next try, which is not to come
                    records[index] = records[index]._replace(request=None, state=EnvState.NEED_RESET)
        self.records = tuple(records)
        self._until_idle(chosen)
        asked: dict[int, Record] = {}
        for index in chosen:
            record = self.records[index]
            episodes = 0 if record.state is EnvState.DONE else record.episodes
            record = record._replace(episodes=episodes, timestep=None, failure=None, ended=None)
            asked[index] = self._resetting(index, record)
        self._ask(asked)
        self._until_idle(chosen)
        self._fanout.call_hooks()
        failures = {index: error for index, error in self.failures().items() if index in asked}
        if failures:
            begun = [index in asked and record.is_ready for index, record in enumerate(self.records)]
            results = [self.observation(index) if ready else None for index, ready in enumerate(begun)]
            error = EnvsFailedError.collect("reset()", failures, results, _ADVICE)
            self._forget(failures, ())
            raise error

    def call(self, what: str, name: str, messages: Mapping[int, Message]) -> dict[int, Any]:
        """Ask envs for something else, each once it is doing nothing else, and wait for the answers.

        Raises:
            EnvsFailedError: Some raised; the others answered.
        """
        self.finish_calls()
        self._until_idle(messages)
        current = self._fanout.ask(name, [messages.get(index) for index in range(len(self.supervisors))])
        self._refuse_if_closed()
        self._fanout.finish()
        if current.failures:
            raise EnvsFailedError.collect(
                what, current.failures, current.answers, "The others answered; all episodes go on."
            )
        return {index: current.answers[index] for index in messages}

    def finish_calls(self) -> None:
        """Wait for what an interrupted :meth:`call` has asked; nobody wants the answer."""
        self._fanout.drop()

    def count_resets_anew(self, chosen: Iterable[int]) -> None:
        """Have the next reset of these envs be the first, as far as seeds are concerned."""
        self.records = tuple(
            record._replace(resets=0) if index in chosen else record for index, record in enumerate(self.records)
        )

    def fail(self, failures: Mapping[int, BaseException]) -> None:
        """Note that these envs have failed, for a reason of the manager's."""
        self.records = tuple(
            record._replace(state=EnvState.ERROR, failure=failures[index]) if index in failures else record
            for index, record in enumerate(self.records)
        )

    def close(self) -> None:
        """End all processes side by side; a call that waits raises ClosedError. Again does nothing."""
        self.closed = True
        close_at_once([one.close for one in self.supervisors])
        self._fanout.close()

    # --- waiting ----------------------------------------------------------------------------------

    def turn(self, patience: float | None) -> None:
        """Take up what has come; if nothing has, wait for something, at most ``patience`` seconds."""
        for index in self._wait(patience):
            self._refuse_if_closed()
            self._take_up(index)
        self._refuse_if_closed()

    def _wait(self, patience: float | None) -> list[int]:
        """Send what is unsent, and return whose answers can be taken up: at once, or after waiting for one.

        Channels are not held beyond this: a failure that the caller keeps would keep their memory mapped by its frames.
        """
        self._refuse_if_closed()
        now = time.monotonic()
        until = math.inf if patience is None else now + patience
        ready: list[int] = []
        awaited: dict[int, tuple[Channel, int]] = {}
        for index, record in enumerate(self.records):
            request = record.request
            if request is None:
                continue
            if request.task is not None:
                request.task.start(self._fanout.pool)  # an interruption may have come before that
                until = min(until, now + _LOOK)
                if request.task.wait(0):
                    ready.append(index)
            elif request.sent > now:
                until = min(until, request.sent, now + _LOOK)
            elif self._is_unsent(index, request):
                self._send(index)
                until = now
            elif (line := self.supervisors[index].waiting()) is None:
                ready.append(index)
            elif now < request.sent + _PATIENCE:
                until = min(until, request.sent + _PATIENCE)
                awaited[index] = line
            else:
                self._await_in_thread(index, self.supervisors[index].resume)
                until = min(until, now + _LOOK)
        return ready + _answered(awaited, now if ready else until)

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
                or not any(record.request and not record.is_stepping for record in self.records)
            )
        )
        self._fanout.call_hooks()

    def until_stepped(self, wanted: float, patience: float | None) -> None:
        """Wait for ``wanted`` timesteps and until ``patience`` is over, or for all; ``None``: for all."""
        begin = time.monotonic()
        wanted = min(wanted, self.stepping() + self.news())
        while self.stepping():
            left = None
            if patience is not None:
                failed = len(self.failures())
                if self.news() + failed >= wanted:
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
        self._fanout.call_hooks()  # while nothing is handed over that Ctrl-C in one could lose
        steps = {index: record.timestep for index, record in enumerate(self.records) if record.timestep is not None}
        self.tell_failures(what, steps, timesteps=steps)
        shaped = shape(steps)
        # The last but the return: a signal handler finds them handed over, or not.
        self._forget((), steps)
        return shaped

    def tell_failures(self, what: str, results: Mapping[int, Any], timesteps: Iterable[int] = ()) -> None:
        """Raise what has failed, if anything, with these results by id; ``timesteps`` of them are handed over so."""
        failures = self.failures()
        if failures:
            every = [results.get(index) for index in range(len(self.supervisors))]
            error = EnvsFailedError.collect(what, failures, every, _ADVICE)
            self._forget(failures, timesteps)
            raise error

    def _forget(self, failures: Iterable[int], timesteps: Iterable[int]) -> None:
        """Take out of the records what is handed to the caller."""
        records = list(self.records)
        for index in failures:
            records[index] = records[index]._replace(failure=None)
        for index in timesteps:
            records[index] = records[index]._replace(timestep=None)
        self.records = tuple(records)

    # --- what follows -----------------------------------------------------------------------------

    def _take_up(self, index: int) -> None:
        """Take up an answer for which there is nothing to wait; a recovery is left to a thread."""
        request, supervisor = self.records[index].request, self.supervisors[index]
        assert request is not None
        if request.task is None and self._is_unsent(index, request):
            return  # its env was closed meanwhile
        try:
            if request.task is not None and request.task.error is not None:
                raise request.task.error
            answer = supervisor.resume() if supervisor.state.request is None else supervisor.collect(heal=False)
        except HealingDue:
            self._await_in_thread(index, supervisor.resume)
        except MultienvError as error:
            self._set(index, self._failed(index, request, error))
        else:
            self._set(index, self._answered(index, request, answer))

    def _await_in_thread(self, index: int, call: Callable[[], Any]) -> None:
        """Have a thread make this call, which leaves the answer to the request of an env with its supervisor."""
        record = self.records[index]
        assert record.request is not None
        task = Task(call)
        self._put(index, record._replace(request=record.request._replace(task=task)))  # noted first: it is not lost
        task.start(self._fanout.pool)

    def _is_unsent(self, index: int, request: Request) -> bool:
        """Tell whether a request in a record has not been sent yet."""
        supervisor = self.supervisors[index]
        return supervisor.state.request is None and supervisor.number == request.mark

    def _ask(self, asked: Mapping[int, Record]) -> None:
        """Note records with new requests, by one assignment, and send these."""
        records = list(self.records)
        for index, record in asked.items():
            records[index] = record
        self.records = tuple(records)
        for index in self._turns.now():
            if index in asked:
                self._send(index)

    def _send(self, index: int) -> None:
        """Send the request in a record; does not block."""
        request, supervisor = self.records[index].request, self.supervisors[index]
        assert request is not None
        maintenance = supervisor.maintenance
        if maintenance.is_due or (request.name == "reset" and maintenance.recycling_due):
            # A process is replaced by plan before this is sent: that may take a while.
            self._await_in_thread(index, partial(_asked_and_answered, supervisor, request))
            return
        try:
            _send_to(supervisor, request)
        except MultienvError as error:
            self._set(index, self._failed(index, request, error))

    def _set(self, index: int, record: Record) -> None:
        """Replace a record, and send its request if it has a new one."""
        self._put(index, record)
        if record.request is not None and record.request.sent <= time.monotonic():
            self._send(index)

    def _put(self, index: int, record: Record) -> None:
        records = list(self.records)
        records[index] = record
        self.records = tuple(records)

    def _answered(self, index: int, request: Request, answer: Any) -> Record:
        """Return the record after an answer."""
        record = self.records[index]
        if request.name == "step":
            return self._stepped(index, request, answer)
        observation, info = answer
        timestep, ended = record.timestep, record.ended
        if ended is not None:
            timestep = ended._replace(observation=observation)
        return record._replace(
            state=EnvState.RUN, request=None, observation=self._kept(observation), info=info, timestep=timestep,
            ended=None,
        )  # fmt: skip

    def _stepped(self, index: int, request: Request, transition: Transition) -> Record:
        record, config = self.records[index], self._config
        if request.dropped:
            return record._replace(state=EnvState.NEED_RESET, request=None)
        observation, reward, terminated, truncated, info = transition
        told = info if isinstance(info, dict) else {}  # the env may have returned anything
        ours = told.get("multienv")
        if isinstance(ours, dict) and ours.get("recovery") == "truncated":
            info = told = {**told, "abnormal": True}
        timestep = Timestep(index, observation, reward, terminated, truncated, info)
        if not timestep.done:
            kept = self._kept(observation)
            return record._replace(request=None, timestep=timestep, observation=kept, info=info)
        episodes = record.episodes + (not _is_abnormal(told))
        if config.reset_inplace:
            timestep = timestep._replace(info={**told, "final_obs": observation})
        if episodes >= config.episode_num:
            return record._replace(state=EnvState.DONE, episodes=episodes, request=None, timestep=timestep)
        if not config.auto_reset:
            return record._replace(state=EnvState.NEED_RESET, episodes=episodes, request=None, timestep=timestep)
        record = self._resetting(index, record._replace(episodes=episodes))
        return record._replace(ended=timestep) if config.reset_inplace else record._replace(timestep=timestep)

    def _resetting(self, index: int, record: Record) -> Record:
        """Return the record with a request for the env's next reset."""
        param = self.params.get(index, {})
        seed = param.get("seed")
        if seed is None:
            seed = self._seed_of(index, record.resets)
        message = Reset((seed,), (param.get("options"),))
        request = Request("reset", message, self.supervisors[index].number, time.monotonic())
        return record._replace(state=EnvState.RESET, resets=record.resets + 1, request=request)

    def _failed(self, index: int, request: Request, error: BaseException) -> Record:
        """Return the record after a failure."""
        error.__traceback__ = None  # its frames would keep the memory mapped that is shared with the env's process
        record, config = self.records[index], self._config
        supervisor = self.supervisors[index]
        tries_left = 0 if request.dropped or request.name == "step" else config.max_retry - request.tries - 1
        if tries_left > 0 and _is_worth_a_retry(error):
            if config.retry_type == "renew":
                supervisor.discard()
            due = time.monotonic() + config.retry_waiting_time
            again = Request("reset", request.content, supervisor.number, due, request.tries + 1)
            return record._replace(request=again)
        state = EnvState.ERROR
        if request.name == "step" and isinstance(error, UsageError):
            episode = supervisor.state.episode
            state = EnvState.RUN if episode in (Episode.RUNNING, Episode.OWED) else state  # nothing was sent
        # A reset in place that failed: the timestep is the caller's all the same.
        timestep = record.timestep if record.ended is None else record.ended
        return record._replace(state=state, request=None, failure=error, timestep=timestep, ended=None)

    # --- helpers ----------------------------------------------------------------------------------

    def _until_idle(self, chosen: Iterable[int]) -> None:
        self.until(lambda: all(self.records[index].request is None for index in chosen))

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


def _answered(awaited: Mapping[int, tuple[Channel, int]], until: float) -> list[int]:
    """Wait until one of these channels has an answer, at most until then; return which have, or have lost it."""
    left = until - time.monotonic()
    if left <= 0:
        return [index for index, (channel, number) in awaited.items() if channel.answered(number)]
    if not awaited:
        time.sleep(left)
        return []
    indices = list(awaited)
    return [indices[place] for place in wait_any(list(awaited.values()), until)]


def _send_to(supervisor: Supervisor, request: Request) -> None:
    if request.name == "step":
        supervisor.send_step(request.content, False)
    else:
        supervisor.send(request.name, request.content, False)


def _asked_and_answered(supervisor: Supervisor, request: Request) -> None:
    _send_to(supervisor, request)
    supervisor.resume()


def _is_worth_a_retry(error: BaseException) -> bool:
    """Tell whether it is the env's or its process's failure, not the caller's."""
    return isinstance(error, EnvError | WorkerLostError) and not isinstance(error, RestartBudgetExceeded)


def _is_abnormal(info: dict[str, Any]) -> bool:
    try:
        return bool(info.get("abnormal", False))
    except Exception:  # an array, for instance
        return True
