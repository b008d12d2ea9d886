#!/usr/bin/env bash
# The wheel: built from the library of this build, installed into an environment of its
# own, and its tests run from there, where neither the sources nor a compiler are found.
#
#   test_wheel.sh SOURCE LIBRARY MAKE_MODEL [unittest option ...]
#
# The environment is kept in the cache: numpy, matplotlib, mypy and the build backend come from
# PyPI.
set -euo pipefail
source=$1 library=$2 make_model=$3
shift 3
# shellcheck source=tests/python/wheel.sh
. "$source/tests/python/wheel.sh"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
version=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
env=${XDG_CACHE_HOME:-$HOME/.cache}/still/python/$version
wanted='numpy matplotlib mypy>=1.8 scikit-build-core>=0.10'

# Two builds may test at once; the first makes the environment.
mkdir -p "$(dirname "$env")"
exec 9>"$env.lock"
flock 9
if [ "$(cat "$env/wanted" 2>/dev/null)" != "$wanted" ]; then
    rm -rf "$env"
    python3 -m venv "$env"
    # shellcheck disable=SC2086 # a list
    "$env/bin/pip" install --quiet --disable-pip-version-check $wanted
    echo "$wanted" >"$env/wanted"
fi
flock -u 9

install_wheel "$env" "$source" "$library" "$scratch"
"$make_model" tiny "$scratch/tiny.gguf" >/dev/null 2>&1
cp -R "$source/python/tests" "$scratch/tests"
cd "$scratch"
export PYTHONPATH=$scratch/site STILL_TINY=$scratch/tiny.gguf STILL_FIXTURES=$source/tests/fixtures
"$env/bin/mypy" --strict --cache-dir "$env/mypy" -p still
"$env/bin/mypy" --strict --cache-dir "$env/mypy" tests "$source/python/tools"
# Without a compiler: nothing but the interpreter is on the path.
PATH=$env/bin "$env/bin/python" -m unittest discover -s tests "$@"
