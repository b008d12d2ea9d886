#!/bin/bash
# A number in a file that is not finite: every command that runs the model names the
# layer and fails, whatever the type of the matrices. $2 is tools/make-model.
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"
make_model=$2
bad=$scratch/bad.gguf tiny=$scratch/tiny.gguf
seq 60 >"$scratch/text"
echo '[5, 6, 7, 8, 9]' >"$scratch/ids"
says='what layer 1 of 0-1 computes is not a number'

# spoil TENSOR VALUE: $bad is $tiny with this number in a vector of floats.
spoil() {
    python3 - "$tiny" "$bad" "$@" <<'PYTHON' || fail "cannot spoil $*"
import struct, sys
data, name = bytearray(open(sys.argv[1], "rb").read()), sys.argv[3].encode()
at = 8
def take(form):
    global at
    values = struct.unpack_from("<" + form, data, at)
    at += struct.calcsize("<" + form)
    return values if len(values) > 1 else values[0]
def text():
    global at
    n = take("Q")
    at += n
    return bytes(data[at - n:at])
def skip(kind):
    if kind == 8:
        text()
    elif kind == 9:
        inner, n = take("IQ")
        for _ in range(n):
            skip(inner)
    else:
        take(" bBhHiIf?  qQd"[kind + 1])
tensors, entries = take("QQ")
for _ in range(entries):
    text()
    skip(take("I"))
where = {}
for _ in range(tensors):
    key = text()
    take("%dQ" % take("I"))
    where[key] = take("IQ")[1]
struct.pack_into("<f", data, -(-at // 32) * 32 + where[name] + 20, float(sys.argv[4]))
open(sys.argv[2], "wb").write(data)
PYTHON
}

for type in f32 f16 bf16 q4_0 q4_1 q5_0 q5_1 q8_0 q2_k q3_k q4_k q5_k q6_k iq4_nl iq4_xs mxfp4; do
    "$make_model" tiny "$tiny" --type $type --force >/dev/null 2>&1 || fail "make-model $type"
    spoil blk.1.attn_norm.weight nan
    for isa in portable avx2 avx512; do
        expect 1 "$says\|not on this processor" "$still" perplexity "$bad" "$scratch/text" \
            --ctx 64 --isa $isa
    done
    expect 1 "$says" "$still" generate "$bad" -p hello -n 4
    expect 1 "$says" "$still" logprobs "$bad" --ids "$scratch/ids"
    expect 1 "$says" "$still" eval "$bad" --data "$here/../fixtures/eval/choice" --tasks piqa
    spoil blk.1.ffn_norm.weight -inf
    expect 1 "$says" "$still" generate "$bad" -p hello -n 4 --method still --chunk 8 --no-allocate
    expect 0 '^perplexity' "$still" perplexity "$tiny" "$scratch/text" --ctx 64
done
for backend in ref bf16; do
    expect 1 "$says" "$still" generate "$bad" -p hello -n 4 --backend $backend
done
spoil output_norm.weight nan
expect 1 'the final norm, the output matrix or the past' "$still" generate "$bad" -p hello -n 4
finish
