#!/usr/bin/env bash
# Run everything that needs a GPU in under ten minutes: the doctor, the CUDA tests, a step of one rank
# over NCCL beside that of one process, and training and sampling benchmarks beside nanoGPT. Writes
# OUT/gpu.txt as it goes and OUT/gpu.json at its end, also when it is stopped.
#
#   scripts/gpu_suite.sh OUT TEXT [NANOGPT]
#
# TEXT is a file, NANOGPT a checkout. On a machine without a network, fill wheels/ beforehand with
# scripts/fetch_wheels.sh. PYTHON is the interpreter (python3), CHARGPT_SUITE_SECONDS the longer
# training budget (100) and CHARGPT_SUITE_LIMIT the seconds after which nanoGPT is stopped (540);
# small values test this script on a CPU. CHARGPT_COMMIT names the commit of the records where git
# does not know it.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(mkdir -p "$1" && cd "$1" && pwd) text=$(realpath "$2") nanogpt=${3:+$(realpath "$3")}
seconds=${CHARGPT_SUITE_SECONDS:-100} limit=${CHARGPT_SUITE_LIMIT:-540} python=${PYTHON:-python3}
exec > >(tee "$out/gpu.txt") 2>&1
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
if [ -d wheels ]; then
  $python -m pip install --quiet --disable-pip-version-check --no-index --no-deps \
    --target "$out/site" wheels/*.whl
  PYTHONPATH=$PYTHONPATH:$out/site
fi
recipe=$($python -c 'import torch; print("gpu" if torch.cuda.is_available() else "cpu")')

step() { printf '\n== %s (after %s s) ==\n' "$1" "$SECONDS"; }
gather() {
  rm -rf "$out/site"
  $python - "$out" "$SECONDS" "${codes[@]}" <<'PYTHON'
import json, re, sys
from pathlib import Path

out, seconds, *codes = Path(sys.argv[1]), *sys.argv[2:]
result = {"seconds": int(seconds), "exit_codes": dict(code.split("=") for code in codes)}
for name in ("doctor", "train", "sample", "ranks", "nanogpt"):
    path = out / f"{name}.json"
    text = re.sub(r" at /[^\"]*", "", path.read_text()) if path.exists() else ""  # no absolute paths
    result[name] = json.loads(text) if text.strip() else None
(out / "gpu.json").write_text(json.dumps(result, indent=2) + "\n")
PYTHON
}
codes=()
trap gather EXIT
trap 'exit 143' TERM INT
trap '' PIPE # of tee, which a signal to all of them ends first

step "doctor"
timeout --foreground 60 $python -m chargpt doctor --json | tee "$out/doctor.json"; codes+=("doctor=$?")
step "training"
timeout --foreground 260 $python scripts/bench/bench_train.py "$text" --repeats 1 --protocols blocks \
  --ours "--budget $((seconds * 3 / 10))s" --ours "--budget ${seconds}s" --json "$out/train.json"; codes+=("train=$?")
step "sampling"
timeout --foreground 90 $python scripts/bench/bench_sample.py --repeats 1 --json "$out/sample.json"
codes+=("sample=$?")
step "tests that need CUDA"
if [ "$recipe" = gpu ]; then
  timeout --foreground 120 $python -m pytest -q -m cuda -rs tests/test_cuda.py -p no:cacheprovider
  codes+=("tests=$?")
  step "one rank over NCCL"
  timeout --foreground 90 $python -m torch.distributed.run --standalone --nproc-per-node 1 \
    scripts/bench/bench_gpu.py "$text" --parts ranks --steps 30 --json "$out/ranks.json"
  codes+=("ranks=$?")
else
  echo "skipped: no CUDA GPU"; codes+=("tests=skipped" "ranks=skipped")
fi
if [ -n "$nanogpt" ]; then
  step "nanoGPT"
  $python scripts/bench/bench_train.py "$text" --repeats 1 --nanogpt "$nanogpt" --recipe "$recipe" \
    --nanogpt-seconds $((limit - SECONDS > 30 ? limit - SECONDS : 30)) --json "$out/nanogpt.json"
  codes+=("nanogpt=$?")
fi
step "done: ${codes[*]}"
[[ "${codes[*]}" =~ ^([a-z]+=(0|skipped) ?)+$ ]]
