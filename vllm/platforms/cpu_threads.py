"""On which CPUs an engine runs, and with how many threads.

Knows VLLM_CPU_OMP_THREADS_BIND, the process's affinity, cores and quotas. Refuses to
know what the threads compute. One thread per core is best: two threads of one core
share its multipliers, and a parallel step waits for its slowest thread.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from math import floor
from pathlib import Path

import torch

_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"
_NO_BINDING = ("nobind", "all")
_CGROUP = Path("/sys/fs/cgroup")
_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """`cpus`: those to keep to, None for all that the process has. `num_threads`: one
    for each of these, else the most that are useful; None for as many as there are."""

    cpus: tuple[int, ...] | None
    num_threads: int | None


def parse_cpu_list(text: str) -> list[int]:
    """CPU numbers of a list such as "0-3,8,10-11". ValueError for anything else."""
    cpus: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(
                f"{_VARIABLE}={text!r}: expected auto, nobind, or CPU numbers such as "
                "0-3,8 (one list per rank, separated by |)"
            )
        cpus += range(int(first), int(last or first) + 1)
    return sorted(set(cpus))


def placement(asked: str | None, local_rank: int = 0) -> Placement:
    """What VLLM_CPU_OMP_THREADS_BIND asks of a rank.

    "auto" (the default): no more threads than the process has cores. "nobind": as many
    as OpenMP has. Lists, one per rank, separated by "|": one thread on
    each CPU of the list. ValueError for a rank without a list, and for CPUs that the
    process may not use.
    """
    text = (asked or "auto").strip()
    stated = os.environ.get("OMP_NUM_THREADS", "").strip()
    if text in _NO_BINDING:
        return Placement(cpus=None, num_threads=None)
    if text == "auto":
        count = None if stated else usable_cores(allowed_cpus())
        return Placement(cpus=None, num_threads=count)
    lists = text.split("|")
    if local_rank >= len(lists):
        raise ValueError(
            f"{_VARIABLE}={text!r} has {len(lists)} lists of CPUs, but rank "
            f"{local_rank} needs one of its own: separate one list per rank with |"
        )
    cpus = parse_cpu_list(lists[local_rank])
    missing = sorted(set(cpus) - allowed_cpus())
    if missing:
        raise ValueError(
            f"{_VARIABLE}={text!r}: this process may not use CPU "
            f"{', '.join(map(str, missing))}; it may use "
            f"{', '.join(map(str, sorted(allowed_cpus())))}"
        )
    return Placement(cpus=tuple(cpus), num_threads=len(cpus))


def place(asked: str | None, local_rank: int = 0) -> Placement:
    """Does what `placement` says to this process."""
    wanted = placement(asked, local_rank)
    if wanted.cpus is not None:
        os.sched_setaffinity(0, wanted.cpus)
        torch.set_num_threads(len(wanted.cpus))
    elif wanted.num_threads is not None:
        # A caller who chose fewer had a reason.
        torch.set_num_threads(min(wanted.num_threads, torch.get_num_threads()))
    return wanted


def allowed_cpus() -> set[int]:
    """CPUs that this process may run on."""
    return set(os.sched_getaffinity(0))


def usable_cores(cpus: Iterable[int]) -> int:
    """Cores among `cpus`, at least one, and no more than a container's quota pays."""
    cores = {_siblings(cpu) for cpu in cpus}
    return max(1, min(len(cores), floor(cpu_quota(_CGROUP) or len(cores))))


def _siblings(cpu: int) -> str:
    """A name for the core of a CPU: the list of its hardware threads."""
    try:
        return Path(_SIBLINGS.format(cpu)).read_text().strip()
    except OSError:
        return str(cpu)


def cpu_quota(root: Path) -> float | None:
    """CPUs that a control group grants (either version), None without a limit."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (root / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if not quota.isdigit() or not int(period):  # "max" and -1: no limit
        return None
    return int(quota) / int(period)
