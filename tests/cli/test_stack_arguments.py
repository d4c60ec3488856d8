import json

import click
import pytest
from click.testing import CliRunner, Result

from outrider.cli.connection import warn
from outrider.cli.main import main
from outrider.cli.options import draft_at_option, drafter_option
from outrider.cli.stack_arguments import parse_size, stack_options, take_stack, unused_variables
from outrider.local.stack_options import StackOptions
from tests.client.scripted import ScriptedService


def taken(*arguments: str, **environment: str) -> tuple[Result, StackOptions | None]:
    found: list[StackOptions] = []

    @click.command()
    @drafter_option
    @draft_at_option
    @stack_options
    def command(**values: object) -> None:
        found.append(take_stack(values))

    result = CliRunner().invoke(command, arguments, env=environment)
    return result, found[0] if found else None


def options_of(*arguments: str, **environment: str) -> StackOptions:
    result, options = taken(*arguments, **environment)
    assert options is not None, (result.output, result.exception)
    return options


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1073741824", 1 << 30), ("8GiB", 8 << 30), ("512 MiB", 512 << 20), ("1.5gib", 3 << 29), ("2GB", 2 * 10**9)],
)
def test_sizes_have_units(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "many", "8 gigs", "-1", "GiB", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="such as 8GiB"):
        parse_size(text)


def test_every_option_reaches_the_service_that_has_its_setting() -> None:
    options = options_of(
        "--model", "org/large", "--drafter", "model", "--draft-model", "org/small",
        "--device", "cuda", "--draft-device", "cpu",
        "--kv-budget", "8GiB", "--max-len", "4096", "--quantization", "Int8WeightOnlyConfig", "--tensor-parallel", "2",
        "--generation-config", "none", "--ready-timeout", "60", "--dtype", "float16",
    )  # fmt: skip
    (target,), (draft,), (orchestrator,) = options.target_specs(), options.draft_specs(), options.orchestrator_specs({})
    assert target.environment["OUTRIDER_KV_BUDGET_BYTES"] == str(8 << 30)
    assert target.environment["OUTRIDER_MAX_SESSION_LEN"] == draft.environment["OUTRIDER_MAX_SESSION_LEN"] == "4096"
    assert (target.environment["OUTRIDER_DEVICE"], draft.environment["OUTRIDER_DEVICE"]) == ("cuda", "cpu")
    quantization = {"quant_method": "torchao", "quant_type": "Int8WeightOnlyConfig"}
    assert json.loads(target.environment["OUTRIDER_QUANTIZATION"]) == quantization
    assert "OUTRIDER_QUANTIZATION" not in draft.environment
    assert "OUTRIDER_KV_BUDGET_BYTES" not in draft.environment
    assert (target.num_ranks, draft.num_ranks) == (2, 1)
    assert orchestrator.environment["OUTRIDER_GENERATION_CONFIG"] == "none"
    assert options.ready_timeout_s == 60


def test_what_is_not_given_is_left_to_the_services() -> None:
    options = options_of()
    (target,), (orchestrator,) = options.target_specs(), options.orchestrator_specs({})
    assert not {"OUTRIDER_QUANTIZATION", "OUTRIDER_MAX_SESSION_LEN", "OUTRIDER_KV_BUDGET_BYTES"} & {*target.environment}
    assert "OUTRIDER_GENERATION_CONFIG" not in orchestrator.environment
    assert (target.num_ranks, options.ready_timeout_s) == (1, None)


def test_a_head_runs_at_both_places_unless_one_is_named() -> None:
    def places(*arguments: str) -> list[str]:
        return [draft.at for draft in options_of(*arguments).drafts]

    assert places() == ["service", "target"]
    assert places("--draft-at", "service") == ["service"]
    options = options_of("--draft-at", "target")
    (target,) = options.target_specs()
    assert not list(options.draft_specs())
    assert target.environment["OUTRIDER_COLOCATED_DRAFTER"] == "block+suffix"
    # Another device is not shared with the target, and a model drafts more sessions elsewhere.
    assert places("--draft-device", "cuda:1") == ["service"]
    assert places("--model", "org/large", "--drafter", "ngram") == ["service"]
    layers = options_of("--model", "org/large", "--drafter", "layers", "--num-layers", "3", "--draft-at", "target")
    (target,) = layers.target_specs()
    assert target.environment["OUTRIDER_COLOCATED_MODEL"] == "org/large"
    assert target.environment["OUTRIDER_COLOCATED_NUM_LAYERS"] == "3"


