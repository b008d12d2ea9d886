#!/usr/bin/env bash
# still pull-data with data sets: a server on the loopback has small files in the published
# formats (published.py), whole, damaged and hostile ones. $2 is tools/make-model.
# shellcheck disable=SC2016 # backquotes of Markdown
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"
make_model=$2

place=$scratch/published data=$scratch/data
python3 "$here/published.py" "$place" http://PLACE || fail "published.py"
list=$scratch/list.json

# serve_files MODE: the published files; $list is a list of sources that has their addresses.
serve_files() {
    serve "$1" "$place/files"
    base=$url/org/tiny/resolve/main
    fresh_list
}
fresh_list() {
    sed "s#http://PLACE#$base#" "$place/sources.json" >"$list"
}
# pull STATUS PATTERN NAME...: by that list, into $data.
pull() {
    local want=$1 pattern=$2
    shift 2
    expect "$want" "$pattern" "$still" pull-data "$@" --mirror "$list" --out "$data"
}
fresh() { rm -rf "$data"; }
# damage NAME COMMAND...: a published file through a filter; in the list its size and
# checksum become those of the damaged one, so that the reader is what has to notice.
damage() {
    local file=$place/files/$1
    shift
    cp "$file" "$scratch/whole"
    "$@" <"$scratch/whole" >"$file"
    python3 - "$list" "$file" <<'PYTHON'
import hashlib, json, pathlib, sys
path, file = map(pathlib.Path, sys.argv[1:])
sources, raw = json.loads(path.read_text()), file.read_bytes()
for entry in (f for s in sources["sets"] for f in s["files"]):
    if entry["name"] == file.name and "sha256" in entry:
        entry.update(bytes=len(raw), sha256=hashlib.sha256(raw).hexdigest())
path.write_text(json.dumps(sources))
PYTHON
}
mend() { cp "$scratch/whole" "$place/files/$1"; }
# refused PATTERN SET FILE COMMAND...: a damaged file is refused, and leaves nothing.
refused() {
    local pattern=$1 set=$2 file=$3
    shift 3
    fresh_list
    damage "$file" "$@"
    fresh
    pull 1 "$pattern" "$set"
    mend "$file"
    [ -z "$(find "$data" -type f ! -name .lock ! -name checksums.json)" ] ||
        fail "left of a damaged $file: $(find "$data" -type f)"
}

# ---- The list ---------------------------------------------------------------

expect 0 'hellaswag_valid.jsonl' "$still" pull-data --list
expect 0 'licence: CC BY-SA 4.0' "$still" pull-data --list
expect 0 '' "$still" pull-data --list --json
json 'len(x["sets"]) == 15 and not any(s["here"] for s in x["sets"])'
json 'all(len(f.get("sha256", "0" * 64)) == 64 for s in x["sets"] for f in s["published"])'
json 'sum("sha256" in f for s in x["sets"] for f in s["published"]) == 12'
json 'len([s for s in x["sets"] if s["name"] == "essays"][0]["published"]) == 49'
# Every task's files come from some set.
expect 0 '' "$still" eval --json
cp "$scratch/out" "$scratch/tasks"
expect 0 '' "$still" pull-data --list --json
python3 - "$scratch/tasks" "$scratch/out" <<'PYTHON' || fail "a task's files have no source"
import json, sys
tasks, sets = (json.load(open(p)) for p in sys.argv[1:])
made = {m for s in sets["sets"] for m in s["makes"]}
lacking = {f for t in tasks["tasks"] for f in t["files"].split()} - made
sys.exit(f"no set makes {lacking}" if lacking else 0)
PYTHON

expect 0 '' "$still" pull-data books alpaca --list --json
json '[s["name"] for s in x["sets"]] == ["books", "alpaca"]'
expect 2 'which data sets' "$still" pull-data
expect 2 '--all is every set' "$still" pull-data --all piqa
expect 2 'are for data sets' "$still" pull-data "$place" --force
expect 1 "did you mean piqa" "$still" pull-data piqq
expect 1 "neither a data set nor a folder" "$still" pull-data piqa nonsense/there
expect 1 'No such file' "$still" pull-data piqa --mirror "$scratch/none.json"
expect 1 'offline.*piqa_valid.jsonl.*demo/books.jsonl.gz is data to try' "$still" pull-data piqa --offline --out "$data"

