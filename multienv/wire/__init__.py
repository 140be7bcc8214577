"""What trainer and worker share: memory, what lies in it, and how it is written and read.

This package is not public: the public names are in ``multienv``, and ``docs/api.md`` lists them.
"""
