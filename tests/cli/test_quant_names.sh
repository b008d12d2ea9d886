#!/bin/bash
# org/name:Q4_K_M: which files a name means, on the hub, in our cache and in Hugging Face's;
# list, rm, show and run; nothing of the network when offline. $2 is tools/make-model.
# shellcheck source=lib.sh disable=SC2154
. "$(dirname "$0")/lib.sh"
make_model=$2
models=$XDG_CACHE_HOME/still/models
repo=$scratch/repo
mkdir -p "$repo/Q6_K"
make() { "$make_model" tiny "$@" >/dev/null 2>&1 || { echo "make-model failed" >&2; exit 1; }; }
make "$repo/tiny-Q4_K_M.gguf" --type q4_k_m
make "$repo/tiny-UD-Q4_K_M.gguf" --type q4_k_m --seed 2
make "$repo/tiny.q8_0.gguf" --type q8_0
make "$scratch/q6.gguf" --type q6_k
make "$scratch/q5.gguf" --type q5_0
python3 "$here/split_gguf.py" "$scratch/q6.gguf" "$repo/Q6_K/tiny" 3 || exit 1
python3 "$here/split_gguf.py" "$scratch/q5.gguf" "$repo/tiny-Q5_0" 2 || exit 1
make "$repo/mmproj-F16.gguf" --type f16
printf '{}' >"$repo/config.json"
fresh() { rm -rf "$XDG_CACHE_HOME"; }
pull() { local want=$1 pattern=$2; shift 2; expect "$want" "$pattern" "$still" pull "$@" --endpoint "$url"; }
has() { # FILES: what the cache holds of org/tiny
    local got
    got=$(cd "$models/org/tiny" 2>/dev/null && find . -type f ! -name '.*' | sort | tr '\n' ' ')
    [ "$got" = "$1" ] || fail "files here: $got, expected: $1"
}
means() { # NAME TYPE: what a name opens, by the type of most of its bytes
    expect 0 "^  ${2,,} " "$still" inspect "$1"
}

# With a suffix only that model, all its parts, whatever the case; then it opens offline.
serve ok "$repo"
pull 0 'downloaded and verified: .*/tiny-Q4_K_M.gguf' org/tiny:q4_k_m
has './tiny-Q4_K_M.gguf '
pull 0 'already here and verified: .*/tiny-Q4_K_M.gguf' org/tiny
pull 0 'Q6_K/tiny-00001-of-00003.gguf' org/tiny:Q6_K
pull 0 'tiny-Q5_0-00001-of-00002.gguf' org/tiny:Q5_0 --json
json "x['files'] == 2 and x['name'] == 'org/tiny:Q5_0'"
pull 0 'tiny.q8_0.gguf' org/tiny:Q8_0
has './Q6_K/tiny-00001-of-00003.gguf ./Q6_K/tiny-00002-of-00003.gguf ./Q6_K/tiny-00003-of-00003.gguf ./tiny-Q4_K_M.gguf ./tiny-Q5_0-00001-of-00002.gguf ./tiny-Q5_0-00002-of-00002.gguf ./tiny.q8_0.gguf '
not_logged mmproj
pull 1 'no such file; choose one of org/tiny:Q6_K, org/tiny:Q4_K_M' org/tiny:Q3_K_S
pull 1 'no such file' org/tiny:K_M
pull 2 'already says which file' org/tiny:Q8_0 --include '*'
stop_server
means org/tiny:Q8_0 Q8_0
means org/tiny:q6_k Q6_K
means org/tiny:Q5_0 Q5_0
means org/tiny Q4_K
expect 0 '' "$still" generate org/tiny:q8_0 -p hello -n 2
expect 0 '' "$still" tokenize org/tiny:Q8_0 hello
expect 1 'not in the cache, which has: org/tiny:Q6_K.*run .still pull org/tiny:Q2_K' "$still" chat org/tiny:Q2_K hi
expect 1 'not in the cache, which has' "$still" run org/tiny:Q2_K hi --offline
expect 2 'unknown command .lst., did you mean list' "$still" lst

# Without Q4_K_M: the only one, else a choice.
rm "$models"/org/tiny/tiny-Q4_K_M.gguf
expect 1 'which of these GGUF models?: org/tiny:Q6_K, org/tiny:Q5_0, org/tiny:Q8_0' "$still" inspect org/tiny
rm -r "$models"/org/tiny/Q6_K "$models"/org/tiny/tiny-Q5_0*
means org/tiny Q8_0
# A part that is not here.
serve ok "$repo"
pull 0 '' org/tiny:Q5_0
stop_server
rm "$models"/org/tiny/tiny-Q5_0-00002-of-00002.gguf
expect 1 'its download is not complete: run .still pull org/tiny:Q5_0' "$still" inspect org/tiny:Q5_0

