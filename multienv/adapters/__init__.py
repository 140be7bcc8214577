"""Multienv's envs for other libraries; each module needs the library that it is named after."""
