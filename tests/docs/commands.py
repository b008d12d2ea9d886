#!/usr/bin/env python3
"""Every command of README.md and docs/, read and run.

    commands.py check PARSER                  reads: each call of still with its option table
    commands.py run STILL [--page GLOB] [-v]  runs: each page from its top, in a folder of its own

commands.toml says what is smaller here than on the page, what commands read, and which
commands do not run, with the reason. What is on no list runs as it stands. A line of the
table that nothing needs any more is an error, so it cannot outlive its command.

A page runs in one shell, in a folder that looks like the source tree: links to what is there,
`build/still`, and room for what commands write. HOME is empty but for the default model,
which the cache lends; all pages share it. A command that ends with another status than 0,
or warns, or takes longer than TIMEOUT fails the test. `still serve` runs until its page ends."""
import argparse
import fnmatch
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

try:
    import tomllib
except ImportError:  # Python before 3.11
    from pip._vendor import tomli as tomllib

import pages as docs

TIMEOUT = 300
KEYS = {"settings": None, "change": {"page", "from", "to", "why"},
        "files": {"page", "name", "text", "link"}, "input": {"page", "command", "text"},
        "says": {"page", "command", "text"}, "listed": {"page", "command", "why"}}
# One shell for a page: reads the names of files with commands, says how each ended.
DRIVER = r"""
shopt -s expand_aliases
while IFS= read -r step; do
    eval "$(<"$step")
ended=(\"\${PIPESTATUS[@]}\")" >"$step.out" 2>&1 <"$step.in"
    echo "${ended[@]}"
done
"""


class Table:
    """commands.toml, and which of its lines were needed."""

    def __init__(self, path):
        table = tomllib.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        self.settings = table.pop("settings", {})
        self.rows = {}
        for kind, rows in table.items():
            for row in rows:
                if kind not in KEYS or not set(row) <= KEYS[kind] or "page" not in row:
                    raise docs.Wrong(f"commands.toml: what is {kind} {row}?")
            self.rows[kind] = rows
        self.used = set()

    def of(self, kind, page):
        for row in self.rows.get(kind, []):
            if fnmatch.fnmatchcase(page, row["page"]):
                yield row

    def first(self, kind, page, statement):
        """The row of a kind that names a command; * and ? in it as in file names."""
        for row in self.of(kind, page):
            pattern = row["command"].replace("[", "[[]")
            if fnmatch.fnmatchcase(docs.one_line(statement), pattern):
                self.used.add(id(row))
                return row
        return None

    def smaller(self, page, statement):
        statement = re.sub(r"\s*\\\n\s*", " ", docs.without_comments(statement)).rstrip()
        for row in self.of("change", page):
            statement, n = re.subn(row["from"], row["to"], statement)
            if n:
                self.used.add(id(row))
        return statement

    def unused(self, kinds, page="*"):
        for kind in kinds:
            for row in self.rows.get(kind, []):
                if id(row) not in self.used and fnmatch.fnmatchcase(row["page"], page):
                    yield f"commands.toml: no command needs this: {kind} {row}"


# ---- Reading -----------------------------------------------------------------------

def parse(parser, words):
    """What still would say of its arguments; None: nothing. A command that a sentence names
    may lack its arguments and the values of its options."""
    done = subprocess.run([parser, *words], capture_output=True, text=True, timeout=60)
    return None if done.returncode == 0 else done.stderr.strip() or "fails"


def program(word, options):
    """A program of the tree is there, and its source has each option."""
    path = docs.ROOT / word
    sources = [file for file in (path, path.with_name(path.name.replace("-", "_") + ".c"))
               if file.is_file()]
    if not sources:
        yield f"{word}: no such program"
    elif sources == [path] and not os.access(path, os.X_OK):
        yield f"{word} is not executable"
    text = "".join(source.read_text(encoding="utf-8", errors="replace") for source in sources)
    for option in options if sources else []:
        if option not in text and f'"{option[2:]}"' not in text:
            yield f"{word} has no option {option}"


