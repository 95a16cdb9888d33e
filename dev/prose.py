"""The project's prose linter: `python -m dev.prose [PATH]...`, part of `./make lint`.

It reads pages, docstrings, comments, string literals with sentences, and names of tests. One table holds the
rules. Other text is left out by its form: code blocks, text in backticks, and text in quotation marks (names,
and outputs of other programs). Literals of tests are left out, too: they quote texts. Names and docstrings of
tests may use relative clauses.

Vale could read pages, but not string literals and docstrings, and would be a second toolchain to install.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
FOLDERS = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs",
    "kvplace",
    "hooks",
    "dev",
    "harness",
    "benchmarks",
    "release",
    "manifests",
    "vm-templates",
    "tests",
)
LEFT_OUT = ("benchmarks/results/", "tests/test_prose.py", "dev/prose.py")
"""Outputs of benchmarks; the rules and their examples."""
KINDS = (
    *(".md", ".py", ".yaml", ".yml", ".tpl", ".json", ".sh", ".go", ".js", ".html"),
    *("Containerfile", "onDefineDomain", "kvplace-hook", "make", "make-certificates"),
)


@dataclass(frozen=True, slots=True)
class Rule:
    """One pattern that pages and messages avoid."""

    pattern: re.Pattern[str]
    write: str
    """The better wording."""


def _rule(pattern: str, write: str) -> Rule:
    """A space in the pattern is any white space, since text is wrapped."""
    return Rule(re.compile(pattern.replace(" ", r"\s+"), re.IGNORECASE), write)


WORDS = (
    _rule(r"\bmend(s|ed|ing)?\b", "fix, repair"),
    _rule(r"\b(VMs?|pods?|one|those) (that|which|who) asks?\b|\bwho asks?\b", "VM that opted in, request"),
    _rule(r"\bholes?\b", "largest free block, contiguous free CPUs"),
    _rule(r"\b(comes?|came|coming|become|becomes) free\b", "is released"),
    _rule(r"\b(is|are|was|were|be|been|being|goes|go|stays?) (away|silent)\b", "is unavailable, down, gone"),
    _rule(r"(?<![-\w])look(s|ed|ing)?\b(?!-)", "check, inspect, read, search"),
    _rule(r"\b(says?|said|saying|tells?|told|telling)\b", "report, print, state"),
    _rule(r"\bsurely mean[st]?\b|\bsurely meant\b", "likely a typo of"),
    _rule(r"\b(somebody|someone|anybody|anyone)\b", "a user, another writer, or the program by name"),
    _rule(r"\b(nobody|no one)\b", "no user, no VM, nothing"),
    _rule(r"\bin force\b", "active, in effect"),
    _rule(
        r"(?<!there\s)\b(is|are|was|were|be) no (?!longer\b|more\b|less\b|fewer\b|later\b|larger\b|one\b)",
        "is not a X, no such X",
    ),
    _rule(r"\btrue answer\b", "not an error"),
)
CLAUSES = (
    _rule(r"\bwhose\b", "a noun with 'with' or 'of', or a second sentence"),
    _rule(
        r"\b(of|for|to|in|on|with|by|from|at|under|after|before|about) (which|whom)\b", "a second sentence"
    ),
    _rule(r"\beverybody\b", "all users, all others"),
    _rule(r"\bthose (that|which|who)\b", "the noun with its clause"),
    _rule(r"\bwho(so|m)?ever\b", "a user or program that, or the noun"),
    _rule(r"\b(whatever|whichever)\b", "any, in every case, or a second sentence"),
    _rule(
        r"(?<!\buser\s)(?<!\busers\s)(?<!\bperson\s)(?<!\bpeople\s)(?<!\breaders\s)(?<!\boperator\s)\bwho\b",
        "'that' for a program, and a noun for a person",
    ),
    _rule(r"\b(goes|went|going) on\b|\bgo on (?!PATH)", "continue, run, or still"),
    _rule(r"\bfor ever\b", "forever, or without end"),
    _rule(
        r"\b(hence|whereby|thereby|thereof|whereas|upon|till|lest)\b", "a plain word, or a second sentence"
    ),
)
HEADINGS = (_rule(r"^(what|who|whose)\b", "a heading that names the thing"),)


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of prose, and the line where it begins."""

    line: int
    text: str
    is_heading: bool = False
    """Whether it is a heading, or the docstring of a module, class or function."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One place to rewrite."""

    path: str
    line: int
    words: str
    write: str

    def __str__(self) -> str:
        """Print it as compilers do."""
        return f"{self.path}:{self.line}: {self.words!r}: write {self.write}"


_MARKED = re.compile(
    r"```.*?(?:```|\Z)|``.*?``|`[^`\n]*(?:\n[^`\n]+)?`"  # code
    r"|\]\([^)\s]*\)|https?://\S+|<[a-z/!][^>]*>"  # targets of links, tags
    r'|"[^"\n]*"|“[^”]*”|(?<!\w)\'[^\'\n]+\'(?!\w)',  # quotations
    re.DOTALL,
)
_TITLED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_PROSE = re.compile(r"[A-Za-z]{2,} [a-z]+ [a-z]")


