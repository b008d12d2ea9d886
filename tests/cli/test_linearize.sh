#!/bin/bash
# still linearize as a shell sees it: runs that are killed, interrupted or out of disk and
# then resumed; bad input; several ranks; the adapter as a model. On a small random model;
# $2 is tools/make-model.
# shellcheck source=lib.sh disable=SC2015,SC2016
. "$(dirname "$0")/lib.sh"
make_model=$2
fixtures=$here/../fixtures
cd "$scratch" || exit 1
for seed in 1 2; do
    "$make_model" tiny "tiny$seed.gguf" --seed $seed >/dev/null 2>&1 ||
        { echo "make-model failed" >&2; exit 1; }
done
python3 - <<'PYTHON'
import json, random
random.seed(1)
words = "the sun moon stone river hot cold in on a then there other after water".split()
text = lambda n: " ".join(random.choice(words) for _ in range(n))
for name in "one", "two":
    with open(name + ".jsonl", "w", encoding="utf-8") as f:
        for i in range(40):
            print(json.dumps({"instruction": text(8), "input": text(4) if i % 2 else "",
                              "output": text(20)}), file=f)
PYTHON
small=(--seq 48 --batch 2 --chunk 8 --threads 2 --lora-rank 2)
train=("$still" linearize tiny1.gguf --data one.jsonl "${small[@]}")
linearize() { local want=$1 pattern=$2; shift 2; expect "$want" "$pattern" "${train[@]}" "$@"; }

# Lines of the run's train.jsonl.
lines() { if [ -e "$1/train.jsonl" ]; then wc -l <"$1/train.jsonl"; else echo 0; fi; }
# Files of a folder whose names hold a word.
named() { find "$1" -name "*$2*"; }
# until_lines DIR N PID: waits until the run has made N steps, or is over.
until_lines() {
    while [ "$(lines "$1")" -lt "$2" ] && kill -0 "$3" 2>/dev/null; do sleep 0.005; done
}
# same DIR DIR: the same numbers, and every step told once.
same() {
    cmp -s "$1/adapter.safetensors" "$2/adapter.safetensors" || fail "$1 and $2 differ"
    python3 - "$1" "$2" <<'PYTHON' || fail "$2/train.jsonl tells other steps than $1"
import json, sys
def steps(d):
    rows = [json.loads(x) for x in open(d + "/train.jsonl", encoding="utf-8")]
    return [(r["stage"], r["step"], r["loss"], r["tokens"]) for r in rows]
sys.exit(steps(sys.argv[1]) != steps(sys.argv[2]))
PYTHON
    [ -z "$(named "$2" tmp)$(named "$2" checkpoint)" ] || fail "left behind: $(named "$2" '')"
}

# must_be_killed NAME PID: it ended by SIGKILL, not by itself.
must_be_killed() {
    wait "$2" 2>/dev/null
    local got=$?
    [ $got = 137 ] || fail "$1: ended with $got before it could be killed"
}

# Exact resume: killed in stage 1, in its last steps, and in stage 2. The run is long
# enough that a kill always comes before its end.
linearize 0 'is a model now' --out whole --tokens 2880
[ "$(cd whole && echo *)" = 'README.md adapter.safetensors report.html still.json train.jsonl' ] ||
    fail "the folder holds $(named whole '')"