# UD-Q4_K_M where it is asked for, and where it is the only Q4_K_M.
fresh; serve ok "$repo"
pull 0 'tiny-UD-Q4_K_M.gguf' org/tiny:ud-q4_k_m
means org/tiny Q4_K
means org/tiny:Q4_K_M Q4_K
pull 0 'tiny-Q4_K_M.gguf' org/tiny:tiny-q4_k_m

# Paths: a folder with a suffix; a file has none; a name with a colon is itself.
means "$repo:q8_0" Q8_0
means "$repo" Q4_K
expect 1 'no such GGUF file; there are: .*:Q8_0' "$still" inspect "$repo:Q2_K"
expect 1 'is a file; leave out :Q8_0' "$still" inspect "$repo/tiny.q8_0.gguf:Q8_0"
cp "$repo/tiny.q8_0.gguf" "$scratch/odd:name"
means "$scratch/odd:name" Q8_0
expect 1 'No such file' "$still" inspect "$scratch/none:Q8_0"

# A base model that an adapter names with its suffix.
for i in $(seq 20); do echo "{\"text\": \"$(seq -s ' ' "$i" 40)\"}"; done >"$scratch/data.jsonl"
pull 0 '' org/tiny:Q8_0
expect 0 'is a model now' timeout 120 "$still" linearize org/tiny:Q8_0 --data "$scratch/data.jsonl" \
    --out "$scratch/mine" -n 64 --batch 1 --seq 64 --chunk 8 --stage 1
grep -q '"org/tiny:Q8_0"' "$scratch/mine/still.json" || fail "the base's suffix is lost"
expect 0 '^  q8_0 ' "$still" inspect "$scratch/mine"
cd "$scratch" || exit 1
expect 0 'is a model now' timeout 120 "$still" linearize repo:q8_0 --data "$scratch/data.jsonl" \
    --out "$scratch/relative" -n 64 --batch 1 --seq 64 --chunk 8 --stage 1
cd / || exit 1
expect 0 '^  q8_0 ' "$still" inspect "$scratch/relative"

# list: everything with a name, by name.
mkdir -p "$models/mine" && cp "$scratch/mine/"* "$models/mine"
expect 0 '^org/tiny:Q8_0 .* cache .* gguf Q8_0' "$still" list
expect 0 '^mine .* adapter of org/tiny:Q8_0' "$still" list
expect 0 '' "$still" list --json
json "[m['name'] for m in x['models'] if m['where'] == 'still'] == ['mine', 'org/tiny:Q4_K_M', 'org/tiny:Q8_0', 'org/tiny:UD-Q4_K_M']"
json "next(m for m in x['models'] if m['name'] == 'mine')['base'] == 'org/tiny:Q8_0'"
python3 - "$scratch/out" >"$scratch/names" <<'PYTHON'
import json, sys
for m in json.load(open(sys.argv[1]))["models"]:
    if m["where"] == "still":
        print(m["name"])
PYTHON
while read -r name; do expect 0 '' "$still" show "$name"; done <"$scratch/names"
expect 1 'did you mean org/tiny:Q8_0' "$still" inspect org/tny:Q8_0
expect 1 'did you mean mine' "$still" chat minee

# rm: one model of several, then the rest; nothing without being told to.
expect 2 'say --yes to remove org/tiny:UD-Q4_K_M' "$still" rm org/tiny:UD-Q4_K_M
expect 0 'removed' "$still" rm org/tiny:UD-Q4_K_M --yes
has './tiny-Q4_K_M.gguf ./tiny.q8_0.gguf '
expect 1 'the cache has org/tiny:Q4_K_M, org/tiny:Q8_0' "$still" rm org/tiny:Q6_K --yes
expect 1 'not in the cache' "$still" rm org --yes
expect 1 'not in the cache' "$still" rm other/tiny --yes
expect 1 'is a path; rm removes models of the cache only' "$still" rm "$repo" --yes
for name in ../models . '' org/.. /etc org/tiny/ org/../org/tiny; do
    expect 1 '' "$still" rm "$name" --yes
