import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from rich.progress import Progress

from outrider import wire
from outrider.cli.distill import Bars
from outrider.cli.main import main
from outrider.cli.options import sampling_options, take_given_sampling
from outrider.cli.rendering import origins_of_words
from outrider.constraint import Constraint
from outrider.errors import InvalidArgument, Overloaded
from outrider.parameters import SamplingParameters
from outrider.tokens import TokenOrigin
from outrider.v1 import tokens_pb2
from tests.client.scripted import HANG, WORDS, ScriptedService, accepted, delta, finished, whole

TEXT = "".join(WORDS)
COMMANDS = ("up", "generate", "chat", "info", "bench", "distill", "demo")


def outrider(*arguments: str, input: str | None = None) -> Result:
    return CliRunner().invoke(main, arguments, input=input)


def test_generate_streams_the_text(service: ScriptedService) -> None:
    result = outrider("generate", "Hello", "--address", service.address)
    assert (result.exit_code, result.stdout) == (0, TEXT + "\n")
    assert "acceptance rate 75%" in result.stderr
    assert "session s" in result.stderr
    assert service.requests[0].text == "Hello"


def test_generate_json_prints_exactly_one_object(service: ScriptedService) -> None:
    result = outrider("generate", "Hello", "--address", service.address, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout) == {
        "text": TEXT,
        "token_ids": list(range(len(WORDS))),
        "finish_reason": "length",
        "session_id": "s",
        "seed": 7,
        "stats": {
            "num_drafts": 4,
            "num_draft_tokens": 8,
            "num_accepted_tokens": 6,
            "num_accepted_tokens_per_pos": [4, 2],
            "num_accepted_tokens_by_drafter": {},
            "acceptance_rate": 0.75,
            "mean_acceptance_length": 2.5,
            "tokens_per_second": 20.0,
            "time_to_first_token_s": 0.5,
            "num_target_passes": 4,
            "drafter": "",
            "draft_at": "",
            "acceptance_rule": None,
            "varying_numerics": False,
            "feature_bytes": 0,
            "num_recomputed_tokens": 0,
            "num_proposed_nodes": 0,
            "num_wasted_nodes": 0,
            "hit_rate": 0.0,
            "duration_s": 0.0,
            "target_time_s": 0.0,
            "wait_time_s": 0.0,
            "queue_time_s": 0.0,
            "predicted_tokens_per_second": 0.0,
        },
    }


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ({"suffix": 30, "eagle3+suffix": 12, "eagle3": 41}, "accepted: 41 eagle3, 30 suffix, 12 both"),
        ({"suffix": 3, "eagle3": 4}, "accepted: 4 eagle3, 3 suffix"),
        ({"eagle3+suffix": 2}, "accepted: 2 both"),
        # With three of them, which two is not clear from the word.
        ({"eagle3+suffix": 2, "ngram": 1}, "accepted: 1 ngram, 2 eagle3+suffix"),
    ],
)
def test_generate_counts_accepted_tokens_by_drafter(
    service: ScriptedService, counts: dict[str, int], words: str
) -> None:
    message = finished(1)
    message.finished.statistics.num_accepted_tokens_by_drafter.update(counts)
    service.scripts = [[accepted(), delta(0), message]]
    result = outrider("generate", "Hello", "--address", service.address)
    assert f" · {words} · " in result.stderr
    as_json = outrider("generate", "Hello", "--address", service.address, "--json")
    assert json.loads(as_json.stdout)["stats"]["num_accepted_tokens_by_drafter"] == counts


def test_generate_does_not_divide_what_one_drafter_proposed(service: ScriptedService) -> None:
    assert "accepted:" not in outrider("generate", "Hello", "--address", service.address).stderr


def test_generate_json_has_logprobs_where_asked_for(service: ScriptedService) -> None:
    message = delta(0)
    message.delta.logprobs.append(
        tokens_pb2.TokenLogprobs(logprob=-0.5, rank=1, top_token_ids=[0], top_logprobs=[-0.5])
    )
    service.scripts = [[accepted(), message, finished(1)]]
    result = outrider("generate", "Hello", "--address", service.address, "--json", "--logprobs", "1")
    expected = {"token_id": 0, "logprob": -0.5, "rank": 1, "top_token_ids": [0], "top_logprobs": [-0.5]}
    assert json.loads(result.stdout)["logprobs"] == [expected]


