"""Processes: how workers come to life, who watches over them, and how their end is told.

::

    trainer ──requests──▶ worker          one pair of pipes per worker: the hot path
       ▲ ◀───replies─────   │
       │                    │ parent of (forkserver, spawn), or watches (fork)
       └──control, fate── warden          one per trainer; holds no env

The warden launches workers, reaps them, reports their exit status and last words, kills those that are
overdue, and kills all of them when the trainer is gone. A blocked read in the trainer is always woken: by
the reply, by the end of the pipe, or by the frame ``GONE`` that the warden writes in the dead worker's name.
"""
