"""`outrider plan` says what it computes, and what cannot be done."""

import json

import pytest
from click.testing import CliRunner, Result

from outrider.cli.main import main

LOAD = "--sessions 200 --rate 12 --pass-s 0.08 --row-s 0.001 --draft-step-s 0.012 --draft-row-s 0.0002 --acceptance 0.8"


def ask(arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", *arguments.split()])


def test_the_table_compares_three_fleets() -> None:
    done = ask(LOAD)
    assert done.exit_code == 0, done.output
    for kind in ("plain", "colocated", "separate"):
        assert kind in done.output
    assert "200" in done.output, "plain decoding gives 12 tokens a second to one session a target: a pass takes 82 ms"


def test_json_has_the_numbers() -> None:
    told = json.loads(ask(f"{LOAD} --hit-rate 0.7 --json").output)
    fleets = {fleet["kind"]: fleet for fleet in told["fleets"]}
    assert told["cheapest"] in fleets
    assert fleets["separate"]["num_drafts"] > 0
    assert fleets["colocated"]["num_drafts"] == 0
    assert all(fleet["rate"] >= 12 for fleet in fleets.values())


def test_what_cannot_be_done_says_what_can() -> None:
    done = ask(LOAD.replace("--rate 12", "--rate 500"))
    assert done.exit_code == 2
    assert "no fleet gives 500 tokens a second" in done.output
    assert "at most" in done.output


@pytest.mark.parametrize("wrong", ["--acceptance 1.5", "--sessions 0", "--pass-s 0"])
def test_wrong_numbers_are_named(wrong: str) -> None:
    done = ask(f"{LOAD} {wrong}")
    assert done.exit_code in (1, 2)
    assert wrong.split()[0].strip("-").replace("-", "_").split("_")[0] in done.output
