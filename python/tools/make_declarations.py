#!/usr/bin/env python3
"""Turns include/still.h into the ctypes declarations of the Python package.

    make_declarations.py HEADER OUT.py     the module still._declarations
    make_declarations.py --check HEADER    a C program that prints sizes and offsets

The build of the wheel runs this, so that the package and its library always come from
one header. It reads the C that still.h is written in: comments, `#define NAME number`,
enums, structs, function types, and functions marked STILL_API. Anything else stops it:
a declaration that it would guess at is worse than none.
"""

import re
import sys
from pathlib import Path
from typing import Dict, List, NamedTuple, NoReturn, Optional, Tuple

# C type: (ctypes, annotation of a struct's field)
SCALARS: Dict[str, Tuple[str, str]] = {
    "bool": ("ct.c_bool", "bool"),
    "char": ("ct.c_char", "_bytes"),
    "unsigned char": ("ct.c_ubyte", "int"),
    "int": ("ct.c_int", "int"),
    "unsigned": ("ct.c_uint", "int"),
    "float": ("ct.c_float", "float"),
    "double": ("ct.c_double", "float"),
    "size_t": ("ct.c_size_t", "int"),
    "int32_t": ("ct.c_int32", "int"),
    "int64_t": ("ct.c_int64", "int"),
    "uint8_t": ("ct.c_uint8", "int"),
    "uint16_t": ("ct.c_uint16", "int"),
    "uint32_t": ("ct.c_uint32", "int"),
    "uint64_t": ("ct.c_uint64", "int"),
}


class Field(NamedTuple):
    name: str
    ctype: str
    annotation: str


class Function(NamedTuple):
    name: str
    result: str
    arguments: List[str]


