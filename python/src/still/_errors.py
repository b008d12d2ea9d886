"""Errors: an exception class for each status of the library, with its message.

Where Python has a class that callers expect (ValueError for an argument, OSError for a
file, MemoryError), ours is also of that class.
"""

from __future__ import annotations

import ctypes as ct
from typing import Any

from . import _declarations as c


class Error(Exception):
    """The library failed; str() is one line: where, what was found, what was expected."""

    status: int = 0


class ArgumentError(Error, ValueError):
    """An argument is invalid."""


class FileError(Error, OSError):
    """The operating system reported an error."""


class FormatError(Error):
    """A file is damaged, or not of the expected format."""


class UnsupportedError(Error, NotImplementedError):
    """Well-formed, but not something still can run."""


class OutOfMemoryError(Error, MemoryError):
    """There is not enough memory."""


class LimitError(Error):
    """Longer than the context, larger than a cap."""


class NumericError(Error, ArithmeticError):
    """NaN or infinity where a number must be."""


class CancelledError(Error):
    """A callback asked to stop."""


CLASSES: dict[int, type[Error]] = {
    c.STILL_E_ARG: ArgumentError,
    c.STILL_E_IO: FileError,
    c.STILL_E_FORMAT: FormatError,
    c.STILL_E_UNSUPPORTED: UnsupportedError,
    c.STILL_E_MEMORY: OutOfMemoryError,
    c.STILL_E_LIMIT: LimitError,
    c.STILL_E_NUMERIC: NumericError,
    c.STILL_E_CANCELLED: CancelledError,
}


def error_of(status: int, text: str) -> Error:
    error = CLASSES.get(status, Error)(text)
    error.status = status
    return error


def call(function: Any, *arguments: Any) -> None:
    """Calls a function of the library that returns a status, and raises what it says."""
    err = c.still_error()
    status = function(*arguments, ct.byref(err))
    if status != c.STILL_OK:
        raise error_of(status, err.text.decode("utf-8", "replace"))


class Callbacks:
    """Keeps what happens in callbacks until the library has returned.

    An exception cannot pass through C: the first is kept, the callback asks to stop, and
    `call` raises it afterwards. Ctrl-C arrives while a callback runs; should it come
    before the callback's first line, ctypes has already answered false, so a
    cancellation that nobody asked for is a KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.raised: BaseException | None = None
        self.asked = False
        self.kept: list[Any] = []

    def make(self, kind: Any, body: Any) -> Any:
        """A C function of type `kind` that runs body(...), which returns False to stop."""

        def run(*arguments: Any) -> bool:
            try:
                if body(*arguments) is not False:
                    return True
                self.asked = True
            except BaseException as error:  # KeyboardInterrupt above all
                self.raised = self.raised or error
            return False

        function = kind(run)
        self.kept.append(function)
        return function

    def make_note(self, kind: Any, body: Any) -> Any:
        """The same for a C function that returns nothing."""

        def run(*arguments: Any) -> None:
            try:
                body(*arguments)
            except BaseException as error:
                self.raised = self.raised or error

        function = kind(run)
        self.kept.append(function)
        return function

    def call(self, function: Any, *arguments: Any) -> None:
        try:
            call(function, *arguments)
        except CancelledError:
            if self.raised is None and not self.asked:
                raise KeyboardInterrupt from None
            if self.raised is None:
                raise
        if self.raised is not None:
            raise self.raised
