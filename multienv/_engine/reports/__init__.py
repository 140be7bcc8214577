"""Crash reports: what is said of a lost worker, what is written about it, and how it is run again."""