def test_every_sampling_parameter_is_an_option(service: ScriptedService) -> None:
    given = {
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.5,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "seed": 2**64 - 1,
        "max_tokens": 12,
        "min_tokens": 2,
        "logprobs": 3,
    }
    options = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    options += ["--stop=a", "--stop=b", "--stop-token-id=5", "--logit-bias=3=-1.5", "--logit-bias=4=2", "--ignore-eos"]
    # The only one that does not go with the others has a test of its own.
    assert "constraint" in SamplingParameters().as_dict()
    result = outrider("generate", "Hello", "--address", service.address, *options)
    assert result.exit_code == 0, result.output
    asked = service.requests[0].parameters
    assert {name: getattr(asked, name) for name in given} == given
    assert (list(asked.stop), list(asked.stop_token_ids), asked.ignore_eos) == (["a", "b"], [5], True)
    assert dict(asked.logit_bias) == {3: -1.5, 4: 2.0}
    assert {item.name for item in asked.DESCRIPTOR.fields} == set(SamplingParameters().as_dict())


def test_what_the_output_must_follow_is_an_option(service: ScriptedService, tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"type": "object"}')
    grammar.write_text('start: "x"')
    expected = {
        f"--json-schema={schema}": Constraint(json_schema='{"type": "object"}'),
        "--json-object": Constraint(json_object=True),
        "--regex=a+": Constraint(regex="a+"),
        "--choice=yes --choice=no": Constraint(choice=["yes", "no"]),
        f"--grammar={grammar}": Constraint(grammar='start: "x"'),
    }
    for options in expected:
        result = outrider("generate", "Hello", "--address", service.address, *options.split())
        assert result.exit_code == 0, result.output
    asked = [wire.parameters_from_message(request.parameters).constraint for request in service.requests]
    assert asked == list(expected.values())
    result = outrider("chat", "--address", service.address, "--regex=a+", input="Hi\n")
    assert wire.parameters_from_message(service.requests[-1].parameters).constraint == Constraint(regex="a+"), result


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], {}),
        (["--temperature", "0", "--seed", "0", "--logprobs", "0"], {"temperature": 0.0, "seed": 0, "logprobs": 0}),
        (["--top-p", "1", "--stop", "a", "--ignore-eos"], {"top_p": 1.0, "stop": ("a",), "ignore_eos": True}),
    ],
)
def test_only_sampling_parameters_that_are_given_are_sent(arguments: list[str], expected: dict[str, object]) -> None:
    found: list[dict[str, object]] = []

    @click.command()
    @sampling_options
    def command(**values: object) -> None:
        found.append(take_given_sampling(values))

    CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert found == [expected]


def test_the_help_tells_the_models_defaults_from_the_services() -> None:
    text = outrider("generate", "--help").stdout
    assert re.search(r"--temperature FLOAT .*?\[default: the model's\]", text, re.DOTALL)
    assert re.search(r"--max-tokens INTEGER .*?\[default: 256\]", text, re.DOTALL)


def test_speculation_options(service: ScriptedService) -> None:
    outrider(
        "generate", "x", "--address", service.address, "--num-speculative-tokens", "7", "--drafter", "layers",
        "--acceptance-rule", "rejection", "--session-id", "mine", "--request-id", "once",
    )  # fmt: skip
    outrider("generate", "x", "--address", service.address, "--no-speculation")
    asked, plain = service.requests
    assert (asked.session_id, asked.request_id) == ("mine", "once")
    assert (asked.speculation.num_speculative_tokens, asked.speculation.drafter) == (7, "layers")
    assert asked.speculation.acceptance_rule == tokens_pb2.ACCEPTANCE_RULE_REJECTION
    assert (asked.speculation.disabled, plain.speculation.disabled) == (False, True)


def test_prompts_come_from_standard_input_as_token_ids_and_as_chat(service: ScriptedService) -> None:
    outrider("generate", "-", "--address", service.address, input="from a pipe\n")
    outrider("generate", "3, 1 4", "--token-ids", "--address", service.address)
    outrider("generate", "Hi", "--chat", "--system", "Be brief.", "--address", service.address)
    text, token_ids, chat = service.requests
    assert text.text == "from a pipe\n"
    assert list(token_ids.token_ids.token_ids) == [3, 1, 4]
    assert [(message.role, message.content) for message in chat.chat.messages] == [
        ("system", "Be brief."),
        ("user", "Hi"),
    ]


def test_a_model_without_a_tokenizer_gives_token_ids(service: ScriptedService) -> None:
    message = delta(0, 3)
    message.delta.text = ""
    service.scripts = [[accepted(), message, finished(3)]]
    assert outrider("generate", "1", "--token-ids", "--address", service.address).stdout == "0 1 2\n"


