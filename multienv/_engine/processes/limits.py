"""Limits that the operating system sets to a process: on descriptors, file sizes, processes."""

from __future__ import annotations

import errno
import os
import resource

from multienv.errors import SystemLimitError

# The soft limit on descriptors is raised to this number at the most: programs that the trainer starts inherit it, and
# some of them close all numbers below it one by one. In containers the hard limit can be 2**30.
_MOST_DESCRIPTORS = 65_536
# Of one worker in the monitor, which has the same limit: fate socket, stderr, stack, announcements, and its snapshot.
# In the trainer there are three: wake socket, fate socket and memory.
_OF_WORKER = 5
_OTHERS = 50
# The least that the monitor needs: without snapshots, and what it has open besides while it launches one more.
_LEAST_OF_WORKER = 4
_LEAST_OTHERS = 25
# The trainer's soft limit before it was raised here, and after that.
_raised: tuple[int, int] | None = None


def raise_descriptor_limit() -> None:
    """Raise this process's soft limit on descriptors to its hard limit, but no higher than 65,536."""
    global _raised
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # a sandbox does not allow it
        return
    _raised = soft, wanted


def refuse_too_many(workers: int) -> None:
    """Raise OSError if the monitor cannot have the descriptors of so many workers."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and _LEAST_OF_WORKER * workers + _LEAST_OTHERS > soft:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def limits_of_workers() -> dict[int, int]:
    """Return the soft limits that a worker takes from this process; the one that was raised here as the user had it.

    The size of files, too: the monitor may have been launched when it was too low for a worker's memory.
    """
    found = {kind: resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE)}
    if _raised is not None and found[resource.RLIMIT_NOFILE] == _raised[1]:
        found[resource.RLIMIT_NOFILE] = _raised[0]
    return found


def limit_error(error: OSError) -> SystemLimitError:
    """Return the error to raise when a system call for a worker has failed: it names the limit and what to do.

    Raises an ``error`` that a signal handler has raised: see ``SystemErrors``.
    """
    if error.errno is None:
        raise error
    return SystemLimitError(error.errno, f"No worker can be launched: {os.strerror(error.errno)}. {advice(error)}")


def advice(error: OSError) -> str:
    """Return which limit of this process a failed system call has met, what is needed, and what to do."""
    number = error.errno
    if number in (errno.EMFILE, errno.ENFILE, errno.ETOOMANYREFS):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        what = f"A process may have {soft} descriptors here (ulimit -n; the hard limit is {hard})"
        if number == errno.ENFILE:
            what = "The system has no descriptor left for any process (sysctl fs.file-max)"
        return (
            f"{what}; n workers need {_OF_WORKER} n + {_OTHERS}. Close files, raise the limit (ulimit -Hn, "
            "/etc/security/limits.conf, docker run --ulimit nofile=...), or have fewer processes (envs_per_worker)."
        )
    if number == errno.EFBIG:
        return (
            f"A file may have {resource.getrlimit(resource.RLIMIT_FSIZE)[0]} bytes here, and the memory that a worker "
            "shares with the trainer counts as a file. Raise the limit (ulimit -f unlimited)."
        )
    if number == errno.EAGAIN:
        return "Raise the limit on processes (ulimit -u; pids.max of the control group), or have fewer of them."
    if number == errno.ENOMEM:
        return "Have fewer processes, or raise the limit on memory (ulimit -v, memory.max of the control group)."
    return "Look at the limits of this process (ulimit -a)."