# report DIR STATE: its page needs nothing else, says how the run stands, and reloads only
# while it goes on; curves have all the steps, the map of heads every head.
report() {
    python3 - "$@" <<'PYTHON' || fail "$1/report.html is not what it should be"
import html.parser, json, re, sys
folder, state = sys.argv[1:]
page = open(folder + "/report.html", encoding="utf-8").read()
rows = [json.loads(x) for x in open(folder + "/train.jsonl", encoding="utf-8")]
tags = []
class Page(html.parser.HTMLParser):
    def handle_starttag(self, tag, attributes):
        assert not {"src", "href"} & dict(attributes).keys(), (tag, attributes)
        tags.append(tag)
p = Page()
p.feed(page)
assert "script" not in tags and "default-src 'none'" in page and page.endswith("</html>\n")
assert f"<b>{state}</b>" in page and ('http-equiv="refresh"' in page) == (state == "training")
drawings = page.split("<svg")[1:]
stages = {r["stage"] for r in rows}
titles = [d[d.index("<title>") + 7:d.index("</title>")] for d in drawings]
assert ("Stage 1: attention transfer" in titles) == (1 in stages), titles
assert ("Stage 2: low-rank training" in titles) == (2 in stages), titles
steps = [r for r in rows if r["stage"] == 1]
line = drawings[0][drawings[0].rindex('class="line s0"'):].split('d="', 1)[1].split('"', 1)[0]
assert len(re.findall("[ML]", line)) == len(steps), (line, len(steps))
heads = [r["valid_relative_by_head"] for r in rows if "valid_relative_by_head" in r]
assert len(heads) == sum("valid_relative" in r for r in rows)
if heads:
    assert "Error by layer and head" in titles
    assert page.count(", head ") == sum(map(len, heads[-1])) == 2 * 4
    last = [r for r in steps if "valid_relative_by_head" in r][-1]
    low, high = (sum(f(layer) for layer in heads[-1]) / 2 for f in (min, max))
    assert low <= last["valid_relative"] <= high, (low, last["valid_relative"], high)
PYTHON
}
report whole 'done'
# A curve of one value is a point.
linearize 0 'is a model now' --out once --stage 1 --tokens 2880 --validate-every 1000
python3 - <<'PYTHON' || fail "the only validation is not drawn"
drawing = open("once/report.html", encoding="utf-8").read().split("<svg")[1]
raise SystemExit(drawing.count('class="mark ') != 1)
PYTHON
grep -q 'valid_relative_by_head' whole/train.jsonl || fail "no errors by head"

resume=()
for step in 1 8 28 36; do
    "${train[@]}" --out killed --tokens 2880 --save-every 1 "${resume[@]}" >/dev/null 2>&1 &
    until_lines killed $step $!
    kill -9 $!
    must_be_killed "step $step" $!
    [ "$(lines killed)" -lt 60 ] || fail "step $step: nothing was left to resume"
    resume=(--resume)
done
go_on() {
    linearize 0 'is a model now' --out "$1" --tokens 2880 --resume
    same whole "$1"
}
touch killed/checkpoint.safetensors.123.0.tmp killed/train.jsonl.123.tmp killed/report.html.123.tmp
go_on killed

# Killed while a checkpoint is being written: what is half written is there then. The
# writer is stopped first, to see whether it was caught at it; if not, it runs on.
cat >killer.py <<'PYTHON'
import os, signal, subprocess, sys
out, command = sys.argv[1], sys.argv[2:]
run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
def writing():
    try:
        names = os.listdir(out)
    except OSError:
        return False
    return ("checkpoint.safetensors" in names and "train.jsonl" in names and
            any(n.startswith("checkpoint") and n.endswith(".tmp") for n in names))
while run.poll() is None:
    if not writing():
        continue
    run.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, run.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    if writing():
        run.send_signal(signal.SIGKILL)
        sys.exit(0 if run.wait() == -signal.SIGKILL and writing() else 1)
    run.send_signal(signal.SIGCONT)
sys.exit(1)
PYTHON
resume=()
for try in 1 2 3; do
    timeout 120 python3 killer.py torn "${train[@]}" --out torn --tokens 2880 --save-every 1 "${resume[@]}" ||
        fail "kill $try: the run ended before it was caught writing a checkpoint"
    resume=(--resume)
done
go_on torn

# Interrupted: saved, told how to go on, status 130. (The run is far too long to end.)
# A step beyond those that are told already: else the signal might come before anyone
# listens for it.
resume=()
for _ in 1 2; do
    told=$(cat stopped/train.jsonl 2>/dev/null | wc -l)
    "${train[@]}" --out stopped --tokens 480000 "${resume[@]}" >/dev/null 2>err &
    until_lines stopped $((told + 2)) $!
    kill -INT $!
    wait $!
    got=$?
    [ $got = 130 ] || fail "status $got after SIGINT"
    [ "$(grep -c 'still: stopped after step .*; the checkpoint is in stopped; go on with --resume' err)" = 1 ] &&
        [ "$(wc -l <err)" = 1 ] || fail "SIGINT says: $(cat err)"
    resume=(--resume)
done
python3 - <<'PYTHON' || fail "steps of a run that was interrupted twice are not told once"
import json, sys
steps = [json.loads(x)["step"] for x in open("stopped/train.jsonl", encoding="utf-8")]
sys.exit(steps != list(range(1, len(steps) + 1)) or len(steps) < 6)
PYTHON