def test_color_shows_how_each_word_came_to_be(service: ScriptedService) -> None:
    result = outrider("generate", "Hello", "--address", service.address, "--color")
    assert "\x1b[32mThe\x1b[0m\x1b[36m cat\x1b[0m" in result.stdout
    assert "drafted and accepted" in result.stderr


@pytest.mark.parametrize(
    ("text", "num", "expected"),
    [("a b c", 3, "AAR"), ("a b", 3, "AR"), ("abc", 3, "R"), ("a b c d", 2, "AAAR"), ("", 2, ""), (" ", 1, "R")],
)
def test_words_share_the_origins_of_tokens(text: str, num: int, expected: str) -> None:
    origins = (TokenOrigin.ACCEPTED,) * (num - 1) + (TokenOrigin.RECOVERED,)
    words = list(origins_of_words(text, origins))
    assert "".join(word for word, _ in words) == text
    letters = "".join(origin.name[0] for _, origin in words)
    assert letters[-1:] == expected[-1:]
    assert len(letters) == len(expected)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("generate",), 2, "Missing argument 'PROMPT'"),
        (("generate", "x", "--nonsense"), 2, "No such option"),
        (("generate", "x", "--temperature", "warm"), 2, "'warm' is not a valid float"),
        (("generate", "x", "--logit-bias", "3"), 2, "is not ID=VALUE"),
        (("generate", "x", "--regex", "a", "--choice", "b"), 2, "has regex and choice, must have one of"),
        (("generate", "x", "--json-schema", "/nowhere"), 2, "does not exist"),
        (("generate", "x", "--grammar", "/bin/sh"), 2, "is not a text file"),
        (("generate", "x", "--chat", "--token-ids"), 2, "exclude each other"),
        (("generate", "x", "--system", "y"), 2, "--system goes with --chat"),
        (("generate", "x", "--top-p", "3"), 2, "top_p is 3.0"),
        (("generate", "x", "--temperature", "nan"), 2, "temperature is nan"),
        (("generate", "x", "--token-ids"), 2, "token_ids: must be numbers"),
        (("generate", "x", "--drafter", "model"), 2, "draft_model: "),
        (("generate", "x", "--drafter", "ngram", "--num-layers", "3"), 2, "num_layers goes with --drafter layers"),
        (("info",), 2, "Missing option '--address'"),
        (("info", "--address", "127.0.0.1:1"), 1, "Failed to connect"),
        (("info", "--address", "localhost"), 2, "'--address': 'localhost' has no port"),
        (("chat", "--address", "127.0.0.1:http"), 2, "'--address': '127.0.0.1:http' must be host:port"),
        (("up", "--address", "127.0.0.1:1", "--num-orchestrators", "2"), 2, "--address goes with one orchestrator"),
        (("up", "--http-address", "[::1]:1", "--num-orchestrators", "2"), 2, "--http-address goes with one"),
        (("up", "--http-address", "localhost"), 2, "http_address: 'localhost' is not HOST:PORT"),
        (("up", "--kv-budget", "much"), 2, "'much' is not a size such as 8GiB"),
        (("nonsense",), 2, "No such command 'nonsense'"),
    ],
)
def test_errors_are_one_line(arguments: tuple[str, ...], code: int, message: str) -> None:
    result = outrider(*arguments)
    assert result.exit_code == code
    assert result.stderr.startswith("outrider: error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert result.stdout == ""


def test_refusals_of_the_service_are_one_line(service: ScriptedService) -> None:
    service.scripts = [[InvalidArgument("max_tokens is 9999, the target allows 100", "max_tokens")]]
    result = outrider("generate", "x", "--address", service.address)
    assert (result.exit_code, result.stderr) == (2, "outrider: error: max_tokens is 9999, the target allows 100\n")


def test_debug_shows_where_an_error_comes_from() -> None:
    result = outrider("--debug", "generate", "x", "--top-p", "3")
    assert isinstance(result.exception, InvalidArgument)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches_by_example(command: str) -> None:
    result = outrider(command, "--help")
    assert result.exit_code == 0
    assert f"  outrider {command}" in result.stdout.partition("Examples:")[2]


def test_chat_takes_turns_from_a_pipe(service: ScriptedService) -> None:
    lines = "Hi\n\nAnd?\n/reset\nAnew\n/quit\nnever sent\n"
    result = outrider("chat", "--address", service.address, "--stats", input=lines)
    assert (result.exit_code, result.stdout) == (0, f"{TEXT}\n" * 3)
    contents = [asked.chat.messages[-1].content for asked in service.requests]
    assert contents == ["Hi", "And?", "Anew"]
    first, second, third = (asked.session_id for asked in service.requests)
    assert first == second != third
    assert service.deleted == [first]


def test_chat_has_commands(service: ScriptedService) -> None:
    lines = "/stats\n/help\nHi\n/stats\n//etc/hosts is a file\n/exit\nnever sent\n"
    result = outrider("chat", "--address", service.address, input=lines)
    assert (result.exit_code, result.stdout) == (0, f"{TEXT}\n" * 2)
    assert [asked.chat.messages[-1].content for asked in service.requests] == ["Hi", "/etc/hosts is a file"]
    before, _, after = result.stderr.partition("/help    lists these commands")
    assert "there is no answer yet" in before
    assert after.count("acceptance rate 75%") == 1
    assert "/reset   starts a new conversation" in after


def test_chat_refuses_an_unknown_command(service: ScriptedService) -> None:
    result = outrider("chat", "--address", service.address, input="/frobnicate now\nnever sent\n")
    expected = "outrider: error: command: /frobnicate is unknown; /help lists the commands, // sends a /\n"
    assert (result.exit_code, result.stderr, service.requests) == (2, expected, [])


def test_chat_in_a_pipe_ends_at_an_error(service: ScriptedService) -> None:
    service.scripts = [whole(), [InvalidArgument("content is too long", "content")]]
    result = outrider("chat", "--address", service.address, input="Hi\nAnd?\n")
    assert (result.exit_code, result.stdout) == (2, f"{TEXT}\n")
    assert result.stderr == "outrider: error: content is too long\n"


def test_info_shows_who_is_out_of_rotation_and_why(service: ScriptedService) -> None:
    result = outrider("info", "--address", service.address)
    assert result.exit_code == 0, result.stderr
    assert "target 127.0.0.1:1" in result.stdout
    assert "out of rotation: TOKENIZER_MISMATCH" in result.stdout
    described = json.loads(outrider("info", "--address", service.address, "--json").stdout)
    assert [worker["in_rotation"] for worker in described["workers"]] == [True, False]
    assert described["workers"][0]["info"]["vocabulary_size"] == 16
    assert described["workers"][0]["load"] is None


def test_bench_lists_what_there_is() -> None:
    lines = outrider("bench").stdout.splitlines()
    assert lines[0].split(maxsplit=1) == ["overhead", "Time per round outside the two models: gRPC, Redis, scheduling"]
    assert all(len(line.split(maxsplit=1)) == 2 for line in lines)
    unknown = outrider("bench", "nonsense")
    assert (unknown.exit_code, unknown.stderr.count("\n")) == (2, 1)
    assert "there are: overhead" in unknown.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--budget", "3d"), "'3d' is not a duration such as 90s, 30m or 1.5h"),
        (("--data", "{folder}"), "has no .safetensors file"),
        (("--steps", "1", "--data", "{folder}/none"), "does not exist"),
    ],
)
def test_distill_names_what_is_wrong(options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    given = [option.replace("{folder}", str(tmp_path)) for option in options]
    result = outrider("distill", "nowhere", str(tmp_path / "draft"), *given)
    assert result.exit_code in (1, 2) and message in result.stderr and result.stderr.count("\n") == 1


def test_distill_shows_one_bar_for_each_stage() -> None:
    progress = Progress(disable=True)
    bars = Bars(progress, is_terminal=True)
    for done in range(1, 4):
        bars.stage("conversations", done, 3)
    for done in range(1, 4):
        bars.stage("lessons", done, 5)
    assert [(task.description, task.completed, task.total) for task in progress.tasks] == [
        ("conversations", 3, 3),
        ("lessons", 3, 5),
    ]


def test_an_interrupt_cancels_the_generation_and_shows_what_there_is(service: ScriptedService) -> None:
    service.scripts = [[accepted(), delta(0, 2), HANG, finished(2, tokens_pb2.FINISH_REASON_CANCELLED)]]
    command = [sys.executable, "-c", "from outrider.cli.main import main; main()"]
    with subprocess.Popen(
        [*command, "generate", "Hello", "--address", service.address],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.read(7) == "The cat"
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=20)
    assert (process.returncode, out) == (130, "\n")
    assert "cancelled" in error
    assert "Traceback" not in error


def test_an_overloaded_service_is_named_after_all_attempts(service: ScriptedService) -> None:
    service.scripts = [[Overloaded("no session is free", retry_after_s=0.01)]]
    result = outrider("generate", "x", "--address", service.address)
    assert (result.exit_code, result.stderr) == (1, "outrider: error: no session is free\n")


def test_the_command_line_loads_no_model_library() -> None:
    program = "import sys; import outrider.cli.main; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