# wrong PATTERN PYTHON: a list of sources that a change of it makes wrong.
serve_files ok
wrong() {
    python3 - "$list" "$scratch/wrong.json" "$2" <<'PYTHON'
import json, sys
x = json.load(open(sys.argv[1]))
piqa, file = x["sets"][0], x["sets"][0]["files"][0]
exec(sys.argv[3])
json.dump(x, open(sys.argv[2], "w"))
PYTHON
    expect 1 "$1" "$still" pull-data piqa --mirror "$scratch/wrong.json" --out "$data"
}
wrong 'not a list of data sources of version 1' 'x["version"] = 2'
wrong "set 'piqa': \"sha265\" is not a name" 'file["sha265"] = file.pop("sha256")'
wrong 'is not the 64 digits' 'file["sha256"] = "X" * 64'
wrong 'is not a plain file name' 'file["name"] = "../../evil"'
wrong 'is not a plain file name' 'file["name"] = ".lock"'
wrong 'not https:// or http://' 'file["url"] = ["file:///etc/passwd"]'
wrong 'a character that addresses have not' 'file["url"] = ["http://a/b c"]'
wrong '"bytes" is not a size' 'file["bytes"] = -5'
wrong '"bytes" or "most" is missing' 'del file["bytes"]'
wrong 'names no converter' 'piqa["convert"] = "pickle"'
wrong 'are not as many as its converter reads' 'piqa["files"].append(dict(file, name="b"))'
wrong '"parts" is not plain file names' 'file["parts"] = {"a/b": "0" * 64}'
wrong '"parts" is not names and checksums' 'file["parts"] = {}'
wrong 'two files are named data.tar' 'file["name"] = "data.tar"'
wrong 'two sets are named piqa' 'x["sets"][1]["name"] = "piqa"'
wrong '"sets" is not a list' 'x["sets"] = {}'
echo '{"version": 1,' >"$scratch/wrong.json"
expect 1 'wrong.json: line 2' "$still" pull-data piqa --mirror "$scratch/wrong.json"

# ---- Every set, as it is published ------------------------------------------