def findings(path: str, text: str) -> Iterator[Finding]:
    """Find the words of the rules in one file."""
    for piece in _pieces(path, text):
        plain = _MARKED.sub(_blank, piece.text)
        for rule in _rules(path, piece):
            for match in rule.pattern.finditer(plain):
                line = piece.line + plain.count("\n", 0, match.start())
                yield Finding(path, line, " ".join(match.group().split()), rule.write)


def _rules(path: str, piece: Piece) -> tuple[Rule, ...]:
    if path.startswith("tests/"):
        return WORDS
    return (*WORDS, *CLAUSES, *HEADINGS) if piece.is_heading else (*WORDS, *CLAUSES)


def _blank(marked: re.Match[str]) -> str:
    """Keep lines and a mark that is no word."""
    return "\n" * marked.group().count("\n") or "_"


def _pieces(path: str, text: str) -> Iterator[Piece]:
    if path.endswith(".md"):
        yield from _page(text)
    elif path.endswith((".py", "onDefineDomain", "kvplace-hook")):
        yield from _module(text, with_literals=not path.startswith("tests/"))
    elif path.endswith((".yaml", ".yml", ".tpl")):
        yield from _manifest(text)
    elif path.endswith(".json"):
        yield from _json(text)
    elif path.endswith((".go", ".js")):
        yield from _source(text)
    elif path.endswith(".html"):
        yield from _web_page(text)
    else:
        yield from _script(text)


def _page(text: str) -> Iterator[Piece]:
    """Read the headings one by one, and all other text at once: its sentences are wrapped."""
    plain = _MARKED.sub(_blank, text)
    for number, line in enumerate(plain.split("\n"), 1):
        if heading := re.match(r"#+ +", line):
            yield Piece(number, line[heading.end() :], is_heading=True)
    yield Piece(1, re.sub(r"^#.*", "", plain, flags=re.MULTILINE))


def _module(text: str, *, with_literals: bool) -> Iterator[Piece]:
    tree = ast.parse(text)
    titles = {node.body[0] for node in ast.walk(tree) if isinstance(node, _TITLED) and node.body}
    documentation: set[ast.AST] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(words)) as constant):
                documentation.add(constant)
                yield Piece(constant.lineno, words, is_heading=node in titles)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if name.startswith("test_"):
                yield Piece(node.lineno, name.replace("_", " "))
    if with_literals:
        for line, words in _literals(tree, documentation):
            if _PROSE.search(words):
                yield Piece(line, words)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield Piece(token.start[0], token.string.lstrip("# "))


def _literals(node: ast.AST, documentation: set[ast.AST]) -> Iterator[tuple[int, str]]:
    """List string literals; a value in an f-string is a mark that is no word."""
    match node:
        case ast.JoinedStr(values=values):
            parts = (str(one.value) if isinstance(one, ast.Constant) else "_" for one in values)
            yield node.lineno, "".join(parts)
        case ast.Constant(value=str(words)) if node not in documentation:
            yield node.lineno, words
        case _:
            for child in ast.iter_child_nodes(node):
                yield from _literals(child, documentation)


def _manifest(text: str) -> Iterator[Piece]:
    """Read the comments and the values of YAML that are sentences."""
    for number, line in enumerate(text.split("\n"), 1):
        value, _, comment = f" {line}".partition(" #")
        for words in (comment, re.sub(r"^[\s-]*[\w./-]+: ", "", value)):
            if _PROSE.search(words):
                yield Piece(number, words.strip("\"' "))


def _json(text: str) -> Iterator[Piece]:
    for number, line in enumerate(text.split("\n"), 1):
        value = re.sub(r'^\s*"\w+": ', "", line).strip('", ')
        if _PROSE.search(value):
            yield Piece(number, value)


def _script(text: str) -> Iterator[Piece]:
    """Read the comments of a shell script or a Containerfile."""
    for number, line in enumerate(text.split("\n"), 1):
        comment = re.match(r"\s*#(?!!)\s*(.*)", line)
        if comment is not None:
            yield Piece(number, comment[1])


def _source(text: str) -> Iterator[Piece]:
    """Read the comments and the literals of Go or JavaScript."""
    for number, line in enumerate(text.split("\n"), 1):
        comment = re.match(r"\s*(?://|/?\*)\s*(.*)", line)
        if comment is not None:
            yield Piece(number, comment[1])
        else:
            for words in re.findall(r'"([^"]*)"|`([^`]*)`', line):
                if _PROSE.search("".join(words)):
                    yield Piece(number, "".join(words))


def _web_page(text: str) -> Iterator[Piece]:
    """Read the text between the tags of a web page."""
    plain = re.sub(r"<!--|-->|<[^>]*>", _blank, text)
    for number, line in enumerate(plain.split("\n"), 1):
        yield Piece(number, line)


def _files(paths: Iterable[str]) -> Iterator[str]:
    wanted = [str(Path(path).resolve().relative_to(PROJECT)) for path in paths] or [*FOLDERS, "make"]
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", *wanted]
    listed = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    for name in listed.split("\0"):
        if name.endswith(KINDS) and not name.startswith(LEFT_OUT) and (PROJECT / name).is_file():
            yield name


def main(paths: list[str]) -> int:
    """Print the findings in the files of the project, or in the named ones."""
    found = [one for name in _files(paths) for one in findings(name, (PROJECT / name).read_text())]
    for one in found:
        print(one)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
