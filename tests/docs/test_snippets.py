"""Code blocks and names in the documentation: Python that compiles and imports, commands and variables that exist."""

import ast
import importlib
import json
import re
from pathlib import Path

import click
import pytest

from outrider.serving.variables import complaints
from tests.docs.command_lines import check
from tests.docs.pages import PAGES, Block, blocks, commands, name_of

BLOCKS = [block for page in PAGES for block in blocks(page)]
_VARIABLE = re.compile(r"OUTRIDER_[A-Z0-9_]*[A-Z0-9]\b(?!\*|_)")


def of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def title(block: Block) -> str:
    return f"{block.page}:{block.text.strip().partition(chr(10))[0][:40]}"


def test_there_are_blocks_of_every_kind() -> None:
    assert len(of("python")) >= 12
    assert len(of("sh")) >= 20


@pytest.mark.parametrize("block", of("python"), ids=title)
def test_python_imports_what_exists(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)


@pytest.mark.parametrize("block", of("json"), ids=title)
def test_json_is_json(block: Block) -> None:
    json.loads(block.text)


@pytest.mark.parametrize("block", of("sh", ""), ids=title)
def test_commands_exist(block: Block) -> None:
    if block.language == "" and "──" in block.text:
        return
    for words in commands(block):
        check(words, strict=block.language == "sh")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_variables_exist(page: Path) -> None:
    assert complaints(set(_VARIABLE.findall(page.read_text())), ()) == []


@pytest.mark.parametrize(
    "line",
    [
        ["outrider", "generate", "Hi", "--colour"],
        ["outrider", "sing"],
        ["outrider", "bench", "speed", "rounds=3"],
        ["python", "-m", "target_service", "--models", "x"],
        ["OUTRIDER_MODELS=x", "outrider", "up"],
        ["make", "nothing"],
        ["docker", "build", "--target", "proxy"],
        ["kubectl", "apply", "-k", "k8s/overlays/nowhere"],
        ["outride", "up"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_is_found(line: list[str]) -> None:
    with pytest.raises((AssertionError, click.NoSuchOption)):
        check(line, strict=True)
