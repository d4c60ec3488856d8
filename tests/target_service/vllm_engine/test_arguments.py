"""The arguments of vLLM: the target's own, the operator's, and those that are at odds."""

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from outrider.errors import InvalidArgument
from target_service.settings import TargetSettings
from target_service.vllm_engine.arguments import engine_arguments


def arguments(given: object = None, **settings: Any) -> dict[str, Any]:
    chosen = {} if given is None else {"engine_args": json.dumps(given)}
    return engine_arguments(TargetSettings(engine="vllm", model="m", **chosen, **settings))  # type: ignore[arg-type]


def test_proposals_come_to_our_scheduler_in_synchronous_steps() -> None:
    found = arguments()
    assert found["model"] == "m"
    assert found["scheduler_cls"] == "target_service.vllm_engine.scheduler.TargetScheduler"
    assert found["async_scheduling"] is False
    assert found["speculative_config"]["method"] == "custom_class"
    assert found["speculative_config"]["num_speculative_tokens"] == 8


def test_the_operators_arguments_come_before_the_targets_settings() -> None:
    found = arguments({"dtype": "float16", "tensor_parallel_size": 2}, dtype="float32", max_sessions=9)
    assert (found["dtype"], found["tensor_parallel_size"], found["max_num_seqs"]) == ("float16", 2, 9)
    found = arguments({"speculative_config": {"num_speculative_tokens": 3}})
    assert found["speculative_config"]["num_speculative_tokens"] == 3
    assert found["speculative_config"]["model"] == "outrider.vllm.NoProposals"
    assert arguments({"speculative_config": None})["speculative_config"] is None


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"async_scheduling": True}, "async_scheduling"),
        ({"scheduler_cls": "other.Scheduler"}, "scheduler_cls"),
        ({"speculative_config": {"method": "ngram"}}, "speculative_config"),
        ({"speculative_config": 3}, "speculative_config"),
    ],
)
def test_arguments_that_the_target_decides_are_refused_by_name(given: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        arguments(given)


@pytest.mark.parametrize(
    "settings",
    [
        {"engine_args": "{}"},
        {"engine": "vllm", "kv_blocks_url": "redis://h"},
        {"engine": "vllm", "colocated_drafter": "ngram"},
        {"engine": "vllm", "quantization": '{"quant_method": "x"}'},
        {"engine": "vllm", "engine_args": "[1]"},
        {"engine": "other"},
    ],
)
def test_settings_without_a_meaning_are_refused(settings: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        TargetSettings(**settings)  # type: ignore[arg-type]


def test_only_the_chosen_engine_is_imported() -> None:
    code = "import sys, target_service.__main__; sys.exit('torch' in sys.modules or 'vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
    code = "import sys, target_service.vllm_engine.engine; sys.exit('torch' in sys.modules or 'vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_the_start_ends_with_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "target_service", "--engine", "vllm"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "engine vllm needs vLLM, which cannot be imported" in done.stderr
    assert "Traceback" not in done.stderr
