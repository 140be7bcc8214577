"""Multienv's envs as other libraries want them; each module needs the library that it is named after."""
