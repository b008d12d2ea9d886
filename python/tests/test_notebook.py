"""examples/linearize.ipynb runs from its first cell to its plots, on a small model."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import still
from common import FIXTURES, TINY, TinyTest, write_records

BOOK = FIXTURES.parent.parent / "python" / "examples" / "linearize.ipynb"


@unittest.skipUnless(BOOK.exists(), "the tests run without the sources")
class Notebook(TinyTest):
    def test_runs(self) -> None:
        book = json.loads(BOOK.read_text(encoding="utf-8"))
        cells = [c for c in book["cells"] if c["cell_type"] == "code"]
        given = [c for c in cells if "parameters" in c["metadata"].get("tags", [])]
        self.assertEqual(len(given), 1)
        self.assertTrue(all(c["outputs"] == [] for c in cells), "outputs are not kept")
        with gzip.open(self.folder / "book.gz", "wt", encoding="utf-8") as f:
            f.write("the sun and the moon and a stone in the river then " * 40)
        small = {"MODEL": str(TINY), "DATA": str(write_records(self.folder / "data.jsonl")),
                 "HELD_OUT": str(self.folder / "book.gz"), "OUT": str(self.folder / "out"),
                 "TOKENS": 960, "SEQ": 48, "BATCH": 2, "CHUNK": 8, "SELECT": 2, "CAP": 8,
                 "LENGTH": 200}
        self.addCleanup(os.chdir, Path.cwd())
        os.chdir(self.folder)
        names: dict[str, Any] = {}
        said = io.StringIO()
        with mock.patch.dict(os.environ, MPLBACKEND="Agg"), contextlib.redirect_stdout(said):
            for cell in cells:
                exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
                if cell is given[0]:
                    self.assertLessEqual(set(small), set(names), "a setting is gone")
                    names.update(small)
        self.assertEqual(set(names["scores"]), {"softmax", "untrained", "linearized"})
        self.assertIn("linearized perplexity", said.getvalue())
        self.assertEqual({p.stage for p in names["history"]}, {1, 2})
        for picture in ("training.svg", "result.svg"):
            text = (self.folder / picture).read_text(encoding="utf-8")
            self.assertIn("</svg>", text)
        self.assertTrue((self.folder / "out" / "adapter.safetensors").exists())
        with still.Model.from_pretrained(self.folder / "out") as again:
            self.assertIsNotNone(again.method)