report stopped interrupted

# Settings that are not those of the run, and runs that cannot be gone on with.
"${train[@]}" --out other --tokens 480000 --save-every 1 >/dev/null 2>&1 &
until_lines other 2 $!
kill -9 $!
must_be_killed other $!
cp -r other before
while read -r pattern options; do
    # shellcheck disable=SC2086
    linearize 1 "other settings: $pattern was" --out other --tokens 480000 --resume $options
done <<'LIST'
learning.rates --lr1 0.02
learning.rates --lr2 0.0005001
learning.rates --lr-scale maps=2
batch --seq 40
batch --micro 2
steps --tokens 960
steps --stage 1
seed --seed 1
method.name --method lolcats
method.select --select 1
method.gate --gate none
lora.rank --lora-rank 3
loss --kd 1
data --data two.jsonl
data --mask-prompt
LIST
expect 1 'other settings: base.fingerprint' "$still" linearize tiny2.gguf --data one.jsonl \
    "${small[@]}" --out other --tokens 480000 --resume
diff -r before other >&2 || fail "a refused run was touched"
linearize 1 'whole: holds no checkpoint to go on from: the run is finished' --out whole --resume
linearize 1 'nowhere: holds no checkpoint' --out nowhere --resume
linearize 1 'other: exists already; go on with its run by --resume' --out other
linearize 1 'whole: exists already; choose another folder' --out whole

# Checkpoints that are damaged.
python3 - <<'PYTHON'
import json, shutil, struct
data = open("other/checkpoint.safetensors", "rb").read()
n = struct.unpack("<Q", data[:8])[0]
head = json.loads(data[8:8 + n])
# Version 1, without a checksum, so that what is wrong is found for what it is.
del head["__metadata__"]["still_format"], head["still.checksum"]
def put(name, content):
    shutil.copytree("other", name)
    open(name + "/checkpoint.safetensors", "wb").write(content)
def with_meta(**change):
    h = json.loads(json.dumps(head))
    h["__metadata__"].update(change)
    text = json.dumps(h).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data[8 + n:-32]
