"""Every option of every command: a bad value is exit code 2 and one sentence, nothing written."""

from typing import Any, get_args

import pytest
from cyclopts import App

from flatlens import cli
from flatlens.cli.app import app

TINY = [
    *("--model-options.widths", "[64,4,10]", "--steps", "1", "--measure", "end", "--samples", "2"),
    *("--train-size", "8", "--evaluate", "4", "--quantities", "sharpness", "--quiet"),
]
# A command line for each command that would work, or fail, in a moment.
COMMANDS: dict[str, list[str]] = {
    "demo": ["--steps", "1", "--quiet"],
    "measure": ["torch.nn:Flatten", "--data", "digits", "--n", "2"],
    "train": ["--out", "run", *TINY],
    "sweep": ["--out", "runs", "--workers", "1", *TINY],
    "reproduce": ["no-such-figure", "--out", "results"],
    "zoo": ["--models", "no_such_model", "--images", "no-such-folder", "--out", "zoo"],
    "report": ["no-such-runs"],
    "compare": ["no-such-a", "no-such-b"],
}
COMMANDS = {command: words for command, words in COMMANDS.items() if command in app}
WORDS: dict[type, list[str]] = {
    int: ["x", "", "1.5", "nan", "inf", "-1", "1e400", "9" * 400, "1,5", "0x10"],
    float: ["x", "", "nan", "inf", "-1", "1e400", "--"],
    bool: ["=maybe", "=2", "=nan"],
}
# Options that take any text; a bad one is refused by what reads it.
TEXTS = ["", "no such value", "x" * 5_000, "no:such", "../..", "%s{}", "\udcff"]


def options(name: str) -> list[tuple[str, Any]]:
    """The long options of a command with the type of one value."""
    found: App = app[name]
    return [
        (argument.name, _single(argument.hint))
        for argument in found.assemble_argument_collection()
        if argument.name.startswith("--") and argument.parse
    ]


def _single(hint: Any) -> Any:
    """Return the type of one value: of `list[int] | None` it is int."""
    while get_args(hint) and not _is_literal(hint):
        hint = next(kind for kind in get_args(hint) if kind is not type(None))
    return hint


def _is_literal(hint: Any) -> bool:
    return all(isinstance(word, str) for word in get_args(hint))


def table() -> list[Any]:
    cases = []
    for command in COMMANDS:
        for option, hint in options(command):
            words = WORDS.get(hint) or (["no-such-choice", ""] if get_args(hint) else [])
            cases += [
                pytest.param(command, option, word, id=f"{command} {option} {word[:12]}")
                for word in words
            ]
    return cases


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(capsys, words):
    """The exit code; the command printed at most one sentence of an error."""
    code = cli.main(words)
    output = capsys.readouterr()
    assert "Traceback" not in output.err
    if code == 2:
        assert output.out == ""
        assert output.err.startswith("flatlens: ")
        assert output.err.count("\n") == 1
        assert len(output.err) < 3_000
    return code


@pytest.mark.parametrize(("command", "option", "word"), table())
def test_a_bad_value_is_one_sentence(command, option, word, folder, capsys):
    given = [option + word] if word.startswith("=") else [option, word]
    assert call(capsys, [command, *COMMANDS[command], *given]) == 2
    assert not list(folder.iterdir())


TEXT_OPTIONS = [
    (command, option, text)
    for command in ("measure", "train", "report", "zoo", "reproduce")
    for option, hint in options(command)
    if hint is str
    for text in TEXTS
]


@pytest.mark.parametrize(("command", "option", "text"), TEXT_OPTIONS)
def test_a_text_that_names_nothing_is_one_sentence(command, option, text, folder, capsys):
    call(capsys, [command, *COMMANDS[command], option, text])


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "words", [["--no-such-option"], ["--no-such-option", "3"], ["surplus", "words"], ["-Z"]]
)
def test_an_unknown_option_or_word_is_one_sentence(command, words, folder, capsys):
    given = words if command not in ("reproduce",) or words[0].startswith("-") else ["--", "-x"]
    assert call(capsys, [command, *COMMANDS[command], *given]) == 2
    assert not list(folder.iterdir())


def test_every_command_is_in_the_table():
    names = {name for name in app if not name.startswith("-")}
    assert names - set(COMMANDS) == {"data"}
