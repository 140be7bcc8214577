"""Crash reports: what is known of a loss, as plain data that is safe to open."""
