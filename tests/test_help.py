"""`--help` of every command: a sentence, its options, and an example that the command accepts."""

import re
import shlex
from dataclasses import fields

import pytest
from typer.main import get_command

from flash_frac.cli import app
from tests.commands import frac


def walk(command, path=("frac",)):
    """All commands and groups, by the words that one types."""
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from walk(inner, (*path, name))


COMMANDS = dict(walk(get_command(app)))
GROUPS = [path for path, command in COMMANDS.items() if hasattr(command, "commands")]
each_command = pytest.mark.parametrize("path", COMMANDS, ids=" ".join)


@each_command
def test_a_sentence_and_an_example(path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    done = frac(*path[1:], "--help")
    assert done.returncode == 0, done.stderr
    first = (COMMANDS[path].help or "").split("\n\n")[0]
    assert re.match(r"[A-Z].*[\w\])][.]$", first, re.DOTALL), first
    words = " ".join(done.stdout.split())
    assert " ".join(first.split()) in words
    assert f"Example: {' '.join(path)}" in words


@each_command
def test_the_command_accepts_its_example(path):
    """It has all arguments it needs, and options that exist."""
    (line,) = re.findall(r"Example: (.*)", COMMANDS[path].help)
    typed = shlex.split(line)
    assert tuple(typed[: len(path)]) == path
    command, rest = COMMANDS[path], typed[len(path) :]
    if path in GROUPS:
        # A group passes on to a command; frac eval CHECKPOINT means frac eval run CHECKPOINT.
        rest = rest if rest[0] in command.commands else ["run", *rest]
        command, rest = command.commands[rest[0]], rest[1:]
    command.make_context(path[-1], rest)


@each_command
def test_every_option_is_explained(path):
    """By a sentence: no fragment that opens with "Of", "What" or "Where"."""
    for option in COMMANDS[path].params:
        if getattr(option, "hidden", False) or "--help" in option.opts:
            continue
        text = getattr(option, "help", None)
        assert text and text.endswith("."), option.name
        assert not re.match(r"(Of|What|Where|For) ", text), (option.name, text)


@each_command
def test_arguments_are_in_capitals(path):
    """As in the texts and errors that name them."""
    command = COMMANDS[path]
    usage = command.get_usage(command.context_class(command, info_name=path[-1]))
    for argument in command.params:
        if argument.param_type_name == "argument":
            assert re.search(rf"\b{argument.name.upper()}\b", usage), usage


def test_fields_of_the_training_help_exist():
    """A recipe may set each of those that it lists, and they are in lines of their own."""
    from flash_frac.data import DataArguments
    from flash_frac.train.arguments import FracTrainingArguments, ModelArguments

    parts = (ModelArguments, DataArguments, FracTrainingArguments)
    known = {field.name for part in parts for field in fields(part)}
    listed = re.findall(r"^ *--(\w+) ", COMMANDS["frac", "train"].help, re.MULTILINE)
    assert len(listed) > 8 and set(listed) <= known
    lines = frac("train", "--help").stdout.splitlines()
    assert sum(line.strip().startswith("--data_files my-texts") for line in lines) == 1
