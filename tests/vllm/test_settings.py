"""A wrong setting, or configuration of vLLM, is one line that names what to set."""

from types import SimpleNamespace
from typing import Any

import pytest

from outrider.errors import InvalidArgument
from outrider.serving.settings import environment_settings
from outrider.vllm.making import check, version_problem
from outrider.vllm.settings import DraftingSettings


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({}, "OUTRIDER_DRAFTS: "),
        ({"OUTRIDER_DRAFTS": "http://drafts"}, "OUTRIDER_DRAFTS: "),
        ({"OUTRIDER_DRAFTS": "kubernetes:///draft:grpc"}, "dns:///host:port here"),
        ({"OUTRIDER_DRAFTS": "a:1", "OUTRIDER_DRAFT_MAX_WAIT_S": "-1"}, "OUTRIDER_DRAFT_MAX_WAIT_S: "),
        ({"OUTRIDER_DRAFTS": "a:1", "OUTRIDER_TLS_KEY": "/key"}, "tls_certificate and tls_key go together"),
        ({"OUTRIDER_DRAFTS": "a:1", "OUTRIDER_LOKAHEAD": "3"}, "OUTRIDER_LOOKAHEAD"),
    ],
    ids=["no drafts", "no place", "a cluster", "a negative wait", "a key alone", "a misspelt name"],
)
def test_a_wrong_variable_is_named(variables: dict[str, str], problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgument) as found:
        environment_settings(DraftingSettings)
    assert problem in found.value.message
    assert "\n" not in found.value.message


def configuration(**changes: Any) -> SimpleNamespace:
    """The parts of a `VllmConfig` that are checked."""
    values = {
        "speculative_config": SimpleNamespace(method="custom_class", num_speculative_tokens=5),
        "scheduler_config": SimpleNamespace(async_scheduling=False),
        "use_v2_model_runner": False,
        "parallel_config": SimpleNamespace(pipeline_parallel_size=1),
    }
    return SimpleNamespace(**values | changes)


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"speculative_config": None}, "--speculative-config"),
        ({"speculative_config": SimpleNamespace(method="ngram")}, "--speculative-config"),
        ({"scheduler_config": SimpleNamespace(async_scheduling=True)}, "--no-async-scheduling"),
        ({"use_v2_model_runner": True}, "VLLM_USE_V2_MODEL_RUNNER=0"),
        ({"parallel_config": SimpleNamespace(pipeline_parallel_size=2)}, "--pipeline-parallel-size 1"),
    ],
)
def test_a_configuration_that_cannot_draft_is_answered_with_the_option(changes: dict[str, Any], option: str) -> None:
    check(configuration())
    with pytest.raises(InvalidArgument) as found:
        check(configuration(**changes))
    assert option in found.value.message


@pytest.mark.parametrize(("version", "is_served"), [("0.32", True), ("0.32.1", True), ("0.33.0", False), ("", False)])
def test_only_versions_that_were_tested_are_served(version: str, is_served: bool) -> None:
    assert bool(version_problem(version)) != is_served
