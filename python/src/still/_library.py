"""The shared library that lies in the package, with the types of its functions."""

from __future__ import annotations

import ctypes as ct
import operator
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Sequence, Union

import numpy as np
import numpy.typing as npt

from . import _declarations as c

if TYPE_CHECKING:
    StrPath = Union[str, os.PathLike[str]]
    Ids = npt.NDArray[np.int32]
    AnyIds = Union[Sequence[int], npt.NDArray[np.integer[Any]]]  # what callers give
    Floats = npt.NDArray[np.float32]

PACKAGE = Path(__file__).resolve().parent


def _load() -> ct.CDLL:
    library = ct.CDLL(str(PACKAGE / "lib" / "libstill.so"))
    for name, (result, arguments) in c.FUNCTIONS.items():
        try:
            function = getattr(library, name)
        except AttributeError:  # an older library was packed: whoever calls it is told
            continue
        function.restype = result
        function.argtypes = arguments
    # Its bytes may hold a NUL, at which c_char_p would end.
    library.still_tokenizer_piece.restype = ct.c_void_p
    return library


lib = _load()


def text_of(value: bytes | None) -> str:
    return value.decode("utf-8", "replace") if value else ""


def path_of(path: StrPath) -> bytes:
    return os.fsencode(path)


def ids_of(ids: Any) -> Ids:
    """Token ids as the library takes them; what does not fit in 32 bits is an error."""
    array = np.asarray(ids)
    if array.ndim != 1:
        raise ValueError(f"ids have the shape {array.shape}; one dimension is expected")
    if array.size == 0:
        return np.zeros(0, np.int32)
    if array.dtype.kind not in "iu":
        raise TypeError(f"ids are of type {array.dtype}; whole numbers are expected")
    if array.max() > 2**31 - 1 or array.min() < -(2**31):
        raise ValueError("ids are beyond 32 bits")
    return np.ascontiguousarray(array, np.int32)


def int_of(value: Any, what: str) -> int:
    """A number for an int of the library: ctypes would cut off what does not fit."""
    number = operator.index(value)
    if not -(2**31) <= number < 2**31:
        raise ValueError(f"{what} is {number}, which is beyond 32 bits")
    return number


def address(array: npt.NDArray[Any]) -> int:
    return int(array.ctypes.data)


def types_of(struct: type[ct.Structure]) -> dict[str, Any]:
    """The types of a struct's members, by name."""
    return {f[0]: f[1] for f in struct._fields_}
