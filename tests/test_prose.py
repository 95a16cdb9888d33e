"""The prose linter finds the words that the project avoids, in its own prose and nowhere else."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dev import prose

EXAMPLES = (
    ("a person mends it", "mends"),
    ("the pods that ask for cores", "pods that ask"),
    ("the largest hole in a node", "hole"),
    ("until the cores come free", "come free"),
    ("while the API server is away", "is away"),
    ("the nodes are looked at again", "looked"),
    ("the agent says why", "says"),
    ("one of its keys was surely meant", "surely meant"),
    ("unless somebody else writes it", "somebody"),
    ("that nobody reads", "nobody"),
    ("the placement in force", "in force"),
    ("this is no page size", "is no"),
    ("exit code 3 is a true answer", "true answer"),
)
CLAUSES = (
    ("a pod whose node is gone", "whose"),
    ("the node on which it runs", "on which"),
    ("the page that everybody reads", "everybody"),
    ("the pods and those that wait", "those that"),
    ("a right of whoever owns it", "whoever"),
    ("it ends, whatever it does", "whatever"),
    ("a client who calls it", "who"),
    ("the search goes on without it", "goes on"),
    ("it would wait for ever", "for ever"),
    ("the pod thereby gets cores", "thereby"),
)


def words(path: str, text: str) -> list[tuple[int, str]]:
    return [(found.line, found.words) for found in prose.findings(path, text)]


def test_every_rule_has_an_example() -> None:
    used = [
        rule
        for text, _ in (*EXAMPLES, *CLAUSES)
        for rule in (*prose.WORDS, *prose.CLAUSES)
        if rule.pattern.search(text)
    ]
    assert used == [*prose.WORDS, *prose.CLAUSES]


@pytest.mark.parametrize(("text", "found"), [*EXAMPLES, *CLAUSES])
def test_a_rule_finds_its_words_wherever_prose_stands(text: str, found: str) -> None:
    assert words("docs/page.md", f"# Title\n\n{text.capitalize()}.\n")[0][0] == 3
    for name, content in (
        ("kvplace/module.py", f'"""A module: {text}."""\n'),
        ("kvplace/module.py", f"x = 1  # {text}\n"),
        ("kvplace/module.py", f'raise Refused("it failed because {text}")\n'),
        ("kvplace/module.py", f'print(f"{{node}} failed because {text}")\n'),
        ("manifests/a.yaml", f"# {text}\n"),
        ("manifests/a.yaml", f"    description: A field and {text}.\n"),
        ("manifests/a.json", f'   "title": "It is so because {text}",\n'),
        ("hooks/Containerfile", f"# {text}\n"),
        ("harness/a.go", f"// Name is a name: {text}.\n"),
        ("kvplace/web/pages/a.js", f'show("it is here, but {text}");\n'),
        ("kvplace/web/pages/a.html", f"<p>It is here, but {text}.</p>\n"),
    ):
        assert words(name, content) == [(1, found)], name


@pytest.mark.parametrize(("text", "found"), EXAMPLES)
def test_names_and_docstrings_of_tests_are_read(text: str, found: str) -> None:
    name = f"def test_{text.replace(' ', '_')}() -> None:\n    pass\n"
    assert words("tests/module.py", name) == [(1, found)]
    assert words("tests/module.py", f'"""A module: {text}."""\n') == [(1, found)]


def test_a_phrase_is_found_across_the_end_of_a_line() -> None:
    assert words("docs/page.md", "# Title\n\nThe node on\nwhich it runs.\n") == [(3, "on which")]
    assert words("kvplace/module.py", '"""The node on\nwhich it runs."""\n') == [(1, "on which")]


def test_tests_may_use_relative_clauses() -> None:
    assert words("tests/module.py", '"""A pod whose node is gone, on which it ran."""\n') == []
    assert words("tests/module.py", "def test_a_pod_whose_node_is_gone() -> None:\n    pass\n") == []


@pytest.mark.parametrize("title", ["What the agent does", "Who may read the map", "Whose core it is"])
def test_headings_and_first_lines_name_their_thing(title: str) -> None:
    first = title.partition(" ")[0]
    assert words("docs/page.md", f"## {title}\n")[0] == (1, first)
    assert words("kvplace/module.py", f'"""{title}."""\n')[0] == (1, first)
    assert words("kvplace/module.py", f'def f() -> None:\n    """{title}."""\n')[0] == (2, first)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("docs/page.md", "```\nthe agent says nobody is away\n```\n"),
        ("docs/page.md", "Write `kubectl say` or [a page](nobody/says.md).\n"),
        ("docs/page.md", 'The kubelet prints "nobody says so".\n'),
        ("docs/page.md", "There is no node. It is no longer there, and that is no more.\n"),
        ("docs/page.md", "A look-up of a name.\n"),
        ("docs/page.md", "A user who runs pods, and people who see colours.\n"),
        ("docs/page.md", "What does it cost? Nothing.\n"),
        ("kvplace/module.py", 'say("done")\nlook = {"somebody": "says"}\n'),
        ("kvplace/module.py", 'KEY = "kvplace.io/says"\n'),
        ("kvplace/module.py", 'print(f"it is {nobody} and {says}")\n'),
        ("kvplace/module.py", '"""Names `somebody` and\n`nobody says`."""\n'),
        ("kvplace/module.py", 'class A:\n    x: int\n    """What differs; empty where nothing does."""\n'),
        ("tests/module.py", 'assert "the kubelet says that nobody looked" in text\n'),
        ("kvplace/web/pages/a.js", "#say(state, words) {\n"),
        ("manifests/a.yaml", "nobody: says\nlook: [somebody]\n"),
    ],
)
def test_code_and_quotations_are_left_alone(path: str, text: str) -> None:
    assert words(path, text) == []


def test_a_finding_names_its_line_inside_of_a_long_text() -> None:
    text = (
        '"""A module.\n\nIt has lines.\nThe agent says why.\n"""\n\nx = ("none here, but " "it says why")\n'
    )
    (first, second) = prose.findings("kvplace/module.py", text)
    assert str(first) == "kvplace/module.py:4: 'says': write report, print, state"
    assert second.line == 7


def test_the_command_prints_findings_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prose, "PROJECT", tmp_path)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    for name in ("kvplace/a.md", "hooks/a.md", "benchmarks/results/a.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("The agent says why.\n")
    assert prose.main([]) == 1
    found = capsys.readouterr().out.splitlines()
    assert [line.rpartition(": ")[0] for line in found] == ["hooks/a.md:1: 'says'", "kvplace/a.md:1: 'says'"]
    (tmp_path / "hooks/a.md").write_text("The agent reports why.\n")
    assert prose.main([str(tmp_path / "hooks/a.md")]) == 0
    assert capsys.readouterr().out == ""
