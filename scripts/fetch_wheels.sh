#!/usr/bin/env bash
# Download the packages that scripts/gpu_suite.sh needs beside torch, numpy, typer, rich, tqdm, PyYAML
# and safetensors into wheels/ (ignored by git), for a machine without a network.
#
#   scripts/fetch_wheels.sh [PYTHON_VERSION]    of that machine, 3.12 by default; Linux on x86-64
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf wheels
${PYTHON:-python3} -m pip download --quiet --dest wheels --only-binary=:all: \
  --python-version "${1:-3.12}" --implementation cp \
  --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
  pydantic charset-normalizer threadpoolctl filelock jinja2 matplotlib pooch xxhash pytest hypothesis
rm -f wheels/numpy-* # the machine's own
du -sh wheels
