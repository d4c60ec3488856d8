"""A compiled function does what the compiler's own call does, and is found again on disk as it was kept."""

import json
import os
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor, fx, nn
from torch.export import Dim

from outrider.lm import code_store
from outrider.lm.code_store import load_code, save_code
from outrider.lm.compilation import _use_disk_cache
from outrider.lm.compiled_function import CompiledFunction, Run, _function_of, compile_function


class Doubled(nn.Module):
    def forward(self, rows: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sin(rows) * 2 + other[0], rows.sum(-1)


def graph_of(module: nn.Module, *tensors: Tensor) -> tuple[fx.GraphModule, list[Tensor]]:
    exported = torch.export.export(module, tensors, dynamic_shapes=({0: Dim.AUTO}, None))
    inputs = [node.meta["val"] for node in exported.graph.find_nodes(op="placeholder")]
    return exported.graph_module, inputs


@pytest.fixture
def tensors() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 8), torch.randn(3, 8)


@pytest.fixture
def function(tensors: tuple[Tensor, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CompiledFunction:
    monkeypatch.setattr(code_store, "cache_dir", lambda: tmp_path)
    made = compiled(tensors)
    assert isinstance(made, CompiledFunction)
    return made


@torch.no_grad()
def compiled(tensors: tuple[Tensor, Tensor]) -> Run:
    _use_disk_cache()
    return compile_function(*graph_of(Doubled(), *tensors), tensors)


def check(made: Run, other: Tensor) -> None:
    for num_rows in (2, 6, 50):
        rows = torch.randn(num_rows, 8)
        for output, expected in zip(made(rows, other), Doubled()(rows, other), strict=True):
            assert torch.allclose(output, expected, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler, about its own code
def test_it_runs_any_number_of_rows(function: CompiledFunction, tensors: tuple[Tensor, Tensor]) -> None:
    check(function, tensors[1])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler, about its own code
def test_another_result_than_the_compilers_own_is_not_taken(
    tensors: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = CompiledFunction.__call__
    monkeypatch.setattr(CompiledFunction, "__call__", lambda self, *given: run(self, *given)[::-1])
    made = compiled(tensors)
    assert not isinstance(made, CompiledFunction)
    check(made, tensors[1])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler, about its own code
def test_it_is_loaded_as_it_was_kept(
    function: CompiledFunction, tensors: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    assert load_code("a") is None
    save_code("a", [function, function], {"names": ["b"]})
    kept = load_code("a")
    assert kept is not None
    functions, facts = kept
    assert facts == {"names": ["b"]}
    assert len(functions) == 2
    for made in functions:
        check(made, tensors[1])
        assert tmp_path in made.library.parents
    # Kept again, over what is loaded.
    save_code("a", [function], {})
    check(functions[0], tensors[1])
    assert load_code("a") is not None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler, about its own code
def test_damaged_files_count_as_none(function: CompiledFunction) -> None:
    save_code("a", [function], {})
    kept = load_code("a")
    assert kept is not None
    library = kept[0][0].library
    facts = library.parent / "facts.json"
    good = library.read_bytes(), facts.read_bytes()
    for path, content in (
        (library, good[0][:-1]),
        (library, b""),
        (facts, b""),
        (facts, good[1][:-1]),
        (facts, b"[]"),
        (facts, json.dumps({"digests": [], "facts": 1}).encode()),
        (facts, good[1].replace(b"{}", b"{ }")),
    ):
        path.unlink()
        path.write_bytes(content)
        assert load_code("a") is None
        library.unlink()
        library.write_bytes(good[0])
        facts.write_bytes(good[1])
    library.unlink()
    assert load_code("a") is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler, about its own code
def test_what_was_not_used_for_longest_is_removed(
    function: CompiledFunction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_store, "_MAX_FOLDERS", 2)
    folder = tmp_path / "compiled" / "kept"
    for number, key in enumerate("ab"):
        save_code(key, [function], {})
        os.utime(folder / key, (number, number))
    assert load_code("a") is not None
    save_code("c", [function], {})
    assert sorted(path.name for path in folder.iterdir()) == ["a", "c"]


def test_an_entry_that_takes_other_inputs_than_the_graph_is_not_called() -> None:
    module = SimpleNamespace(inductor_entry=None, call=_plain, cpp_wrapper_src="raii_handles(input_handles, 4)")
    assert _function_of([cast(ModuleType, module)], 2) is None
    assert _function_of([], 2) is None


def _plain(args: object) -> None:
    """As the compiler's own call, but for what it does."""


def test_what_is_no_library_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_store, "cache_dir", lambda: tmp_path)
    save_code("a", [lambda: None], {})
    assert load_code("a") is None
    assert not list(tmp_path.iterdir())
