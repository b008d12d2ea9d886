"""A model and the tokens it has seen."""

from __future__ import annotations

import ctypes as ct
from typing import TYPE_CHECKING, Any, Sequence

import numpy as np
import numpy.typing as npt

from . import _declarations as c
from ._errors import call
from ._handle import Handle
from ._library import address, ids_of, int_of, lib, path_of

if TYPE_CHECKING:
    from ._library import AnyIds, Floats, Ids, StrPath
    from ._model import Model

# Tokens of one call into the library. Python sees Ctrl-C between calls; results do not
# depend on where the tokens are cut.
_PIECE = 256


class Snapshot(Handle):
    """The past of a session, set aside; `Session.restore` returns to it."""

    _what = "snapshot"

    def __init__(self, session: Session) -> None:
        self._model = session.model
        self._own(session._lock)
        with self._lock:
            call(lib.still_session_snapshot, session._handle, ct.byref(self._c))

    def _free(self) -> None:
        lib.still_snapshot_free(self._c)


class Session(Handle):
    """Tokens go in, logits come out; the memory of the past is the method's.

    Made by `Model.session`, and closed with its model. Calls on sessions of one model wait
    for each other.
    """

    _what = "session"

    def __init__(self, model: Model, handle: ct.c_void_p) -> None:
        self.model = model
        self._own(model._lock)
        self._c = handle

    def _free(self) -> None:
        if self._c.value in self.model._open:  # else it was freed with the model
            self.model._open.discard(self._c.value)
            lib.still_session_free(self._c)

    def __del__(self) -> None:
        if getattr(self, "_c", None):
            self.model._drop(self._c.value)

    @property
    def _handle(self) -> ct.c_void_p:
        if self._c and self._c.value not in self.model._open:
            raise ValueError("the session is closed, with its model")
        return super()._handle

    def __len__(self) -> int:
        """Tokens it has seen."""
        with self._lock:
            return int(lib.still_session_length(self._handle))

    @property
    def limit(self) -> int:
        """The most tokens it can see: the ctx it was made with."""
        with self._lock:
            return int(lib.still_session_limit(self._handle))

    def feed(self, ids: AnyIds) -> Floats:
        """Appends tokens; the logits after the last one. Ctrl-C stops between pieces:
        `len` then says how many tokens were taken."""
        tokens = ids_of(ids)
        if len(tokens) == 0:
            raise ValueError("no tokens to feed")
        with self._lock:
            for at in range(0, len(tokens), _PIECE):
                part = tokens[at : at + _PIECE]
                call(lib.still_session_feed, self._handle, address(part), len(part))
            return self.logits

    def step(self, id: int) -> Floats:
        """One token more; the logits after it."""
        return self.feed([id])

    @property
    def logits(self) -> Floats:
        """[vocab] floats after the last token (a copy)."""
        with self._lock:
            pointer = lib.still_session_logits(self._handle)
            if not pointer:
                raise ValueError("the session has no logits: feed it tokens first")
            return np.ctypeslib.as_array(pointer, (self.model.info.vocab,)).copy()

    def logprobs(self, ids: AnyIds) -> Floats:
        """Feeds n tokens; log p of each but the first, given all before: n - 1 numbers."""
        return self.top_logprobs(ids, 0)[0]

    def top_logprobs(self, ids: AnyIds, k: int) -> tuple[Floats, Ids, Floats]:
        """The same with the k most likely ids at each place and their log-probabilities:
        [n-1], [n-1, k], [n-1, k]."""
        tokens = ids_of(ids)
        if len(tokens) < 2:
            raise ValueError("log-probabilities need at least two tokens")
        if not 0 <= k <= self.model.info.vocab:
            raise ValueError(f"k is {k}, the vocabulary has {self.model.info.vocab} tokens")
        n = len(tokens) - 1
        out = np.empty(n, np.float32)
        top, top_out = np.empty((n, k), np.int32), np.empty((n, k), np.float32)
        with self._lock:
            # Pieces overlap by none: the last logits of a piece score the next one's first.
            for at in range(0, len(tokens), _PIECE):
                part = tokens[at : at + _PIECE]
                if at > 0:
                    _score(self.logits, int(part[0]), k, out[at - 1 : at],
                           top[at - 1], top_out[at - 1])
                if len(part) == 1:
                    call(lib.still_session_feed, self._handle, address(part), 1)
                elif k:
                    call(lib.still_session_top_logprobs, self._handle, address(part),
                         len(part), k, address(out[at:]), address(top[at:]),
                         address(top_out[at:]))
                else:
                    call(lib.still_session_logprobs, self._handle, address(part), len(part),
                         address(out[at:]), None)
        return out, top, top_out

    def reset(self) -> None:
        """Back to empty."""
        with self._lock:
            lib.still_session_reset(self._handle)

    def fork(self) -> Session:
        """A new session with the same settings and the same past."""
        handle = ct.c_void_p()
        with self._lock:
            call(lib.still_session_fork, self._handle, ct.byref(handle))
            return self.model._opened(handle)

    def snapshot(self) -> Snapshot:
        """Sets its past aside."""
        return Snapshot(self)

    def restore(self, snapshot: Snapshot) -> None:
        """Returns to a snapshot of this session, or of another with the same settings."""
        if snapshot._model is not self.model:
            raise ValueError("the snapshot is of a session of another model")
        with self._lock:
            call(lib.still_session_restore, self._handle, snapshot._handle)

    def save(self, path: StrPath) -> None:
        """Writes its past to a file, so that a long prompt is paid for once."""
        with self._lock:
            call(lib.still_session_save, self._handle, path_of(path))

    def load(self, path: StrPath) -> None:
        """Reads what `save` wrote, of the same model with the same settings."""
        with self._lock:
            call(lib.still_session_load, self._handle, path_of(path))

    def rollback(self, length: int) -> int:
        """Goes back to at most `length` tokens; the length reached. Feed the tokens from
        there on again. Methods other than softmax return to chunk boundaries, as many as
        `rollback` of Model.session said."""
        at = ct.c_int()
        with self._lock:
            call(lib.still_session_rollback, self._handle, int_of(length, "the length"),
                 ct.byref(at))
        return at.value


