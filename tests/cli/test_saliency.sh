#!/bin/bash
# still saliency on a small random model: figures, the page, and what is refused. $2 is
# tools/make-model.
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"
make_model=$2
tiny=$scratch/tiny.gguf
"$make_model" tiny "$tiny" >/dev/null 2>&1 || { echo "make-model failed" >&2; exit 1; }
saliency() { local want=$1 pattern=$2; shift 2; expect "$want" "$pattern" \
    "$still" saliency "$@"; }
text=$scratch/text.txt page=$scratch/report.html
for i in $(seq 12); do
    printf 'Line %d: </script><b onclick="x()">Ärger & <!-- 漢字 -->\n' "$i"
done >"$text"
small=(--chunk 16 --select 4 --threads 2)

# What is wrong is said in a line.
: >"$scratch/empty.txt"
printf 'only a few words' >"$scratch/short.txt"
head -c 64 "$tiny" >"$scratch/broken.gguf"
while IFS='|' read -r status pattern arguments; do
    [ -n "$status" ] || continue
    eval "set -- $arguments"
    saliency "$status" "$pattern" "$@"
done <<CASES
2|needs a file with text|
2|one argument too many|a b c
2|outside 3..131072|$tiny $text --ctx 2
1|nowhere.txt|$tiny $scratch/nowhere.txt
1|no such file or folder|nonsense $text
1|broken.gguf|$scratch/broken.gguf $text
1|empty.txt: holds no text|$tiny $scratch/empty.txt
1|tokens, at least 385 are needed|$tiny $scratch/short.txt
1|48 tokens, at least 49 are needed|$tiny $text --chunk 16 --ctx 48
1|method lolcats chooses no tokens|$tiny $text --method lolcats --chunk 16
1|method softmax chooses no tokens|$tiny $text --method softmax --chunk 16
2|--score: 'best' is none of|$tiny $text --chunk 16 --score best
1|/proc/figures|$tiny $text --chunk 16 --figures /proc/figures
1|/no/such/folder/x.html: cannot write|$tiny $text --chunk 16 --out /no/such/folder/x.html --quiet
CASES

# Figures, as a table and as JSON.
saliency 0 '^| all | [01]\.' "$tiny" "$text" "${small[@]}"
[ "$(grep -c '^| [01] |' "$scratch/out")" = 2 ] || fail "not a row a layer"
saliency 0 '' "$tiny" "$text" "${small[@]}" --ctx 100 --json --quiet
[ -s "$scratch/err" ] && fail "--quiet: $(cat "$scratch/err")"
json '(x["method"], x["score"], x["tokens"]) == ("still", "s3", 100)'
json '(x["chunk"], x["select"], x["cap"], x["chance"]) == (16, 4, 32, 0.25)'
json 'x["chunks"] == 4 and len(x["layers"]) == 2' # 0 to 4 have left, the first is not counted
json 'all(0 <= f["overlap"] <= 1 and -1 <= f["correlation"] <= 1 and 0 <= f["captured"] <= 1
          for part in [x] + x["layers"] + x["layers"][0]["heads"]
          for f in (part["whole"], part["received"]))'
json 'x["layers"][1]["layer"] == 1 and x["exact"] == (20 + 20) / 100'
saliency 0 '' "$tiny" "$text" "${small[@]}" --layers 1-1 --heads per-head --score keynorm --json
json '[l["layer"] for l in x["layers"]] == [1] and x["score"] == "keynorm"'

# The page holds everything it needs, and the text only as data.
saliency 0 '' "$tiny" "$text" "${small[@]}" --out "$page"
[ -e "$page.part" ] && fail "the temporary file is still there"
python3 - "$page" "$text" <<'PYTHON' || fail "the page is not what it should be"
import html.parser, json, sys
page, text = (open(p, encoding="utf-8").read() for p in sys.argv[1:])

class Page(html.parser.HTMLParser):
    scripts, tags, inside = [], [], False
    def handle_starttag(self, tag, attributes):
        assert not {"src", "href", "onclick"} & dict(attributes).keys(), (tag, attributes)
        self.tags.append(tag)
        if tag == "script":
            self.scripts.append("")
            self.inside = True
    def handle_endtag(self, tag):
        self.inside = self.inside and tag != "script"
    def handle_data(self, data):
        if self.inside:
            self.scripts[-1] += data

p = Page()
p.feed(page)
assert "b" not in p.tags and "link" not in p.tags and len(p.scripts) == 2
assert "://" not in page and "default-src 'none'" in page and "innerHTML" not in page
data = json.loads(p.scripts[0])
n, rows = len(data["tokens"]), data["layers"] * data["heads"]
shown = "".join(data["tokens"])
assert shown.replace("\u00b7", "").endswith(text[-40:]), shown[-60:]
for name in ("local", "whole", "received", "folded"):
    assert len(data[name]) == rows and all(len(row) == n for row in data[name]), name
assert data["received"][0][data["left"]] is None and data["received"][0][0] is not None
kept = [t for t in range(data["left"]) if data["folded"][0][t] < 0]
assert 0 in kept and len(kept) == min(32, data["left"] // 4), kept
assert len(data["by_layer"]) == data["layers"] and data["method"]["chunk"] == 16
PYTHON
# Again over the old one, with another score.
saliency 0 '' "$tiny" "$text" "${small[@]}" --score random --seed 3 --out "$page" --json
grep -q '"score":"random"' "$page" || fail "the report was not replaced"

# Figures: four drawings that need nothing else, and a table.
figures=$scratch/new/figures
saliency 0 '' "$tiny" "$text" "${small[@]}" --cap none --figures "$figures" --json
json 'abs(x["captured_by"]["s3"] - x["received"]["captured"]) < 1e-9'
json 'set(x["captured_by"]) == {"s3", "received", "keynorm", "distinct", "random",
                                "s3 over the whole past", "best possible"}'
