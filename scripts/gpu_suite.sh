#!/usr/bin/env bash
# Run everything that needs a GPU in under ten minutes: the doctor, the CUDA tests, and training and
# sampling benchmarks beside nanoGPT. Writes OUT/gpu.json and OUT/gpu.txt.
#
#   scripts/gpu_suite.sh OUT TEXT [NANOGPT]
#
# TEXT is a file, NANOGPT a checkout. On a machine without a network, first put the wheels of the
# missing dependencies into wheels/ (`pip download -d wheels ...`).
# CHARGPT_SUITE_SECONDS (150) is the training budget; a small value tests this script on a CPU.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(mkdir -p "$1" && cd "$1" && pwd) text=$(realpath "$2") nanogpt=${3:+$(realpath "$3")}
seconds=${CHARGPT_SUITE_SECONDS:-150}
exec > >(tee "$out/gpu.txt") 2>&1
export PYTHONPATH=$PWD CHARGPT_CACHE="$out/cache" PYTHONUNBUFFERED=1
[ -d wheels ] && python -m pip install --quiet --no-index --find-links wheels --no-deps wheels/*.whl
step() { printf '\n== %s (%ss) ==\n' "$*" "$SECONDS"; }

step "doctor"
python -m chargpt doctor --json | tee "$out/doctor.json"
step "tests that need CUDA"
python -m pytest -q -m cuda -rs tests/test_cuda.py -p no:cacheprovider; tests=$?
step "training"
timeout 400 python scripts/bench/bench_train.py "$text" ${nanogpt:+--nanogpt "$nanogpt"} --recipe gpu --pairs 1 \
  --ours "--budget 30s" --ours "--budget ${seconds}s" --json "$out/train.json"; training=$?
step "sampling"
timeout 150 python scripts/bench/bench_sample.py --repeats 1 ${nanogpt:+--nanogpt "$nanogpt"} \
  --json "$out/sample.json"; sampling=$?
step "done"
rm -rf "$out/cache"
python - "$out" "$tests" "$training" "$sampling" <<'PYTHON'
import json, sys
from pathlib import Path

out = Path(sys.argv[1])
result = dict(zip(("tests", "training", "sampling"), map(int, sys.argv[2:]), strict=True))
result = {"exit_codes": result}
for name in ("doctor", "train", "sample"):
    path = out / f"{name}.json"
    text = path.read_text() if path.exists() else ""
    result[name] = json.loads(text) if text.strip() else None
(out / "gpu.json").write_text(json.dumps(result, indent=2) + "\n")
PYTHON
exit $((tests + training + sampling > 0))
