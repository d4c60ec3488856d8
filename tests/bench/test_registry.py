"""The benchmarks by name, and the validation of their options; `make bench-check` tests their figures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import capacity, load, registry
from bench.kinds import KINDS
from outrider.errors import InvalidArgument


def test_a_capacity_lies_between_the_loads_that_get_the_rate_and_those_that_do_not() -> None:
    points = [(1, 16.0), (4, 8.0), (16, 4.0)]
    assert capacity.capacity(points, 8.0) == pytest.approx(4)
    assert capacity.capacity(points, 32**0.5) == pytest.approx(8)
    assert capacity.capacity(points, 1.0) == 16
    assert capacity.capacity(points, 20.0) == 0
    with pytest.raises(InvalidArgument):
        registry.run("capacity", arguments={"sessions": "4,1"})


def test_there_are_ten_prompts_of_each_kind() -> None:
    assert [len(prompts) for prompts in KINDS.values()] == [10, 10, 10, 10]
    assert len({prompt for prompts in KINDS.values() for prompt in prompts}) == 40


def test_every_bench_names_its_options() -> None:
    assert {"load", "engine", "context"} <= set(registry.names())
    with pytest.raises(InvalidArgument, match="the options are sessions"):
        registry.run("load", arguments={"nonsense": "1"})


@pytest.mark.parametrize(
    ("bench", "arguments"),
    [
        ("load", {"sessions": "1,x"}),
        ("load", {"sessions": "0"}),
        ("load", {"model": "shape:nonsense"}),
        ("engine", {"part": "speed,nonsense"}),
        ("context", {"lengths": "64,16"}),
    ],
)
def test_wrong_options_are_named(bench: str, arguments: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(arguments))):
        registry.run(bench, arguments=arguments)


def test_waves_follow_until_all_prompt_lengths_have_been() -> None:
    options = load.Options(prompt_lens="1,2,3")
    assert options.lengths(1) == [[1], [2], [3], [1], [2], [3], [1], [2]]
    assert options.lengths(2)[:4] == [[1, 2], [3, 1], [2, 3], [1, 2]]
    assert options.lengths(8)[:2] == [[1, 2, 3, 1, 2, 3, 1, 2], [3, 1, 2, 3, 1, 2, 3, 1]]
    assert [len(options.lengths(num)) for num in (4, 8, 16, 32, 64)] == [8, 8, 4, 2, 1]


def test_the_command_line_measures_and_draws(tmp_path: Path) -> None:
    """Run in a process of its own, because gRPC's asyncio is bound to the first event loop that uses it."""
    picture = tmp_path / "commits.png"
    program = [sys.executable, "-c", "from outrider.cli.main import main; main()"]
    options = ["num_sessions=20", "num_rounds=32", "prompt_len=20", "--json", "--plot", str(picture)]
    done = subprocess.run([*program, "bench", "commits", *options], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["bench"] == "commits"
    assert 0 < result["figures"]["commit_p50_s"] <= result["figures"]["commit_p99_s"] < 1
    assert picture.stat().st_size > 1000
