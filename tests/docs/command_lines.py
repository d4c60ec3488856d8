"""Checks of command lines in the documentation: programs, options, make targets, files and benches that exist."""

import ast
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Final

import click

from bench.registry import _MODULES as BENCHES
from draft_service.settings import DraftSettings
from orchestrator.settings import OrchestratorSettings
from outrider.cli.main import main
from outrider.serving.variables import complaints
from target_service.settings import TargetSettings
from tests.docs.pages import ROOT

_SERVICES: Final = {
    "target_service": TargetSettings,
    "draft_service": DraftSettings,
    "orchestrator": OrchestratorSettings,
}
_ASSIGNMENT: Final = re.compile(r"([A-Z][A-Z0-9_]*)=(.*)", re.DOTALL)


def check(words: Sequence[str], *, strict: bool) -> None:
    """Checks a command line.

    Args:
        words: of the line.
        strict: whether a program that is not known is an error; elsewhere a line may be no command.
    """
    rest = list(words)
    while rest and (assigned := _ASSIGNMENT.fullmatch(rest[0])):
        assert complaints({assigned[1]: assigned[2]}, ()) == []
        rest.pop(0)
    program, arguments = rest[0].removeprefix(".venv/bin/"), rest[1:]
    if program in _CHECKS:
        _CHECKS[program](arguments)
    else:
        assert not strict or program in _OTHERS, f"{program}: not known"


def _outrider(arguments: Sequence[str]) -> None:
    name, *rest = arguments
    assert name in main.commands, f"outrider {name}: no such command"
    command = main.commands[name]
    if name == "bench" and rest:
        _bench(rest)
        return
    # "..." stands for more options; what goes to or comes from files is the shell's.
    rest = [word for word in rest if word != "..."]
    rest = rest[: next((number for number, word in enumerate(rest) if word in ("<", ">", "|")), len(rest))]
    context = click.Context(command, info_name=name, help_option_names=["-h", "--help"])
    _, left, _ = command.make_parser(context).parse_args(args=list(rest))
    assert left == []


def _bench(arguments: Sequence[str]) -> None:
    name, *rest = arguments
    if name.isupper():
        return
    # Read, not imported: that would load a model library.
    tree = ast.parse((ROOT / BENCHES[name].replace(".", "/")).with_suffix(".py").read_text())
    (kind,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Options")
    options = {ast.unparse(item.target) for item in kind.body if isinstance(item, ast.AnnAssign)}
    for argument in rest:
        assert argument.partition("=")[0] in options or argument.startswith("--"), f"outrider bench {name}: {argument}"


def _python(arguments: Sequence[str]) -> None:
    assert arguments[0] == "-m"
    name, *rest = arguments[1:]
    if name in _SERVICES:
        _service(name, rest)
    elif name not in ("outrider.serving", "venv"):
        assert importlib.util.find_spec(name), name


def _service(name: str, arguments: Sequence[str]) -> None:
    fields = _SERVICES[name].model_fields
    for option in (word for word in arguments if word.startswith("--")):
        assert option.removeprefix("--").replace("-", "_") in fields, f"{name} {option}"


def _torchrun(arguments: Sequence[str]) -> None:
    number = arguments.index("-m")
    _service(arguments[number + 1], arguments[number + 2 :])


def _make(arguments: Sequence[str]) -> None:
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for name in (word for word in arguments if "=" not in word):
        assert name in targets, f"make {name}"


def _kubectl(arguments: Sequence[str]) -> None:
    for option, value in pairwise(arguments):
        if option in ("-k", "-f", "kustomize"):
            assert (ROOT / value).exists(), value


def _docker(arguments: Sequence[str]) -> None:
    file = (ROOT / "Dockerfile").read_text()
    for option, value in pairwise(arguments):
        if option == "--target" and not value.isupper():
            assert re.search(rf"^FROM \S+ AS {value}$", file, re.MULTILINE), value
        if option == "--build-arg":
            assert re.search(rf"^ARG {value.partition('=')[0]}(=|$)", file, re.MULTILINE), value


_CHECKS: Final[Mapping[str, Callable[[Sequence[str]], None]]] = {
    "outrider": _outrider,
    "python": _python,
    "torchrun": _torchrun,
    "make": _make,
    "kubectl": _kubectl,
    "docker": _docker,
}
_OTHERS: Final = frozenset({"curl", "kill", "pip", "printf"})