done
has './tiny-Q4_K_M.gguf ./tiny.q8_0.gguf '
# Links: removed themselves, never what they lead to.
mkdir "$scratch/outside" && echo precious >"$scratch/outside/file"
ln -s "$scratch/outside" "$models/org/tiny/link"
ln -s "$scratch/outside/file" "$models/org/tiny/file"
ln -s "$models/org/tiny" "$models/org/alias"
ln -s "$models/org" "$models/team"
expect 1 'is a link' "$still" rm org/alias --yes
expect 1 'is a link' "$still" rm team/tiny --yes
expect 0 'removed' "$still" rm org/tiny -y --json
json "x['removed'] == 'org/tiny'"
[ ! -e "$models/org/tiny" ] || fail "org/tiny is still here"
[ "$(cat "$scratch/outside/file")" = precious ] || fail "rm followed a link"
rm "$models/org/alias" "$models/team"
expect 0 '' "$still" rm mine --yes
expect 1 "no model 'mine'" "$still" chat mine hi

# run: brings what is missing, then answers; a second time it asks nobody.
fresh; serve ok "$repo"
expect 0 'downloaded\|.' "$still" run org/tiny:Q8_0 hello -n 2 --chat-template chatml --endpoint "$url"
logged 'tiny.q8_0.gguf'
: >"$scratch/log"
expect 0 '' "$still" run org/tiny:q8_0 hello -n 2 --chat-template chatml --endpoint "$url"
[ ! -s "$scratch/log" ] || fail "asked for what is here: $(cat "$scratch/log")"
# ... also the base of an adapter that is only a name away
rm -r "$models/org"
expect 0 '' "$still" run "$scratch/mine" hello -n 2 --chat-template chatml --endpoint "$url"
has './tiny.q8_0.gguf '
expect 1 'no model .nosuch' "$still" run nosuch hello --endpoint "$url"

# Offline: not a byte over the network, and what is missing is named.
: >"$scratch/log"
pull 0 'already here' org/tiny:Q8_0 --offline
pull 1 'offline.*run .still pull org/tiny:Q6_K' org/tiny:Q6_K --offline
HF_HUB_OFFLINE=1 pull 1 'offline.*run .still pull org/other' org/other
HF_HUB_OFFLINE=1 expect 1 'run .still pull org/other' "$still" run org/other hi --endpoint "$url"
HF_HUB_OFFLINE=0 pull 0 'already here' org/tiny:Q8_0
[ "$(grep -c resolve "$scratch/log")" = 0 ] || fail "downloaded again"
grep -q org/other "$scratch/log" && fail "offline, but the hub was asked"

# Hugging Face's cache: used where it lies, never changed.
fresh
hub=$scratch/hf/hub
snapshot() { # COMMIT FILE...: a snapshot of them, as links to blobs
    local commit=$1 file
    shift
    mkdir -p "$hub/models--org--tiny/blobs" "$hub/models--org--tiny/snapshots/$commit"
    for file; do
        cp "$repo/$file" "$hub/models--org--tiny/blobs/$commit-${file##*/}"
        ln -s "../../blobs/$commit-${file##*/}" "$hub/models--org--tiny/snapshots/$commit/${file##*/}"
    done
}
commit=0123456789abcdef0123456789abcdef01234567
snapshot $commit tiny.q8_0.gguf tiny-Q5_0-00001-of-00002.gguf tiny-Q5_0-00002-of-00002.gguf
export HF_HOME=$scratch/hf
: >"$scratch/log"
means org/tiny:Q8_0 Q8_0
means org/tiny:q5_0 Q5_0
pull 0 "already in Hugging Face's cache: .*/snapshots/$commit/tiny.q8_0.gguf" org/tiny:Q8_0
expect 0 '' "$still" run org/tiny:Q8_0 hello -n 2 --chat-template chatml --endpoint "$url"
[ ! -s "$scratch/log" ] || fail "asked for what is here: $(cat "$scratch/log")"
expect 0 '^org/tiny:Q8_0 .* Hugging Face .* gguf' "$still" list
expect 1 "is in Hugging Face's cache, which still only reads" "$still" rm org/tiny:Q8_0 --yes
expect 1 "is in Hugging Face's cache" "$still" rm org/tiny --yes
pull 0 'downloaded' org/tiny:Q6_K
means org/tiny:Q6_K Q6_K
means org/tiny:Q8_0 Q8_0
# refs/main chooses among snapshots; without it several are nobody's choice.
other=fedcba9876543210fedcba9876543210fedcba98
snapshot $other tiny-Q4_K_M.gguf
expect 1 'not in the cache' "$still" inspect org/tiny:Q8_0
mkdir -p "$hub/models--org--tiny/refs"
printf '%s' $other >"$hub/models--org--tiny/refs/main"
means org/tiny:Q4_K_M Q4_K
printf '../../../../elsewhere' >"$hub/models--org--tiny/refs/main"
expect 1 'not in the cache' "$still" inspect org/tiny:Q4_K_M
printf '%s\n' $commit >"$hub/models--org--tiny/refs/main"
means org/tiny:Q8_0 Q8_0
# A blob that is gone, as an interrupted download of theirs leaves it.
expect 0 'removed' "$still" rm org/tiny:Q6_K --yes
rm "$hub/models--org--tiny/blobs/$commit-tiny-Q5_0-00002-of-00002.gguf"
expect 1 'not complete' "$still" inspect org/tiny:Q5_0
# HF_HUB_CACHE goes before HF_HOME; both may begin with ~.
unset HF_HOME
HF_HUB_CACHE=$hub means org/tiny:Q8_0 Q8_0
HOME=$scratch HF_HOME='~/hf' means org/tiny:Q8_0 Q8_0
HF_HOME=$scratch/nothing expect 1 'run .still pull org/tiny:Q8_0' "$still" inspect org/tiny:Q8_0
mkdir -p "$XDG_CACHE_HOME/huggingface" && cp -a "$hub" "$XDG_CACHE_HOME/huggingface/hub"
means org/tiny:Q8_0 Q8_0

