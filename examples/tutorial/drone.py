"""A drone in a simulator that leaks memory, and now and then segfaults or hangs."""

import ctypes
import random
import time

import gymnasium
import numpy as np

CHANCE = random.SystemRandom()  # no seed brings these bugs back


class Drone(gymnasium.Env):
    """Stay near height 0 in gusty wind; action 0 pushes down, 1 up."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, bugs=True):
        self.bugs = bugs
        self.leaked = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.height, self.speed, self.steps = 0.0, 0.0, 0
        return self.seen(), {}

    def step(self, action):
        if self.bugs:
            self.strike()
        self.speed += (0.02 if action else -0.02) + 0.01 * self.np_random.normal()
        self.height += self.speed
        self.steps += 1
        crashed = abs(self.height) > 1.0
        return self.seen(), 1.0 - abs(self.height), crashed, self.steps == 200, {}

    def seen(self):
        return np.array([self.height, self.speed], np.float32)

    def strike(self):
        self.leaked.append(bytearray(b"x") * 50_000)
        dice = CHANCE.random()
        if dice < 1 / 3_000:
            ctypes.string_at(0)  # reads address 0: SIGSEGV
        if dice > 1 - 1 / 10_000:
            time.sleep(3600.0)