def check_page(parser, page, found, text, table):
    """What is wrong with the commands of a page, by their text alone."""
    for line, statement in found:
        where, short = f"{page}:{line}", docs.one_line(statement)
        table.first("listed", page, statement)
        table.smaller(page, statement)
        for words in docs.still_calls(statement):
            wrong = parse(parser, words)
            if wrong:
                yield f"{where}: {short}: {wrong}"
        for word, options in docs.tree_calls(statement):
            for wrong in program(word, options):
                yield f"{where}: {short}: {wrong}"
    for span in docs.inline(text):
        words = span.split()[1:]
        options = [word.split("=")[0] for word in words[1:] if re.match(r"--[a-z-]+", word)]
        for option in options:  # each on its own: a value may be a word of the sentence
            wrong = parse(parser, [words[0], option.rstrip(".,;:"), "1"])
            if wrong and "unknown option" in wrong or wrong and "is not one of" in wrong:
                yield f"{page}: `{span}`: {wrong}"
        if not options and (wrong := parse(parser, [words[0], "--help"])):
            yield f"{page}: `{span}`: {wrong}"


def check_itself(parser):
    """The checks find what they are for."""
    def found(text):
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as empty:
            table = Table(empty.name)
        try:
            return list(check_page(parser, "page", docs.statements(text), text, table))
        except docs.Wrong as wrong:
            return [str(wrong)]
    bad = {"```sh\nstill chat smollm2 --tmep 1\n```\n": "--tmep",
           "    FOO=1 still eval --samples ten\n": "ten",
           "    mpirun -np 2 still linearize a \\\n        --dat b\n": "--dat",
           "```sh\nzcat a | still generate -n -5 -p x\n```\n": "-5",
           "```sh\nstill conjure\n```\n": "conjure",
           "```sh\nbench/nothing --fast\n```\n": "no such program",
           "```sh\nbench/peer-llamacpp --no-such-option\n```\n": "--no-such-option",
           "```sh\necho 'never ends\n```\n": "bash cannot read",
           "```\nstill list\n```\n": "a block of ''",
           "See `still serve --prot 1`.\n": "--prot", "See `still sevre`.\n": "sevre"}
    for text, says in bad.items():
        wrong = found(text)
        if not any(says in line for line in wrong):
            yield f"the check finds nothing in {text!r}: {wrong}"
    good = "```sh\nstill chat smollm2 --temp 1 # --nothing\n```\n\n    y_t = --x\n\n`still -h`\n"
    if found(good):
        yield f"the check finds something in {good!r}: {found(good)}"


def check(parser):
    table, wrong, n = Table(docs.ROOT / "tests/docs/commands.toml"), [], 0
    for path in docs.pages():
        page = path.relative_to(docs.ROOT).as_posix()
        try:
            found = docs.read(path)
            n += len(found)
            wrong += check_page(parser, page, found, path.read_text(encoding="utf-8"), table)
        except docs.Wrong as what:
            wrong.append(f"{page}:{what}")
    wrong += check_itself(parser)
    wrong += table.unused(("change", "listed"))
    print("\n".join(wrong))
    print(f"{n} commands read, {len(wrong)} wrong")
    return 1 if wrong or n < 100 else 0


# ---- Running -----------------------------------------------------------------------

