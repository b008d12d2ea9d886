#!/usr/bin/env python3
"""The memory that `still inspect` states is what the system shows when `still generate`
runs with that context: bill.py STILL [--make-model TOOL].

The peak is VmHWM: all resident pages, those of mapped files and libraries included. Stated
and seen may differ by 3%, or by SLACK bytes where the model is small: pages of code that a
run touches, and buffers of its text.

With --make-model on small random models in several types, one with a trained adapter;
without on SmolLM2 and smollm2-still, whose conversation may take no more than the base
model's and what `inspect` states for its state and its adapter.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile

SLACK = 4 * 2**20
METHODS = ["softmax", "still", "lolcats", "hedgehog", "t2r", "liger", "supra", "swa"]
WORDS = "the sun moon stone river hot cold in on a then there other after water".split()
ADAPTER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../models/smollm2-still")


def run(*command):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"failed: {' '.join(command)}\n{done.stderr}")
    return done.stdout


def text(n):
    """n words in which most tokens of a small vocabulary come up."""
    return " ".join(WORDS[(i * i + i // 7) % len(WORDS)] + (str(i % 1000) if i % 5 == 0 else "")
                    for i in range(n))


class Check:
    def __init__(self, still, folder):
        self.still, self.prompt, self.failed = still, os.path.join(folder, "prompt"), 0

    def seen(self, model, words, *options):
        """Tokens of the context, and the peak of a run."""
        with open(self.prompt, "w", encoding="utf-8") as f:
            f.write(text(words))
        out = json.loads(run(self.still, "generate", model, "--prompt-file", self.prompt, "-n",
                             "8", "--temp", "0", "--json", "--quiet", *options))
        return out["prompt_tokens"] + 8, out["peak_rss_bytes"]

    def bill(self, model, words, *options):
        ctx, peak = self.seen(model, words, *options)
        out = json.loads(run(self.still, "inspect", model, "--ctx", str(ctx), "--json", *options))
        stated = out.get("memory_method", out["memory"])
        off = stated["total"] - peak
        good = abs(off) <= max(0.03 * peak, SLACK)
        self.failed += not good
        print(f"{os.path.basename(model):16} {' '.join(options):28} {ctx:5} tokens: stated "
              f"{stated['total'] / 2**20:7.2f} MiB, peak {peak / 2**20:7.2f}, "
              f"{100 * off / peak:+5.1f}%{'' if good else '  FAILED'}", flush=True)
        return stated, peak


def random_models(check, make_model, folder):
    def model(kind, *options):
        path = os.path.join(folder, f"{kind}.gguf")
        run(make_model, "smollm2-135m", path, "--layers", "3", "--vocab", "8000", "--type", kind,
            *options)
        return path
    quantized = model("q4_1")
    for method in METHODS:
        for words in (3, 200):
            check.bill(quantized, words, "--method", method, "--no-allocate")
    check.bill(quantized, 2000, "--method", "still", "--no-allocate", "--chunk", "32")
    for other in model("f16"), model("q8_0"), model("f32"):
        check.bill(other, 3, "--method", "softmax")
        check.bill(other, 1000, "--method", "liger")
    data = os.path.join(folder, "data.jsonl")
    with open(data, "w", encoding="utf-8") as f:
        for i in range(20):
            print(json.dumps({"instruction": text(8), "input": "", "output": text(20 + i)}),
                  file=f)
    adapter = os.path.join(folder, "adapter")
    run(check.still, "linearize", quantized, "--data", data, "--seq", "48", "--batch", "2",
        "--chunk", "8", "--tokens", "96", "--lora-rank", "8", "--out", adapter)
    for words in (3, 600):
        check.bill(adapter, words)
        check.bill(adapter, words, "--no-merge")


def real_models(check):
    for method in METHODS:
        check.bill("smollm2", 300, "--method", method, "--no-allocate")
    for words in (300, 4000):
        check.bill(ADAPTER, words)
    check.bill("smollm2", 4000, "--method", "softmax")
    check.bill("smollm2", 4000, "--method", "still", "--no-allocate")
    check.bill(ADAPTER, 300, "--no-merge")
    base, base_peak = check.bill("smollm2", 3, "--method", "softmax")
    own, own_peak = check.bill(ADAPTER, 3)
    more = own["cache"] + own["weights_resident"] - base["weights_resident"]
    if own_peak - base_peak > more + SLACK:
        check.failed += 1
        print(f"FAILED: smollm2-still takes {(own_peak - base_peak) / 2**20:.1f} MiB more, its "
              f"state and adapter {more / 2**20:.1f}")


def main():
    p = argparse.ArgumentParser()
    p.add_argument("still")
    p.add_argument("--make-model")
    args = p.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        check = Check(args.still, folder)
        if args.make_model:
            random_models(check, args.make_model, folder)
        else:
            real_models(check)
    sys.exit(check.failed > 0)


if __name__ == "__main__":
    main()
