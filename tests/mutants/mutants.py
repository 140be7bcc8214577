"""The mutants: defects that a programmer could make, each as one replacement of text in one file of the package.

``old`` stands exactly once in its file; ``tests/unit/test_mutants.py`` holds that true. Whoever rewrites such a line
writes the defect anew, in the new words.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One defect.

    Attributes:
        name: What is broken, in a sentence.
        invariant: The invariant of ``docs/guarantees.md`` that it breaks.
        file: In the package.
        old: Text that stands there once.
        new: What stands in its place.
        tests: Files, beginnings of their paths, or tests that are likely to catch it, tried first; else the file of the
            invariant is.
    """

    name: str
    invariant: int
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ()


SIMULATED_STARTS = ("tests/simulation/test_single_faults.py", "tests/simulation/test_faults_and_programs.py")
UNIT_JOURNAL = ("tests/unit/test_journal.py",)
SEVEN = "tests/invariants/test_7_nothing_left_behind.py"


def _of(number: int) -> tuple[str, ...]:
    """Return the file of an invariant."""
    return (f"tests/invariants/test_{number}_",)


MUTANTS = [
    # --- 1: no splice -----------------------------------------------------------------------------
    Mutant(
        "After an error has ended the episode, step() goes on in a new process instead of asking for a reset.",
        1,
        "recovery/state_machine.py",
        "    if kind is not Kind.STEP or state.episode in (Episode.RUNNING, Episode.TRUNCATED):\n",
        "    if kind is not Kind.STEP or state.episode is not Episode.ENDED:\n",
    ),
    Mutant(
        "A truncation that a call has left pending is forgotten: the next step goes on in a new process.",
        1,
        "recovery/state_machine.py",
        "skipped = state.pending_truncations if event.request.kind is Kind.STEP else ()",
        "skipped = ()",
        _of(3),
    ),
    Mutant(
        "The episode of a single env counts as running after a truncation.",
        1,
        "recovery/state_machine.py",
        "ended = event.ended and not rules.resets_itself and rules.slots == 1",
        "ended = False",
    ),
    Mutant(
        "With NEXT_STEP autoreset a batch resets one step early.",
        1,
        "worker/rows.py",
        'if self._group.autoreset != "SAME_STEP":',
        'if self._group.autoreset == "DISABLED":',
        ("tests/contract/test_vector_env.py",),
    ),
    Mutant(
        "With SAME_STEP autoreset a batch loses the final observation.",
        1,
        "worker/rows.py",
        'return observation, {"final_obs": final_observation, "final_info": final_info, **(info or {})}',
        'return observation, {"final_info": final_info, **(info or {})}',
        ("tests/contract/test_vector_env.py",),
    ),
    # --- 2: exact recovery ------------------------------------------------------------------------
    Mutant(
        "Steps on the hot path are not recorded in the journal.",
        2,
        "recovery/hot_path.py",
        "journal.entries[number] = bytes(buffers.records[side])",
        "pass",
    ),
    Mutant(
        "Native code: steps on the hot path are not recorded in the journal.",
        2,
        "_native.c",
        "int failed = entries == NULL || entry == NULL || PyDict_SetItem(entries, number, entry) < 0;",
        "int failed = entries == NULL || entry == NULL;",
    ),
    Mutant(
        "Native code: each worker is given the actions of the first.",
        2,
        "_native.c",
        "(char *)self->view.buf + start * row, size",
        "(char *)self->view.buf, size",
        ("tests/contract/test_vector_env.py",),
    ),
    Mutant(
        "Native code: infos of numbers are left out.",
        2,
        "_native.c",
        "    if (length == 0) {\n        return PySequence_GetItem(self->replies, side);",
        "    if (length >= 0) {\n        return PySequence_GetItem(self->replies, side);",
        ("tests/contract/test_number_infos.py",),
    ),
    Mutant(
        "Native code: a worker takes the end of an episode for a step like any other.",
        2,
        "_native.c",
        "for (int flag = 2; flag < 4; flag++)",
        "for (int flag = 3; flag < 4; flag++)",
        ("tests/contract/test_vector_env.py",),
    ),
    Mutant(
        "A replay cannot begin at a reset inside a rollout.",
        5,
        "recovery/rollouts.py",
        "reply.starts.append((number, answers.generators))",
        "pass",
        ("tests/faults/test_rollouts_and_kills.py",),
    ),
    Mutant(
        "After a step of a rollout that shows nothing the next one shows what was there before.",
        3,
        "recovery/rollouts.py",
        'answers.stand(aside, {**answers.standing(aside), "seen": number})',
        "pass",
        ("tests/faults/test_rollouts_and_kills.py", "tests/contract/test_rollouts.py"),
    ),
    Mutant(
        "The step that was asked again after a loss is not recorded.",
        2,
        "recovery/supervisor.py",
        "        if (not is_call or is_recorded(message)) and number",
        "        if ((not is_call and message is not None) or is_recorded(message)) and number",
    ),
    Mutant(
        "A reply that is read again after Ctrl-C is recorded again, with what was laid over its rows.",
        2,
        "recovery/supervisor.py",
        " and number not in self.journal.entries:",
        ":",
        ("tests/simulation/test_interruptions.py",),
    ),
    Mutant(
        "Calls that may change the env are not recorded.",
        2,
        "wire/messages.py",
        "(isinstance(message, Call) and message.recorded)",
        "(isinstance(message, Call) and not message.recorded)",
    ),
    Mutant(
        "A trimmed journal still claims to reach back to the construction of the envs.",
        2,
        "recovery/journal.py",
        "histories.append(History(tuple(kept), history.ended, is_whole))",
        "histories.append(History(tuple(kept), history.ended, history.is_whole))",
    ),
    Mutant(
        "The journal forgets what the newest forked snapshot needs.",
        2,
        "recovery/journal.py",
        "min(wanted + [snapshot + 1] * bool(snapshot), default=self.last + 1)",
        "min(wanted, default=self.last + 1)",
        UNIT_JOURNAL,
    ),
    Mutant(
        "The last request is left out of a replay.",
        2,
        "recovery/journal.py",
        "numbers = [number for number in self.entries if number >= front]",
        "numbers = [number for number in self.entries if front <= number < last]",
    ),
    Mutant(
        "Calls and attributes set before the first request of a replay are not repeated.",
        2,
        "recovery/journal.py",
        "tuple(payload for number, payload in self._lasting.items() if number < front),",
        "(),",
        SIMULATED_STARTS,
    ),
    Mutant(
        "A replay does not put back the generators of an env before the reset that it begins with.",
        2,
        "worker/starts.py",
        "                seeding.restore(self._envs[slot], generators)\n",
        "                pass\n",
        SIMULATED_STARTS,
    ),
    Mutant(
        "A replay from the construction on does not put back generators that a constructor has made without a seed.",
        2,
        "recovery/journal.py",
        "bisect_left(numbers, one.number), one.generators)",
        'bisect_left(numbers, one.number), b"" if self.is_whole else one.generators)',
        ("tests/contract/test_without_seeds.py",),
    ),
    Mutant(
        "Envs take part in a replay from its first request on, before the reset that they begin with.",
        2,
        "worker/host.py",
        "skipped = group.waiting = {start.slot for start in message.starts}",
        "skipped = group.waiting = {start.slot for start in message.starts if start.entry < 0}",
        SIMULATED_STARTS,
    ),
    Mutant(
        "An env begins a replay one request after its reset.",
        2,
        "worker/host.py",
        "for start in message.starts if start.entry == index}",
        "for start in message.starts if start.entry == index - 1}",
        SIMULATED_STARTS,
    ),
    Mutant(
        "A reset that raised is told of as one at which a replay can begin.",
        2,
        "worker/env_group.py",
        "            self.starts.forget(slot)\n",
        "            pass\n",
        ("tests/unit/test_worker_starts.py",),
    ),
    Mutant(
        "What an env showed before the reset that its replay begins with is compared.",
        2,
        "recovery/verification.py",
        "waiting = {slot for slot, start in starts.items() if place < start}",
        "waiting = set()",
        SIMULATED_STARTS,
    ),
    Mutant(
        "Of the step in which an env began an episode with SAME_STEP the end of the one before is compared, too.",
        2,
        "recovery/verification.py",
        "starting = set() if exact else {slot for slot, start in starts.items() if place == start}",
        "starting = set()",
        SIMULATED_STARTS,
    ),
    Mutant(
        "A woken snapshot leaves out the first request that came after it was taken.",
        2,
        "recovery/recoverer.py",
        "plan = None if fate.snapshot is None else since(fate.snapshot)",
        "plan = None if fate.snapshot is None else since(fate.snapshot + 1)",
        _of(3),
    ),
    Mutant(
        "A single env's observation is a view of shared memory, which later steps overwrite.",
        2,
        "wire/codecs.py",
        "bank.layout.leaves[0]).copy\n",
        "bank.layout.leaves[0]).view\n",
    ),
    Mutant(
        "With copy=True the batch of a single worker is a view of shared memory, which later steps overwrite.",
        2,
        "vector/batching.py",
        "return lambda replies, views, turn: np.ndarray(shape, dtype, bytearray().join(views[0]))",
        "return lambda replies, views, turn: (\n"
        "        replies[0].leaves[0] if len(replies) == 1 else np.ndarray(shape, dtype, bytearray().join(views[0]))\n"
        "    )",
    ),
    # --- 3: verified, or honest -------------------------------------------------------------------
    Mutant(
        "A replay is not compared with what the caller saw.",
        3,
        "recovery/recoverer.py",
        "found = differences(plan.entries, replayed, codec.layout, exact=codec.exact, starts=starts)",
        "found = {}",
    ),
    Mutant(
        "A replay is compared without the rewards.",
        3,
        "recovery/verification.py",
        '        ("the reward differs", layout.rewards, 8, going_on),\n',
        "",
    ),
    Mutant(
        "A replay is compared without observations that travel as a payload.",
        3,
        "recovery/verification.py",
        "        elif before != after:\n",
        "        elif len(before) != len(after):\n",
    ),
    Mutant(
        "A call that raises in a replay alone is not seen.",
        3,
        "recovery/verification.py",
        "differs = (one.record[3] ^ other.record[3]) & RAISED",
        "differs = 0",
        ("tests/simulation/test_faults_and_programs.py",),
    ),
    Mutant(
        "Envs of a batch whose replay differs are adopted as exact.",
        3,
        "recovery/lifecycle.py",
        "for slot, what in self.found.mismatches.items()\n",
        "for slot, what in ()\n",
    ),
    Mutant(
        "A woken snapshot whose replay differs is adopted as exact.",
        3,
        "recovery/recoverer.py",
        '        if mismatches:\n            sometimes("what follows a woken snapshot differs")\n'
        "            self._let_go(channel)\n            return None\n",
        "",
    ),
    Mutant(
        "A replay begins at a reset though the caller has seen too little since to prove it.",
        3,
        "recovery/journal.py",
        "tuple(one for one in self.starts if one.number < self.ended)",
        "self.starts",
        UNIT_JOURNAL,
    ),
    Mutant(
        "After a replay has led elsewhere an env of a batch is still replayed from resets before that.",
        3,
        "recovery/lifecycle.py",
        "            self._journal.lose(found.mismatches)\n",
        "",
        ("tests/invariants/test_5_recovery_is_bounded.py",),
    ),
    Mutant(
        "The step of an env of a batch that is given up does not say that it is truncated.",
        3,
        "recovery/answers.py",
        "reply.rewards[slot], reply.terminated[slot], reply.truncated[slot] = 0.0, False, True",
        "reply.rewards[slot], reply.terminated[slot], reply.truncated[slot] = 0.0, False, False",
    ),
    Mutant(
        "A request that ends every process is not recognised as poison.",
        3,
        "recovery/state_machine.py",
        "if count >= rules.poison_after}",
        "if count < 0}",
    ),
    # --- 4: a reply belongs to its request --------------------------------------------------------
    Mutant(
        "Native code: the hot path takes whatever reply there is, whatever its number.",
        4,
        "_native.c",
        "while (!(is_there = atomic_load(reply) == number) && looks) {",
        "while (!(is_there = atomic_load(reply) > 0) && looks) {",
    ),
    Mutant(
        "The hot path takes whatever reply there is, whatever its number.",
        4,
        "recovery/hot_path.py",
        "if not supervisor.is_answered(number, until):",
        "if not words[REPLY]:",
    ),
    Mutant(
        "A channel takes whatever reply there is after it has slept, whatever its number.",
        4,
        "processes/worker_process.py",
        "                if self.answered(number):  # read after",
        "                if words[REPLY]:  # read after",
    ),
    Mutant(
        "A worker that has missed its deadline is kept and waited for again.",
        4,
        "recovery/pending.py",
        'raise channel.kill(cause="hung", stack=True)',
        "return False",
        _of(5),
    ),
    Mutant(
        "Of envs at their own pace the result is taken before it is handed over: Ctrl-C in between loses it.",
        8,
        "vector/hosted_vector_env.py",
        "        results = [stream.ready[env] for env in envs]\n",
        "        results = [stream.ready[env] for env in envs]\n        stream.hand_over(envs)\n",
        ("tests/simulation/test_interruptions.py",),
    ),
    Mutant(
        "An env at its own pace is noted as under way only after it was asked.",
        8,
        "stream.py",
        "        self.given = {**self.given, **{env: Noted(name, one) for env, one in requests.items()}}\n        self._ask()\n",
        "        before, self.given = self.given, {**self.given, **{env: Noted(name, one) for env, one in requests.items()}}\n"
        "        given, self.given = self.given, before\n        self._fan.send_some(given)\n        self.given = given\n",
        ("tests/simulation/test_interruptions.py", "tests/contract/test_own_pace.py"),
    ),
    # --- 5: bounded -------------------------------------------------------------------------------
    Mutant(
        "The deadline of an env is not counted anew when another env of its process is called.",
        5,
        "recovery/pending.py",
        "if last != number or mark != before:\n            self._longest",
        "if last != number:\n            self._longest",
    ),
    Mutant(
        "A request that was ended by a deadline found from the times seen has no longer in the next process.",
        5,
        "recovery/supervisor.py",
        "self.pending.limit = SECOND_CHANCE * limit",
        "self.pending.limit = limit",
        ("tests/contract/test_auto_deadlines.py",),
    ),
    Mutant(
        "What an env took is not noted, where its deadline is found from the times seen.",
        5,
        "recovery/limits.py",
        "        self._slowest[name] = seconds\n",
        "",
        ("tests/contract/test_auto_deadlines.py",),
    ),
    Mutant(
        "The deadline of a step is not armed on the hot path.",
        5,
        "recovery/hot_path.py",
        "pending.until = None if limit is None else monotonic() + limit",
        "pending.until = None",
    ),
    Mutant(
        "Native code: the deadline of a step is not armed.",
        5,
        "_native.c",
        "until = limit == Py_None ? Py_NewRef(Py_None) : time_from_now(seconds);",
        "until = Py_NewRef(Py_None);",
    ),
    Mutant(
        "Native code: what is due between two requests is not seen to.",
        5,
        "_native.c",
        "int is_due = get_truth(maintenance, &f_is_due);",
        "int is_due = 0;",
        ("tests/contract/test_recycling.py",),
    ),
    Mutant(
        "The process that is asked again after a loss has what the lost one has left of the deadline.",
        5,
        "recovery/pending.py",
        "        if segment.words[REQUEST] != number:\n            self.arm()\n",
        "        if segment.words[REQUEST] != number:\n",
    ),
    Mutant(
        "A recovery has no deadline.",
        5,
        "recovery/recoverer.py",
        "effort.until = None if limit is None else time.monotonic() + limit",
        "effort.until = None",
    ),
    Mutant(
        "Restarts are not charged to the budget.",
        5,
        "recovery/policy.py",
        "        self._restarts.append(now)\n",
        "",
        ("tests/unit/test_policy.py",),
    ),
    Mutant(
        "The limit of the journal counts the bytes of plain steps alone.",
        5,
        "recovery/journal.py",
        "        held = self.stride * len(self.entries) + sum(self._longer.values())\n",
        "        held = self.stride * len(self.entries)\n",
        UNIT_JOURNAL,
    ),
    Mutant(
        "After a process was replaced by plan replays begin at the construction again.",
        5,
        "recovery/lifecycle.py",
        "            self._journal.go_on_from(found.plan)\n",
        "",
        ("tests/invariants/test_5_recovery_is_bounded.py",),
    ),
    Mutant(
        "SIGTERM is not followed by SIGKILL.",
        5,
        "processes/monitor.py",
        "(term + TERM_GRACE, signal.SIGKILL), last]",
        "last]",
    ),
    Mutant(
        "A worker that sleeps is not woken by a request.",
        5,
        "processes/worker_process.py",
        "self._wake_socket.send(wake_bytes(number), NO_SIGNAL | socket.MSG_DONTWAIT)",
        "pass",
    ),
    Mutant(
        "A replay in which envs that share generators begin at different requests is believed.",
        3,
        "worker/host.py",
        "        if group.starts.has_drawn:\n",
        "        if False:\n",
    ),
    Mutant(
        "An interrupted recovery is charged to the budget once more.",
        5,
        "recovery/recoverer.py",
        "        if effort.turn is None:\n",
        "        if True:\n",
        ("tests/unit/test_policy.py",),
    ),
    Mutant(
        "The first replay may use up the whole of Deadlines.recovery.",
        5,
        "recovery/recoverer.py",
        "                until = (time.monotonic() + until) / 2\n            effort.deaths.clear()",
        "                until = effort.until\n            effort.deaths.clear()",
        ("tests/invariants/test_5_recovery_is_bounded.py",),
    ),
    Mutant(
        "What a worker tells of itself ends on a cluster before the time of its resets.",
        5,
        "cluster/relay.py",
        "range(PID, PID + 7)",
        "range(PID, PID + 5)",
        ("tests/cluster/test_relay.py",),
    ),
    Mutant(
        "Calls and renderings do not count among the seconds that a replay may take.",
        5,
        "worker/host.py",
        "                if is_recorded(message):\n",
        "                if False:\n",
        ("tests/invariants/test_5_recovery_is_bounded.py",),
    ),
    # --- 6: one env's failure stays its own -------------------------------------------------------
    Mutant(
        "An exception of one env drops what its neighbours have returned.",
        6,
        "vector/hosted_vector_env.py",
        'results[index] = (seen, reply.rewards[slot], *ended) if current.name == "step" else seen',
        'results[index] = None if current.name == "step" else seen',
    ),
    Mutant(
        "The neighbour of the env that ended the process is blamed.",
        6,
        "processes/worker_process.py",
        "slot=words[SLOT] - 1,",
        "slot=words[SLOT] - 2,",
    ),
    Mutant(
        "In a batch the env that is stepped is not marked.",
        6,
        "worker/rows.py",
        "                    words[SLOT] = mark\n",
        "",
    ),
    # --- 7: nothing left behind -------------------------------------------------------------------
    Mutant(
        "The monitor does not end after its last worker.",
        7,
        "processes/monitor.py",
        "if self._takes_orders and time.monotonic() >= self._ends_at:",
        "if False:",
        (f"{SEVEN}::test_the_last_close_leaves_nothing",),
    ),
    Mutant(
        "The monitor does not kill a hanging worker that the trainer has let go of.",
        7,
        "processes/monitor.py",
        "                self._forsake(worker)\n            else:\n                worker.end(after=ORPHAN_GRACE)\n",
        "                self._forsake(worker)\n",
        (f"{SEVEN}::test_an_env_that_is_forgotten_while_it_hangs_leaves_nothing",),
    ),
    Mutant(
        "The monitor does not look whether the trainer is alive, but waits for the end of its sockets.",
        7,
        "processes/monitor.py",
        "        if os.getppid() != self._trainer:\n            self._lose_trainer()\n",
        "",
        (f"{SEVEN}::test_no_worker_outlives_a_trainer_whose_descriptors_a_copy_of_it_holds",),
    ),
    Mutant(
        "A worker outlives a monitor that is killed.",
        7,
        "processes/monitor.py",
        "        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)",
        "        prctl(_PR_SET_PDEATHSIG, 0)",
        ("tests/faults/test_monitor.py",),
    ),
    Mutant(
        "Processes that a dead worker's env has started are not killed.",
        7,
        "processes/monitor.py",
        "        self._kill_adopted(adopted)\n",
        "",
        (f"{SEVEN}::test_what_an_env_has_started_ends_with_its_process",),
    ),
    Mutant(
        "Nobody reaps the monitor.",
        7,
        "processes/launcher.py",
        "        code = self.process.wait()\n",
        "        code = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT).si_status\n",
        (f"{SEVEN}::test_the_last_close_leaves_nothing",),
    ),
    Mutant(
        "close() leaves a descriptor open.",
        7,
        "processes/worker_process.py",
        "            self._wake_socket.close()\n            self._fate.close()\n            if keep_memory:\n",
        "            self._wake_socket.close()\n            if keep_memory:\n",
        (f"{SEVEN}::test_the_last_close_leaves_nothing",),
    ),
    Mutant(
        "close() does not free kept snapshots.",
        7,
        "recovery/checkpoint.py",
        "        for snapshot in list(self._kept):\n            snapshot.free()\n",
        "",
        (f"{SEVEN}::test_the_last_close_leaves_nothing",),
    ),
    # --- 8: Ctrl-C is the trainer's ---------------------------------------------------------------
    Mutant(
        "Workers do not ignore SIGINT.",
        8,
        "worker/main.py",
        "signal.signal(signal.SIGINT, signal.SIG_IGN)",
        "signal.signal(signal.SIGINT, signal.default_int_handler)",
    ),
    Mutant(
        "What an interrupted step of a batch returned is dropped by the next step.",
        8,
        "vector/hosted_vector_env.py",
        "                return self._outcome(self._fanout.resume())\n",
        "                self._fanout.drop()\n",
    ),
    Mutant(
        "What was asked of some envs when Ctrl-C came, and not of the others, stays asked of them.",
        8,
        "fanout.py",
        "                supervisor.take_back()\n",
        "                pass\n",
    ),
    Mutant(
        "Envs are brought back from a snapshot that has executed a request which was taken back.",
        8,
        "recovery/lifecycle.py",
        "gone.fate.snapshot > committed",
        "gone.fate.snapshot < 0",
        ("tests/simulation/test_single_faults.py",),
    ),
    Mutant(
        "An interrupted step that is completed by the next call does not say so.",
        8,
        "envs/calls.py",
        'if current.resumed and current.name == "step":',
        "if False:",
    ),
    # --- 9: errors tell ---------------------------------------------------------------------------
    Mutant(
        "An error does not show the last lines of stderr.",
        9,
        "processes/monitor.py",
        "        worker.tail += data\n",
        "",
    ),
    Mutant(
        "An error does not tell the exit code.",
        9,
        "processes/monitor.py",
        "self._finish(worker, os.waitstatus_to_exitcode(status))",
        "self._finish(worker, None)",
    ),
    Mutant(
        "The error of a loss does not tell the seed.",
        9,
        "recovery/record.py",
        "seed=self.seed_of(slot, command),\n            pid=gone.pid,",
        "seed=None,\n            pid=gone.pid,",
    ),
    Mutant(
        "An exception of the env comes without its traceback.",
        9,
        "reports/texts.py",
        "error.remote_traceback = failure.traceback",
        'error.remote_traceback = ""',
    ),
    # --- 10: isolation ----------------------------------------------------------------------------
    Mutant(
        "All workers have the same seeds.",
        10,
        "wire/messages.py",
        "return secrets.randbits(64), secrets.randbits(32)",
        "return 0, 0",
    ),
    Mutant(
        "A worker's generators are not seeded.",
        10,
        "worker/host.py",
        "            seeding.seed_process(message.seeds)\n",
        "            pass\n",
    ),
    Mutant(
        "The process that replaces a lost one has other seeds.",
        10,
        "recovery/recoverer.py",
        "pack_message(replace(self.build, replacement=replacement))",
        "pack_message(replace(self.build, replacement=replacement, seeds=self.build.seeds and drawn_seeds()))",
    ),
    Mutant(
        "A woken snapshot draws other numbers from `random`.",
        10,
        "worker/snapshots.py",
        "            random.setstate(drawn)\n",
        "",
    ),
]
