"""Objects of the library, and when they are freed.

The library wants one object to be used by one thread at a time, and ctypes lets other
threads run while it is called, so every call holds the object's lock; what belongs to a
model has the lock of the model.
"""

from __future__ import annotations

import ctypes as ct
import threading
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

if TYPE_CHECKING:
    from types import TracebackType

H = TypeVar("H", bound="Handle")


class Handle:
    """An object of the library: freed by `close`, by `with`, or when nothing refers to it
    any more. A class says what it is called (`_what`) and how it is freed (`_free`), and
    calls `_own` before it is opened."""

    _what = "object"
    _c: ct.c_void_p  # NULL: it is closed
    _lock: threading.RLock

    def _own(self, lock: threading.RLock | None = None) -> None:
        self._c = ct.c_void_p()
        self._lock = threading.RLock() if lock is None else lock

    def _free(self) -> None:
        raise NotImplementedError

    @property
    def _handle(self) -> ct.c_void_p:
        if not self._c:
            raise ValueError(f"the {self._what} is closed")
        return self._c

    def close(self) -> None:
        """Frees its memory; it cannot be used any more."""
        with self._lock:
            if self._c:
                self._free()
            self._c = ct.c_void_p()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"a {self._what} can neither be copied nor pickled")

    def __enter__(self: H) -> H:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        # Nothing was opened if its __init__ failed. No lock: nobody else refers to it, and
        # whoever holds the lock may wait for what this thread holds.
        if getattr(self, "_c", None):
            self._free()