class Header:
    """What still.h declares, in its order."""

    def __init__(self, text: str) -> None:
        self.constants: Dict[str, int] = {}
        self.enums: List[str] = []
        self.opaque: List[str] = []
        self.structs: Dict[str, List[Field]] = {}
        self.callbacks: Dict[str, Function] = {}
        self.functions: List[Function] = []
        text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
        for name, value in re.findall(r"(?m)^#define (STILL_\w+) +(\d+)[uU]?\s*$", text):
            self.constants[name] = int(value)
        text = re.sub(r'(?ms)^#ifdef __cplusplus.*?^#endif$', "", text)
        text = re.sub(r"(?m)^#.*(\\\n.*)*$", "", text)
        self.whole = set(re.findall(r"\bstruct (\w+)\s*\{", text))  # those with members
        for statement in self.split(text):
            self.declare(statement)

    @staticmethod
    def split(text: str) -> List[str]:
        """Statements: up to a ';' that is in no braces."""
        out, depth, start = [], 0, 0
        for i, c in enumerate(text):
            depth += (c == "{") - (c == "}")
            if c == ";" and depth == 0:
                out.append(" ".join(text[start:i].split()))
                start = i + 1
        if text[start:].strip():
            fail(text[start:].strip(), "no ';' ends it")
        return out

    def declare(self, s: str) -> None:
        enum = re.fullmatch(r"(?:typedef )?enum ?(\w*) ?\{(.*)\} ?(\w*)", s)
        struct = re.fullmatch(r"(?:typedef )?struct (\w+) ?\{(.*)\} ?(\w*)", s)
        opaque = re.fullmatch(r"typedef struct (\w+) (\w+)", s)
        callback = re.fullmatch(r"typedef (.+?) ?\(\*(\w+)\) ?\((.*)\)", s)
        if enum:
            self.declare_enum(enum[2])
            if enum[3]:
                self.enums.append(enum[3])
        elif struct:
            self.structs[struct[1]] = [
                f for part in struct[2].split(";") if part.strip()
                for f in self.fields(part.strip())]
        elif opaque:
            self.opaque.append(opaque[2])
        elif callback:
            self.callbacks[callback[2]] = self.function(callback[2], callback[1], callback[3])
        elif s.startswith("STILL_API "):
            function = re.fullmatch(r"STILL_API (.+?)(\w+) ?\((.*)\)", s)
            if not function:
                fail(s, "not a function")
            self.functions.append(self.function(function[2], function[1], function[3]))
        else:
            fail(s, "neither an enum, a struct, a function type nor a STILL_API function")

    def declare_enum(self, body: str) -> None:
        value = -1
        for item in body.split(","):
            name, _, given = (x.strip() for x in item.partition("="))
            if name:
                value = int(given, 0) if given else value + 1
                self.constants[name] = value

    def function(self, name: str, result: str, arguments: str) -> Function:
        out = []
        for a in [] if arguments.strip() in ("", "void") else arguments.split(","):
            a = a.strip()
            match = re.fullmatch(r"(.*?[\s*])(\w+)(\[\w*\])?", a)
            if not match or "(" in a:
                fail(a, f"not an argument of {name} that can be read")
            base, stars = self.parts(match[1] + ("*" if match[3] else ""))
            out.append(self.ctype(base, stars, "argument")[0])
        base, stars = self.parts(result)
        return Function(name, self.ctype(base, stars, "result")[0], out)

    def fields(self, text: str) -> List[Field]:
        pointer = re.fullmatch(r"(.+?) ?\(\*(\w+)\) ?\((.*)\)", text)
        if pointer:
            f = self.function(pointer[2], pointer[1], pointer[3])
            return [Field(f.name, callback_type(f), "Any")]
        out: List[Field] = []
        first, *others = text.split(",")
        match = re.fullmatch(r"(.*?[\s*])(\w+)((?:\[\w+\])*)", first.strip())
        if not match:
            fail(text, "not a member of a struct that can be read")
        base, stars = self.parts(match[1])
        plain = re.fullmatch(r"(?:const )*([\w ]+?)[ *]*(?:const)?[ *]*", match[1].strip())
        for i, d in enumerate([match[0][len(match[1]):]] + [o.strip() for o in others]):
            own = re.fullmatch(r"(\**) ?(\w+)((?:\[\w+\])*)", d)
            if not own or not plain:
                fail(text, f"'{d}' is not a name that can be read")
            out.append(self.field(own[2], base, stars if i == 0 else len(own[1]), own[3]))
        return out

    def field(self, name: str, base: str, stars: int, dims: str) -> Field:
        sizes = [d if d.isdigit() else str(self.constant(d)) for d in re.findall(r"\w+", dims)]
        ctype, annotation = self.ctype(base, stars, "field")
        if sizes and not (base == "char" and stars == 0 and len(sizes) == 1):
            annotation = "Any"
        for size in reversed(sizes):
            ctype = f"{ctype} * {size}" if " " not in ctype else f"({ctype}) * {size}"
        return Field(name, ctype, annotation)

    def constant(self, name: str) -> int:
        if name not in self.constants:
            fail(name, "not a constant of the header")
        return self.constants[name]

    @staticmethod
    def parts(text: str) -> Tuple[str, int]:
        """'const char *const *' -> ('char', 2)"""
        words = re.sub(r"\b(const|struct|enum)\b", " ", text)
        return " ".join(words.replace("*", " ").split()), words.count("*")

    def ctype(self, base: str, stars: int, what: str) -> Tuple[str, str]:
        if base == "void":
            if stars:
                return "ct.c_void_p" if stars == 1 else "ct.POINTER(ct.c_void_p)", "Any"
            return ("None", "None") if what == "result" else fail(base, f"as a {what}")
        if base in self.enums:
            base = "int"
        if base in self.callbacks:
            return (base, "Any") if stars == 0 else fail(base, "a pointer to a function type")
        if base in self.whole:
            if stars == 0 and base not in self.structs:
                fail(base, "has its members after it is used by value")
            return "ct.POINTER(" * stars + base + ")" * stars, "Any" if stars else base
        if base in self.opaque:
            if stars == 0:
                fail(base, "is opaque")
            return "ct.c_void_p" if stars == 1 else "ct.POINTER(ct.c_void_p)", "Any"
        if base not in SCALARS:
            fail(base, "not a type that is known")
        scalar, annotation = SCALARS[base]
        if stars == 0:
            return scalar, annotation
        if base == "char" and what in ("field", "result"):
            return ("ct.c_char_p", "Optional[_bytes]") if stars == 1 else (
                "ct.POINTER(ct.c_char_p)", "Any")
        # A pointer to bytes or numbers is passed as an address: numpy has it as one.
        if what == "argument":
            return ("ct.c_char_p" if base == "char" and stars == 1 else "ct.c_void_p"), "Any"
        return ("ct.c_void_p" if stars > 1 else f"ct.POINTER({scalar})"), "Any"


