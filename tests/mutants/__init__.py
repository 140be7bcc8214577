"""Defects made by hand, and the program that says which test catches each: ``python tests/mutants --help``."""
