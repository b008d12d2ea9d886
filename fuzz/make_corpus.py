"""Writes the seeds of the file fuzzers: small valid files of each kind.

    python3 fuzz/make_corpus.py
"""
import base64
import gzip
import json
import pathlib
import struct
import zlib

CORPUS = pathlib.Path(__file__).parent / "corpus"


def put(target, name, data):
    folder = CORPUS / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)


def text(s):
    return struct.pack("<Q", len(s)) + s.encode()


def gguf(pairs, tensors, version=3, alignment=32):
    """pairs: (key, type, bytes); tensors: (name, dims innermost first, type, bytes)."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs))
    for key, kind, value in pairs:
        head += text(key) + struct.pack("<I", kind) + value
    data = b""
    for name, dims, kind, raw in tensors:
        head += text(name) + struct.pack("<I", len(dims))
        head += struct.pack(f"<{len(dims)}Q", *dims)
        head += struct.pack("<IQ", kind, len(data))
        data += raw + bytes(-len(raw) % alignment)
    return head + bytes(-len(head) % alignment) + data


ARRAY, STRING = 9, 8
words = struct.pack("<IQ", STRING, 2) + text("a") + text("bc")
put("fuzz_gguf", "empty", gguf([], []))
put("fuzz_gguf", "pairs", gguf([
    ("general.architecture", STRING, text("llama")),
    ("general.alignment", 4, struct.pack("<I", 32)),
    ("a.u8", 0, b"\x01"), ("a.i16", 3, b"\x01\x02"), ("a.f32", 6, bytes(4)),
    ("a.bool", 7, b"\x01"), ("a.u64", 10, bytes(8)), ("a.f64", 12, bytes(8)),
    ("a.words", ARRAY, words),
    ("a.ints", ARRAY, struct.pack("<IQ3i", 5, 3, 1, -2, 3)),
], [], version=2))
put("fuzz_gguf", "tensors", gguf([("general.alignment", 4, struct.pack("<I", 8))], [
    ("a", (3,), 0, bytes(12)), ("b", (2, 3), 1, bytes(12)), ("c", (32, 2), 2, bytes(36)),
    ("d", (256, 1, 1, 1), 12, bytes(144)), ("e", (4,), 30, bytes(8)),
], alignment=8))


def safetensors(tensors, metadata=None, align=8):
    header, data = {}, b""
    if metadata:
        header["__metadata__"] = metadata
    for name, dtype, shape, raw in tensors:
        header[name] = {"dtype": dtype, "shape": shape,
                        "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % align)
    return struct.pack("<Q", len(head)) + head + data


put("fuzz_safetensors", "empty", safetensors([]))
put("fuzz_safetensors", "types", safetensors([
    ("d", "F64", [1], bytes(8)), ("l", "I64", [], bytes(8)), ("f", "F32", [1, 2], bytes(8)),
    ("i", "I32", [1], bytes(4)), ("h", "F16", [2], bytes(4)), ("b", "BF16", [1], bytes(2)),
], {"format": "pt"}))
put("fuzz_safetensors", "odd", safetensors([("f", "F32", [2], bytes(8))], align=1))

lines = b'{"text":"one\\n","id":[1,{"a":null}]}\n\n{"text":"\\u00e9\\u0000"}\r\n'
put("fuzz_text", "lines", lines)
put("fuzz_text", "plain", b"plain text\nof two lines")
put("fuzz_text", "lines.gz", gzip.compress(lines, mtime=0))
put("fuzz_text", "empty.gz", gzip.compress(b"", mtime=0))

records = [{"instruction": "Add.", "input": "1, 2", "output": "3"},
           {"instruction": "Greet.", "input": None, "output": "\u00e9"},
           {"text": "plain"}, {"output": 1}, []]
lines = "\n".join(map(json.dumps, records)).encode()
put("fuzz_records", "lines", lines + b"\n{cut\n\n")
put("fuzz_records", "array", json.dumps(records).encode())
put("fuzz_records", "object", json.dumps({"data": records}, indent=1).encode())
put("fuzz_records", "object_line", json.dumps({"data": records}).encode())
put("fuzz_records", "cut", b'{"text":"cut\n' + lines)
put("fuzz_records", "lines.gz", gzip.compress(lines, mtime=0))


def adapter(tensors, rank=1, **method):
    """still.json, a byte 0, adapter.safetensors; for tests/fixtures/train/model."""
    config = {"format": "still-adapter", "version": 1,
              "base": {"name": "model", "fingerprint": "00" * 32},
              "method": {"name": "swa", "chunk": 8, "select": 2, "cap": 16, "score": "s3",
                         "heads": "shared", "la_scale": "exact", "gate": False,
                         "norm_map": False, "first_layer": 1, "last_layer": 1,
                         "seed": 0} | method,
              "lora": {"rank": rank, "alpha": 16.0, "targets": ["q"]}}
    return json.dumps(config).encode() + b"\0" + safetensors(tensors)


maps = [("layers.1.map_q", "F16", [4, 16, 16], bytes(2048)),
        ("layers.1.map_k", "F16", [2, 16, 16], bytes(1024))]
put("fuzz_adapter", "low-rank", adapter([
    ("layers.1.lora.q.a", "F32", [1, 64], bytes(256)),
    ("layers.1.lora.q.b", "BF16", [64, 1], bytes(128))]))
put("fuzz_adapter", "maps", adapter(maps, 0, name="hedgehog", select=0, cap=0))
put("fuzz_adapter", "alpha", adapter(
    maps + [("layers.1.alpha", "F32", [4], bytes(16))], 0, name="still", norm_map=True))
put("fuzz_adapter", "missing", adapter([], name="supra", last_layer=-1))


def token_cache(vocab, entries, records=1, broken=0, why=b""):
    body = struct.pack(f"<{len(entries)}I", *entries)
    head = struct.pack("<8sIIQQQ32s240sI", b"STILLTOK", 1, vocab, records, broken,
                       len(entries), bytes(32), why, zlib.crc32(body))
    return head + struct.pack("<I", zlib.crc32(head)) + body


put("fuzz_token_cache", "small", token_cache(10, [1, 2 | 1 << 31, 9]))
put("fuzz_token_cache", "empty", token_cache(10, []))
put("fuzz_token_cache", "broken", token_cache(4, [3] * 9, 5, 2, b"line 2: is no JSON object"))
put("fuzz_token_cache", "beyond", token_cache(3, [1, 2, 3]))

put("fuzz_tekken", "small", json.dumps({
    "config": {"pattern": "\\p{L}+|.", "default_vocab_size": 260,
               "default_num_special_tokens": 3, "version": "v11"},
    "special_tokens": [{"rank": 0, "token_str": "<unk>", "is_control": True},
                       {"rank": 1, "token_str": "<s>", "is_control": True}],
    "vocab": [{"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode()}
              for i in range(256)] + [{"rank": 256, "token_bytes": "YWI="},
                                      {"rank": 257, "token_bytes": "dGhl"}]}).encode())
put("fuzz_model_names", "types", b"q4_k_m\nx-Q4_K_M.gguf\nx-UD-Q4_K_M.gguf\nx.iq4_xs.gguf\n"
    b"x_BF16.gguf\nmmproj-F16.gguf")
put("fuzz_model_names", "parts", b"Q6_K\nQ6_K/x-00001-of-00002.gguf\nQ6_K/x-00002-of-00002.gguf\n"
    b"x-Q8_0-00001-of-00001.gguf\nx-00003-of-00002.gguf")
put("fuzz_model_names", "odd", b"\n.gguf\n-00001-of-00002.gguf\na/b.gguf\nc/b.gguf\nx.still.gguf")
put("fuzz_nfc", "latin", "cafe\u0301 a\u0323\u0302 \u212b\u1e9b\u0323".encode())
put("fuzz_nfc", "hangul", "\u1100\u1161\u11a8\uac00\u11a8\uac01".encode())
put("fuzz_nfc", "indic", "\u0915\u093c\u0958\u0bc6\u0bbe\U00011099\U000110ba".encode())

put("fuzz_json", "object", b'{"a": 1, "b": [true, false, null], "c": {"d": -1.5e-3}, "a": 2}')
put("fuzz_json", "strings", rb'["", "\"\\\/\b\f\n\r\t", "\u00e9\ud83d\ude00\u0000", "\u20ac"]')
put("fuzz_json", "utf8", '["\u00e9\u20ac\U0001f600"]'.encode())
put("fuzz_json", "numbers", b"[0, -0, 1.0, 1e5, 9223372036854775807, 1e308, 0.1E-400]")

for name, text in {
        "turns": "{% for m in messages %}\n  {{- '<|' + m.role + '|>' + m['content'] | trim }}\n"
                 "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
        "tools": "{%- for t in tools %}{{ t | tojson(indent=2) }}{% if not loop.last %},{% endif %}"
                 "{%- endfor %}{% for m in messages if m.tool_calls is defined %}"
                 "{% for k, v in m.tool_calls[0].function.arguments.items() %}{{ k ~ v }}"
                 "{% endfor %}{% endfor %}",
        "macros": "{% macro f(a, b=2) %}{{ a }}{{ varargs }}{{ caller() if caller }}{% endmacro %}"
                  "{{ f(1) }}{% call f(3, 4, 5) %}x{% endcall %}",
        "values": "{% set ns = namespace(n=0) %}{% set ns.n = ns.n + 7 // 2 ** 2 % 3 %}"
                  "{{ [1, 'a', {'k': (1,)}, none][::-1] }}{{ 'a b'.split() | map('upper') | list }}"
                  "{{ '%05.1f|%s' % (2.5, 'x') }}{{ '{:>5}{0!r}'.format(1) }}",
        "strings": "{{ messages[1].content.strip().upper()[1:3] }}{{ 'x<' | e + '<' | safe }}"
                   "{{ messages | selectattr('role', 'eq', 'user') | map(attribute='content') | join }}"
                   "{% filter replace('a', 'b') %}aa{% endfilter %}{% raw %}{{ }}{% endraw %}",
        "limits": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ 'a' * 10 ** 9 }}{{ f(1) }}"}.items():
    put("fuzz_template", name, text.encode())


def zipped(method, files, flags=0):
    """A zip archive with times of zero: the same bytes every time."""
    out, directory = b"", b""
    for name, data in files:
        packer = zlib.compressobj(9, zlib.DEFLATED, -15)
        packed = data if method == 0 else packer.compress(data) + packer.flush()
        fields = struct.pack("<HHHHHIIIHH", 20, flags, method, 0, 0, zlib.crc32(data),
                             len(packed), len(data), len(name), 0)
        directory += (b"PK\1\2" + struct.pack("<H", 20) + fields
                      + struct.pack("<HHHII", 0, 0, 0, 0, len(out)) + name)
        out += b"PK\3\4" + fields + name + packed
    return out + directory + b"PK\5\6" + struct.pack(
        "<HHHHIIH", 0, 0, len(files), len(files), len(directory), len(out), 7) + b"comment"


QUESTIONS = [(b"a/dev.jsonl", b'{"goal": "g", "sol1": "a", "sol2": "b"}\n' * 9),
             (b"a/dev-labels.lst", b"0\n1\n"), (b"a/", b"")]
put("fuzz_zip", "deflated", zipped(8, QUESTIONS))
put("fuzz_zip", "stored", zipped(0, QUESTIONS))
put("fuzz_zip", "encrypted", zipped(8, QUESTIONS[:1], flags=1))
put("fuzz_zip", "empty", zipped(8, []))
put("fuzz_zip", "cut", zipped(8, QUESTIONS)[:-20])


def tarred(files, magic):
    out = b""
    for name, data, kind in files:
        prefix, name = (b"folder", name) if magic == b"ustar\x0000" else (b"", name)
        head = (name.ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2
                + b"%011o\0" % len(data) + b"00000000000\0" + b" " * 8 + kind + bytes(100)
                + magic + bytes(64) + b"0000000\0" * 2 + prefix.ljust(155, b"\0") + bytes(12))
        head = head[:148] + b"%06o\0 " % sum(head) + head[156:]
        out += head + data + bytes(-len(data) % 512)
    return out + bytes(1024)


TEXTS = [(b"data/test/a_test.csv", b"q,1,2,3,4,A\n" * 60, b"0"), (b"data/", b"", b"5"),
         (b"link", b"", b"2"), (b"b.txt", b"x", b"0")]
put("fuzz_tar", "ustar", tarred(TEXTS, b"ustar\x0000"))
put("fuzz_tar", "gnu", tarred(TEXTS, b"ustar  \0"))
put("fuzz_tar", "old", tarred(TEXTS, bytes(8)))
put("fuzz_tar", "gzipped", gzip.compress(tarred(TEXTS, b"ustar\x0000"), 9, mtime=0))
put("fuzz_tar", "cut", tarred(TEXTS, bytes(8))[:700])

put("fuzz_csv", "plain", b"q,1,2,3,4,A\nr,,,,,B\n")
put("fuzz_csv", "quoted", b'"a ""b"", c","two\nlines",x"y"z,"",A\r\n\r\n"end"')
put("fuzz_csv", "utf8", "\ufeff\u00dcber,\u6771,\U0001f600\n".encode())
put("fuzz_csv", "open", b'a,"never closed\n')
put("fuzz_csv", "many", b"," * 20)

# A converter's number, then the text of a set as it is published.
for number, (name, data) in enumerate({
        "piqa": b'{"goal": "g", "sol1": "a", "sol2": "b"}\n{"goal":"", "sol1":"", "sol2":""}'
                b"\n\xff0\n1\n",
        "arc": b'{"id": "A", "question": {"stem": "s", "choices": [{"text": "x", "label": "1"},'
               b'{"text": "y", "label": "2"}]}, "answerKey": "2"}\n',
        "hellaswag": b'{"ind": 1, "activity_label": "l", "ctx_a": "a", "ctx_b": "b", "ctx": "c",'
                     b'"split": "val", "split_type": "i", "label": 1, "endings": ["e", "f"],'
                     b'"source_id": "s"}\n',
        "winogrande": b'{"qID": "1", "sentence": "s _", "option1": "a", "option2": "b",'
                      b'"answer": "2"}\n',
        "mmlu": b'"a ""q"", b",1,2,3,4,A\r\nq,"x\ny",,,,D\n',
        "lambada": b'{"text": "one two\\n\\nthree"}\n',
        "wikitext2": b" \n = Du Fu = \n \n Text . \n = = Life = = \n \n = A = 2 = \n \n x \n",
        "squad": b'{"version": "v2.0", "data": [{"title": "t", "paragraphs": [{"context": "c",'
                 b'"qas": [{"id": "1", "question": "q", "answers": [{"text": "a"}]}]}]}]}',
        "hotpotqa": b'[{"_id": "1", "answer": "a", "question": "q", "supporting_facts": '
                    b'[["t", 0]], "context": [["t", ["s", "u"]]], "type": "b", "level": "e"}]',
        "essays": "July 2010What is\n\u00fcber\n".encode(),
        "babi": b"1 Mary moved.\n2 John went.\n3 Where is Mary? \thome\t1\n4 No.\n"
                b"5 Why? \tso\t4 2\n1 New.\n2 Who? \tme\t1\n",
        "books": b"\xef\xbb\xbfThe eBook\r\n\r\nTitle: Emma\r\nAuthor: Jane Austen\r\n\r\n"
                 b"*** START OF THE PROJECT GUTENBERG EBOOK EMMA ***\r\n\r\nProduced by X\r\n\r\n"
                 b"    EMMA\r\n\r\nText.\r\n\r\nEnd of Project Gutenberg's Emma\r\n"
                 b"*** END OF THE PROJECT GUTENBERG EBOOK EMMA ***\r\nLicence\r\n",
        "alpaca": b'[{"instruction": "i", "input": "", "output": "o"}]',
        "words": b"ATM\nblue-eyed \n\nstone"}.items()):
    put("fuzz_convert", name, bytes([number]) + data)
