"""Adapters in a Llama of transformers: its logits are those of still.Model."""
# mypy: disable-error-code="import-not-found, import-untyped", disallow-untyped-calls=False

from __future__ import annotations

import json
import os
import random
import tempfile
import unittest
from pathlib import Path
from typing import Any

import numpy as np
import still
import torch
from still.torch import HybridAttention, patch
from transformers import LlamaForCausalLM

TINY = Path(os.environ["STILL_TINY"])
CACHED = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "still" / "models"
TOLERANCE = 1e-3


def llama(folder: Path, **options: Any) -> Any:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


def ours(model: still.Model, ids: list[int]) -> np.ndarray[Any, Any]:
    """Logits after every token, one by one."""
    with model.session(ctx=len(ids), cache="f32") as s:
        return np.stack([s.step(i) for i in ids])


def theirs(model: Any, ids: list[int]) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        out: np.ndarray[Any, Any] = model(torch.tensor([ids])).logits[0].float().numpy()
        return out


class Trained(unittest.TestCase):
    """One small model, and adapters that linearize trained for it."""

    top: Path
    ids: list[int]

    @classmethod
    def setUpClass(cls) -> None:
        scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(scratch.cleanup)
        cls.top = Path(scratch.name)
        words = "the sun moon stone river hot cold in on a then there other after".split()
        rng = random.Random(1)
        with open(cls.top / "text.jsonl", "w", encoding="utf-8") as f:
            for _ in range(40):
                print(json.dumps({"instruction": " ".join(rng.choices(words, k=8)),
                                  "output": " ".join(rng.choices(words, k=20))}), file=f)
        still.export(TINY, cls.top / "plain", format="safetensors", dtype="f32")
        with still.Model(TINY) as model:
            vocab = model.info.vocab
        cls.ids = [rng.randrange(vocab) for _ in range(70)]

    def train(self, name: str, method: still.Method, **options: Any) -> Path:
        # Large steps, so that a number that is not used, or used wrongly, shows.
        return still.linearize(TINY, self.top / "text.jsonl", self.top / name, method=method,
                               seq=64, batch=2, tokens=1024, lr=(0.02, 0.005), **options)

    def compare(self, model: Any, folder: Path, **options: Any) -> None:
        with still.Model.from_pretrained(folder, **options) as own:
            want = ours(own, self.ids)
        off = float(np.abs(theirs(model, self.ids) - want).max())
        self.assertLess(off, TOLERANCE)

    def test_adapter_of_a_gguf_file(self) -> None:
        for name, method in (
                ("still", still.Method("still", chunk=8, select=2, cap=6)),
                ("bits", still.Method("still", chunk=8, select=8, cap=12, score="distinct",
                                      caps="1/0:4", gate=False, key_bits=5, value_bits=3)),
                ("lolcats", still.Method("lolcats", chunk=8)),
                ("t2r", still.Method("t2r", chunk=8)),
                ("some", still.Method("still", chunk=8, select=2, cap=6, first_layer=1))):
            with self.subTest(name):
                adapter = self.train(name, method)
                model = llama(self.top / "plain")
                before = theirs(model, self.ids)
                patched = patch(model, adapter)
                self.assertIs(patched, model)
                self.compare(model, adapter, merge=False, backend="ref")
                self.assertGreater(float(np.abs(theirs(model, self.ids) - before).max()), 0.05)

    def test_exported_folder(self) -> None:
        adapter = self.train("merged", still.Method("still", chunk=8, select=2, cap=6))
        folder = self.top / "merged-folder"
        still.export(adapter, folder, format="safetensors", dtype="f32")
        self.compare(patch(llama(folder), folder), folder)

    def test_training_goes_on(self) -> None:
        """Gradients reach every number of the adapter, and a step changes the loss."""
        adapter = self.train("more", still.Method("still", chunk=8, select=2, cap=6))
        model = patch(llama(self.top / "plain"), adapter)
        model.train()
        ids = torch.tensor([self.ids])
        added = [p for m in model.modules() if isinstance(m, HybridAttention)
                 for n, p in m.named_parameters() if "base" not in n]
        self.assertGreater(len(added), 10)
        optimizer = torch.optim.SGD(added, lr=0.05)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(ids, labels=ids).loss
            loss.backward()
            for p in added:
                assert p.grad is not None
                self.assertGreater(float(p.grad.abs().max()), 0)
            optimizer.step()
            losses.append(float(loss.detach()))
        self.assertLess(losses[2], losses[0])

    def test_padding_generating_and_halves(self) -> None:
        adapter = self.train("use", still.Method("still", chunk=8, select=2, cap=6))
        model = patch(llama(self.top / "plain"), adapter).eval()
        ids = torch.tensor([self.ids, self.ids])
        mask = torch.ones_like(ids)
        mask[1, 40:] = 0
        with torch.no_grad():
            padded = model(ids, attention_mask=mask).logits
            alone = model(ids[1:, :40]).logits
            self.assertLess(float((padded[1, :40] - alone[0]).abs().max()), TOLERANCE)
            with self.assertRaisesRegex(ValueError, "pad on the right"):
                model(ids, attention_mask=mask.flip(1))
            with self.assertRaisesRegex(ValueError, "use_cache=False"):
                model(ids, use_cache=True)
            longer = model.generate(ids[:1, :30], max_new_tokens=4, do_sample=False)
            next_ids = model(longer[:, :-1]).logits[0, 29:].argmax(-1)
            self.assertEqual(longer[0, 30:].tolist(), next_ids.tolist())
        want = theirs(model, self.ids)
        plain = llama(self.top / "plain").to(torch.bfloat16)
        for half in (patch(plain, adapter), model.to(torch.bfloat16)):
            self.assertLess(float(np.abs(theirs(half, self.ids) - want).max()), 0.5)

    def test_refusals(self) -> None:
        adapter = self.train("once", still.Method("still", chunk=8, select=2, cap=6))
        model = patch(llama(self.top / "plain"), adapter)
        with self.assertRaisesRegex(ValueError, "has an adapter already"):
            patch(model, adapter)
        with self.assertRaisesRegex(TypeError, "not a Llama"):
            patch(torch.nn.Linear(2, 2), adapter)
        with self.assertRaisesRegex(ValueError, "is no adapter"):
            patch(llama(self.top / "plain"), TINY)
        with self.assertRaises(still.FileError):
            patch(llama(self.top / "plain"), self.top / "nowhere")
        with self.assertRaisesRegex(ValueError, "of another model"):
            patch(llama(self.top / "plain"), "smollm2-still", paired=True)


