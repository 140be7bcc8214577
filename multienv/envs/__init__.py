"""The faces of single envs, and of lists of them."""
