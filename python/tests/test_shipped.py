"""The model that comes with still, as the first lines of the manual run it."""

from __future__ import annotations

import unittest

import still


class Shipped(unittest.TestCase):
    def test_first_lines(self) -> None:
        with still.Model.from_pretrained("smollm2-still") as model:
            pieces = list(model.generate("The capital of France is", stream=True, max_tokens=8))
            self.assertIn("Paris", "".join(pieces))
            self.assertGreater(len(pieces), 3)
            reply = model.chat([{"role": "user", "content": "What is the capital of Italy?"}],
                               temperature=0.0, max_tokens=24)
            self.assertIn("Rome", reply)
            # A text far longer than the window, in the memory of a short one.
            near, far = (model.bill(ctx=n).cache for n in (16384, 1 << 20))
            self.assertEqual(near, far)
