"""The script for a machine with a GPU: complete, and clear where there is none."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tests" / "gpu" / "run_on_device.sh"


def test_the_limits_of_its_steps_add_up_to_less_than_eight_minutes() -> None:
    text = SCRIPT.read_text()
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    limits = [int(n) for n in re.findall(r"^ *step \w+ (\d+) ", text, re.M)]
    (budget,) = map(int, re.findall(r"left=\$\(\((\d+) - SECONDS", text))
    assert len(limits) == 4 and sum(limits) <= budget < 8 * 60
    for word in shlex.split(" ".join(re.findall(r"tests/[\w/.]+", text))):
        assert (ROOT / word).exists(), word


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_ends_at_once_and_says_so(tmp_path: Path) -> None:
    environment = {**os.environ, "OUT": str(tmp_path), "PYTHON": sys.executable}
    ended = subprocess.run(
        ["bash", str(SCRIPT)], env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert "no GPU: torch" in ended.stdout
    assert "no GPU: torch" in (tmp_path / "report.md").read_text()
    assert os.access(SCRIPT, os.X_OK)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_the_benchmark_says_so_too() -> None:
    command = [sys.executable, "-m", "tests.gpu.bench"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 1 and "no CUDA device" in ended.stderr
