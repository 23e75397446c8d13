#!/bin/bash
# python -m benchmarks.gpu on a machine with a CUDA device and without a network, in the root of a checkout:
#
#     bash benchmarks/gpu.sh
#
# Wheels in the folder .whl are installed to build/site-packages. Results go to $OUT, or to build/gpu. It takes at
# most eight minutes, whatever happens.
set -u
cd "$(dirname "$0")/.." || exit 2
export OUT=${OUT:-$PWD/build/gpu} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
if compgen -G '.whl/*.whl' >/dev/null; then
  "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir \
    --upgrade --target "$PWD/build/site-packages" .whl/*.whl ||
    for wheel in .whl/*.whl; do "$PYTHON" -m zipfile -e "$wheel" "$PWD/build/site-packages"; done
fi
export PYTHONPATH=$PWD:$PWD/build/site-packages${PYTHONPATH:+:$PYTHONPATH}
exec timeout --signal=TERM --kill-after=10 480 "$PYTHON" -m benchmarks.gpu "$@"