def free_ports(n):
    sockets = [socket.socket() for _ in range(n)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [str(s.getsockname()[1]) for s in sockets]
    for s in sockets:
        s.close()
    return ports


def listens(port, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", int(port)), 1).close()
            return True
        except OSError:
            time.sleep(0.1)
    return False


def furnish(tree, page, table, still):
    """A folder like the source tree, for a page."""
    tree.mkdir()
    for entry in docs.ROOT.iterdir():
        if entry.name not in ("build", ".git"):
            (tree / entry.name).symlink_to(entry)
    (tree / "build").mkdir()
    (tree / "build/still").symlink_to(still)
    for row in table.of("files", page):
        table.used.add(id(row))
        if "link" in row:
            (tree / row["name"]).symlink_to(docs.ROOT / row["link"])
        else:
            (tree / row["name"]).write_text(row["text"], encoding="utf-8")


class Shell:
    """The one shell of a page."""

    def __init__(self, tree, environment):
        self.folder, self.n = tree.with_suffix(".steps"), 0
        self.folder.mkdir()
        self.process = subprocess.Popen(["bash", "-c", DRIVER], cwd=tree, env=environment,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        start_new_session=True)
        os.set_blocking(self.process.stdout.fileno(), False)

    def run(self, statement, text):
        """(whether it ended well, what it printed)"""
        self.n += 1
        step = self.folder / str(self.n)
        step.write_text(statement, encoding="utf-8")
        pathlib.Path(f"{step}.in").write_text(text, encoding="utf-8")
        self.process.stdin.write(f"{step}\n".encode())
        self.process.stdin.flush()
        end, said = time.monotonic() + TIMEOUT, b""
        while not said.endswith(b"\n") and time.monotonic() < end and self.process.poll() is None:
            said += self.process.stdout.read() or b""
            time.sleep(0.02)
        try:
            out = pathlib.Path(f"{step}.out").read_text(encoding="utf-8", errors="replace")
        except OSError:
            out = ""
        status = said.decode().split()
        # A command that is cut off by the end of its pipe (zcat | head) did its work.
        well = bool(status) and status[-1] == "0" and set(status[:-1]) <= {"0", "141"}
        return well, out or f"(nothing printed; status {' '.join(status) or 'none'})"

    def close(self):
        for sign in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, sign)
                self.process.wait(10)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                pass
        self.process.stdin.close()
        self.process.stdout.close()


def run_page(page, table, still, scratch, environment, times):
    """What went wrong with the commands of a page, run one after the other."""
    listed = docs.read(docs.ROOT / page)
    todo = [(line, s) for line, s in listed if not table.first("listed", page, s)]
    if not todo:
        return
    ports = dict(zip(("8080", "8081", "8082"), free_ports(3)))
    tree = scratch / page.replace("/", "-").removesuffix(".md")
    furnish(tree, page, table, still)
    shell = Shell(tree, environment)
    try:
        for line, statement in todo:
            text = (table.first("input", page, statement) or {}).get("text", "")
            says = table.first("says", page, statement)
            smaller = table.smaller(page, statement)
            for port, free in ports.items():
                smaller = smaller.replace(port, free)
            serves = re.match(r"still serve .*--port (\d+)", smaller)
            if serves and not smaller.endswith("&"):
                smaller += " &"
            began = time.monotonic()
            well, out = shell.run(smaller, text)
            if serves and not listens(serves[1], 60):
                well, out = False, f"nobody listens: {out}"
            times.append((time.monotonic() - began, page, line, docs.one_line(smaller)))
            said = "\n".join(out.strip().splitlines()[-12:])
            if os.environ.get("VERBOSE"):
                print(f"{times[-1][0]:6.1f} s  {page}:{line}: {times[-1][3]}\n{said}", flush=True)
            if not well:
                yield f"{page}:{line}: {times[-1][3]}\n{said}"
            elif "still: warning: " in out and "warning" not in (says or {}).get("text", ""):
                yield f"{page}:{line}: {times[-1][3]}: warns\n{said}"
            elif says and not re.search(says["text"], out):
                yield f"{page}:{line}: {times[-1][3]}: does not say {says['text']}\n{said}"
    finally:
        shell.close()


def run(still, pattern):
    table = Table(docs.ROOT / "tests/docs/commands.toml")
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    if not (cache / "still/models/smollm2").is_dir():
        print("skipped: the default model is not in the cache")
        return 77
    wrong, times, began = [], [], time.monotonic()
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="still-docs-"))
    try:
        home = scratch / "home"
        (home / ".cache/still/models").mkdir(parents=True)
        (home / ".cache/still/models/smollm2").symlink_to(cache / "still/models/smollm2")
        (scratch / "bin").mkdir()
        (scratch / "bin/still").symlink_to(still)
        environment = {key: value for key, value in os.environ.items()
                       if not re.match(r"(?:HF|STILL|XDG|HUGGING)", key)}
        environment.update(HOME=str(home), TERM="dumb", LC_ALL="C.UTF-8", HF_HUB_OFFLINE="1",
                           PATH=f"{scratch}/bin:{os.environ['PATH']}",
                           OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
                           OMPI_MCA_rmaps_base_oversubscribe="1")
        environment.update({f"STILL_{key.upper().replace('-', '_')}": str(value)
                            for key, value in table.settings.items()})
        for path in docs.pages():
            page = path.relative_to(docs.ROOT).as_posix()
            if fnmatch.fnmatchcase(page, pattern):
                wrong += run_page(page, table, still, scratch, environment, times)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if pattern == "*":
        wrong += table.unused(("files", "input", "says"))
    print("\n".join(wrong))
    for seconds, page, line, short in sorted(times, reverse=True)[:10]:
        print(f"{seconds:6.1f} s  {page}:{line}: {short[:90]}")
    print(f"{len(times)} commands run in {time.monotonic() - began:.0f} s, {len(wrong)} wrong")
    return 1 if wrong or not times else 0


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # and end what was started
    options = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    options.add_argument("what", choices=("check", "run"))
    options.add_argument("program", type=os.path.abspath)
    options.add_argument("--page", default="*")
    given = options.parse_args()
    return check(given.program) if given.what == "check" else run(given.program, given.page)


if __name__ == "__main__":
    sys.exit(main())