def _score(logits: Floats, id: int, k: int, out: Floats, top: Ids, top_out: Floats) -> None:
    """What the library computes for a place inside a piece, for the place before one."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    wide -= np.log(np.exp(wide).sum())
    out[0] = wide[id]
    if k:
        best = np.lexsort((np.arange(len(wide)), -wide))[:k]
        top[:] = best
        top_out[:] = wide[best]


def step(sessions: Sequence[Session], ids: AnyIds) -> list[Floats]:
    """One token for each of several sessions of one model, computed together: faster
    than one by one, with the same results. The logits of each."""
    tokens = ids_of(ids)
    if len(sessions) != len(tokens) or not sessions:
        raise ValueError(f"{len(sessions)} sessions and {len(tokens)} tokens")
    model = sessions[0].model
    if any(s.model is not model for s in sessions):
        raise ValueError("the sessions are of different models")
    if len({id(s) for s in sessions}) < len(sessions):
        raise ValueError("a session is there twice")
    with model._lock:
        handles: Any = (ct.c_void_p * len(sessions))(*[s._handle for s in sessions])
        call(lib.still_session_step, handles, address(tokens), len(sessions))
        return [s.logits for s in sessions]


class Sampler(Handle):
    """Chooses tokens from logits. temperature 0: the most likely one."""

    _what = "sampler"

    def __init__(self, vocab: int, *, temperature: float = 0.0, top_k: int = 0,
                 top_p: float = 1.0, min_p: float = 0.0, repeat_penalty: float = 1.0,
                 repeat_last: int = 64, seed: int = 0) -> None:
        p = c.still_sampler_params(temperature=temperature, top_k=top_k, top_p=top_p,
                                   min_p=min_p, repeat_penalty=repeat_penalty,
                                   repeat_last=repeat_last, seed=seed)
        self._vocab = int_of(vocab, "the vocabulary's size")
        self._own()
        call(lib.still_sampler_new, ct.byref(p), self._vocab, ct.byref(self._c))

    def sample(self, logits: npt.ArrayLike) -> int:
        array = np.ascontiguousarray(logits, np.float32)
        if array.shape != (self._vocab,):
            raise ValueError(f"logits have the shape {array.shape}, not ({self._vocab},)")
        id = ct.c_int32()
        with self._lock:
            call(lib.still_sampler_sample, self._handle, address(array), ct.byref(id))
        return id.value

    def accept(self, id: int) -> None:
        """Tells it that a token was emitted; prompt tokens too, for the penalty."""
        with self._lock:
            lib.still_sampler_accept(self._handle, int_of(id, "the id"))

    def _free(self) -> None:
        lib.still_sampler_free(self._c)
