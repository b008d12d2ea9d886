#!/usr/bin/env python3
"""The ctypes declarations of the Python package against a C compiler's view of still.h:
size of every struct, offset and size of every member, value of every constant, and the
functions that the header marks. Needs python3 and cc alone.

    declarations.py SOURCE_FOLDER
"""

import ctypes
import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> int:
    source = Path(sys.argv[1])
    header = source / "include" / "still.h"
    make = [sys.executable, str(source / "python" / "tools" / "make_declarations.py")]
    wrong, compared = [], 0
    with tempfile.TemporaryDirectory() as scratch:
        module = Path(scratch) / "declarations.py"
        subprocess.run([*make, str(header), str(module)], check=True)
        spec = importlib.util.spec_from_file_location("declarations", module)
        d = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(d)
        program = subprocess.run([*make, "--check", str(header)], check=True,
                                 stdout=subprocess.PIPE).stdout
        (Path(scratch) / "check.c").write_bytes(program)
        subprocess.run(["cc", "-I", str(header.parent), "-o", f"{scratch}/check",
                        f"{scratch}/check.c"], check=True)
        said = subprocess.run([f"{scratch}/check"], check=True, stdout=subprocess.PIPE,
                              text=True).stdout
    for line in said.splitlines():
        name, *numbers = line.split()
        if "." in name:
            struct, member = name.split(".")
            field = getattr(d.STRUCTS[struct], member)
            ours = [field.offset, field.size]
        elif name in d.STRUCTS:
            ours = [ctypes.sizeof(d.STRUCTS[name])]
        else:
            ours = [getattr(d, name)]
        compared += 1
        if ours != [int(n) for n in numbers]:
            wrong.append(f"{name}: the compiler says {numbers}, the declarations {ours}")
    marked = set(re.findall(r"\b(still_\w+)\(", re.sub(
        r"(?s)/\*.*?\*/", "", header.read_text(encoding="utf-8"))))
    for name in marked.symmetric_difference(d.FUNCTIONS):
        wrong.append(f"{name}: not both in the header and in the declarations")
    print("\n".join(wrong) or f"{compared} numbers and {len(d.FUNCTIONS)} functions agree")
    return 1 if wrong or compared < 100 else 0


if __name__ == "__main__":
    sys.exit(main())
