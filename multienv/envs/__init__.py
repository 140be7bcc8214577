"""The classes of single envs, and of lists of them."""
