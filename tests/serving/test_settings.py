"""Where settings come from, what is refused, and how they explain themselves."""

from typing import Literal

import pytest
from pydantic import Field, ValidationError

from draft_service.settings import DraftSettings
from orchestrator.settings import OrchestratorSettings
from outrider.drafters.options import DrafterOptions, ModelOptions
from outrider.serving.settings import Listed, ServingSettings, WorkerSettings, load_settings, settings_table
from target_service.settings import TargetSettings


class Example(ServingSettings):
    """Settings of an example. Only the first line is shown."""

    targets: Listed = Field(("a:1", "b:2"), description="Addresses of targets.")
    wait_s: float | None = Field(None, gt=0, lt=9.5, description="Wait, 100% of it.")
    rule: Literal["coupled", "rejection"] = Field("coupled", description="Default rule.")


def load(*arguments: str) -> Example:
    return load_settings(Example, arguments, program="example")


def test_command_line_before_environment_before_default(monkeypatch):
    monkeypatch.setenv("OUTRIDER_TARGETS", "c:3, d:4")
    monkeypatch.setenv("OUTRIDER_WAIT_S", "2")
    settings = load("--wait-s", "3")
    assert (settings.targets, settings.wait_s, settings.rule) == (("c:3", "d:4"), 3.0, "coupled")


def test_an_empty_variable_is_unset(monkeypatch):
    monkeypatch.setenv("OUTRIDER_WAIT_S", "")
    assert load().wait_s is None


def test_settings_are_frozen():
    with pytest.raises(ValidationError):
        load().wait_s = 1.0


@pytest.mark.parametrize(
    "arguments",
    [("--wait-s", "0"), ("--wait-s", "soon"), ("--rule", "typical"), ("--wait", "1"), ("--no-such", "1")],
)
def test_a_wrong_value_ends_with_two_and_a_line_that_names_it(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        load(*arguments)
    assert caught.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("example: ")
    assert arguments[0] in last


def test_a_wrong_variable_is_named_without_its_value(monkeypatch, capsys):
    monkeypatch.setenv("OUTRIDER_WAIT_S", "hunter2")
    with pytest.raises(SystemExit):
        load()
    error = capsys.readouterr().err
    assert "OUTRIDER_WAIT_S" in error
    assert "hunter2" not in error


def test_help_explains_every_setting(capsys):
    with pytest.raises(SystemExit) as caught:
        load("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert caught.value.code == 0
    assert "Wait, 100% of it. [> 0, < 9.5] (default: unset)" in text
    for name in Example.model_fields:
        assert f"--{name.replace('_', '-')}" in text


def test_the_table_has_a_row_for_each_setting():
    rows = settings_table(Example).splitlines()[2:]
    assert len(rows) == len(Example.model_fields)
    assert "| `OUTRIDER_TARGETS` | `a:1,b:2` | Addresses of targets. |" in rows
    assert "| `OUTRIDER_RULE` | `coupled` | Default rule. [coupled, rejection] |" in rows


def test_every_setting_is_described():
    assert all(field.description for field in ServingSettings.model_fields.values())


def test_there_are_no_more_settings_than_were_decided_on() -> None:
    """A field that two classes declare counts twice. A new one needs a reason that no constant has."""
    kinds = (ServingSettings, WorkerSettings, ModelOptions, DrafterOptions)
    kinds += (DraftSettings, TargetSettings, OrchestratorSettings)
    declared = [name for kind in kinds for name in kind.__annotations__ if name in kind.model_fields]
    # 59, five of the HTTP API, two of the target's engine, whose texts the suffix drafter learns from, and an
    # orchestrator's name, which its responses carry.
    assert len(declared) <= 68, declared
    # None is left out: each field of a service is declared by one of these classes.
    assert set(declared) == {name for kind in kinds for name in kind.model_fields}