json 'all(x["captured_by"]["best possible"] >= y for y in x["captured_by"].values())'
cp "$scratch/out" "$scratch/figures.json"
python3 - "$figures" "$scratch/figures.json" <<'PYTHON' || fail "figures are not what they should be"
import json, os, sys
import xml.etree.ElementTree as tree
folder, run = sys.argv[1], json.load(open(sys.argv[2], encoding="utf-8"))
assert sorted(os.listdir(folder)) == ["captured.svg", "places.svg", "scores.svg", "words.svg",
                                      "words.tsv"], os.listdir(folder)
def drawing(name):
    text = open(f"{folder}/{name}.svg", encoding="utf-8").read()
    assert "prefers-color-scheme:dark" in text and text.count("://") == 1  # the namespace
    svg = tree.fromstring(text)
    width, height = float(svg.get("width")), float(svg.get("height"))
    for e in svg.iter():
        assert e.tag.rpartition("}")[2] in ("svg", "title", "style", "rect", "text", "path"), e.tag
        if "x" in e.attrib:
            assert 0 <= float(e.get("x")) <= width and 0 <= float(e.get("y")) <= height, e.attrib
    return svg
def dots(svg, look):
    return [e.get("d").count("h0") for e in svg.iter() if look in e.get("class", "").split()]
tokens, chunks = run["tokens"], run["chunks"] + 1
# A legend's dot, then two panels; the first token, which sees nothing but itself, is left out.
scores = drawing("scores")
chosen = 4 * chunks - 1
assert dots(scores, "thick") == [1, chosen, chosen], dots(scores, "thick")
assert sum(dots(scores, "fine")) == 2 + 2 * (tokens - 1 - chosen)
# Where tokens are: the words of a chunk, and a line a token that is salient at all.
places = drawing("places")
lines = [e.get("d") for e in places.iter() if e.get("class") == "s1"]
assert len(lines) == 1 and lines[0].count("V") == 4 * chunks, lines
# Seven curves of 21 points, a mark each, and in the legend.
marks = [e for e in drawing("captured").iter() if "mark" in e.get("class", "").split()]
assert len(marks) == 7 * (21 + 1), len(marks)
drawing("words")
PYTHON
# Classes of words, with a tokenizer whose tokens are letters.
line='A man will not see Rome, no 12 of some.'
for i in $(seq 8); do printf '%s\n' "$line"; done >"$scratch/words.txt"
saliency 0 '^| negation | ' "$tiny" "$scratch/words.txt" "${small[@]}" --figures "$figures"
saliency 0 '' "$tiny" "$scratch/words.txt" "${small[@]}" --figures "$figures" --json
cp "$scratch/out" "$scratch/figures.json"
python3 - "$figures/words.tsv" "$scratch/figures.json" "$scratch/words.txt" <<'PYTHON' ||
import collections, csv, json, re, sys
rows = list(csv.DictReader(open(sys.argv[1], encoding="utf-8"), delimiter="\t",
                           quoting=csv.QUOTE_NONE))
run = json.load(open(sys.argv[2], encoding="utf-8"))
text = open(sys.argv[3], encoding="utf-8").read()
assert run["tokens"] == len(text)
left = (run["chunks"] + 1) * 16
kind = {"will": "modality", "not": "negation", "no": "negation", "Rome": "names",
        "12": "digits", "some": "quantification", ",": "punctuation", ".": "punctuation"}
want = collections.Counter()
for m in re.finditer(r"\s|\w+|[,.]", text):
    c = "space" if m.group().isspace() else kind.get(m.group(), "other words")
    want[c] += sum(i < left for i in range(m.start(), m.end()))
for name, share in run["classes"].items():
    assert abs(share["text"] - want[name] / left) < 1e-9, (name, share, want[name] / left)
    here = [r for r in rows if r["class"] == name]
    assert sum(int(r["times"]) for r in here) == want[name], name
assert abs(sum(s["kept"] for s in run["classes"].values()) - 1) < 1e-9
kept = [float(r["kept"]) for r in rows]
assert kept == sorted(kept, reverse=True) and abs(sum(kept) - left / 4) < 0.05
assert {r["token"] for r in rows if r["class"] == "names"} == {"R", "-o", "-m", "-e"}
PYTHON
    fail "words are counted wrongly: $(cat "$scratch/figures.json")"

# A model that linearize made runs its own method.
for i in $(seq 40); do echo "{\"text\": \"line $i of some training text\"}"; done >"$scratch/data.jsonl"
expect 0 '' "$still" linearize "$tiny" --data "$scratch/data.jsonl" --out "$scratch/mine" \
    --method still --chunk 8 --stage both -n 64 --seq 32 --batch 1 --held-out 0
saliency 0 '' "$scratch/mine" "$text" --json
json '(x["chunk"], x["select"], x["cap"]) == (8, 2, 16)'
saliency 1 'trained for method still, not lolcats' "$scratch/mine" "$text" --method lolcats
finish
