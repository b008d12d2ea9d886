"""still: language models in constant memory.

    import still

    with still.Model.from_pretrained("smollm2-still") as model:
        for piece in model.generate("Once upon a time", stream=True):
            print(piece, end="", flush=True)

A model runs with the attention it was trained with, or with an adapter that linearize
wrote: its memory is then constant and its time linear in the length of the text. See
docs/python.md, and include/still.h of the package, the manual of the library beneath.
"""

from __future__ import annotations

from ._errors import (
    ArgumentError,
    CancelledError,
    Error,
    FileError,
    FormatError,
    LimitError,
    NumericError,
    OutOfMemoryError,
    UnsupportedError,
)
from ._evaluate import EvalResult, Perplexity, evaluate, perplexity, tasks
from ._library import lib as _lib
from ._method import Method, methods
from ._model import Bill, Model, ModelInfo, Sampling
from ._names import Resolved, adapter_base, resolve
from ._session import Sampler, Session, Snapshot, step
from ._tokenizer import Decoder, Tokenizer
from ._train import StagePlan, TrainProgress, export, linearize, plan

__version__: str = _lib.still_version().decode()

__all__ = [
    "ArgumentError", "Bill", "CancelledError", "Decoder", "Error", "EvalResult", "FileError",
    "FormatError", "LimitError", "Method", "Model", "ModelInfo", "NumericError",
    "OutOfMemoryError", "Perplexity", "Resolved", "Sampler", "Sampling", "Session",
    "Snapshot", "StagePlan", "Tokenizer", "TrainProgress", "UnsupportedError", "adapter_base",
    "evaluate", "export", "linearize", "methods", "perplexity", "plan", "resolve", "step",
    "tasks",
]
