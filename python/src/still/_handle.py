"""Objects of the library, and when they are freed."""

from __future__ import annotations

import ctypes as ct
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from types import TracebackType

H = TypeVar("H", bound="Handle")


class Handle:
    """An object of the library: freed by `close`, by `with`, or when nothing refers to it
    any more. A class says what it is called (`_what`) and how it is freed (`_free`)."""

    _what = "object"
    _c: ct.c_void_p  # NULL: it is closed

    def _free(self) -> None:
        raise NotImplementedError

    @property
    def _handle(self) -> ct.c_void_p:
        if not self._c:
            raise ValueError(f"the {self._what} is closed")
        return self._c

    def close(self) -> None:
        """Frees its memory; it cannot be used any more."""
        if self._c:
            self._free()
        self._c = ct.c_void_p()

    def __enter__(self: H) -> H:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_c", None):  # nothing was opened if its __init__ failed
            self.close()
