"""What the tests share: a small random model, and a folder that is removed."""

from __future__ import annotations

import json
import os
import random
import tempfile
import unittest
from pathlib import Path

import still

TINY = Path(os.environ["STILL_TINY"])
FIXTURES = Path(os.environ["STILL_FIXTURES"])


class TinyTest(unittest.TestCase):
    """Tests with `self.model`, tiny, and `self.folder`, empty."""

    def setUp(self) -> None:
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = Path(scratch.name)
        before = os.environ.get("XDG_CACHE_HOME")
        os.environ["XDG_CACHE_HOME"] = str(self.folder / "cache")
        self.addCleanup(self.restore, before)
        self.model = still.Model(TINY, threads=2)
        self.addCleanup(self.model.close)

    @staticmethod
    def restore(before: str | None) -> None:
        if before is None:
            del os.environ["XDG_CACHE_HOME"]
        else:
            os.environ["XDG_CACHE_HOME"] = before


def write_records(path: Path, n: int = 40) -> Path:
    """Records of random words, to train on."""
    words = "the sun moon stone river hot cold in on a then there other after water".split()
    rng = random.Random(1)
    with open(path, "w", encoding="utf-8") as f:
        for _ in range(n):
            print(json.dumps({"instruction": " ".join(rng.choices(words, k=8)),
                              "output": " ".join(rng.choices(words, k=20))}), file=f)
    return path
