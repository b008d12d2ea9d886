#!/bin/bash
# Constrained output of the commands, on a small random model. $2 is tools/make-model.
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"
make_model=$2
tiny=$scratch/tiny.gguf
"$make_model" tiny "$tiny" >/dev/null 2>&1 || { echo "make-model failed" >&2; exit 1; }
generate() { local want=$1 pattern=$2; shift 2; expect "$want" "$pattern" \
    "$still" generate "$tiny" -p hello "$@"; }

# A schema whose texts are short whatever the model says.
cat >"$scratch/schema.json" <<'JSON'
{"type": "object", "title": "Answer", "required": ["ok", "kind", "n", "list"], "properties": {
  "ok": {"type": "boolean"}, "kind": {"enum": ["cat", "dog"]},
  "name": {"type": "string", "minLength": 2, "maxLength": 6},
  "n": {"type": "integer", "minimum": -5, "maximum": 120},
  "list": {"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 3}},
 "additionalProperties": false}
JSON
cat >"$scratch/check.py" <<'PYTHON'
import json, sys
x = json.load(open(sys.argv[1], encoding="utf-8"))
assert x["stop"] == "grammar", x
v = json.loads(x["text"])
assert list(v) == [k for k in ("ok", "kind", "name", "n", "list") if k in v], v
assert isinstance(v["ok"], bool) and v["kind"] in ("cat", "dog"), v
assert isinstance(v["n"], int) and -5 <= v["n"] <= 120, v
assert 2 <= len(v.get("name", "ab")) <= 6, v
assert 1 <= len(v["list"]) <= 3 and set(v["list"]) == {None}, v
PYTHON
for how in '--temp 0' '--temp 1 --seed 1' '--temp 3 --seed 2' '--temp 2 --top-k 5 --seed 3' \
    '--temp 1 --top-p 0.5 --repeat-penalty 1.3'; do
    # shellcheck disable=SC2086
    generate 0 '' -n 400 --json-schema "$scratch/schema.json" --json $how
    python3 "$scratch/check.py" "$scratch/out" 2>"$scratch/why" ||
        fail "$how: $(tail -1 "$scratch/why") $(head -c 300 "$scratch/out")"
done

# A grammar; the same from standard input; a reply that is cut says so.
printf 'root ::= "yes" | "no"' >"$scratch/a.gbnf"
generate 0 '^\(yes\|no\)$' --grammar "$scratch/a.gbnf"
"$still" generate "$tiny" -p hello --grammar - <"$scratch/a.gbnf" 2>/dev/null |
    grep -qx 'yes\|no' || fail "a grammar from standard input"
printf 'root ::= [a-z ]{40,} "."' >"$scratch/b.gbnf"
generate 0 '' --grammar "$scratch/b.gbnf" --json -n 7
json 'x["stop"] == "length" and len(x["tokens"]) == 7'
json 'all(c in "abcdefghijklmnopqrstuvwxyz ." for c in x["text"])'
for i in 1 2; do
    printf 'hello\nagain\n' >"$scratch/lines"
    "$still" chat "$tiny" --chat-template chatml --lines -q --grammar "$scratch/a.gbnf" \
        --temp 1 --seed $i <"$scratch/lines" >"$scratch/out" 2>"$scratch/err" || fail "chat with a grammar"
    [ "$(grep -cx 'yes\|no' "$scratch/out")" = 2 ] || fail "chat: $(cat "$scratch/out" "$scratch/err")"
done

# What is wrong is said with its place.
printf 'root ::= x\nx ::= x "a" | "b"' >"$scratch/c.gbnf"
generate 1 "c.gbnf: grammar: line 2, column 1: rule 'x' is left-recursive" --grammar "$scratch/c.gbnf"
printf '{"properties": {"a": {"not": {}}}}' >"$scratch/c.json"
generate 1 'c.json: schema: /properties/a/not: this keyword is not supported' \
    --json-schema "$scratch/c.json"
generate 1 'none.gbnf' --grammar "$scratch/none.gbnf"
generate 2 'exclude one another' --grammar "$scratch/a.gbnf" --json-schema "$scratch/c.json"
generate 2 'ignore-eos' --grammar "$scratch/a.gbnf" --ignore-eos
finish
