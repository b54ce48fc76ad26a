"""Where threads run: the syntax of VLLM_CPU_OMP_THREADS_BIND, cores and quotas."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm.platforms.cpu_threads import (
    Placement,
    allowed_cpus,
    cpu_quota,
    parse_cpu_list,
    placement,
    usable_cores,
)

CPU = min(allowed_cpus())


@pytest.fixture(autouse=True)
def nothing_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.parametrize(
    ("text", "want"),
    [("0", [0]), ("0-3", [0, 1, 2, 3]), ("8,0-1, 4", [0, 1, 4, 8]), ("2,2", [2])],
)
def test_cpu_lists_are_read(text: str, want: list[int]) -> None:
    assert parse_cpu_list(text) == want


@pytest.mark.parametrize("text", ["a", "1-", "1-x", "", "1,,2", "0 1"])
def test_broken_cpu_lists_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="VLLM_CPU_OMP_THREADS_BIND"):
        parse_cpu_list(text)


@pytest.mark.parametrize("text", [None, "", "auto"])
def test_by_default_each_core_has_a_thread_and_nothing_is_bound(
    text: str | None,
) -> None:
    cores = usable_cores(allowed_cpus())
    assert placement(text) == Placement(cpus=None, num_threads=cores)
    assert 1 <= cores <= len(allowed_cpus())


def test_a_stated_number_of_threads_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert placement("auto").num_threads is None
    assert placement("nobind") == Placement(cpus=None, num_threads=None)


def test_each_rank_has_the_list_of_its_own() -> None:
    both = f"{CPU}|{CPU}"
    assert placement(both, 1) == Placement(cpus=(CPU,), num_threads=1)
    with pytest.raises(ValueError, match=r"2 lists .* rank 2"):
        placement(both, 2)


def test_cpus_that_are_not_ours_are_refused_by_number() -> None:
    with pytest.raises(ValueError, match="may not use CPU 99999"):
        placement("99999")


def test_a_process_keeps_to_its_cpus() -> None:
    code = (
        "import os, torch\n"
        "from vllm.platforms.cpu_threads import place\n"
        f"place('{CPU}')\n"
        "print(sorted(os.sched_getaffinity(0)), torch.get_num_threads())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"},
    )
    assert done.stdout.split("\n")[0] == f"[{CPU}] 1"


@pytest.mark.parametrize(
    ("files", "want"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_quotas_of_containers_are_read(
    tmp_path: Path, files: dict[str, str], want: float | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_quota(tmp_path) == want