fresh
pull 0 'piqa_valid.jsonl, 2 records' --all
for made in "$place"/made/*; do
    cmp -s "$made" "$data/${made##*/}" || fail "differs: ${made##*/}"
done
[ ! -e "$data/published" ] || fail "published files are left"
: >"$scratch/log"
pull 0 'babi: already here and verified' --all
not_logged GET
pull 0 '' --all --offline --json
json 'all(s["here"] and s["files"][0]["records"] for s in x["sets"])'
expect 0 '^piqa (here)$' "$still" pull-data --list --out "$data"

# What was made is what eval, perplexity and linearize read.
tiny=$scratch/tiny.gguf
"$make_model" tiny "$tiny" >/dev/null 2>&1 || fail "make-model"
expect 0 '^| lambada |' "$still" eval "$tiny" --data "$data" -j 1 --ctx 64 \
    --tasks piqa,arc,hellaswag,winogrande,mmlu,lambada
expect 0 '' "$still" eval "$tiny" --data "$data" --tasks qa@512,babilong_qa1@0 \
    --samples 1 --freeze "$scratch/frozen"
expect 0 '' "$still" perplexity "$tiny" "$data/wikitext2_raw_test.jsonl" --ctx 16 -j 1
mkdir -p "$XDG_CACHE_HOME/still"
expect 1 'not here yet: `still pull-data books`' "$still" linearize "$tiny" --data books \
    --out "$scratch/new" --dry-run
cp -r "$data" "$XDG_CACHE_HOME/still/data"
expect 0 '' "$still" linearize "$tiny" --data alpaca@1 --data books@2 --dry-run --seq 24 \
    --batch 1 --chunk 8 -j 1 --tokens 48
expect 1 'nope: no such file.*demo/books.jsonl.gz.*pull-data books' \
    "$still" linearize "$tiny" --data nope --out "$scratch/new"
expect 2 'demo/books.jsonl.gz.*pull-data books' "$still" linearize "$tiny" --out "$scratch/new"

# A file that was changed is made again; one from elsewhere is left, unless forced.
echo >>"$data/piqa_valid.jsonl"
pull 0 'checksum is .*making it again' piqa
cmp -s "$place/made/piqa_valid.jsonl" "$data/piqa_valid.jsonl" || fail "not made again"
fresh
mkdir "$data"
echo mine >"$data/piqa_valid.jsonl"
pull 0 'from elsewhere (--force replaces it)' piqa
grep -q '^mine$' "$data/piqa_valid.jsonl" || fail "a file from elsewhere was replaced"
pull 0 '2 records' piqa --force --keep
cmp -s "$place/files/physicaliqa-train-dev.zip" "$data/published/physicaliqa-train-dev.zip" ||
    fail "--keep kept nothing"
: >"$scratch/log"
pull 0 '2 records' piqa --force # what was kept has its checksum: nothing is fetched
not_logged GET

# ---- Downloads ---------------------------------------------------------------

# All files in one place, by the program's own list: its sizes and checksums count there.
expect 1 'the list of sources says 1824009' \
    "$still" pull-data piqa --mirror "$base" --out "$data/own"
expect 0 'alpaca_original.jsonl, 2 records' \
    "$still" pull-data alpaca --mirror "$base/" --out "$data/own"
expect 1 '1 of 2 sets could not be brought: piqa;' \
    "$still" pull-data piqa alpaca-cleaned --mirror "$base" --out "$data/own"
[ -s "$data/own/alpaca_cleaned.jsonl" ] || fail "one set's failure kept another away"

fresh # a wrong checksum
sed -i 's/\("sha256": "\)..../\10000/' "$list"
pull 1 'physicaliqa-train-dev.zip.*checksum is .*, expected 0000' piqa
[ ! -e "$data/piqa_valid.jsonl" ] || fail "made of a wrong file"

fresh # of a large archive only what is needed comes
fresh_list
: >"$scratch/log"
pull 0 '' arc --json
json '0 < x["sets"][0]["downloaded_bytes"] < 1_100_000'
[ "$(stat -c %s "$place/files/ARC-V1-Feb2018.zip")" -gt 1800000 ] || fail "a small archive"
logged 'ARC-V1-Feb2018.zip range=bytes=[0-9]*-[0-9]'
not_logged ' range= '
cmp -s "$place/made/arc_easy_test.jsonl" "$data/arc_easy_test.jsonl" || fail "arc differs"
[ ! -e "$data/published" ] || fail "parts are left"
fresh # or all of it, if the server sends no parts, or they are others
sed -i 's/\("ARC-Easy-Test.jsonl": "\)..../\10000/' "$list"
pull 0 'checksum of ARC-Easy-Test.jsonl is .*; downloading all of it' arc
logged 'ARC-V1-Feb2018.zip range= '
serve_files no-ranges
fresh
pull 0 'does not send parts of files; downloading all of it' arc
cmp -s "$place/made/arc_easy_test.jsonl" "$data/arc_easy_test.jsonl" || fail "arc differs"

fresh # a dropped connection goes on where it was; a dead one at the next run
serve_files drop
pull 0 'mmlu_test.jsonl, 3 records' mmlu
logged 'data.tar range=bytes=100000-'
fresh
serve_files drop-dead
pull 1 '' mmlu
[ "$(stat -c %s "$data/published/data.tar.part")" = 200000 ] || fail "no part was kept"
serve_files ok
pull 0 'mmlu_test.jsonl, 3 records' mmlu
logged 'data.tar range=bytes=200000-'

fresh # no checksum is known: that of the first download counts, whatever tags say
serve_files odd-tag
pull 0 '2 records' alpaca
cp "$data/alpaca_original.jsonl" "$scratch/first"
damage alpaca_data.json sed 's/tips/hints/'
pull 1 'is not what it was when it was first downloaded' alpaca --force
cmp -s "$scratch/first" "$data/alpaca_original.jsonl" || fail "replaced by what differs"
sed -i '/"alpaca_data.json"/,/}/s/"sha256"/"was"/' "$data/checksums.json"
pull 0 '2 records' alpaca --force
cmp -s "$scratch/first" "$data/alpaca_original.jsonl" && fail "not replaced"
mend alpaca_data.json

fresh # a second address
serve_files ok
sed -i "s#\\(\"url\": \\[\\)#\\1 #; s#\"$base/data.tar\"#\"$base/gone.tar\", \"$base/data.tar\"#" "$list"
pull 0 'gone.tar: the server answers 404, not found; trying http' mmlu
grep -q '/data.tar"' "$data/checksums.json" || fail "another address was noted"

fresh # sizes that are only bounds
sed -i 's/"most": 100000000/"most": 100/' "$list"
pull 1 'more than 100 bytes' alpaca
serve_files html
fresh
pull 1 'HTML page' piqa

# ---- Damaged and hostile files -----------------------------------------------

serve_files ok

zip=physicaliqa-train-dev.zip
# edited PYTHON: a filter; x is the file's bytes.
edited() { python3 -c "import sys; x = bytearray(sys.stdin.buffer.read()); exec(sys.argv[1])
sys.stdout.buffer.write(x)" "$1"; }
# zip_of PYTHON: a filter that puts another archive in a file's place; z is it.
zip_of() { python3 -c "import io, sys, zipfile; b = io.BytesIO(); z = zipfile.ZipFile(b, 'w', 8)
exec(sys.argv[1])
z.close(); sys.stdout.buffer.write(b.getvalue())" "$1"; }
tar_of() { python3 -c "import io, sys, tarfile; b = io.BytesIO(); t = tarfile.open(fileobj=b, mode='w')
def add(name, data, **k):
    i = tarfile.TarInfo(name); i.size = len(data)
    for a, v in k.items(): setattr(i, a, v)
    t.addfile(i, io.BytesIO(data))
exec(sys.argv[1])
t.close(); sys.stdout.buffer.write(b.getvalue())" "$1"; }
refused 'not a zip archive' piqa $zip head -c 500
refused 'not a zip archive' piqa $zip tail -c 10
refused 'not a zip archive' piqa $zip edited 'x = b"<html>" * 50'
refused 'damaged zip archive' piqa $zip edited 'x[70] ^= 255'
refused 'its directory lies outside' piqa $zip edited 'x[-6:-2] = b"\0\0\0\x7f"'
refused 'zip64' piqa $zip edited 'x[-14:-10] = b"\xff" * 4'
refused 'has no dev-labels.lst' piqa $zip zip_of 'z.writestr("dev.jsonl", b"{}")'
refused 'has more than one dev.jsonl' piqa $zip \
    zip_of 'z.writestr("a/dev.jsonl", b""); z.writestr("b/dev.jsonl", b"")'
refused 'encrypted' piqa $zip edited 'x[x.find(b"PK\1\2") + 8] |= 1'
refused 'unpacks to more than its size' piqa $zip edited \
    'at = x.find(b"PK\1\2"); x[at + 24:at + 28] = b"\5\0\0\0"'
refused 'unpacks to 4026531840 bytes, at most' piqa $zip edited \
    'at = x.find(b"PK\1\2"); x[at + 24:at + 28] = b"\0\0\0\xf0"'
refused 'unpacks to 300000000 bytes, at most' piqa $zip \
    zip_of 'z.writestr("dev.jsonl", bytes(300_000_000))'
refused 'dev-labels.lst:2: there are fewer labels' piqa $zip zip_of \
    'q = b"{\"goal\":\"g\",\"sol1\":\"a\",\"sol2\":\"b\"}\n"; z.writestr("dev.jsonl", q * 3)
z.writestr("dev-labels.lst", b"0\n1\n")'
refused 'dev-labels.lst:1: a label is not 0 or 1' piqa $zip zip_of \
    'z.writestr("dev.jsonl", b"{\"goal\":\"g\",\"sol1\":\"a\",\"sol2\":\"b\"}")
z.writestr("dev-labels.lst", b"2\n")'
refused 'dev.jsonl:2: .*' winogrande winogrande_1.1.zip zip_of \
    'z.writestr("x/dev.jsonl", b"\n{\"sentence\": \"")'
refused 'has no records for' winogrande winogrande_1.1.zip zip_of \
    'z.writestr("x/dev.jsonl", b"")'
refused 'no choice has the answer' arc ARC-V1-Feb2018.zip zip_of \
    'q = b"{\"id\":\"i\",\"answerKey\":\"Z\",\"question\":{\"stem\":\"s\",\"choices\":[]}}"
for n in "Easy", "Challenge":
    z.writestr(f"ARC-{n}-Test.jsonl", q)'
refused 'ends early\|not a whole tar' mmlu data.tar head -c 100000
refused 'not a tar archive' mmlu data.tar edited 'x[0:9] = b"data/test"; x[200] ^= 1'
refused 'has no records for' mmlu data.tar tar_of 'add("data/README.txt", b"")'
refused 'test.csv:1: .*inside quotes' mmlu data.tar tar_of \
    'add("data/test/a_test.csv", b"\"never closed,1,2,3,4,A\n")'
refused 'test.csv:2: is not a question, four choices and a letter' mmlu data.tar tar_of \
    'add("data/test/a_test.csv", b"q,1,2,3,4,A\nq,1,2,3,4,E\n")'
refused 'test.csv:1: no UTF-8' mmlu data.tar tar_of \
    'add("data/test/a_test.csv", b"\xff,1,2,3,4,A\n")'
refused 'hellaswag_val.jsonl:1: "label"' hellaswag hellaswag_val.jsonl \
    sed 's/"label": 3/"label": 4/'
refused 'lambada_test.jsonl:1: the text does not end' lambada lambada_test.jsonl \
    sed 's/ stone"/stone "/'
refused 'dev-v2.0.json: line 1, column' squad dev-v2.0.json head -c 300
refused 'article 1: "title" is not a text' squad dev-v2.0.json sed 's/"title"/"titel"/'
refused 'record 1: "context" is not titles and sentences' hotpotqa \
    hotpot_dev_distractor_v1.json sed 's/\["Ed\."\]/"Ed."/'
refused 'not a JSON array' alpaca alpaca_data.json sed 's/^\[/{/'
refused 'record 2: ' alpaca alpaca_data.json head -c 250
refused 'wiki.test.raw: has no articles' wikitext2 wikitext-2-raw-v1.zip zip_of \
    'z.writestr("wiki.test.raw", b" \n text \n")'
refused 'its number does not follow' babi tasks_1-20_v1-2.tar.gz tar_of \
    'add("t/en-10k/qa1_x_test.txt", b"1 Fact.\n3 Fact.\n")'
refused "the answer's facts are not lines before it" babi tasks_1-20_v1-2.tar.gz tar_of \
    'add("t/en-10k/qa1_x_test.txt", b"1 Fact.\n2 Where? \there\t7\n")'
refused 'has no file en-10k/qa2' babi tasks_1-20_v1-2.tar.gz tar_of \
    'add("t/en-10k/qa1_x_test.txt", b"1 Fact.\n2 Where? \there\t1\n")'
refused 'END OF THE PROJECT GUTENBERG' books pg20.txt head -c 150
refused 'not text in UTF-8' essays worked.txt edited 'x = b"\xff\xfe"'

# Names in archives are only compared: nothing is written outside of the folder.
serve_files ok
damage data.tar tar_of 'add("../../../../tmp/evil/data/test/x_test.csv", b"q,1,2,3,4,A\n")
add("/data/dev/x_dev.csv", b"q,1,2,3,4,A\n"); add("data/val/x_val.csv", b"q,1,2,3,4,A\n")
add("data/test/y_test.csv", b"", type=b"2", linkname="/etc/passwd")'
fresh
pull 0 'mmlu_test.jsonl, 1 records' mmlu
[ ! -e /tmp/evil ] || fail "a file outside of the folder"

finish
