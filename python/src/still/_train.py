"""Linearizing a model: two stages of training that end in an adapter."""

from __future__ import annotations

import ctypes as ct
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence, Union

from . import _declarations as c
from ._errors import Callbacks
from ._library import lib, path_of, text_of, types_of
from ._method import Method
from ._model import Model
from ._names import cache, resolve

if TYPE_CHECKING:
    from ._library import StrPath

    Data = Union[StrPath, Sequence[StrPath], Mapping[StrPath, float]]

_GROUPS = ("maps", "scalars", "gate", "lora")
_TARGETS = ("q", "k", "v", "o", "gate")


@dataclass(frozen=True)
class TrainProgress:
    """The state of a run after a step. NaN: this step has no such figure."""

    stage: int
    step: int
    steps: int
    tokens: int
    loss: float
    norm: float
    lr: float
    relative: float
    kl: float
    valid_loss: float
    valid_relative: float
    tokens_per_s: float
    seconds_left: float
    peak_rss: int


@dataclass(frozen=True)
class StagePlan:
    """What a stage will take."""

    stage: int
    steps: int
    tokens: int
    trained: int
    bytes: int
    seconds: float


_NUMBERS = ("stage", "tokens", "seq", "batch", "micro_batch", "mask_prompt", "held_out", "seed",
            "warmup", "clip", "beta1", "beta2", "decay", "lora_rank", "lora_alpha",
            "lora_dropout", "kd", "cap_share", "match_weights", "freeze_maps", "save_every",
            "validate_every", "resume")


class _Run:
    """The parameters of a run, and all that they point to."""

    def __init__(self, model: Model | StrPath, data: Data, out: StrPath | None,
                 method: Method | str, callback: Callable[[TrainProgress], bool | None] | None,
                 options: dict[str, Any]) -> None:
        self.owned = not isinstance(model, Model)
        self.model = model if isinstance(model, Model) else Model.from_pretrained(model)
        self.calls = Callbacks()
        weights: dict[StrPath, float]
        if isinstance(data, Mapping):
            weights = dict(data)
        elif isinstance(data, (str, os.PathLike)):
            weights = {data: 0.0}
        else:
            weights = {path: 0.0 for path in data}
        self.data = (c.still_train_data * len(weights))(
            *[c.still_train_data(path_of(k), v) for k, v in weights.items()])
        method = Method(method) if isinstance(method, str) else method
        tokens = cache("tokens")
        tokens.mkdir(parents=True, exist_ok=True)
        p = self.params = c.still_train_params(
            method=method._c, n_data=len(weights), cache_dir=path_of(tokens),
            out=path_of(out) if out is not None else None, base_name=self.base_name())
        p.data = ct.cast(self.data, ct.POINTER(c.still_train_data))
        for name, value in options.items():
            self.set(name, value)

        def each(user: Any, state: Any) -> bool:
            if callback is None:
                return True
            s = state[0]
            values = {f: getattr(s, f) for f in TrainProgress.__dataclass_fields__}
            return callback(TrainProgress(**values)) is not False

        p.each = self.calls.make(c.still_train_fn, each)
        p.reading = self.calls.make(c.still_progress_fn, lambda user, done, total: True)
        p.note = self.calls.make_note(
            types_of(c.still_train_params)["note"],
            lambda user, line: warnings.warn(text_of(line), stacklevel=2))

    def base_name(self) -> bytes:
        """A cached model by its name, a path as an absolute path."""
        named = self.model._named
        return path_of(Path(named).resolve() if Path(named).exists() else named)

    def set(self, name: str, value: Any) -> None:
        p = self.params
        if name == "lr":  # one for both stages, or (first, second)
            both = (value, value) if isinstance(value, (int, float)) else tuple(value)
            p.lr[1], p.lr[2] = both
        elif name == "lr_scale":
            for group, scale in value.items():
                # 0 freezes a group here; in C a zeroed struct is all defaults
                p.lr_scale[_GROUPS.index(group)] = scale if scale else -1
        elif name == "lora_targets":
            for target in value:
                p.lora_targets |= 1 << _TARGETS.index(target)
        elif name == "start":
            p.start = path_of(value) if value is not None else None
        elif name in _NUMBERS:
            setattr(p, name, value)
        else:
            raise TypeError(f"linearize has no option '{name}'")

    def close(self) -> None:
        if self.owned:
            self.model.close()


def linearize(model: Model | StrPath, data: Data, out: StrPath, *,
              method: Method | str = "still",
              callback: Callable[[TrainProgress], bool | None] | None = None,
              **options: Any) -> Path:
    """Trains an adapter for a plain model and writes it to the folder `out`, which
    Model.from_pretrained opens.

    data: JSONL or JSON, gzipped or not, with records of instruction, input, output, or of
    text; a list of such files, or a dict of files and shares. callback is called after
    every step; False ends the run after saving. Ctrl-C does the same, and resume=True goes
    on from there.

    options, as of `still linearize`: stage (1 or 2; 0: both), tokens (of each stage; 20
    million), seq (1024), batch (8), micro_batch (1), lr (one, or one for each stage),
    lr_scale ({"maps": 0.5}; 0 freezes a group), warmup, clip, decay, seed, held_out,
    mask_prompt, lora_rank, lora_alpha, lora_dropout, lora_targets (["q", "k"]), kd,
    cap_share, match_weights, freeze_maps, save_every, validate_every, start, resume.
    """
    run = _Run(model, data, out, method, callback, options)
    try:
        with run.model._at_work() as handle:
            run.calls.call(lib.still_linearize, handle, ct.byref(run.params))
    finally:
        run.close()
    return Path(out)


def plan(model: Model | StrPath, data: Data, *, method: Method | str = "still",
         **options: Any) -> list[StagePlan]:
    """What linearize would take, measured on a sequence of each stage."""
    run = _Run(model, data, None, method, None, options)
    result = c.still_train_plan()
    try:
        with run.model._at_work() as handle:
            run.calls.call(lib.still_linearize_plan, handle, ct.byref(run.params),
                           ct.byref(result))
    finally:
        run.close()
    return [StagePlan(s, result.steps[s], result.tokens[s], result.trained[s],
                      result.bytes[s], result.seconds[s])
            for s in (1, 2) if result.steps[s]]


def export(model: StrPath, path: StrPath, *, format: str, dtype: str | None = None) -> None:
    """Writes a model for other programs: format safetensors, gguf, peft or adapter; dtype
    f32, f16, bf16, q8_0 (see `still export`)."""
    found = resolve(model)
    calls = Callbacks()
    p = c.still_export_params(
        format=format.encode(), path=path_of(path), dtype=dtype.encode() if dtype else None,
        adapter=path_of(found.adapter) if found.adapter else None,
        progress=calls.make(c.still_progress_fn, lambda user, done, total: True))
    calls.call(lib.still_export, path_of(found.model), ct.byref(p))
