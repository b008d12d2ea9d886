"""How layers remember the past: the settings of a method."""

from __future__ import annotations

import ctypes as ct
from typing import Any, Generic, TypeVar, overload

from . import _declarations as c
from ._errors import call
from ._library import int_of, lib, text_of

T = TypeVar("T")
_POSITIONS = ("auto", "absolute", "capped")


class _Setting(Generic[T]):
    """A member of the C struct as an attribute."""

    def __init__(self, doc: str) -> None:
        self.__doc__ = doc

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self.name = name

    @overload
    def __get__(self, obj: None, owner: type[Any]) -> _Setting[T]: ...
    @overload
    def __get__(self, obj: Method, owner: type[Any]) -> T: ...
    def __get__(self, obj: Method | None, owner: type[Any]) -> Any:
        if obj is None:
            return self
        value = getattr(obj._c, self.name)
        return text_of(value) if isinstance(value, bytes) else value

    def __set__(self, obj: Method, value: T) -> None:
        if isinstance(value, str):
            data = value.encode()
            room = getattr(c.still_method, self.name).size
            if len(data) >= room:
                raise ValueError(f"{self.name}: {len(data)} bytes, at most {room - 1}")
            setattr(obj._c, self.name, data)
        else:
            setattr(obj._c, self.name, value)


class Method:
    """`Method("still", chunk=64, select=16)`: a method's defaults, and what you change.

    docs/methods.md has the equations; `still.methods()` lists the names.
    """

    name = _Setting[str]("softmax, still, lolcats, ...")
    chunk = _Setting[int]("C: the window is one to two chunks")
    select = _Setting[int]("tokens of a chunk that stay exact when it leaves the window")
    cap = _Setting[int]("most tokens that stay exact; -1: no cap")
    caps = _Setting[str]("layers or heads with another cap: 17-18:768,23/0:512")
    key_bits = _Setting[int]("of a salient token's keys: 8 or 5; 0: as in the window")
    value_bits = _Setting[int]("of its values: 4 or 3; 0: as in the window")
    score = _Setting[str]("what chooses them: s3, distinct, received, keynorm, random")
    per_head = _Setting[bool]("choose per query head instead of per kv head")
    window_scale = _Setting[bool]("LoLCATs' scaling of the linear term")
    norm_preserved = _Setting[bool]("the feature map keeps the norm of its input")
    gate = _Setting[bool]("gate on the linear term")
    forget = _Setting[bool]("no linear state")
    first_layer = _Setting[int]("first layer it replaces; others stay softmax")
    last_layer = _Setting[int]("last layer it replaces; -1: the last")
    seed = _Setting[int]("of the random score")

    def __init__(self, name: str, *, chunk: int = 0, **settings: Any) -> None:
        self._c = c.still_method()
        call(lib.still_method_init, ct.byref(self._c), name.encode(),
             int_of(chunk, "the chunk"))
        self.set(**settings)

    @classmethod
    def compact(cls, *, chunk: int = 0, **settings: Any) -> Method:
        """still as it remembers most in the same bytes once it is trained."""
        return cls._from(lib.still_method_compact, chunk, settings)

    @classmethod
    def untrained(cls, *, chunk: int = 0, **settings: Any) -> Method:
        """still for a model without an adapter."""
        return cls._from(lib.still_method_untrained, chunk, settings)

    @classmethod
    def _from(cls, init: Any, chunk: int, settings: dict[str, Any]) -> Method:
        made = c.still_method()
        call(init, ct.byref(made), int_of(chunk, "the chunk"))
        out = cls._of(made)
        out.set(**settings)
        return out

    @classmethod
    def _of(cls, struct: c.still_method) -> Method:
        """A copy of the library's struct."""
        out = cls.__new__(cls)
        out._c = c.still_method()
        ct.pointer(out._c)[0] = struct
        return out

    def set(self, **settings: Any) -> None:
        """Changes several settings; a name that is none of them is an error."""
        for key, value in settings.items():
            if key != "positions" and not isinstance(getattr(type(self), key, None), _Setting):
                raise TypeError(f"a method has no setting '{key}'")
            setattr(self, key, value)

    @property
    def positions(self) -> str:
        """auto, absolute or capped: how far away keys may be."""
        return _POSITIONS[self._c.positions]

    @positions.setter
    def positions(self, value: str) -> None:
        if value not in _POSITIONS:
            raise ValueError(f"positions are {', '.join(_POSITIONS)}, not '{value}'")
        self._c.positions = _POSITIONS.index(value)

    def copy(self) -> Method:
        return Method._of(self._c)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Method) and bytes(self._c) == bytes(other._c)

    __hash__ = None  # type: ignore[assignment]  # it can change

    def __repr__(self) -> str:
        parts = [f"{k}={getattr(self, k)!r}" for k in ("chunk", "select", "cap", "score")]
        return f"Method({self.name!r}, {', '.join(parts)})"


def method_of(given: Method | str | None) -> Method | None:
    return Method(given) if isinstance(given, str) else given


def methods() -> dict[str, str]:
    """Names of the methods, and what each is."""
    out: dict[str, str] = {}
    summary = ct.c_char_p()
    while name := lib.still_method_at(len(out), ct.byref(summary)):
        out[text_of(name)] = text_of(summary.value)
    return out
