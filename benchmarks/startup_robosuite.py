"""Make an env of robosuite, and drop it: what the first one of a process loads and compiles is preloaded, too."""

from startup import robosuite_env

env = robosuite_env()
env.reset(seed=0)
env.close()
