"""The Python of docs/python.md runs as it stands, one block after the other, with a small
model in place of smollm2. Blocks that need PyTorch are left to tests_torch."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

from common import FIXTURES, TINY, TinyTest, write_records
from still import _model, _names

PAGE = FIXTURES.parent.parent / "docs" / "python.md"


@unittest.skipUnless(PAGE.exists(), "the tests run without the sources")
class Manual(TinyTest):
    def test_every_block(self) -> None:
        blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"),
                            flags=re.S | re.M)
        blocks = [b for b in blocks if "import torch" not in b]
        self.assertGreater(len(blocks), 4)
        write_records(self.folder / "mine.jsonl")
        shutil.copytree(FIXTURES / "eval" / "choice", self.folder / "data")
        shutil.copy(TINY, self.folder / "tiny.gguf")
        before = Path.cwd()
        self.addCleanup(os.chdir, before)
        os.chdir(self.folder)

        def resolve(name: Any, download: bool = True) -> _names.Resolved:
            small = {"smollm2": "tiny.gguf", "smollm2-still": "tiny.gguf"}
            return _names.resolve(small.get(str(name), name), download)

        # Adapters name their base as it was given.
        place = self.folder / "cache" / "still" / "models" / "smollm2"
        place.mkdir(parents=True)
        shutil.copy(TINY, place / "SmolLM2-135M-Instruct.Q4_1.gguf")
        names: dict[str, Any] = {}
        with mock.patch.object(_model, "resolve", resolve), \
                contextlib.redirect_stdout(io.StringIO()):
            for block in blocks:
                exec(compile(block, str(PAGE), "exec"), names)
        self.assertIn("results", names)
