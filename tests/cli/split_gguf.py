#!/usr/bin/env python3
"""Splits a GGUF model into parts, as llama.cpp's tool names and marks them.

    split_gguf.py MODEL.gguf PREFIX N     ->  PREFIX-00001-of-0000N.gguf ...
"""
import struct
import sys

ALIGN = 32
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}

path, prefix, parts = sys.argv[1], sys.argv[2], int(sys.argv[3])
data = open(path, "rb").read()
at = 0


def take(form):
    global at
    values = struct.unpack_from("<" + form, data, at)
    at += struct.calcsize("<" + form)
    return values[0] if len(values) == 1 else values


def skip_string():
    global at
    length = take("Q")
    at += length


def skip_value(kind):
    global at
    if kind == 8:
        skip_string()
    elif kind == 9:
        inner, count = take("I"), take("Q")
        for _ in range(count):
            skip_value(inner)
    else:
        at += SIZES[kind]


assert data[:4] == b"GGUF"
at = 4
version, n_tensors, n_meta = take("I"), take("Q"), take("Q")
first = at
for _ in range(n_meta):
    skip_string()
    skip_value(take("I"))
meta = data[first:at]
tensors = []  # name with its length, shape and type as they are, offset
for _ in range(n_tensors):
    start = at
    skip_string()
    dims = take("I")
    take("%dQ" % dims)
    take("I")
    tensors.append((data[start:at], take("Q")))
begin = (at + ALIGN - 1) // ALIGN * ALIGN
ends = sorted(offset for _, offset in tensors) + [len(data) - begin]


def key(name, kind, form, value):
    return struct.pack("<Q", len(name)) + name + struct.pack("<I" + form, kind, value)


for i in range(parts):
    own = tensors[i * n_tensors // parts:(i + 1) * n_tensors // parts]
    head = meta if i == 0 else b""
    head += key(b"split.no", 2, "H", i) + key(b"split.count", 2, "H", parts)
    head += key(b"split.tensors.count", 5, "i", n_tensors)
    body = b""
    for head_of, offset in own:
        head += head_of + struct.pack("<Q", len(body))
        body += data[begin + offset:begin + ends[ends.index(offset) + 1]]
        body += b"\0" * (-len(body) % ALIGN)
    out = b"GGUF" + struct.pack("<IQQ", version, len(own), (n_meta if i == 0 else 0) + 3) + head
    out += b"\0" * (-len(out) % ALIGN) + body
    with open("%s-%05d-of-%05d.gguf" % (prefix, i + 1, parts), "wb") as f:
        f.write(out)
