#!/usr/bin/env bash
# Run what needs a GPU, in parts, within nine minutes. Writes OUT/gpu.txt as it goes and OUT/gpu.json
# at its end, also when it is stopped.
#
#   CHARGPT_SUITE_PARTS="doctor variants" scripts/gpu_suite.sh OUT TEXT [NANOGPT]
#
# TEXT is a file, NANOGPT a checkout. The parts, and the seconds after which each is stopped; without
# CHARGPT_SUITE_PARTS all run but `long`, and `nanogpt` only beside a checkout:
#
#   doctor    60  versions, clocks, speed, gradients
#   tests    120  tests/test_cuda.py
#   ranks     90  a step of one rank over NCCL beside that of one process
#   steps     60  a step of three sizes, and its longest kernels
#   starts   120  seconds to the first step without and with torch.compile, from an empty cache
#   variants 150  the same from a full cache, and a training step beside its variants
#   table     90  step time and MFU for model, block and batch sizes
#   train    200  two training budgets
#   sample    60  1, 16 and 64 sequences
#   nanogpt  240  nanoGPT's recipe
#   long     580  on a text of some 100 MB, for the same time: chargpt, nanoGPT as it comes, and
#                 nanoGPT at the same size, with its compilation counted and not
#
# On a machine without a network, fill wheels/ beforehand with scripts/fetch_wheels.sh. PYTHON is the
# interpreter (python3), CHARGPT_SUITE_SECONDS the longer training budget (60; `long` takes half as
# much more), CHARGPT_SUITE_LIMIT the seconds after which all stops (540; for `long` alone 590).
# Without a GPU, small models test this script. CHARGPT_COMMIT names the commit of the records where
# git does not know it.
set -uo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd) text=$(realpath "$2") nanogpt=${3:+$(realpath "$3")}
cd "$(dirname "$0")/.."
all="doctor tests ranks steps starts variants table train sample"
parts=${CHARGPT_SUITE_PARTS:-$all ${nanogpt:+nanogpt}}
seconds=${CHARGPT_SUITE_SECONDS:-60} python=${PYTHON:-python3}
limit=${CHARGPT_SUITE_LIMIT:-$([ "$parts" = long ] && echo 590 || echo 540)}
for name in $parts; do
  known=" $all ${nanogpt:+nanogpt long} "
  [[ $known == *" $name "* ]] || { echo "cannot run $name: choose from$known" >&2; exit 2; }
  rm -f "$out/$name.json"
done
exec > >(tee "$out/gpu.txt") 2>&1
TORCHINDUCTOR_CACHE_DIR=$(mktemp -d)
export TORCHINDUCTOR_CACHE_DIR PYTHONPATH=$PWD PYTHONUNBUFFERED=1
if [ -d wheels ]; then
  $python -m pip install --quiet --disable-pip-version-check --no-index --no-deps \
    --target "$out/site" wheels/*.whl
  PYTHONPATH=$PYTHONPATH:$out/site
fi
recipe=gpu length=20000 ours=(--ours "--budget $((seconds * 3 / 10))s" --ours "--budget ${seconds}s")
small=()
if ! $python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  recipe=cpu length=20 ours=(--ours "--budget ${seconds}s")
  small=(--steps 1 -s model.n_layer=1 -s model.n_embd=32 -s model.n_head=1 -s model.block_size=16
    -s train.batch_size=2 -s dtype=float32)
fi

part() { # NAME SECONDS COMMAND...: run a part that was asked for, in its time and what is left
  local left=$((limit - SECONDS))
  local most=$(($2 < left ? $2 : left))
  [[ " $parts " == *" $1 "* ]] || return
  printf '\n== %s (after %s s, at most %s s) ==\n' "$1" "$SECONDS" "$most"
  if [ "$most" -le 0 ]; then codes+=("$1=late"); return; fi
  timeout --foreground "$most" "${@:3}"; codes+=("$1=$?")
}
bench_gpu() { # NAME SECONDS PARTS...
  part "$1" "$2" $python scripts/bench/bench_gpu.py "$text" --parts "${@:3}" \
    --json "$out/$1.json" "${small[@]}"
}
gather() {
  rm -rf "$out/site" "$TORCHINDUCTOR_CACHE_DIR"
  $python - "$out" "$SECONDS" "$parts" "${codes[@]}" <<'PYTHON'
import json, re, sys
from pathlib import Path

out, seconds, parts, *codes = Path(sys.argv[1]), *sys.argv[2:]
result = {"seconds": int(seconds), "exit_codes": dict(code.split("=") for code in codes)}
for name in parts.split():
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

part doctor 60 bash -o pipefail -c "$python -m chargpt doctor --json | tee '$out/doctor.json'"
part tests 120 $python -m pytest -q -m cuda -rs tests/test_cuda.py -p no:cacheprovider
part ranks 90 $python -m torch.distributed.run --standalone --nproc-per-node 1 \
  scripts/bench/bench_gpu.py "$text" --parts ranks --json "$out/ranks.json" --steps 30 "${small[@]}"
bench_gpu steps 60 steps profile
bench_gpu starts 120 starts
bench_gpu variants 150 variants
bench_gpu table 90 table
part train 200 $python scripts/bench/bench_train.py "$text" --repeats 1 "${ours[@]}" \
  --protocols blocks --json "$out/train.json"
part sample 60 $python scripts/bench/bench_sample.py --repeats 1 --length $length \
  --json "$out/sample.json"
left=$((limit - SECONDS - 30))
part nanogpt 240 $python scripts/bench/bench_train.py "$text" --repeats 1 --nanogpt "$nanogpt" \
  --recipe $recipe --nanogpt-seconds $((left < 30 ? 30 : left < 200 ? left : 200)) \
  --json "$out/nanogpt.json"
part long 580 $python scripts/bench/bench_train.py "$text" --repeats 1 --nanogpt "$nanogpt" \
  --recipe long --nanogpt-seconds $((seconds * 3 / 2)) --ours "--budget $((seconds * 3 / 2))s" \
  --protocols blocks --json "$out/long.json"
printf '\n== done after %s s: %s ==\n' "$SECONDS" "${codes[*]}"
[[ "${codes[*]}" =~ ^([a-z]+=0 ?)+$ ]]
