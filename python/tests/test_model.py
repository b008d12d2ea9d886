"""Models, tokenizers, sessions: what Python says is what the library says."""

from __future__ import annotations

import threading

import numpy as np

import still
from common import TINY, TinyTest

TEXT = "the sun and the moon, and a stone in the river"


class Tokens(TinyTest):
    def test_text_comes_back(self) -> None:
        tk = self.model.tokenizer
        for text in (TEXT, "naïve 漢字 🙂\n\n", "a\0b", ""):
            ids = tk.encode(text, bos=False)
            self.assertEqual(ids.dtype, np.int32)
            self.assertEqual(tk.decode(ids), text)
            self.assertEqual(b"".join(tk.piece(int(i)) for i in ids).decode(), text)

    def test_special_tokens(self) -> None:
        tk = self.model.tokenizer
        assert tk.eos is not None
        end = tk.piece(tk.eos).decode()
        self.assertTrue(tk.is_end(tk.eos))
        self.assertEqual(tk.encode(end, bos=False, special=True).tolist(), [tk.eos])
        self.assertNotIn(tk.eos, tk.encode(end, bos=False))
        self.assertEqual(tk.decode([tk.eos]), "")
        self.assertEqual(tk.decode([tk.eos], special=True), end)

    def test_ids_out_of_range(self) -> None:
        tk = self.model.tokenizer
        with self.assertRaises(ValueError):
            tk.piece(len(tk))
        with self.assertRaises(TypeError):
            tk.decode([0.5])  # type: ignore[list-item]
        with self.assertRaises(ValueError):
            tk.decode([2**40])

    def test_own_file(self) -> None:
        with still.Tokenizer.open(TINY) as tk:
            self.assertEqual(tk.encode(TEXT).tolist(),
                             self.model.tokenizer.encode(TEXT).tolist())
        with self.assertRaises(ValueError):
            tk.encode(TEXT)

    def test_chat_template(self) -> None:
        tk = self.model.tokenizer
        talk = [{"role": "user", "content": "hi <|im_end|> there"}]
        ids = tk.encode_chat(talk, template="chatml")
        self.assertIn("hi <|im_end|> there", tk.decode(ids, special=True))
        with self.assertRaisesRegex(still.ArgumentError, "not so"):
            tk.encode_chat(talk, template="{{ raise_exception('not so') }}")
        with self.assertRaisesRegex(still.FormatError, "line 1"):
            tk.encode_chat(talk, template="{% if %}")


