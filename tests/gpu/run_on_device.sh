#!/usr/bin/env bash
# Tests the kernels on a real GPU and times them, in less than 8 minutes. Needs nvcc or a
# vllm/_cuda_kernels.so that was built before, and Python with torch, triton, pytest.
#
#   OUT=DIR          where report.md and the logs go (default: ./gpu-report)
#   PYTHON=...       which Python (default: python3)
#   WHEELS=DIR       wheels of what that Python lacks; put on its path, nothing installed
#
# Every step has a limit of its own and a line in the report; a failing step stops none
# of the others. The exit status is the number of steps that failed.
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=${OUT:-$PWD/gpu-report}
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
REPORT=$OUT/report.md
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
unset TRITON_INTERPRET

if [ -n "${WHEELS:-}" ]; then
  SITE=$(mktemp -d)
  $PYTHON -m pip install -q --no-index --no-deps --no-compile --target "$SITE" \
    "$WHEELS"/*.whl && export PYTHONPATH=$PYTHONPATH:$SITE
fi

failed=0
begun=$SECONDS
# step NAME LIMIT COMMAND...: runs it, keeps its log, and adds a line to the report.
step() {
  local name=$1 limit=$2 log=$OUT/$1.log start=$SECONDS status
  shift 2
  timeout --kill-after=10 "$limit" "$@" >"$log" 2>&1
  status=$?
  local last
  last=$(grep -v '^ *$' "$log" | tail -n 1 | cut -c 1-110 | tr '|' '/')
  case $status in
    0) outcome=passed ;;
    124 | 137) outcome="stopped after $limit s" ;;
    *) outcome="failed ($status)" ;;
  esac
  [ $status -eq 0 ] || failed=$((failed + 1))
  echo "| $name | $outcome | $((SECONDS - start)) | $last |" | tee -a "$REPORT"
}

describe() {
  $PYTHON - <<'PY'
import platform, torch
from importlib.metadata import PackageNotFoundError, version

if not torch.cuda.is_available():
    raise SystemExit(f"no GPU: torch {torch.__version__} sees none")
name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
free, total = torch.cuda.mem_get_info()
print(f"* {name}, capability {capability[0]}.{capability[1]}, "
      f"{free / 2**30:.0f} of {total / 2**30:.0f} GiB free")
print(f"* Python {platform.python_version()}, torch {torch.__version__}")
for package in ("triton", "flashinfer-python", "transformers", "pytest"):
    try:
        print(f"* {package} {version(package)}")
    except PackageNotFoundError:
        print(f"* {package} is not installed")
PY
}

{
  echo "# Kernels on a GPU"
  echo
  describe
} >"$REPORT" 2>&1 || { cat "$REPORT"; exit 1; }
printf '\n| step | outcome | seconds | last line |\n| --- | --- | ---: | --- |\n' >>"$REPORT"
cat "$REPORT"

capability=$($PYTHON -c \
  'import torch; print(*torch.cuda.get_device_capability(), sep="")')
case $capability in 90 | 100 | 120) capability+=a ;; esac
if command -v nvcc >/dev/null; then
  step build 120 env VLLM_TARGET_DEVICE=cuda VLLM_CUDA_TARGETS="$capability" \
    $PYTHON setup.py build_ext --inplace
fi

pytest=($PYTHON -m pytest -q -p no:cacheprovider)
several=()
$PYTHON -c 'import xdist' 2>/dev/null && several=(-n 4)
step cuda 60 "${pytest[@]}" tests/gpu/test_cuda_kernels.py
step triton 150 "${pytest[@]}" "${several[@]}" tests/triton --ignore=tests/triton/test_compiled.py
step engines 120 "${pytest[@]}" -s tests/gpu/test_engines.py
left=$((450 - SECONDS + begun))
[ $left -gt 10 ] && step bench $left $PYTHON -m tests.gpu.bench \
  --json "$OUT/bench.json" --seconds $((left - 5))

if [ -s "$OUT/bench.log" ]; then
  printf '\n## Benchmark\n\n```\n' >>"$REPORT"
  grep -E '^what ' "$OUT/bench.log" >>"$REPORT"
  echo '```' >>"$REPORT"
fi
echo "report: $REPORT ($((SECONDS - begun)) s, $failed steps failed)"
exit $failed