put("bad.cut", data[:len(data) // 2])
put("bad.empty", b"")
put("bad.step", with_meta(**{"at.step": "18446744073709551616"}))
put("bad.stage", with_meta(**{"at.stage": "3"}))
put("bad.word", with_meta(**{"at.step": "-1"}))
put("bad.none", with_meta(**{"at.tokens": ""}))
h = json.loads(json.dumps(head))
h["value"]["shape"] = [h["value"]["shape"][0] // 2, 2]
text = json.dumps(h).encode()
text += b" " * (-len(text) % 8)
put("bad.shape", struct.pack("<Q", len(text)) + text + data[8 + n:-32])
put("bad.version", with_meta(still_format="3"))
put("bad.unsealed", with_meta(still_format="2"))
put("bad.flip", data[:-100] + bytes([data[-100] ^ 1]) + data[-99:])
put("old", with_meta())
PYTHON
for bad in bad.*; do
    linearize 1 "$bad/checkpoint.safetensors: " --out "$bad" --tokens 480000 --resume
done
told=$(lines old)
"${train[@]}" --out old --tokens 480000 --resume >/dev/null 2>&1 &
until_lines old $((told + 2)) $!
kill -INT $!
wait $!
[ $? = 130 ] || fail "a checkpoint of version 1 cannot be gone on with"

# A disk that is full: while the first checkpoint is written, and while a later one is.
# (The limit is on a file's size.)
full=(bash -c 'ulimit -f "$0"; exec "$@"')
kib=$(($(stat -c %s other/checkpoint.safetensors) / 1024 - 16))
expect 1 'cannot write: File too large' "${full[@]}" $kib "${train[@]}" --out full --tokens 480
[ -z "$(named full tmp)" ] || fail "left behind: $(named full '')"
cp -r before full2
expect 1 'cannot write: File too large' "${full[@]}" $kib "${train[@]}" --out full2 --tokens 480000 --resume --save-every 1
cmp -s before/checkpoint.safetensors full2/checkpoint.safetensors || fail "a full disk lost the checkpoint"
[ -z "$(named full2 tmp)" ] || fail "left behind: $(named full2 '')"

# Bad input: one line, nothing made.
: >empty
echo '{"a": 1}' >nofields
printf 'garbage\n{"text":\n' >broken
refused() {
    linearize "$@" --out refused
    [ ! -e refused ] || { fail "a folder was made by: $*"; rm -rf refused; }
}
expect 1 'empty: file is empty' "$still" linearize tiny1.gguf "${small[@]}" --data empty --out refused
expect 1 'nofields: none of 1 record has' "$still" linearize tiny1.gguf "${small[@]}" --data nofields --out refused
expect 1 'broken: none of 2 records has' "$still" linearize tiny1.gguf "${small[@]}" --data broken --out refused
refused 1 'missing: no such file' --data missing
expect 1 'no/refused: cannot be made: No such file' "${train[@]}" --out no/refused
expect 1 'empty/refused: cannot be made: Not a directory' "${train[@]}" --out empty/refused
refused 1 'tokens, expected at least the 100000 of one sequence' --seq 100000
refused 1 '2 sequences of 48 tokens, 3 at once' --micro 3
refused 1 'softmax is the teacher itself' --method softmax
refused 1 'method swa has nothing to train in stage 1' --method swa --stage 1
refused 1 'method liger has no attention weights' --method liger --loss weights
refused 1 'layers 1-7 cannot be converted' --layers 1-7
refused 2 "the weight must be more than 0" --data one.jsonl@0
refused 2 "'q,z' is not a list" --lora-targets q,z
refused 2 "'maps' is not maps=X" --lr-scale maps
refused 2 'outside' --lr1 1e9
expect 2 'data FILE is missing' "$still" linearize tiny1.gguf --out refused
expect 2 'out DIR is missing' "$still" linearize tiny1.gguf --data one.jsonl
mkdir large && cp "$fixtures"/train/model/* large && cp "$fixtures/vocab/gpt2.json" large/tokenizer.json
expect 1 'the tokenizer has 520 tokens, the model.s vocabulary 320' "$still" linearize large --data one.jsonl "${small[@]}" --out refused
expect 1 'has no tokenizer' "$still" linearize "$fixtures/train/model" --data one.jsonl "${small[@]}" --out refused
expect 1 'whole: is already linearized: train .*tiny1.gguf, with --start whole' \
    "$still" linearize whole --data one.jsonl "${small[@]}" --out refused
[ ! -e refused ] || fail "a folder was made"
cat broken two.jsonl >mixed
linearize 0 '"broken":2' --data mixed --tokens 96 --dry-run --json
linearize 0 'warning: 2 records of the data are broken and left out: mixed: line 1: ' \
    --data mixed --tokens 96 --out some-broken

# Divergence: stops, names the layer, and the checkpoint before it can be gone on with.
linearize 1 'stage 1, step 0: the step makes .layers.0.map_q. (layer 0) no number; the last checkpoint is good' \
    --tokens 192 --lr-scale maps=1e38 --lr1 10 --save-every 1 --out nan
linearize 1 'stage 1, step 0: the step makes' --tokens 192 --lr-scale maps=1e38 --lr1 10 --save-every 1 --out nan --resume
[ "$(lines nan)" = 0 ] || fail "a step that failed was told"

# Bits of the salient cache belong to an adapter, and to a saved session.
linearize 0 'is a model now' --out bits --tokens 192 --cache-type-k q8 --cache-type-v q4
grep -q '"key_bits": 8' bits/still.json || fail "the bits are not in still.json"
said='the sun the moon the stone the river hot cold in on a then there other after water'
expect 0 '' "$still" generate bits -p "$said" -n 4 --ignore-eos --save-state bits.state
expect 0 '' "$still" generate bits -p 'the' -n 4 --ignore-eos --load-state bits.state
expect 1 'cache-type-k=8 cache-type-v=4' "$still" generate bits --cache-type-k f16 \
    --cache-type-v f16 -p 'the' -n 4 --load-state bits.state

# The adapter as a model, for every command.
mkdir moved && cp whole/still.json whole/adapter.safetensors moved
echo '[1, 2, 3, 4, 5]' >ids
seq 200 >text
expect 0 'still' "$still" inspect whole
expect 0 '{' "$still" inspect whole --json
expect 0 'ids' "$still" tokenize whole 'the sun' --json
expect 0 '' "$still" generate whole -p 'the sun' -n 40 --ignore-eos
expect 1 'brings no chat template' "$still" chat whole
expect 0 'logprobs' "$still" logprobs whole --ids ids --json
expect 0 'perplexity' "$still" perplexity whole text --ctx 64 --json
expect 0 '' "$still" generate moved -p 'the sun' -n 40 --ignore-eos
expect 1 'trained for method still, not softmax' "$still" generate whole -p hi -n 1 --method softmax
linearize 0 '' --out second --tokens 192 --seed 5
expect 0 '' "$still" generate whole -p 'the sun' -n 4 --save-state state
expect 0 '' "$still" generate whole -p 'the moon' -n 4 --load-state state
expect 1 '' "$still" generate second -p 'the moon' -n 4 --load-state state
expect 1 '' "$still" generate tiny1.gguf -p 'the moon' -n 4 --load-state state
linearize 0 '' --out third --tokens 96 --stage 2 --start whole --layers 1-1
expect 0 '' "$still" generate third -p 'the sun' -n 4

# Adapters that are damaged, or of another model.
python3 - <<'PYTHON'
import json, os, struct
config = open("whole/still.json", encoding="utf-8").read()
data = open("whole/adapter.safetensors", "rb").read()
n = struct.unpack("<Q", data[:8])[0]
head = json.loads(data[8:8 + n])
def tensors(h, tail=data[8 + n:-32]):
    text = json.dumps(h).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + tail
# Version 1, without a checksum, so that what is wrong is found for what it is.
config = config.replace('"version": 2', '"version": 1')
del head["__metadata__"], head["still.checksum"]
data = tensors(head)
n = struct.unpack("<Q", data[:8])[0]
def put(name, config=config, data=data):
    os.mkdir(name)
    open(name + "/still.json", "w", encoding="utf-8").write(config)
    if data is not None:
        open(name + "/adapter.safetensors", "wb").write(data)
def setting(path, value):
    c = json.loads(config)
    at = c
    for key in path.split(".")[:-1]:
        at = at[key]
    at[path.split(".")[-1]] = value
    return json.dumps(c)
def renamed(old, new):
    h = dict(head)
    h[new] = h.pop(old)
    return tensors(h)
put("ill.json.cut", config[:100])
put("ill.json.empty", "")
put("ill.json.deep", "[" * 100000)
for i, (path, value) in enumerate([
        ("method.chunk", -1), ("method.chunk", 1 << 40), ("method.name", "nothing"),
        ("method.name", "x" * 4000), ("method.last_layer", 99), ("method.first_layer", -2),
        ("method.select", 10 ** 9), ("method.heads", "both"), ("method.score", "none"),
        ("lora.rank", 1 << 30), ("lora.rank", 1024), ("lora.rank", -1),
        ("lora.targets", ["w"]), ("lora.alpha", "x"), ("base.fingerprint", "00"),
        ("base.fingerprint", "00" * 32), ("format", "x"), ("version", 2), ("version", 3),
        ("method.key_bits", 7), ("method.value_bits", 8)]):
    put(f"ill.json.{i}", setting(path, value))
put("whole.old")
put("ill.none", data=None)
put("ill.cut", data=data[:len(data) // 2])
put("ill.missing", data=renamed("layers.1.map_k", "layers.9.map_k"))
h = json.loads(json.dumps(head))
shape = h["layers.0.map_q"]["shape"]
h["layers.0.map_q"]["shape"] = [shape[0] * shape[1], shape[2]]
put("ill.shape", data=tensors(h))
for i, name in enumerate(("layers.0.map_q", "layers.1.gate")):
    begin = head[name]["data_offsets"][0] + 8 + n
    put(f"ill.nan{i}", data=data[:begin] + struct.pack("<f", float("nan")) + data[begin + 4:])
PYTHON
expect 0 '' "$still" generate whole.old -p hi -n 1
for bad in ill.*; do
    expect 1 '' "$still" generate "$bad" -p hi -n 1
done
sed "s/tiny1.gguf/tiny2.gguf/" whole/still.json >moved/still.json
expect 1 'trained for another base model' "$still" generate moved -p hi -n 1
sed "s/tiny1.gguf/gone.gguf/" whole/still.json >moved/still.json
expect 1 'moved: is an adapter of base model .*gone.gguf' "$still" generate moved -p hi -n 1

# Several ranks: the same result within rounding, repeatable; a rank that dies.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
ranks() { ASAN_OPTIONS=${ASAN_OPTIONS:-}:detect_leaks=0 timeout 600 mpirun --oversubscribe -np 2 "${train[@]}" --threads 1 --batch 4 --tokens 1536 "$@" </dev/null; }
if ! command -v mpirun >/dev/null; then
    echo "skipped: no mpirun for several ranks"
elif ! ranks --dry-run >out 2>err; then
    grep -q 'libstill-mpi.so, is neither' err && echo "skipped: built without MPI" ||
        fail "two ranks do not start: $(cat err)"
else
    [ "$(grep -c records out)" = 1 ] || fail "both ranks tell the plan"
    linearize 0 '' --out one --threads 1 --batch 4 --tokens 1536
    ranks --out ranks --json >out 2>err || fail "two ranks: $(cat err)"
    [ "$(grep -c '"step"' out)" = 16 ] && [ "$(grep -c '"done"' out)" = 1 ] || fail "two ranks print $(cat out)"
    python3 - <<'PYTHON' || fail "two ranks differ from one"
import json, struct, sys
def values(d):
    data = open(d + "/adapter.safetensors", "rb").read()
    n = struct.unpack("<Q", data[:8])[0]
    out = []
    for name, t in sorted(json.loads(data[8:8 + n]).items()):
        if name in ("__metadata__", "still.checksum"):
            continue
        begin, end = t["data_offsets"]
        out += struct.unpack("<%df" % ((end - begin) // 4), data[8 + n + begin:8 + n + end])
    return out
one, two = values("one"), values("ranks")
error = sum((a - b) ** 2 for a, b in zip(one, two)) ** .5 / sum(a * a for a in one) ** .5
losses = [[json.loads(x)["loss"] for x in open(d + "/train.jsonl")] for d in ("one", "ranks")]
print("two ranks against one: relative error %.2g" % error)
near = all(abs(a - b) <= 1e-4 * abs(a) for a, b in zip(*losses))
sys.exit(not (error <= 1e-4 and near and len(losses[1]) == 16))
PYTHON
    ranks --out again >out 2>err || fail "two ranks: $(cat err)"
    [ "$(grep -c 'is a model now' out)" = 1 ] || fail "both ranks tell the end: $(cat out)"
    same ranks again
    ranks --out dead --save-every 1 >out 2>err &
    job=$!
    victim=
    while [ -z "$victim" ] && kill -0 $job 2>/dev/null; do
        victim=$(pgrep -f -- "$still linearize tiny1.gguf .*--out dead" | while read -r p; do
            tr '\0' '\n' <"/proc/$p/environ" 2>/dev/null |
                grep -qx OMPI_COMM_WORLD_RANK=1 && echo "$p"; done | head -n 1)
    done
    until_lines dead 3 $job
    start=$SECONDS
    kill -9 "$victim"
    wait $job && fail "a job that lost a rank ended well"
    [ $((SECONDS - start)) -le 10 ] || fail "a dead rank is noticed after $((SECONDS - start)) s"
    grep -q '^still: rank 1 of 2 ended' err || fail "a dead rank: $(cat err)"
    ranks --out dead --resume >out 2>err || fail "going on after a dead rank: $(cat err)"
    same ranks dead
    # Over sockets, as under torchrun: the same bits.
    torch() { timeout 600 python3 "$here/../train/launch.py" --seconds 300 2 "${train[@]}" \
        --threads 1 --batch 4 --tokens 1536 "$@" </dev/null; }
    torch --out torch --json >out 2>err || fail "two ranks of torchrun: $(cat err)"
    [ "$(grep -c '"done"' out)" = 1 ] || fail "two ranks of torchrun print $(cat out)"
    same ranks torch
    ranks --out refused --batch 3 >out 2>err && fail "3 sequences for 2 ranks"
    [ "$(grep -c '^still: a batch of 3 sequences cannot be dealt out evenly to 2 ranks' err)" = 1 ] ||
        fail "3 sequences for 2 ranks: $(cat err)"
    ranks --out refused --data missing >out 2>err && fail "two ranks without data"
    [ "$(grep -c '^still: ' err)" = 1 ] || fail "two ranks without data: $(cat err)"
    ranks --out refused --lr-scale maps=1e38 --lr1 10 >out 2>err && fail "two ranks that diverge"
    [ "$(grep -c '^still: stage 1, step 0: the step makes' err)" = 1 ] || fail "two ranks that diverge: $(cat err)"
fi
finish
