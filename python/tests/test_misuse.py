"""What nobody should do, but somebody will: numbers that do not fit, objects that are closed
under others, copies, callbacks and threads that interfere. Each is an exception, never a
crash and never another number."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import pickle
import subprocess
import sys
import threading
import time
import unittest
from typing import Any, Callable

import numpy as np
from common import TINY, TinyTest, write_records

import still

LARGE = (2**31, 2**32 + 5, 2**64, -(2**31) - 1, 10**30)


class Arguments(TinyTest):
    def refused(self, use: Callable[[], object]) -> None:
        with self.assertRaises((ValueError, TypeError)):
            use()

    def test_ids(self) -> None:
        kinds: list[Any] = [[1.5], ["a"], [None], [True], [2**31], [2**70], [10**6], 5, None,
                            b"abc", {1, 2}, np.array([[1, 2]]), np.zeros(2)]
        with self.model.session(ctx=8) as s:
            for ids in kinds:
                for use in (s.feed, self.model.logprobs, self.model.generate):
                    with self.subTest(ids=ids, use=use):
                        self.refused(lambda: use(ids))
            self.assertEqual(len(s), 0)
            every_second = np.arange(8)[::2]
            for same in (every_second.astype(">i4"), every_second.astype(np.uint8),
                         every_second.tolist(), range(0, 8, 2)):
                want = s.feed(every_second)
                s.reset()
                np.testing.assert_array_equal(s.feed(same), want)
                s.reset()

    def test_large_numbers(self) -> None:
        vocab = self.model.info.vocab
        with self.model.session(ctx=8) as s:
            s.feed([1, 2])
            decoder, sampler = still.Decoder(self.model.tokenizer), still.Sampler(vocab)
            for n in LARGE:
                for use in (s.step, s.rollback, decoder.push, sampler.accept,
                            self.model.tokenizer.piece, self.model.tokenizer.is_end,
                            lambda n: self.model.session(ctx=n),
                            lambda n: self.model.session(ctx=8, rollback=n),
                            lambda n: self.model.bill(ctx=n),
                            lambda n: still.Sampler(n),
                            lambda n: still.Sampler(vocab, top_k=n),
                            lambda n: still.Method("still", chunk=n),
                            lambda n: still.Method("still", cap=n),
                            lambda n: still.Model(TINY, threads=n),
                            lambda n: still.evaluate(self.model, "fwe", ".", lengths=[n])):
                    with self.subTest(n=n, use=use):
                        self.refused(lambda: use(n))
            self.assertEqual(len(s), 2)

    def test_logits(self) -> None:
        sampler = still.Sampler(4)
        self.assertEqual(sampler.sample([0.0, 2.0, 1.0, 0.0]), 1)
        self.assertEqual(sampler.sample(np.array([0, 9, 2, 9, 1, 9, 0, 9.0])[::2]), 1)
        for bad in ([0.0] * 3, np.zeros((4, 1)), [float("nan")] * 4):
            with self.assertRaises((ValueError, still.NumericError)):
                sampler.sample(bad)

    def test_a_session_twice(self) -> None:
        with self.model.session(ctx=8) as s, self.assertRaisesRegex(ValueError, "twice"):
            still.step([s, s], [1, 2])


class Lifetimes(TinyTest):
    def test_after_its_model(self) -> None:
        s, tk = self.model.session(ctx=8), self.model.tokenizer
        s.feed([1])
        snapshot, decoder = s.snapshot(), still.Decoder(tk)
        pieces = self.model.generate("the sun", stream=True)
        next(pieces)
        self.model.close()
        for use in (lambda: s.logits, lambda: s.feed([1]), s.reset, s.fork, s.snapshot,
                    lambda: s.restore(snapshot), lambda: decoder.push(65), decoder.flush,
                    lambda: still.Decoder(tk), lambda: next(pieces)):
            with self.subTest(use=use), self.assertRaisesRegex(ValueError, "closed"):
                use()
        for thing in (snapshot, decoder, s, tk):
            thing.close()

    def test_after_its_tokenizer(self) -> None:
        tk = still.Tokenizer.open(TINY)
        decoder = still.Decoder(tk)
        tk.close()
        with self.assertRaisesRegex(ValueError, "closed"):
            decoder.push(65)

    def test_no_copies(self) -> None:
        with self.model.session(ctx=8) as s:
            for thing in (self.model, s, self.model.tokenizer):
                for use in (copy.copy, copy.deepcopy, pickle.dumps):
                    with self.assertRaisesRegex(TypeError, "copied"):
                        use(thing)

    def test_any_order(self) -> None:
        """Objects go in every order, and all at once in a cycle."""
        for order in itertools.permutations(range(4)):
            model = still.Model(TINY, threads=1)
            s = model.session(ctx=8)
            s.feed([1])
            things: list[Any] = [model, s, s.snapshot(), still.Decoder(model.tokenizer)]
            del model, s
            for i in order:
                things[i] = None
            things = [still.Model(TINY, threads=1)]
            things += [things[0].session(ctx=8), things]
            del things
            gc.collect()

    def test_freed_while_another_thread_works(self) -> None:
        done = threading.Event()

        def work() -> None:
            with self.model.session(ctx=4096) as mine:
                mine.feed(np.arange(4000) % 500)
            done.set()

        thread = threading.Thread(target=work)
        thread.start()
        while not done.is_set():
            self.model._drop(0)  # what a session does that nothing refers to: it never waits
        thread.join()
        self.model.session(ctx=8).close()
        self.assertEqual((self.model._open, self.model._dropped), (set(), []))

    def test_no_callback_closes_the_model(self) -> None:
        data = write_records(self.folder / "data.jsonl")
        said: list[str] = []

        def each(p: still.TrainProgress) -> None:
            said.append(self.model.generate("the sun", max_tokens=2))
            self.model.close()

        with self.assertRaisesRegex(ValueError, "at work"):
            still.linearize(self.model, data, self.folder / "out", seq=32, batch=1, tokens=64,
                            method=still.Method("still", chunk=8), callback=each)
        self.assertEqual(said, [self.model.generate("the sun", max_tokens=2)])

    def test_a_child_process(self) -> None:
        """After fork the child has a model of its own; ends are not waited for."""
        program = (
            "import os, sys, still\n"
            "m = still.Model(sys.argv[1], threads=2); s = m.session(ctx=64)\n"
            "want = s.feed([1, 2, 3]); pid = os.fork()\n"
            "s.feed([4]); ok = m.generate('the sun', max_tokens=4) and len(s) == 4\n"
            "m.close()\n"
            "if pid == 0: os._exit(0 if ok else 3)\n"
            "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n")
        subprocess.run([sys.executable, "-c", program, str(TINY)], check=True, timeout=120,
                       env=dict(os.environ))


class Threads(TinyTest):
    SECONDS = 2.0

    def together(self, *uses: Callable[[], object]) -> None:
        """Runs them over and over, each in a thread. An exception of ours is no failure."""
        end = time.monotonic() + self.SECONDS
        wrong: list[BaseException] = []

        def work(use: Callable[[], object]) -> None:
            while time.monotonic() < end:
                try:
                    use()
                except (ValueError, still.Error):
                    pass
                except BaseException as error:
                    wrong.append(error)
                    return

        threads = [threading.Thread(target=work, args=(use,)) for use in uses]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.assertEqual(wrong, [])

    def test_one_session(self) -> None:
        s = self.model.session(ctx=2048, rollback=2)
        path = self.folder / "state"
        s.feed([1, 2, 3])
        s.save(path)
        ids = np.arange(300) % 500
        self.together(lambda: s.feed(ids), s.reset, lambda: s.logits, lambda: s.rollback(5),
                      lambda: s.fork().close(), lambda: s.save(path), lambda: s.load(path),
                      lambda: s.restore(s.snapshot()), lambda: len(s), s.fork)

    def test_closed_meanwhile(self) -> None:
        box = [still.Model(TINY, threads=1)]
        box.append(box[0].session(ctx=4096))  # type: ignore[arg-type]
        ids = np.arange(200) % 500

        def renew() -> None:
            old = box[0]
            box[0] = still.Model(TINY, threads=1)
            box[1] = box[0].session(ctx=4096)  # type: ignore[call-overload]
            old.close()

        def close() -> None:
            box[1].close()
            time.sleep(0.002)

        self.together(lambda: box[1].feed(ids), close, close, renew,  # type: ignore[attr-defined]
                      lambda: box[0].generate("the sun", max_tokens=20),
                      lambda: box[0].tokenizer.decode(box[0].tokenizer.encode("the sun" * 99)))
        box[0].close()


if __name__ == "__main__":
    unittest.main()
