"""Thousands of runs a minute without processes: see ``simulation``."""
