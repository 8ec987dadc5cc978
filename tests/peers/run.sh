#!/usr/bin/env bash
# Compare tracerl.numerics with the public packages: bash tests/peers/run.sh [--golden | pytest arguments]
# Installs them into .cache/peers on first use (about 6 GB, mostly torch). --golden rewrites the committed vectors.
set -euo pipefail
cd "$(dirname "$0")/../.."
UV=${UV:-uv}
FOUROVERSIX=1.0.5
export VIRTUAL_ENV=$PWD/.cache/peers
python=$VIRTUAL_ENV/bin/python

torch=$(sed -n '/^name = "torch"$/{n;s/version = "\(.*\)"/\1/p}' uv.lock)
stamp="torch==$torch fouroversix==$FOUROVERSIX $(sha256sum <tests/peers/requirements.txt)"
if [[ ! -f $VIRTUAL_ENV/installed || $(<"$VIRTUAL_ENV/installed") != "$stamp" ]]; then
    "$UV" venv --quiet --clear --python .venv/bin/python "$VIRTUAL_ENV"
    "$UV" pip install --quiet "torch==$torch" -r tests/peers/requirements.txt
    SKIP_CUDA_BUILD=1 "$UV" pip install --quiet --no-build-isolation --no-deps "fouroversix==$FOUROVERSIX"
    "$UV" pip install --quiet "pydantic>=2.11,<3" "PyYAML>=6.0.2,<7"
    echo "$stamp" >"$VIRTUAL_ENV/installed"
fi

export PYTHONPATH=jobs:tests/peers OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if [[ ${1:-} == --golden ]]; then
    exec "$python" -W ignore tests/peers/make_golden.py
fi
exec "$python" -m pytest -c tests/peers/pytest.ini "$@" tests/peers
