"""Launch worker processes, talk to them, and learn of their death.

::

    trainer ── wake socket: bytes, EOF ── worker        requests and replies lie in shared memory (wire.segment)
       │                                      │ child of
       └── control: launches; fate: ─────── monitor       one per trainer; holds no env
           kill, stack, exit status

channel         the seam: what the rest of the package knows of a process
worker_process  the channel to a real process
serial          the channel to a host in the trainer itself
launcher        starts processes through the monitor, and the monitor itself
monitor         the main program of the monitor
protocol        the messages between launcher, worker_process and monitor
leftovers       finds processes that a dead worker has started
environment     what a worker gets of the trainer's surroundings
limits          the system's limits on descriptors, file sizes and processes
"""
