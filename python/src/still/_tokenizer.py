"""Text to ids and back, and chat templates."""

from __future__ import annotations

import ctypes as ct
import json
from typing import TYPE_CHECKING, Any, Mapping, Sequence

import numpy as np

from . import _declarations as c
from ._errors import UnsupportedError, call
from ._handle import Handle
from ._library import address, ids_of, int_of, lib, path_of, text_of

if TYPE_CHECKING:
    from ._library import AnyIds, Ids, StrPath


class Decoder(Handle):
    """Ids to text as they come: never a part of a character, which waits for its rest."""

    _what = "decoder"

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        self._tokenizer = tokenizer  # must outlive this
        self._own(tokenizer._lock)
        with self._lock:
            call(lib.still_decoder_new, tokenizer._handle, special, ct.byref(self._c))

    @property
    def _handle(self) -> ct.c_void_p:
        self._tokenizer._handle  # raises if it is closed
        return super()._handle

    def push(self, id: int) -> str:
        text, n = ct.c_void_p(), ct.c_size_t()
        with self._lock:
            call(lib.still_decoder_push, self._handle, int_of(id, "the id"),
                 ct.byref(text), ct.byref(n))
            return ct.string_at(text, n.value).decode("utf-8", "replace")

    def flush(self) -> str:
        text, n = ct.c_void_p(), ct.c_size_t()
        with self._lock:
            lib.still_decoder_flush(self._handle, ct.byref(text), ct.byref(n))
            return ct.string_at(text, n.value).decode("utf-8", "replace")

    def _free(self) -> None:
        lib.still_decoder_free(self._c)


class Tokenizer(Handle):
    """A tokenizer: of a model, or of a file (`Tokenizer.open`)."""

    _what = "tokenizer"

    def __init__(self, handle: ct.c_void_p, owner: Handle | None = None) -> None:
        self._own(owner._lock if owner is not None else None)
        self._c = handle
        self._owner = owner  # a Model it belongs to; None: it is this object's own

    @classmethod
    def open(cls, path: StrPath, *, split: str | None = None) -> Tokenizer:
        """GGUF, a Hugging Face folder or tokenizer.json, tekken.json, SentencePiece .model,
        tiktoken ranks (split: their rule, "qwen2", where it is not Llama 3's)."""
        handle = ct.c_void_p()
        if split is None:
            call(lib.still_tokenizer_open, path_of(path), ct.byref(handle))
        else:
            call(lib.still_tokenizer_open_split, path_of(path), split.encode(),
                 ct.byref(handle))
        return cls(handle)

    @property
    def _handle(self) -> ct.c_void_p:
        if self._owner is not None:
            self._owner._handle  # raises if the model is closed
        return super()._handle

    def _free(self) -> None:
        if self._owner is None:
            lib.still_tokenizer_free(self._c)

    def encode(self, text: str, *, bos: bool = True, special: bool = False) -> Ids:
        """The ids of a text. bos: with the start token, if the model wants one. special:
        text such as <|im_end|> becomes that token; not for text you did not write."""
        data = text.encode("utf-8", "surrogatepass")
        flags = (c.STILL_ENCODE_BOS if bos else 0) | (c.STILL_ENCODE_SPECIAL if special else 0)
        ids = np.empty(len(data) + 1, np.int32)  # never more than bytes and a start token
        n = ct.c_size_t()
        with self._lock:
            call(lib.still_tokenizer_encode, self._handle, data, len(data), flags,
                 address(ids), len(ids), ct.byref(n))
            if n.value > len(ids):  # but for odd vocabularies
                ids = np.empty(n.value, np.int32)
                call(lib.still_tokenizer_encode, self._handle, data, len(data), flags,
                     address(ids), len(ids), ct.byref(n))
        return ids[: n.value].copy()

    def decode(self, ids: AnyIds, *, special: bool = False) -> str:
        """The text of ids; special: with the text of special tokens."""
        decoder = Decoder(self, special=special)
        return "".join([decoder.push(int(i)) for i in ids_of(ids)]) + decoder.flush()

    def piece(self, id: int, *, special: bool = True) -> bytes:
        """The bytes of one token; a character may be spread over several."""
        n = ct.c_size_t()
        with self._lock:
            text = lib.still_tokenizer_piece(self._handle, int_of(id, "the id"), special,
                                             ct.byref(n))
            if text is None and not 0 <= id < len(self):
                raise ValueError(f"id {id} is not in the vocabulary of {len(self)}")
            return ct.string_at(text, n.value) if text else b""

    def __len__(self) -> int:
        with self._lock:
            return int(lib.still_tokenizer_vocab_size(self._handle))

    @property
    def bos(self) -> int | None:
        with self._lock:
            id = int(lib.still_tokenizer_bos(self._handle))
        return None if id < 0 else id

    @property
    def eos(self) -> int | None:
        with self._lock:
            id = int(lib.still_tokenizer_eos(self._handle))
        return None if id < 0 else id

    def is_end(self, id: int) -> bool:
        """Whether generation ends at this token: end of text, end of turn."""
        with self._lock:
            return bool(lib.still_tokenizer_is_end(self._handle, int_of(id, "the id")))

    @property
    def chat_template(self) -> str | None:
        """The model's own chat template (Jinja)."""
        with self._lock:
            text = lib.still_tokenizer_chat_template(self._handle)
            return text_of(text) if text else None

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], *,
                    template: str | None = None, generation_prompt: bool = True,
                    variables: Mapping[str, Any] | None = None) -> Ids:
        """The ids of a conversation. messages: role, content and what else the template
        reads. template: Jinja text, or the name of one that comes with still ("chatml");
        None: the model's own. variables: further ones of the template ("tools"). Text of
        special tokens inside a message stays text."""
        if template is None and self.chat_template is None:
            raise UnsupportedError("the model has no chat template; name one with "
                                   "template='chatml'")
        chosen = None
        if template is not None:
            named = lib.still_chat_template_named(template.encode())
            chosen = named if named is not None else template.encode()
        data = json.dumps({**(variables or {}), "messages": [dict(m) for m in messages]})
        encoded = data.encode()
        talk = c.still_conversation(variables=encoded, n_variables=len(encoded),
                                    add_generation_prompt=generation_prompt)
        text = c.still_rendering()
        with self._lock:
            call(lib.still_chat_render, self._handle, chosen, ct.byref(talk), ct.byref(text))
            try:
                n = ct.c_size_t()
                call(lib.still_chat_encode, self._handle, ct.byref(text), 0, None, 0,
                     ct.byref(n))
                ids = np.empty(n.value, np.int32)
                call(lib.still_chat_encode, self._handle, ct.byref(text), 0, address(ids),
                     len(ids), ct.byref(n))
            finally:
                lib.still_rendering_free(ct.byref(text))
        return ids
