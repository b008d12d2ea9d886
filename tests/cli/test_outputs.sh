#!/bin/bash
# Files that commands write: what cannot be written is said before the work, - is standard
# output; and options without an effect are pointed out. $2 is tools/make-model.
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"
make_model=$2
cd "$scratch" || exit 1
"$make_model" tiny tiny.gguf >/dev/null 2>&1 || { echo "make-model failed" >&2; exit 1; }
for i in $(seq 12); do echo "Line $i of a text that is long enough for a few chunks"; done >text.txt
bench=("$still" bench decode --shape tiny --lengths 64 --rounds 1 --steps 1 --method softmax --against '')
saliency=("$still" saliency tiny.gguf text.txt --chunk 16 --select 4)

# Said at once: a model that is not there would be the first error otherwise.
: >file
expect 1 'no/such/x.csv: cannot write: .*its folder is not there' \
    "$still" bench prefill missing.gguf --csv no/such/x.csv
expect 1 'file/x.svg: cannot write: Not a directory' \
    "$still" bench prefill missing.gguf --svg file/x.svg
expect 1 'no/x.html: cannot write' "$still" saliency missing.gguf text.txt --out no/x.html
expect 1 'no/heads.svg: cannot write' "$still" allocate missing.gguf --svg no/heads.svg
expect 1 'no/state: cannot write' "$still" generate missing.gguf -p x --save-state no/state
expect 1 'no/x.gguf: cannot write' "$still" export missing.gguf --to gguf --out no/x.gguf
expect 1 'no/x/: cannot write' "$still" export missing.gguf --to safetensors --out no/x/
mkdir folder
expect 1 'folder: is a folder; --csv needs' "$still" bench prefill missing.gguf --csv folder
expect 1 'file: ' "$still" saliency missing.gguf text.txt --figures file
if [ "$(id -u)" != 0 ]; then # root may write anywhere
    chmod a-w folder
    expect 1 'name a folder you may write to' "$still" bench prefill missing.gguf --csv folder/x.csv
    chmod u+w folder
fi
# What can be written is: here, below, a device, over an old file.
for path in x.csv ./x.csv folder/x.csv "$scratch/x.csv" /dev/null; do
    expect 0 '^| 64 |' "${bench[@]}" --csv "$path"
done
[ "$(wc -l <folder/x.csv)" = 2 ] || fail "folder/x.csv has not two lines"

# What the command reads is not written over, whatever name it goes by.
ln -s tiny.gguf link.gguf
cp tiny.gguf before
read_too='is read by this command'
expect 1 "tiny.gguf: $read_too; --save-state needs" "$still" generate tiny.gguf -p x --save-state tiny.gguf
expect 1 "./tiny.gguf: $read_too" "$still" generate -m link.gguf -p x --save-state ./tiny.gguf
expect 1 "text.txt: $read_too" "$still" generate tiny.gguf -f text.txt --save-state text.txt
expect 1 "text.txt: $read_too; --out needs" "${saliency[@]}" --out text.txt
expect 1 "tiny.gguf: $read_too; --csv needs" "$still" bench decode tiny.gguf --csv tiny.gguf
cmp -s tiny.gguf before || fail "the model was written over"
expect 0 '' "$still" generate tiny.gguf -p x -n 2 --save-state state
expect 0 '' "$still" generate tiny.gguf -p x -n 2 --load-state state --save-state state

# - is standard output, and nothing else is there.
expect 0 '' "${bench[@]}" --csv - --svg chart.svg
cmp -s <(head -c 11 out) <(printf 'what,model,') || fail "--csv -: $(head -c 200 out)"
[ "$(wc -l <out)" = 2 ] || fail "--csv - is not two lines"
[ -s chart.svg ] || fail "--svg beside --csv - was not written"
expect 0 '' "${bench[@]}" --plot -
python3 -c 'import sys, xml.etree.ElementTree as t; t.parse(sys.argv[1])' out || fail "--plot - is no SVG"
expect 0 '' "${saliency[@]}" --out - --quiet
head -1 out | grep -q '^<!DOCTYPE html>' || fail "--out - does not begin with the page"
grep -q '^| all |' out && fail "--out -: the table is there, too"
[ -e ./- ] && fail "a file named - was written"
# A drawing of few heads has room for what is written above them.
expect 0 '' "$still" allocate tiny.gguf --budget 1MB --probes 1 --quiet --svg heads.svg
python3 - <<'PYTHON' || fail "the text of heads.svg does not fit"
import xml.etree.ElementTree as tree
svg = tree.parse("heads.svg").getroot()
longest = max(len(t.text) for t in svg.iter() if t.tag.endswith("text"))
raise SystemExit(int(svg.get("width")) < 64 + 7 * longest)
PYTHON
expect 2 'csv - and --json both write' "${bench[@]}" --csv - --json
expect 2 'both write to standard output' "${bench[@]}" --csv - --svg -
expect 2 'standard output (-) cannot take it' "$still" generate tiny.gguf -p x --save-state -
expect 2 'the name is empty' "${bench[@]}" --csv ''

# Options without an effect.
warned() { grep -q "^still: warning: .*$1" err || fail "no warning '$1': $(cat err)"; }
silent() { grep 'warning' err && fail "a warning where none belongs: $*"; }
expect 0 '' "$still" generate tiny.gguf -p hello -n 2 --chunk 64 --cap none
warned 'no effect: --chunk, --cap; .*--method'
expect 0 '' "$still" perplexity tiny.gguf text.txt --ctx 64 --score random
warned 'no effect: --score;'
expect 0 '' "$still" generate tiny.gguf -p hello -n 2 --chunk 64 --cap 8 --method still
silent '--method still'
# What has no effect is still read.
expect 2 "score: 's4' is unknown, did you mean s3" "$still" generate tiny.gguf -p x --score s4
expect 2 "budget: 'nan' is not a number of bytes" "$still" generate tiny.gguf -p x --budget nan
expect 2 "cap: 'x' is neither a number of tokens" "$still" generate tiny.gguf -p x --method still --cap x
expect 2 "budget: '0' is not a number of bytes" "$still" generate tiny.gguf -p x --budget 0
expect 0 '' "$still" generate tiny.gguf -p hello -n 2 --top-p 0.5 --min-p 0.1
warned 'no effect: --top-p, --min-p; .*--temp'
expect 0 '' "$still" generate tiny.gguf -p hello -n 2 --top-p 0.5 --temp 1
silent '--temp 1'
expect 0 '' "$still" generate tiny.gguf -p hello -n 2
silent 'no option'
expect 0 '' "${saliency[@]}"
silent 'saliency'
expect 0 '' "${saliency[@]}" --select 16
warned 'all 16 tokens of a chunk are selected.*--select 4'
for i in $(seq 40); do echo "{\"text\": \"line $i of some training text\"}"; done >data.jsonl
train=("$still" linearize tiny.gguf --data data.jsonl --stage 1 -n 64 --batch 1 --held-out 0)
expect 0 '' "${train[@]}" --chunk 16 --seq 32 --out short
warned 'seq 32: no token leaves the window of two chunks of 16'
expect 0 '' "${train[@]}" --chunk 8 --seq 32 --out long
silent 'linearize --seq'
expect 0 '' "${train[@]}" --method hedgehog --seq 32 --out hedgehog
silent 'hedgehog has no window'
finish
