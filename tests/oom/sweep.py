#!/usr/bin/env python3
"""Fails every allocation of whole commands, one a run: the command must end by itself and
either say memory in one line of error, or give what it gives otherwise.

    sweep.py STILL MAKE_MODEL FAIL_ALLOC_LIBRARY [--stride N] [COMMAND ...]

--stride N tries the first 100 allocations and then every N-th. Commands: inspect,
generate, grammar, schema, logprobs, eval, linearize."""
import argparse
import concurrent.futures
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile

LIMIT = 120  # seconds a run may take
GRAMMAR = r'''root ::= (word | list) ("," " "? word){1,3} [^a-y"\\]? .
word ::= [a-z\u00e9]+ | "caf\u00e9" | "(" root ")"
list ::= "[" (word (";" word)*)? "]"
'''
SCHEMA = {
    "$defs": {"node": {"type": "object", "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 4},
        "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "required": ["name", "next"], "additionalProperties": False}},
    "type": "object", "additionalProperties": False,
    "required": ["kind", "size", "day", "code", "tags", "first", "any"],
    "properties": {
        "kind": {"enum": ["a", 2, None, {"x": [True]}]},
        "size": {"type": "number", "minimum": -1.5, "exclusiveMaximum": 20},
        "day": {"type": "string", "format": "date"},
        "code": {"type": "string", "pattern": "^[A-C]{2,3}(-\\d+)?$"},
        "tags": {"type": "array", "prefixItems": [{"const": "t"}], "items": {"type": "integer"},
                 "maxItems": 3},
        "first": {"$ref": "#/$defs/node"},
        "any": {"type": "object"}}}


def write_inputs(folder, make_model):
    """A random model with a vocabulary, an adapter for it, token ids, training data."""
    subprocess.run([make_model, "tiny", folder / "tiny.gguf", "--seed", "1"], check=True,
                   capture_output=True)
    subprocess.run([make_model, "tiny", folder / "tiny", "--seed", "1"], check=True,
                   capture_output=True)
    (folder / "ids.json").write_text(json.dumps({"ids": [1, 5, 9, 13, 17, 21, 25, 29] * 4}))
    (folder / "words.gbnf").write_text(GRAMMAR, encoding="utf-8")
    (folder / "node.json").write_text(json.dumps(SCHEMA))
    rng = random.Random(1)
    words = "the sun moon stone river hot cold in on a then there other after".split()
    with open(folder / "data.jsonl", "w", encoding="utf-8") as f:
        for i in range(6):
            f.write(json.dumps({"instruction": " ".join(rng.choices(words, k=6)),
                                "input": "sun" if i % 2 else "",
                                "output": " ".join(rng.choices(words, k=12))}) + "\n")


def commands(still, folder, fixtures):
    """Arguments by name; OUT becomes the run's own folder."""
    train = [still, "linearize", folder / "tiny.gguf", "--data", folder / "data.jsonl",
             "--seq", "32", "--batch", "1", "--chunk", "8", "--threads", "1", "--lora-rank",
             "2", "--tokens", "96", "--save-every", "1", "--out", "OUT"]
    write = [still, "generate", folder / "tiny.gguf", "-p", "the sun", "-n", "12", "--temp",
             "1.5", "--seed", "1", "--threads", "1"]
    return {
        "inspect": [still, "inspect", folder / "tiny", "--json", "--tensors", "--method",
                    "still", "--chunk", "8", "--no-allocate"],
        "generate": [still, "generate", folder / "tiny.gguf", "-p", "the sun", "-n", "6",
                     "--ignore-eos", "--threads", "1", "--method", "still", "--chunk", "8",
                     "--no-allocate"],
        "grammar": write + ["--grammar", folder / "words.gbnf"],
        "schema": write + ["--json-schema", folder / "node.json"],
        "logprobs": [still, "logprobs", folder / "adapter", "--ids", folder / "ids.json",
                     "--threads", "1", "--json"],
        "eval": [still, "eval", folder / "tiny.gguf", "--data", fixtures / "eval/choice",
                 "--tasks", "piqa,lambada", "--limit", "2", "--threads", "1",
                 "--log", "OUT/log"],
        "linearize": train,
    }


def result_of(out):
    """What a run left beside its standard output, which then has timings."""
    adapter, log = out / "adapter.safetensors", out / "log"
    if adapter.exists():
        return adapter.read_bytes()
    return sorted(log.read_text().splitlines()) if log.exists() else None


def run(argv, library, scratch, at):
    out = pathlib.Path(tempfile.mkdtemp(dir=scratch))
    counted = out / "count"
    env = dict(os.environ, LD_PRELOAD=str(library), FAIL_AT=str(at), FAIL_COUNT=str(counted),
               XDG_CACHE_HOME=str(out / "cache"), LC_ALL="C")
    argv = [str(a).replace("OUT", str(out / "out")) if str(a).startswith("OUT") else str(a)
            for a in argv]
    if "--log" in argv:
        (out / "out").mkdir()
    try:
        p = subprocess.run(argv, env=env, capture_output=True, stdin=subprocess.DEVNULL,
                           timeout=LIMIT)
        status, text, error = p.returncode, p.stdout, p.stderr.decode("utf-8", "replace")
    except subprocess.TimeoutExpired:
        status, text, error = "none: it hangs", b"", ""
    count = int(counted.read_text()) if counted.exists() else -1
    answer = (status, text, error, result_of(out / "out"), count)
    shutil.rmtree(out)
    return answer


def as_computed(text):
    """A result without what was measured: the bill's `runtime`, pages that the process held,
    differs a little from run to run, and so does the total."""
    return re.sub(rb'"(runtime|total)":\d+', b"", text)


def complaint(answer, clean):
    """What is wrong with a run, or None."""
    status, text, error, result, _ = answer
    lines = [line for line in error.splitlines() if not line.startswith("still: warning: ")]
    if status == 0:
        if result != clean[3] or result is None and as_computed(text) != as_computed(clean[1]):
            return "succeeds, but the result is another"
        return None
    if status != 1:
        return f"ends with status {status}: {error[-300:]}"
    if len(lines) != 1 or not lines[0].startswith("still: ") or "memory" not in lines[0]:
        return f"does not say memory in one line: {error[-300:]}"
    return None


def main():
    args = argparse.ArgumentParser()
    args.add_argument("still", type=pathlib.Path)
    args.add_argument("make_model", type=pathlib.Path)
    args.add_argument("library", type=pathlib.Path)
    args.add_argument("--stride", type=int, default=1)
    args.add_argument("command", nargs="*")
    args = args.parse_args()
    fixtures = pathlib.Path(__file__).resolve().parent.parent / "fixtures"
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        write_inputs(folder, args.make_model)
        all_commands = commands(args.still.resolve(), folder, fixtures)
        subprocess.run([str(folder / "adapter") if a == "OUT" else str(a)
                        for a in all_commands["linearize"]], check=True, capture_output=True,
                       env=dict(os.environ, XDG_CACHE_HOME=str(folder / "cache")))
        for name in args.command or all_commands:
            argv = all_commands[name]
            clean = run(argv, args.library.resolve(), folder, 0)
            if clean[0] != 0 or clean[4] < 100:
                sys.exit(f"{name} does not run: status {clean[0]}, {clean[4]} allocations "
                         f"counted: {clean[2]}")
            places = [n for n in range(1, clean[4] + 1) if n <= 100 or n % args.stride == 0]
            harmless = 0
            with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
                answers = pool.map(lambda n: run(argv, args.library.resolve(), folder, n),
                                   places)
                for n, answer in zip(places, answers):
                    why = complaint(answer, clean)
                    harmless += answer[0] == 0
                    if why:
                        wrong += 1
                        print(f"{name}: allocation {n} of {clean[4]}: {why}", flush=True)
            print(f"{name}: {len(places)} of {clean[4]} allocations failed in turn, "
                  f"{harmless} without harm", flush=True)
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
