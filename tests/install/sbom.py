#!/usr/bin/env python3
"""The installed bill of materials against what the binaries link.

    sbom.py SOURCE STILL.SPDX.JSON BINARY ...

Each library that a binary needs is there once, with a licence and a version; each relation is
between elements that exist; the same input gives the same bytes; and a library that nobody
has heard of is listed by its name, and said.
"""
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

C_LIBRARY = re.compile(r"(lib(c|m|dl|rt|pthread)|ld-linux.*)\.so(\.\d+)*")


def sbom(source, *binaries):
    done = subprocess.run([f"{source}/scripts/sbom", *binaries], capture_output=True, text=True,
                          check=True, env={**os.environ, "SOURCE_DATE_EPOCH": "1700000000"})
    return done.stdout, done.stderr


def needed(binary):
    text = subprocess.run(["objdump", "-p", binary], capture_output=True, text=True,
                          check=True).stdout
    return set(re.findall(r"^ *NEEDED +(\S+)", text, flags=re.M))


def links(document):
    """{binary: names of packages that it links}"""
    names = {p["SPDXID"]: p["name"] for p in document["packages"]}
    out = {}
    for r in document["relationships"]:
        assert r["relatedSpdxElement"] in names, r
        if r["relationshipType"] == "DYNAMIC_LINK":
            out.setdefault(names[r["spdxElementId"]], []).append(names[r["relatedSpdxElement"]])
    return out


def check_installed(document, binaries):
    assert document["spdxVersion"] == "SPDX-2.3", document["spdxVersion"]
    linked = links(document)
    known = {p["name"]: p for p in document["packages"]}
    identities = {p["SPDXID"] for p in document["packages"]}
    assert len(identities) == len(document["packages"]), "an element twice"
    for binary in binaries:
        sonames = needed(binary)
        c_library = {s for s in sonames if C_LIBRARY.fullmatch(s)}
        found = linked.pop(pathlib.Path(binary).name)
        assert len(found) == len(sonames - c_library) + bool(c_library), (binary, found, sonames)
        for name in found:
            assert known[name]["licenseDeclared"] != "NOASSERTION", f"{name} has no licence"
            assert known[name].get("versionInfo"), f"{name} has no version"
    assert not linked, f"not installed: {linked}"


def check_unknown(source):
    """A library of our own, with a soname that the table does not have."""
    with tempfile.TemporaryDirectory() as scratch:
        for name, options in (("unheard", ["-Wl,-soname,libunheard.so.7"]),
                              ("user", ["-Wl,--no-as-needed", f"{scratch}/libunheard.so"])):
            subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "/dev/null", "-x", "none",
                            "-o", f"{scratch}/lib{name}.so", *options], check=True)
        text, said = sbom(source, f"{scratch}/libuser.so")
        assert "libunheard.so.7" in links(json.loads(text))["libuser.so"], text
        assert "libunheard.so.7 is not in the table" in said, said


def main(source, installed, *binaries):
    check_installed(json.loads(pathlib.Path(installed).read_text(encoding="utf-8")), binaries)
    assert sbom(source, *binaries) == sbom(source, *binaries)
    check_unknown(source)


main(*sys.argv[1:])
