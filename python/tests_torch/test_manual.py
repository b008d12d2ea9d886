"""The Python of docs/python.md that needs PyTorch runs as it stands, with a small model in
place of smollm2."""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import os
import re
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import still
import torch
from still import _names, _torch_patch, _train

PAGE = Path(os.environ["STILL_MANUAL"])
TINY = Path(os.environ["STILL_TINY"])


class Manual(unittest.TestCase):
    def test_every_block(self) -> None:
        blocks = [b for b in re.findall(r"^```python\n(.*?)^```",
                                        PAGE.read_text(encoding="utf-8"), flags=re.S | re.M)
                  if "import torch" in b]
        self.assertEqual(len(blocks), 2)
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        folder = Path(scratch.name)
        (folder / "text.jsonl").write_text('{"text": "the sun and the moon"}\n' * 200)
        adapter = still.linearize(TINY, folder / "text.jsonl", folder / "adapter", seq=64,
                                  method=still.Method("still", chunk=8), batch=2, tokens=256)
        small = {"smollm2": TINY, "smollm2-still": adapter}

        def resolve(name: Any, download: bool = True) -> _names.Resolved:
            return _names.resolve(small.get(str(name), name), download)

        self.addCleanup(os.chdir, Path.cwd())
        os.chdir(folder)
        names: dict[str, Any] = {"still": still}
        with mock.patch.object(_train, "resolve", resolve), \
                mock.patch.object(_torch_patch, "resolve", resolve):
            for block in blocks:
                exec(compile(block, str(PAGE), "exec"), names)
        self.assertGreater(float(names["q"].grad.abs().max()), 0)
        self.assertEqual(names["logits"].dim(), 3)
        self.assertTrue(bool(torch.isfinite(names["logits"]).all()))


if __name__ == "__main__":
    unittest.main()