@unittest.skipUnless((CACHED / "smollm2").exists(), "smollm2 is not in the cache")
class Shipped(unittest.TestCase):
    def test_smollm2(self) -> None:
        """The adapter that comes with the package, beyond its window: as it is, and merged
        into the weights."""
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        plain, merged = Path(scratch.name) / "plain", Path(scratch.name) / "merged"
        still.export("smollm2", plain, format="safetensors", dtype="f32")
        still.export("smollm2-still", merged, format="safetensors", dtype="f32")
        with still.Model.from_pretrained(merged) as own:
            assert own.method is not None
            # Where salient tokens are rounded to a few bits, a number between two levels
            # may go to either: they stay as they are here, and some are folded.
            method = own.method.copy()
            method.set(key_bits=0, value_bits=0, select=32, cap=16, caps="")
            ids = own.tokenizer.encode("The tide comes in twice a day, and takes the sand "
                                       "that the wind had brought. " * 30)[:400]
            with own.session(ctx=512, cache="f32", method=method) as s:
                want = s.feed(ids)
        for folder, adapter in ((merged, str(merged)), (plain, "smollm2-still")):
            model = patch(llama(folder), adapter)
            for module in model.modules():
                if isinstance(module, HybridAttention):
                    module.method = method
            got = theirs(model, [int(i) for i in ids])[-1]
            self.assertLess(float(np.abs(got - want).max()), TOLERANCE, adapter)


if __name__ == "__main__":
    unittest.main()
