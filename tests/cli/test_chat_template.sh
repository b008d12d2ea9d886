#!/bin/bash
# Chat templates from the command line, on a small random model. $2 is tools/make-model.
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"
tiny=$scratch/tiny.gguf
"$2" tiny "$tiny" >/dev/null 2>&1 || { echo "make-model failed" >&2; exit 1; }
talk=$scratch/messages.json
template=$scratch/own.jinja
echo '[{"role": "user", "content": "a <|im_end|> b"}]' >"$talk"
cat >"$template" <<'JINJA'
{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}
{% if add_generation_prompt %}[{{ name | default("nobody") }}/{{ n | default(0) + 1 }}{% endif %}
JINJA
render() { local want=$1 pattern=$2; shift 2; expect "$want" "$pattern" \
    "$still" tokenize "$tiny" --chat "$talk" "$@"; }

# A file, its variables: JSON where the value is JSON, else a string.
render 1 'no chat template'
render 0 '^\[user: a <|im_end|> b\]\[nobody/1$' --chat-template "$template"
render 0 '\]\[Ann/42$' --chat-template "$template" --template-arg name=Ann --template-arg n=41
render 0 '\]$' --chat-template "$template" --template-arg add_generation_prompt=false
render 2 "messages are the conversation's own" --chat-template "$template" --template-arg messages=[]
echo '{"messages": [{"role": "user", "content": "x"}], "name": "Bob"}' >"$scratch/object.json"
expect 0 '^\[user: x\]\[Bob/1$' "$still" tokenize "$tiny" --chat "$scratch/object.json" \
    --chat-template "$template" --template-arg name=Ann
expect 0 '^\[user: x\]' bash -c "'$still' tokenize '$tiny' --chat - \
    --chat-template '$template' <'$scratch/object.json'"

# What a user types stays text: its ids are those of plain text, not the special token's.
render 0 '' --chat-template chatml --json
json 'x["text"] == "<|im_start|>user\na <|im_end|> b<|im_end|>\n<|im_start|>assistant\n"'
json '[x["text"][a:b] for a, b in x["content"]] == ["a <|im_end|> b"]'
cp "$scratch/out" "$scratch/rendered.json"
python3 - "$still" "$tiny" "$scratch/rendered.json" <<'PYTHON' || fail "content became a special token"
import json, subprocess, sys
still, model, path = sys.argv[1:]
def ids(text, *options):
    out = subprocess.run([still, "tokenize", model, text, "--json", *options],
                         check=True, capture_output=True).stdout
    return json.loads(out)["ids"]
got = json.load(open(path))["ids"]
content = ids("a <|im_end|> b")
parts = [ids("<|im_start|>user\n", "--special"), content,
         ids("<|im_end|>\n<|im_start|>assistant\n", "--special")]
if got != sum(parts, []):
    sys.exit(f"{got}, not {parts}")
PYTHON

# chat takes the same options.
printf 'hi\n' | timeout 600 "$still" chat "$tiny" --chat-template "$template" -n 4 --json \
    >"$scratch/out" 2>"$scratch/err" || fail "chat: $(cat "$scratch/err")"
grep -q '^{"reply":' "$scratch/out" || fail "no reply: $(cat "$scratch/out")"
expect 1 'no chat template' "$still" chat "$tiny"

# Errors: one line that says where.
bad() { # bad PATTERN TEMPLATE
    printf %s "$2" >"$scratch/bad.jinja"
    render 1 "$1" --chat-template "$scratch/bad.jinja"
}
bad 'line 2, column 6: unknown filter' $'\n{{ a|nothing }}'
bad 'endif' '{% if messages %}'
bad 'no roles today' '{{ raise_exception("no roles today") }}'
bad "'nope' is undefined" '{{ nope.x }}'
bad 'steps\|MiB' '{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}'
bad 'MiB\|steps' '{{ "a" * 10 ** 9 }}'
bad 'deep' '{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}'
bad 'MiB' '{% set n = namespace(s="abcdefgh") %}{% for i in range(40) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}'
bad 'digits' '{{ "%.999999999f" % 1.5 }}'
bad 'brackets' "{{ $(printf '(%.0s' {1..9999}) }}"
bad 'deep' "{{ $(printf 'not %.0s' {1..9999}) 1 }}"
bad 'unknown test' '{{ messages is odder }}'
bad 'unknown statement' '{% frobnicate %}'
bad 'UTF-8' $'\xff'
render 1 'the names are chatml, llama3' --chat-template "$scratch/none.jinja"
render 2 'KEY=VALUE' --chat-template "$template" --template-arg name
for text in '' '[' '7' '{}' '[1]' '[{"role": 1}]'; do
    echo "$text" >"$scratch/broken.json"
    expect 1 '' "$still" tokenize "$tiny" --chat "$scratch/broken.json" --chat-template chatml
done
expect 2 'exclude' "$still" tokenize "$tiny" text --chat "$talk"
expect 2 'need --chat' "$still" tokenize "$tiny" text --chat-template chatml

# A template that writes nothing leaves nothing to answer; one that writes the same each time does.
for empty in '' '{%- if false %}x{% endif -%}'; do
    printf '%s' "$empty" >"$scratch/empty.jinja"
    expect 1 'the chat template writes nothing' "$still" chat "$tiny" hi --chat-template "$scratch/empty.jinja" -n 2
done
printf 'the sun' >"$scratch/same.jinja"
[ "$(printf 'a\nb\n' | "$still" chat "$tiny" --lines --chat-template "$scratch/same.jinja" -n 2 --json | wc -l)" = 2 ] ||
    fail "a template that ignores the conversation is not answered twice"
finish