# Their token: sent to the endpoint as HF_TOKEN would be, which goes before it.
fresh; mkdir -p "$scratch/home"; printf 'lying-there\n' >"$scratch/home/token"
: >"$scratch/log"
HF_HOME=$scratch/home pull 0 downloaded org/tiny:Q8_0
logged 'auth=Bearer lying-there'
fresh; : >"$scratch/log"
HF_HOME=$scratch/home HF_TOKEN=said pull 0 downloaded org/tiny:Q8_0
logged 'auth=Bearer said'
not_logged lying-there
fresh; : >"$scratch/log"
HF_TOKEN_PATH=$scratch/home/token pull 0 downloaded org/tiny:Q8_0
logged 'auth=Bearer lying-there'
fresh; : >"$scratch/log" # where everybody could read it, it stays at home
HF_HOME=$scratch/home http_proxy=$url expect 0 'token is not sent' \
    "$still" pull org/tiny:Q8_0 --endpoint http://hub.invalid
not_logged 'lying-there'
printf 'two words' >"$scratch/home/token"
fresh; HF_HOME=$scratch/home pull 1 'holds no token' org/tiny:Q8_0

# Hostile and broken hubs: parts, names, sums.
fresh; serve drop "$repo"; pull 0 downloaded org/tiny:Q5_0; means org/tiny:Q5_0 Q5_0
fresh; serve wrong-hash "$repo"; pull 1 'checksum is' org/tiny:Q5_0; has ''
expect 1 'run .still pull org/tiny:Q5_0' "$still" inspect org/tiny:Q5_0
fresh; serve size-lie "$repo"; pull 1 'the hub lists' org/tiny:Q8_0; has ''
fresh; serve missing-part "$repo"; pull 1 'is one of 2 parts, of which the hub lists 1' org/tiny:Q5_0
for mode in evil-gguf evil-part evil-control evil-long; do
    fresh; serve $mode "$repo"; pull 1 'refuses file name' org/tiny:Q4_K_M
    [ ! -e "$models/org" ] || fail "$mode: left $(find "$models")"
done
fresh; serve odd-names "$repo"; pull 0 'tiny-Q4_K_M.gguf' org/tiny:Q4_K_M
has './tiny-Q4_K_M.gguf '
fresh; serve many-names "$repo"; pull 1 'choose one of org/tiny:Q6_K.*\.\.\.' org/tiny:Q3_K_S
fresh; serve 404; pull 1 'check name' org/typo
[ ! -e "$models/org" ] || fail "a name that does not exist left a folder"
stop_server

# An unfinished download counts as none, is listed as one, and can be removed.
fresh; serve drop-dead "$repo"; pull 1 'still: http' org/tiny:Q8_0 --timeout 1
stop_server
expect 1 'not complete: run .still pull org/tiny:Q8_0' "$still" inspect org/tiny:Q8_0
expect 0 '^org/tiny:Q8_0 .*unfinished' "$still" list
expect 0 'removed' "$still" rm org/tiny:q8_0 --yes
[ ! -e "$models/org" ] || fail "an unfinished download is still here"
finish
