"""The commands of the documentation: which pages, which blocks, which statements.

A block is a ```sh fence, or an indented block in which a line begins with a program. Every
other fence must name what it is (```python, ```text), so that no command hides in one.
A statement is what bash reads as one: a line, or several that a backslash, a quote or a
pipe joins."""
import pathlib
import re
import shlex
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PAGES = ("README.md", "docs/*.md", "demo/*.md", "deploy/*.md", "models/*/*.md", "python/*.md",
         "examples/*.md", "CONTRIBUTING.md")
SHELL = {"sh", "bash", "console"}
OTHER = {"python", "c", "json", "text", "toml", "ini", "cmake", "gbnf"}
# What begins a line of an indented block of commands: a program by name, or one of the tree.
PROGRAMS = set("""still make cmake ctest curl pip python3 mpirun srun sbatch sudo apt docker podman
kubectl systemctl cat printf echo head tail zcat gzip source alias export cc git cd cp mkdir rm
chrt nice lm_eval sed grep time for if while""".split())
TREE = re.compile(r"(?:\./)?(?:build|bench|scripts|recipes|tools|eval|tests|examples)/[\w./-]+$")

LAUNCHERS = {"mpirun", "srun", "nice", "chrt", "sudo", "time", "env"}
STILL = re.compile(r"(?:[\w./-]*build/(?:\w+/)?)?still$")


class Wrong(Exception):
    """The documentation cannot be read as it should be."""


def pages(root=ROOT):
    return [page for pattern in PAGES for page in sorted(root.glob(pattern))]


def read(page):
    """The statements of a page. The page that the command prints has forms of usage in
    indented blocks, and examples in fences."""
    return statements(page.read_text(encoding="utf-8"), page.name == "cli.md")


def begins_with_program(line):
    words = line.split()
    while words and re.match(r"\w+=", words[0]):
        words.pop(0)
    return bool(words) and (words[0] in PROGRAMS or bool(TREE.match(words[0])))


def blocks(text, fenced_only=False):
    """(line number, code) of every block of commands, in order."""
    found, lines, at = [], text.splitlines(), 0
    while at < len(lines):
        fence = re.match(r"( *)```(\w*)", lines[at])
        if fence:
            end = at + 1
            while end < len(lines) and not lines[end].strip().startswith("```"):
                end += 1
            if fence[2] not in SHELL | OTHER:
                raise Wrong(f"{at + 1}: a block of '{fence[2]}', which is none of "
                            f"{', '.join(sorted(SHELL | OTHER))}")
            if fence[2] in SHELL:
                found.append((at + 2, [line[len(fence[1]):] for line in lines[at + 1:end]]))
            at = end + 1
        elif not fenced_only and lines[at].startswith("    ") and (at == 0 or not lines[at - 1].strip()):
            end = at
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            code = [line[4:] for line in lines[at:end]]
            if any(map(begins_with_program, code)):
                found.append((at + 1, code))
            at = end
        else:
            at += 1
    return found


def complete(code):
    return subprocess.run(["bash", "-n", "-c", code], capture_output=True).returncode == 0


def statements(text, fenced_only=False):
    """(line number, statement) of every command of a page, in order."""
    found = []
    for first, lines in blocks(text, fenced_only):
        parts, begin = [], first
        for number, line in enumerate(lines, first):
            if not parts and (not line.strip() or line.lstrip().startswith("#")):
                continue
            if not parts:
                begin = number
            parts.append(line)
            if not line.endswith("\\") and complete("\n".join(parts)):
                found.append((begin, "\n".join(parts)))
                parts = []
        if parts:
            raise Wrong(f"{begin}: bash cannot read this: {parts[0]}")
    return found


def without_comments(statement):
    """A statement less what follows a # that no quotes hold."""
    quoted = r"'[^']*'|\"(?:[^\"\\]|\\.)*\""
    return re.sub(rf"({quoted}|\\.)|(?<!\S)#[^\n]*", lambda found: found[1] or "", statement)


def one_line(statement):
    """A statement as messages and patterns have it: without line ends and comments."""
    return " ".join(re.sub(r"\\\n", " ", without_comments(statement)).split())


def inline(text):
    """Commands within sentences: `still serve --port 0`."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    spans = re.findall(r"`(still [a-z][^`]*)`", text)
    return [" ".join(span.split()) for span in spans]


def words_of(statement):
    """The simple commands of a statement, as lists of words; variables have a value."""
    text = re.sub(r"\\\n", " ", without_comments(statement))
    text = re.sub(r"\"?\$\{\w+\[@\]\}\"?", " ", text)  # an array: options, or none
    text = re.sub(r"\$\(\([^()]*\)\)|\$\{?\w+\}?", "1", text)
    text = re.sub(r"\$'", "'", text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars="();<>|&\n")
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    lexer.commenters = "#"
    commands, redirected = [[]], False
    for word in lexer:
        if set(word) <= set("<>&") and set(word) & set("<>"):
            redirected = True  # the next word is a file
        elif set(word) <= set("();<>|&\n"):
            commands.append([])
        elif redirected:
            redirected = False
        else:
            commands[-1].append(word)
    return [command for command in commands if command]


def starts(command):
    """Where the program of a simple command is: behind variables, and behind programs that
    start others. None: a launcher that starts nothing we know."""
    at = 0
    while at < len(command) and re.match(r"\w+=", command[at]):
        at += 1
    if at < len(command) and command[at] in LAUNCHERS:
        for behind in range(at + 1, len(command)):
            if STILL.match(command[behind]) or TREE.match(command[behind]):
                return behind
    return at if at < len(command) else None


def still_calls(statement):
    """What each `still` of a statement is given: lists of arguments."""
    calls = []
    for command in words_of(statement):
        at = starts(command)
        if at is not None and STILL.match(command[at]):
            calls.append(command[at + 1:])
    return calls


def tree_calls(statement):
    """(program, its options) of each program of the tree in a statement."""
    for command in words_of(statement):
        at = starts(command)
        if at is not None and TREE.match(command[at]) and \
                not re.match(r"(?:\./)?(?:build|tests)/", command[at]):
            yield command[at], [word.split("=")[0] for word in command[at + 1:]
                                if re.match(r"--[a-z]", word)]