class Sessions(TinyTest):
    def ids(self, n: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        return np.random.default_rng(1).integers(0, self.model.info.vocab, n)

    def methods(self) -> list[still.Method]:
        return [still.Method("softmax"), still.Method("still", chunk=16, select=4, cap=8)]

    def test_feed_in_any_pieces(self) -> None:
        ids = self.ids(600)  # more than a piece
        for method in self.methods():
            with self.model.session(ctx=1000, method=method) as a, \
                    self.model.session(ctx=1000, method=method) as b:
                whole = a.feed(ids)
                for id in ids[:-1].tolist():
                    b.step(id)
                np.testing.assert_array_equal(whole, b.step(int(ids[-1])))
                self.assertEqual((len(a), a.limit), (600, 1000))
                self.assertEqual((whole.dtype, whole.shape),
                                 (np.dtype(np.float32), (self.model.info.vocab,)))

    def test_logprobs_are_of_logits(self) -> None:
        ids = self.ids(515)  # two pieces, and one of three tokens
        got = self.model.logprobs(ids)
        self.assertEqual(got.shape, (514,))
        with self.model.session(ctx=515) as s:
            for i in range(514):
                row = s.step(int(ids[i])).astype(np.float64)
                want = row[ids[i + 1]] - row.max() - np.log(np.exp(row - row.max()).sum())
                self.assertAlmostEqual(got[i], want, delta=1e-4)

    def test_top_logprobs(self) -> None:
        ids = self.ids(300)
        with self.model.session(ctx=300) as s:
            logprob, top, top_logprob = s.top_logprobs(ids, 3)
        self.assertEqual((top.shape, top_logprob.shape), ((299, 3), (299, 3)))
        self.assertTrue((np.diff(top_logprob, axis=1) <= 0).all())
        for i in np.flatnonzero(top[:, 0] == ids[1:]):
            self.assertAlmostEqual(logprob[i], top_logprob[i, 0], places=5)
        with self.model.session(ctx=300) as s:
            for place in range(299):  # over the border of pieces, too
                self.assertEqual(int(s.step(int(ids[place])).argmax()), top[place, 0])

    def test_fork_save_load_snapshot_rollback(self) -> None:
        ids = self.ids(80)
        for method in self.methods():
            with self.model.session(ctx=200, method=method, rollback=2) as s:
                s.feed(ids[:64])
                fork, kept = s.fork(), s.snapshot()
                s.save(self.folder / "state")
                want = s.feed(ids[64:])
                np.testing.assert_array_equal(fork.feed(ids[64:]), want)
                s.restore(kept)
                self.assertEqual(len(s), 64)
                np.testing.assert_array_equal(s.feed(ids[64:]), want)
                s.load(self.folder / "state")
                np.testing.assert_array_equal(s.feed(ids[64:]), want)
                at = s.rollback(70)
                self.assertLessEqual(at, 70)
                self.assertEqual(len(s), at)
                with self.assertRaisesRegex(ValueError, "no logits"):
                    s.logits
                np.testing.assert_array_equal(s.feed(ids[at:]), want)
                s.reset()
                self.assertEqual(len(s), 0)

    def test_several_together(self) -> None:
        ids = self.ids(12)
        alone, together = [], [self.model.session(ctx=16) for _ in range(3)]
        for i, s in enumerate(together):
            with self.model.session(ctx=16) as one:
                one.feed(ids[: i + 2])
                s.feed(ids[: i + 2])
                alone.append(one.step(7))
        for want, got in zip(alone, still.step(together, [7, 7, 7])):
            np.testing.assert_array_equal(got, want)

    def test_threads_wait_for_each_other(self) -> None:
        ids = self.ids(200)
        with self.model.session(ctx=200) as s:
            want = s.feed(ids)
        got: list[bool] = []

        def work() -> None:
            with self.model.session(ctx=200) as mine:
                got.append(bool((mine.feed(ids) == want).all()))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.assertEqual(got, [True] * 4)

    def test_bill(self) -> None:
        near, far = (self.model.bill(ctx=n, method="softmax") for n in (128, 1280))
        self.assertGreater(far.cache, near.cache)
        constant = [self.model.bill(ctx=n, method=self.methods()[1]).cache
                    for n in (5120, 51200)]
        self.assertEqual(*constant)


class Text(TinyTest):
    def test_stream_is_the_whole(self) -> None:
        pieces = self.model.generate(TEXT, stream=True, max_tokens=40)
        self.assertNotIsInstance(pieces, str)
        self.assertEqual("".join(pieces), self.model.generate(TEXT, max_tokens=40))

    def test_greedy_is_argmax(self) -> None:
        ids = self.model.tokenizer.encode(TEXT).tolist()
        with self.model.session(ctx=200) as s:
            logits, out = s.feed(ids), []
            for _ in range(20):
                out.append(int(logits.argmax()))
                if self.model.tokenizer.is_end(out[-1]):
                    break
                logits = s.step(out[-1])
        self.assertEqual(self.model.generate(ids, max_tokens=20),
                         self.model.tokenizer.decode(out))

    def test_stop_strings(self) -> None:
        whole = self.model.generate(TEXT, max_tokens=30)
        self.assertGreater(len(whole), 4)
        stop = whole[2:5]
        self.assertEqual(self.model.generate(TEXT, max_tokens=30, stop=[stop, "\0never"]),
                         whole[: whole.find(stop)])

    def test_seed_and_temperature(self) -> None:
        def written(seed: int) -> str:
            return self.model.generate(TEXT, max_tokens=20, temperature=1.0, seed=seed)
        self.assertEqual(written(1), written(1))
        self.assertGreater(len({written(s) for s in range(5)}), 1)

    def test_continues_a_session(self) -> None:
        ids = self.model.tokenizer.encode(TEXT)
        want = self.model.generate(ids, max_tokens=10)
        with self.model.session(ctx=200) as s:
            s.feed(ids[:3])
            self.assertEqual(self.model.generate(ids[3:], max_tokens=10, session=s), want)
            self.assertGreaterEqual(len(s), len(ids))

    def test_chat(self) -> None:
        talk = [{"role": "user", "content": "hello"}]
        ids = self.model.tokenizer.encode_chat(talk, template="chatml")
        self.assertEqual(
            self.model.chat(talk, template="chatml", temperature=0.0, repeat_penalty=1.0,
                            max_tokens=8),
            self.model.generate(ids, max_tokens=8))

    def test_an_iterator_left_alone_frees_its_session(self) -> None:
        pieces = self.model.generate(TEXT, stream=True, max_tokens=40)
        next(iter(pieces))
        del pieces
        self.assertEqual(self.model._open, set())


class Errors(TinyTest):
    def test_classes(self) -> None:
        with self.assertRaisesRegex(still.FileError, "none.gguf"):
            still.Model(self.folder / "none.gguf")
        self.assertTrue(issubclass(still.FileError, OSError))
        bad = self.folder / "bad.gguf"
        bad.write_bytes(TINY.read_bytes()[:1000])
        with self.assertRaisesRegex(still.FormatError, "bad.gguf"):
            still.Model(bad)
        with self.assertRaises(still.ArgumentError) as caught:
            still.Method("none")
        self.assertIn("none", str(caught.exception))
        self.assertGreater(caught.exception.status, 0)
        with self.model.session(ctx=4) as s, self.assertRaises(still.LimitError):
            s.feed([1, 2, 3, 4, 5])
        with self.model.session(ctx=4) as s, self.assertRaises(still.ArgumentError):
            s.feed([10**6])

    def test_settings(self) -> None:
        m = still.Method("still", chunk=32, select=3, positions="capped")
        self.assertEqual((m.chunk, m.select, m.positions), (32, 3, "capped"))
        self.assertEqual(m, m.copy())
        with self.assertRaises(TypeError):
            still.Method("still", chunks=32)
        with self.assertRaisesRegex(ValueError, "score"):
            m.score = "x" * 40
        self.assertIn("still", still.methods())

    def test_closed(self) -> None:
        s = self.model.session(ctx=8)
        tk = self.model.tokenizer
        self.model.close()
        for use in (lambda: len(s), lambda: tk.encode("x"), lambda: self.model.session(ctx=1)):
            with self.assertRaisesRegex(ValueError, "closed"):
                use()
        self.model.close()  # once more does nothing
