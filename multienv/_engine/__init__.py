"""What the env classes are made of. Not public: the public names are in ``multienv``, and ``docs/api.md`` lists them.

Rooms, the nearest to the env classes first. Each imports only from itself and from rooms below it, and nothing else of
multienv but its values: ``config``, ``errors``, ``events`` (``tests/unit/test_architecture.py`` checks it)::

    cluster                  workers on the nodes of a Ray cluster
    asking                   send to several workers, collect, recover in threads, continue after Ctrl-C
    building                 how workers and their envs are built, and how functions travel to them
    recovery                 state machine, hot path, journal, recoverer, verification: the supervisor of one worker
    reports                  the texts about a loss, and crash reports
    processes                launching, monitoring and ending processes; the channel to a process
    worker                   inside a worker process: the request loop, the envs, snapshots
    wire                     the shared memory of a worker: its layout, and how it is read
    threads, cores           calls in threads that Ctrl-C may interrupt; which worker runs on which core
    interrupts               where Ctrl-C may raise KeyboardInterrupt
    native, sometimes        the native extension; names of rare branches, for tests
    version, publishing      of multienv; what public things say of where they are from
"""
