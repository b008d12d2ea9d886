"""Benchmarks of quality, and perplexity."""

from __future__ import annotations

import ctypes as ct
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Sequence

import numpy as np

from . import _declarations as c
from ._errors import Callbacks
from ._library import address, ids_of, int_of, lib, path_of, text_of, types_of
from ._model import Model

if TYPE_CHECKING:
    from ._library import AnyIds, Floats, Ids, StrPath
    from ._method import Method


@dataclass(frozen=True)
class EvalResult:
    """Figures of one task at one length. None: not one of its figures."""

    task: str
    metric: str
    length: int
    n: int
    acc: float
    acc_stderr: float
    acc_norm: float | None
    acc_norm_stderr: float | None
    perplexity: float | None
    seconds: float

    @property
    def value(self) -> float:
        """The figure to compare."""
        return self.acc_norm if self.metric == "acc_norm" and self.acc_norm is not None \
            else self.acc


def tasks() -> dict[str, str]:
    """Names of the tasks, and what each asks."""
    out: dict[str, str] = {}
    summary = ct.c_char_p()
    while name := lib.still_eval_task_at(len(out), ct.byref(summary), None, None):
        out[text_of(name)] = text_of(summary.value)
    return out


def evaluate(model: Model | StrPath, tasks: str | Sequence[str], data: StrPath, *,
             limit: int = 0, lengths: Sequence[int] = (), samples: int = 0, shots: int = 0,
             seed: int = 0, ctx: int = 0, method: Method | str | None = None,
             log: StrPath | None = None,
             callback: Callable[[str, int, int], bool | None] | None = None
             ) -> list[EvalResult]:
    """Runs tasks on a model: a result for each task and length, in order.

    data: the folder with their files (`still pull-data`). limit: items of each task.
    lengths, samples: of generated tasks (niah_single_1, babilong_qa1, ...). callback(record,
    done, total) is called after each item, record its line of JSON; False stops. log: a file
    of these records, from which the same call continues after a stop."""
    names = [tasks] if isinstance(tasks, str) else list(tasks)
    owned = not isinstance(model, Model)
    opened = model if isinstance(model, Model) else Model.from_pretrained(model)
    calls = Callbacks()
    types = types_of(c.still_eval_params)

    def each(user: Any, item: Any) -> bool:
        i = item[0]
        return callback is None or callback(text_of(i.record), i.done, i.total) is not False

    session = opened._session_params(ctx, 0, None, method, 0)
    lists = (ct.c_char_p * len(names))(*[n.encode() for n in names])
    wanted = (ct.c_int * len(lengths))(*[int_of(n, "a length") for n in lengths])
    p = c.still_eval_params(
        n_tasks=len(names), data=path_of(data), limit=limit, n_lengths=len(lengths),
        samples=samples, shots=shots, seed=seed, log=path_of(log) if log else None,
        each=calls.make(types["each"], each), poll=calls.make(types["poll"], lambda user: True))
    p.task = ct.cast(lists, types["task"])
    p.length = ct.cast(wanted, types["length"])
    p.session = ct.pointer(session)
    room = 64 * max(len(names), 1)
    out = (c.still_eval_result * room)()
    n = ct.c_int()
    try:
        with opened._at_work() as handle:
            calls.call(lib.still_eval_run, handle, ct.byref(p), out, room, ct.byref(n))
    finally:
        if owned:
            opened.close()
    return [_result(out[i]) for i in range(n.value)]


def _result(r: Any) -> EvalResult:
    def known(x: float) -> float | None:
        return None if math.isnan(x) else x

    return EvalResult(
        task=text_of(r.task), metric=text_of(r.metric), length=r.length, n=r.n, acc=r.acc,
        acc_stderr=r.acc_stderr, acc_norm=known(r.acc_norm),
        acc_norm_stderr=known(r.acc_norm_stderr), perplexity=known(r.perplexity),
        seconds=r.seconds)


@dataclass(frozen=True)
class Perplexity:
    value: float
    stderr: float
    nll: float
    n: int
    windows: int
    each: Floats


def perplexity(model: Model | StrPath, text: str | AnyIds, *, ctx: int = 0,
               method: Method | str | None = None,
               callback: Callable[[int, int, float], bool | None] | None = None) -> Perplexity:
    """Perplexity of a text or of ids in windows of ctx tokens (0: the trained length).
    callback(done, total, value so far); False stops. `each` of the result is log p of
    every token, NaN at the first of a window."""
    owned = not isinstance(model, Model)
    opened = model if isinstance(model, Model) else Model.from_pretrained(model)
    calls = Callbacks()
    out = c.still_perplexity()

    def progress(user: Any, done: int, total: int) -> bool:
        return callback is None or callback(done, total, out.value) is not False

    try:
        ids = ids_of(opened.tokenizer.encode(text) if isinstance(text, str) else text)
        each = np.empty(len(ids), np.float32)
        window = ctx or min(opened.info.ctx_train or len(ids), len(ids))
        with opened.session(ctx=window, method=method) as s, opened._at_work():
            calls.call(lib.still_perplexity_run, s._handle, address(ids), len(ids), window,
                       address(each), calls.make(c.still_progress_fn, progress), None,
                       ct.byref(out))
    finally:
        if owned:
            opened.close()
    return Perplexity(out.value, out.stderr_, out.nll, out.n, out.windows, each)
