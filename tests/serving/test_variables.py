"""Variables that begin with OUTRIDER_: all that are read are known, and any other ends the start."""

import click
import pytest
from click.testing import CliRunner

from draft_service.settings import DraftSettings
from orchestrator.settings import OrchestratorSettings
from outrider.cli.main import main
from outrider.serving.settings import ServingSettings, load_settings
from outrider.serving.variables import NAMES, PREFIX, RETIRED, complaints
from outrider.vllm.settings import DraftingSettings
from target_service.settings import TargetSettings

SERVICES = (TargetSettings, DraftSettings, OrchestratorSettings)


def read_by_commands(command: click.Command) -> set[str]:
    """Returns the variables that a command and those below it read."""
    variables = {item.envvar for item in command.params if isinstance(item.envvar, str)}
    below = command.commands.values() if isinstance(command, click.Group) else ()
    return variables.union(*map(read_by_commands, below))


def test_the_names_are_those_of_all_settings_and_of_the_command_line() -> None:
    read = {name.removeprefix(PREFIX).lower() for name in read_by_commands(main)}
    read.update(name for kind in (*SERVICES, DraftingSettings) for name in kind.model_fields)
    assert list(NAMES) == sorted(read)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("MAX_SESION", "MAX_SESSIONS"), ("TARGET_", "TARGET"), ("TOKENS", "TOKEN"), ("DURABILTY", "DURABILITY")],
)
def test_a_misspelt_variable_ends_the_start_with_the_nearest_name(
    name: str, nearest: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(f"OUTRIDER_{name}", "hunter2")
    with pytest.raises(SystemExit) as caught:
        load_settings(ServingSettings, [], program="example")
    line = f"OUTRIDER_{name} is no setting; the nearest is OUTRIDER_{nearest}\n"
    assert (caught.value.code, capsys.readouterr().err) == (1, f"example: {line}")
    result = CliRunner().invoke(main, ["info", "--address", "127.0.0.1:1"])
    assert (result.exit_code, result.stderr) == (1, f"outrider: error: {line}")


@pytest.mark.parametrize("kind", SERVICES)
def test_names_of_other_services_and_other_programs_are_let_pass(
    kind: type[ServingSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OUTRIDER_DURABILITY", "OUTRIDER_KV_BLOCKS", "outrider_num_layers", "OUTRIDER_TOKEN", "OUTRIDERS_ONE"):
        monkeypatch.setenv(name, "")
    load_settings(kind, [], program="example")


LINKS = """
OUTRIDER_PORT OUTRIDER_SERVICE_HOST OUTRIDER_SERVICE_PORT OUTRIDER_SERVICE_PORT_GRPC
OUTRIDER_PORT_50051_TCP OUTRIDER_PORT_50051_TCP_PROTO OUTRIDER_PORT_50051_TCP_PORT OUTRIDER_PORT_50051_TCP_ADDR
OUTRIDER_PORT_53_UDP OUTRIDER_ORCHESTRATOR_SERVICE_HOST OUTRIDER_ORCHESTRATOR_PORT_9090_TCP_ADDR
"""


def test_what_kubernetes_tells_of_a_service_of_that_name_is_let_pass() -> None:
    assert complaints(LINKS.split(), ()) == []
    assert len(complaints(["OUTRIDER_SERVICE_HOSTS", "OUTRIDER_PORT_50051_TCP_HOST"], ())) == 2


def test_a_retired_name_is_answered_with_what_to_do_instead() -> None:
    retired = {"patience_s": "set OUTRIDER_DRAFT_MAX_WAIT_S"}
    answer = "OUTRIDER_PATIENCE_S is no setting any more: set OUTRIDER_DRAFT_MAX_WAIT_S"
    assert complaints(["OUTRIDER_PATIENCE_S", "OUTRIDER_TARGETS"], (), retired) == [answer]


def test_retired_names_are_names_no_more_and_have_an_answer() -> None:
    assert not set(RETIRED) & set(NAMES)
    assert all(name == name.lower() and text and not text.endswith(".") for name, text in RETIRED.items())
