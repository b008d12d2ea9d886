#!/usr/bin/env python3
"""debian/ against what was installed, so that `make deb` will not stop at it: each file is in
one package, each line of debian/*.install stands for a file, and version and soname are ours.

    debian.py SOURCE PREFIX VERSION SONAME     (0.1.0 and 0.1)
"""
import pathlib
import re
import sys

# What debian/rules itself puts there, or hands to dh_installdocs.
OF_RULES = ("usr/lib/systemd/", "usr/lib/python3")
DOCUMENTS = ("usr/share/doc/still/still.spdx.json",)


def installed(prefix):
    """Files as Debian has them: libraries in a folder named after the machine."""
    for file in pathlib.Path(prefix).rglob("*"):
        name = file.relative_to(prefix).as_posix()
        if not file.is_dir():
            yield "usr/" + re.sub(r"^lib(/[\w-]+-linux-gnu)?/", "lib/MACHINE/", name)


def matches(pattern, name):
    """A file, or all of a folder; * is a part of a name, as in debhelper."""
    parts = "[^/]*".join(re.escape(part) for part in pattern.split("*"))
    return re.fullmatch(f"{parts}(/.*)?", name)


def main(source, prefix, version, soname):
    debian, wrong = pathlib.Path(source) / "debian", []
    lines = {(file.stem, line.split()[0]) for file in debian.glob("*.install")
             for line in file.read_text().splitlines() if line.startswith("usr/")}
    files = sorted(set(installed(prefix)) - set(DOCUMENTS))
    for file in files:
        owners = {package for package, pattern in lines if matches(pattern, file)}
        if len(owners) != 1:
            wrong.append(f"{file} is in {len(owners)} packages: {sorted(owners)}")
    for package, pattern in sorted(lines):
        if not pattern.startswith(OF_RULES) and not any(matches(pattern, f) for f in files) \
                and package != "still-mpi":  # where MPI is not installed
            wrong.append(f"{package}.install: nothing matches {pattern}")
    if not (debian / "changelog").read_text().startswith(f"still ({version}-"):
        wrong.append(f"changelog does not begin with version {version}")
    if f"\nPackage: libstill{soname}\n" not in (debian / "control").read_text():
        wrong.append(f"control has no package libstill{soname}")
    if wrong:
        sys.exit("debian/: " + "\n".join(wrong))


main(*sys.argv[1:])