def test_a_combination_is_started_as_its_model_is() -> None:
    head = options_of("--drafter", "eagle3+suffix")
    assert [draft.at for draft in head.drafts] == ["service", "target"]
    (target,), (draft,) = head.target_specs(), head.draft_specs()
    assert (draft.name, draft.environment["OUTRIDER_DRAFTER"]) == ("draft-eagle3+suffix-0", "eagle3+suffix")
    assert draft.environment["OUTRIDER_MODEL"] == "embedded"
    assert target.environment["OUTRIDER_COLOCATED_DRAFTER"] == "eagle3+suffix"
    layers = options_of("--model", "org/large", "--drafter", "layers+suffix", "--num-layers", "3")
    (draft,) = layers.draft_specs()
    assert (draft.environment["OUTRIDER_MODEL"], draft.environment["OUTRIDER_NUM_LAYERS"]) == ("org/large", "3")
    result, _ = taken("--model", "org/large", "--drafter", "model+suffix")
    assert "needs a model that shares the target's tokenizer" in str(result.exception or result.output)


def test_variables_of_the_services_are_defaults() -> None:
    options = options_of(OUTRIDER_MODEL="org/large", OUTRIDER_KV_BUDGET_BYTES="4096", OUTRIDER_REDIS_URL="redis://r")
    assert (options.model, options.kv_budget_bytes, options.redis_url) == ("org/large", 4096, "redis://r")
    same = options_of("--model", "org/large", OUTRIDER_MODEL="org/large")
    assert same.model == "org/large"


def test_an_option_that_contradicts_its_variable_is_refused() -> None:
    result, options = taken("--model", "org/large", OUTRIDER_MODEL="org/other")
    assert (result.exit_code, options) == (2, None)
    assert "--model contradicts OUTRIDER_MODEL=org/other: give one of both" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "./nope"), "model: no such folder: ./nope"),
        (("--drafter", "model", "--draft-model", "/no/such"), "draft_model: no such folder: /no/such"),
        (("--quantization", "int3"), "quantization: is 'int3', must be a config of torchao"),
        (("--drafter", "none", "--draft-device", "cpu"), "draft_device goes with a drafter that has a model"),
        (("--drafter", "none", "--draft-at", "target"), "draft_at: a draft within the target has no device of its own"),
    ],
)
def test_wrong_values_are_named_before_anything_starts(arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(main, ["up", *arguments])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert message in result.stderr


@pytest.mark.parametrize(
    "given", [("--model", "org/large"), ("--dtype", "float32"), ("--redis-url", "redis://r"), ("--ready-timeout", "1")]
)
@pytest.mark.parametrize("command", [("generate", "x"), ("chat",)])
def test_options_of_a_stack_are_refused_beside_an_address(
    service: ScriptedService, command: tuple[str, ...], given: tuple[str, str]
) -> None:
    result = CliRunner().invoke(main, [*command, "--address", service.address, *given], input="")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert f"{given[0]} is of a stack that this command starts: not with --address" in result.stderr
    assert service.requests == []


@pytest.mark.parametrize("drafter", ["medusa", "model", "layers", "model+suffix"])
def test_beside_an_address_a_drafter_is_what_the_request_requires(service: ScriptedService, drafter: str) -> None:
    result = CliRunner().invoke(
        main, ["generate", "x", "--address", service.address, "--drafter", drafter, "--draft-at", "service"]
    )
    assert result.exit_code == 0, result.output
    (request,) = service.requests
    assert (request.speculation.drafter, request.speculation.draft_at) == (drafter, "service")


def test_a_variable_is_no_contradiction_to_an_address(service: ScriptedService) -> None:
    result = CliRunner().invoke(
        main, ["generate", "x", "--address", service.address], env={"OUTRIDER_MODEL": "org/large"}
    )
    assert result.exit_code == 0, result.output


def test_variables_without_effect_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    (sentence,) = unused_variables({"OUTRIDER_TARGETS": "127.0.0.1:1", "OUTRIDER_MODEL": "x", "OUTRIDER_DRAFTS": ""})
    warn(sentence)
    assert (
        capsys.readouterr().err == "outrider: warning: OUTRIDER_TARGETS is not used: the stack starts its own targets\n"
    )
