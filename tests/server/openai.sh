#!/usr/bin/env bash
# OpenAI's Python client (PyPI) against the server with the real model: openai.sh STILL
set -euo pipefail
still=$1
here=$(cd "$(dirname "$0")" && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/still
venv=$cache/openai-client
if ! "$venv/bin/python" -c 'import openai, pydantic' 2>/dev/null; then
    if [ -n "${OFFLINE:-}" ]; then
        echo "skipped: PyPI's openai is not in the cache"
        exit 77
    fi
    rm -rf "$venv"
    mkdir -p "$cache"
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check openai==1.109.1 pydantic==2.11.9 || {
        rm -rf "$venv"
        echo "skipped: PyPI's openai is not in the cache"
        exit 77
    }
fi
scratch=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null || true; rm -rf "$scratch"' EXIT
"$still" serve smollm2 --port 0 --json --ctx 2048 --parallel 2 >"$scratch/out" 2>"$scratch/err" &
server=$!
for _ in $(seq 600); do
    [ ! -s "$scratch/out" ] || break
    kill -0 "$server" 2>/dev/null || { cat "$scratch/err" >&2; exit 1; }
    sleep 0.1
done
port=$(sed -n 's/.*"port":\([0-9]*\).*/\1/p' "$scratch/out")
timeout 900 "$venv/bin/python" "$here/openai_client.py" "$port"
