#!/usr/bin/env bash
# still.torch, in the installed package, with PyTorch and transformers.
#
#   test_torch.sh SOURCE LIBRARY MAKE_MODEL [unittest option ...]
#   test_torch.sh --install     puts both into the cache, from PyPI: 6 GB, once
#
# Without them in the cache it is skipped.
set -euo pipefail
version=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
env=${XDG_CACHE_HOME:-$HOME/.cache}/still/torch/$version
if [ "${1:-}" = --install ]; then
    mkdir -p "$(dirname "$env")"
    python3 -m venv "$env"
    exec "$env/bin/pip" install --quiet --disable-pip-version-check \
        torch transformers numpy 'mypy>=1.8' 'scikit-build-core>=0.10'
fi
source=$1 library=$2 make_model=$3
shift 3
# shellcheck source=tests/python/wheel.sh
. "$source/tests/python/wheel.sh"
if ! "$env/bin/python" -c 'import torch, transformers, mypy, scikit_build_core' 2>/dev/null; then
    echo "skipped: PyTorch is not in the cache (tests/python/test_torch.sh --install)"
    exit 77
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
install_wheel "$env" "$source" "$library" "$scratch"
"$make_model" tiny "$scratch/tiny.gguf" >/dev/null 2>&1
cp -R "$source/python/tests_torch" "$scratch/tests"
cd "$scratch"
export PYTHONPATH=$scratch/site STILL_TINY=$scratch/tiny.gguf STILL_MANUAL=$source/docs/python.md
export HF_HUB_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1 TQDM_DISABLE=1
"$env/bin/mypy" --strict --cache-dir "$env/mypy" -p still
"$env/bin/mypy" --strict --cache-dir "$env/mypy" tests
# No exec: the folder is removed afterwards.
"$env/bin/python" -m unittest discover -s tests "$@"
