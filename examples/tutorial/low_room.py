"""A bug that strikes each time: this simulator segfaults above a height of 0.8."""

import ctypes
from functools import partial

import numpy as np
from drone import Drone

from multienv import SubprocessVectorEnv


class LowRoom(Drone):
    """Do not fly up in it."""

    def step(self, action):
        result = super().step(action)
        if self.height > 0.8:
            ctypes.string_at(0)
        return result


if __name__ == "__main__":
    with SubprocessVectorEnv([partial(LowRoom, bugs=False)] * 2) as envs:
        envs.reset(seed=0)
        truncated = np.zeros(2, bool)
        while not truncated.any():
            actions = np.array([1, 0])  # the first drone rises
            observations, rewards, terminated, truncated, infos = envs.step(actions)
        print("truncated:", truncated, "heights:", observations[:, 0])
        print(infos["multienv"]["reason"][0])
