"""The numbers of an adapter, for models that others run."""

from __future__ import annotations

import ctypes as ct
from typing import TYPE_CHECKING

import numpy as np

from . import _declarations as c
from ._errors import call
from ._handle import Handle
from ._library import address, lib, path_of, text_of
from ._method import Method

if TYPE_CHECKING:
    from ._library import Floats, StrPath


class Adapter(Handle):
    """What linearize wrote: a method, and tensors by name (include/still.h lists them)."""

    _what = "adapter"

    def __init__(self, path: StrPath) -> None:
        self._own()
        call(lib.still_adapter_open, path_of(path), ct.byref(self._c))
        info = lib.still_adapter_get_info(self._c)[0]
        self.method = Method._of(info.method[0])
        self.lora_rank = int(info.lora_rank)
        self.lora_alpha = float(info.lora_alpha)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._index: dict[str, int] = {}
        for i in range(lib.still_adapter_tensor_count(self._c)):
            t = c.still_tensor_info()
            lib.still_adapter_tensor(self._c, i, ct.byref(t))
            name = text_of(t.name)
            self.shapes[name] = tuple(t.dim[: t.n_dims])
            self._index[name] = i

    def _free(self) -> None:
        lib.still_adapter_free(self._c)

    def __contains__(self, name: str) -> bool:
        return name in self._index

    def __getitem__(self, name: str) -> Floats:
        """The numbers of a tensor, of its shape (a copy)."""
        out = np.empty(self.shapes[name], np.float32)
        with self._lock:
            call(lib.still_adapter_values, self._handle, self._index[name], address(out),
                 out.size)
        return out
