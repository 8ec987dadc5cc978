#!/usr/bin/env bash
# Measure the transport beside its peers: bash benchmarks/transport/run.sh [--quick]
# Installs the peers into .cache/bench-transport on first use (about 500 MB, mostly Ray). The share of records in a
# step is measured in the project's own environment, which has torch.
set -euo pipefail
cd "$(dirname "$0")/../.."
UV=${UV:-uv}
export VIRTUAL_ENV=$PWD/.cache/bench-transport
python=$VIRTUAL_ENV/bin/python

stamp=$(sha256sum <benchmarks/transport/requirements.txt)
if [[ ! -f $VIRTUAL_ENV/installed || $(<"$VIRTUAL_ENV/installed") != "$stamp" ]]; then
    "$UV" venv --quiet --clear --python .venv/bin/python "$VIRTUAL_ENV"
    "$UV" pip install --quiet -r benchmarks/transport/requirements.txt
    echo "$stamp" >"$VIRTUAL_ENV/installed"
fi

export PYTHONPATH=jobs OMP_NUM_THREADS=1
"$python" benchmarks/transport/ring.py "$@"
"$python" benchmarks/transport/object.py "$@"
.venv/bin/python benchmarks/transport/step.py "$@"