def fail(text: str, why: str) -> NoReturn:
    sys.exit(f"make_declarations.py: {text!r}: {why}")


def callback_type(f: Function) -> str:
    return f"ct.CFUNCTYPE({', '.join([f.result] + f.arguments)})"


CHECKED = '''
class _Checked(ct.Structure):
    """ctypes would cut off the bits of a number that do not fit."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        kept = getattr(self, name)
        if type(kept) is int and kept != value:
            super().__setattr__(name, 0)
            raise ValueError(f"{name} is {value}, which does not fit in its type")
'''


def module(h: Header, name: str) -> str:
    out = [f'"""Declarations of {name}. Written by tools/make_declarations.py."""',
           "from __future__ import annotations", "", "import ctypes as ct",
           "from typing import Any, Optional", "",
           "_bytes = bytes  # members may be called as types are", "", CHECKED]
    out += [f"{n} = {v}" for n, v in h.constants.items()]
    for s, fields in h.structs.items():
        out += ["", "", f"class {s}(_Checked):"]
        out += [f"    {f.name}: {f.annotation}" for f in fields]
        if fields[0][:2] == ("size", "ct.c_size_t"):
            out += ["", "    def __init__(self, **members: Any) -> None:",
                    "        super().__init__(ct.sizeof(type(self)), **members)"]
    out += ["", ""]
    out += [f"{c.name} = {callback_type(c)}" for c in h.callbacks.values()]
    for s, fields in h.structs.items():
        out += ["", f"{s}._fields_ = ["]
        out += [f'    ("{f.name}", {f.ctype}),' for f in fields] + ["]"]
    out += ["", "", "FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {"]
    for f in h.functions:
        out.append(f'    "{f.name}": ({f.result}, [{", ".join(f.arguments)}]),')
    out += ["}", "", "STRUCTS: dict[str, type[ct.Structure]] = {"]
    out += [f'    "{s}": {s},' for s in h.structs] + ["}", ""]
    return "\n".join(out)


def check(h: Header) -> str:
    out = ["#include <stddef.h>", "#include <stdio.h>", "#include <still.h>",
           "int main(void)", "{"]
    for s, fields in h.structs.items():
        out.append(f'    printf("{s} %zu\\n", sizeof({s}));')
        for f in fields:
            out.append(f'    printf("{s}.{f.name} %zu %zu\\n", offsetof({s}, {f.name}), '
                       f"sizeof((({s} *)0)->{f.name}));")
    for n in h.constants:
        out.append(f'    printf("{n} %lld\\n", (long long){n});')
    return "\n".join(out + ["    return 0;", "}", ""])


def main(arguments: List[str]) -> Optional[str]:
    if len(arguments) != 2:
        return __doc__
    if arguments[0] == "--check":
        sys.stdout.write(check(Header(Path(arguments[1]).read_text(encoding="utf-8"))))
        return None
    header = Path(arguments[0])
    text = module(Header(header.read_text(encoding="utf-8")), header.name)
    Path(arguments[1]).write_text(text, encoding="utf-8")
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
