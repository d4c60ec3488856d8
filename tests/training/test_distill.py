"""Drafts made from nothing but a target, and runs that are killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from outrider.drafters.loading import load_drafter
from outrider.drafters.options import DrafterKind, DrafterOptions
from outrider.errors import InvalidArgument, ModelUnsupported
from outrider.lm.heads.checkpoint import load_eagle3, load_manifest, load_medusa, load_vocabulary
from outrider.lm.heads.eagle3 import usual_feature_layers
from outrider.lm.heads.vocabulary import DraftVocabulary
from outrider.training.distill import DataOptions, distill
from outrider.training.methods import chosen_layers
from outrider.training.options import DistillOptions, MethodKind
from outrider.training.synthesis import SynthesisOptions
from outrider.training.teacher import Teacher
from outrider.training.trainer import Progress
from tests.draft_service.conftest import draft, proposal
from tests.lm.models import CONFIGS, save_model
from tests.training.models import save_target

SYNTHESIS = SynthesisOptions(num_conversations=192, max_turn_len=8, max_answer_len=40, shard_size=64)
# What an untrained draft must be beaten by, at the first position, greedy.
GAIN = {MethodKind.EAGLE3: 0.2, MethodKind.MEDUSA: 0.05, MethodKind.LAYERS: 0.15}


class Told:
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, int, int]] = []
        self.steps: list[Progress] = []

    def stage(self, name: str, done: int, total: int) -> None:
        self.stages.append((name, done, total))

    def training(self, progress: Progress) -> None:
        self.steps.append(progress)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def data(target: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations that a first distillation wrote."""
    output = tmp_path_factory.mktemp("first")
    distill(_options(target, output, num_steps=1), DataOptions(synthesis=SYNTHESIS), "", Told())
    return output / "work" / "data"


def _options(target: str, output: Path, **changes: Any) -> DistillOptions:
    fields: dict[str, Any] = {
        "num_steps": 100,
        "depth": 3,
        "draft_vocab_size": 48,
        "num_layers": 1,
        "tokens_per_batch": 1024,
        "learning_rate": 5e-3,
        "held_out": 0.15,
    }
    return DistillOptions(target, output, **(fields | changes))


def _points(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "work" / "curve.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "method",
    [
        MethodKind.EAGLE3,
        pytest.param(MethodKind.MEDUSA, marks=pytest.mark.slow),
        pytest.param(MethodKind.LAYERS, marks=pytest.mark.slow),
    ],
)
def test_acceptance_on_held_out_prompts_rises(method: MethodKind, target: str, data: Path, tmp_path: Path) -> None:
    told = Told()
    results = distill(_options(target, tmp_path, method=method), DataOptions(corpus=data), "the command", told)
    measured = [point for point in _points(tmp_path) if "greedy" in point]
    assert measured[0]["step"] == 0 and measured[-1]["step"] == 100
    assert measured[-1]["greedy"][0] > measured[0]["greedy"][0] + GAIN[method]
    assert measured[-1]["sampled"][0] > measured[0]["sampled"][0] + 0.05
    chain, tree = results.acceptance["chain"], results.acceptance["tree 4x2x1"]
    assert tree[True].mean_acceptance_length > chain[True].mean_acceptance_length > 1
    assert list(chain[True].rates) == measured[-1]["greedy"]
    assert told.steps[-1].step == told.steps[-1].num_steps == 100 and told.steps[-1].remaining_s == 0
    _check_folder(tmp_path, method, target)


def _check_folder(folder: Path, method: MethodKind, target: str) -> None:
    card = (folder / "README.md").read_text()
    assert "the command" in card and "| chain | greedy |" in card and "100 steps" in card
    assert (folder / "curve.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads((folder / "results.json").read_text())["steps"] == 100
    manifest = load_manifest(folder)
    assert manifest is not None and manifest.method == method.value
    assert manifest.target_fingerprint == Teacher(target).fingerprint
    match method:
        case MethodKind.EAGLE3:
            assert len(load_eagle3(folder)[1]) == 48
        case MethodKind.MEDUSA:
            assert len(load_medusa(folder)[0].heads) == 3
        case MethodKind.LAYERS:
            assert AutoModelForCausalLM.from_pretrained(folder).config.num_hidden_layers == 1
            vocabulary = load_vocabulary(folder)
            assert vocabulary is not None and len(vocabulary) == 48
            _check_drafts(folder, vocabulary)


def _check_drafts(folder: Path, vocabulary: DraftVocabulary) -> None:
    drafter = load_drafter(DrafterOptions(drafter=DrafterKind.MODEL, model=str(folder), device="cpu"))
    [drafted] = draft(drafter, proposal([5, 6, 7], 6))
    assert len(drafted) == 6 and set(drafted) <= set(vocabulary.token_ids.tolist())


def test_a_trimmed_draft_leaves_out_what_is_the_targets(target: str, data: Path, tmp_path: Path) -> None:
    options = _options(target, tmp_path, num_steps=2, trim=True)
    distill(options, DataOptions(corpus=data), "", Told())
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    teacher = Teacher(target)
    head, vocabulary = load_eagle3(tmp_path, lambda token_ids: teacher.output_layer[token_ids])
    assert torch.equal(head.lm_head.weight, teacher.output_layer[vocabulary.token_ids].bfloat16())


def test_a_budget_is_kept_to(target: str, data: Path, tmp_path: Path) -> None:
    told = Told()
    started_s = time.monotonic()
    distill(_options(target, tmp_path, num_steps=0, budget_s=6.0), DataOptions(corpus=data), "", told)
    assert told.steps[-1].step == told.steps[-1].num_steps > 10
    assert time.monotonic() - started_s < 20


# One thread, as in this process: beside other work the threads of so small a model wait for each other all the time.
_ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def _command(target: str, data: Path, output: Path) -> list[str]:
    settings = ["--steps", "40", "--depth", "2", "--vocabulary", "48", "--batch", "512", "--checkpoint-every", "0.1s"]
    command = [sys.executable, "-c", "from outrider.cli.main import main; main()", "distill"]
    return [*command, target, str(output), "--data", str(data), *settings]


def test_a_killed_run_goes_on_to_the_same_curve(target: str, data: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run(_command(target, data, whole), check=True, capture_output=True, timeout=120, env=_ENVIRONMENT)
    process = subprocess.Popen(
        _command(target, data, killed), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=_ENVIRONMENT
    )
    _wait_for_checkpoint(killed / "work", process)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    before = len(_points(killed))
    done = subprocess.run(
        _command(target, data, killed), check=True, capture_output=True, timeout=120, text=True, env=_ENVIRONMENT
    )
    assert f"the draft is in {killed}" in done.stdout
    assert 3 < before < len(_points(killed))
    assert _points(killed) == _points(whole)
    weights, others = (load_file(folder / "model.safetensors") for folder in (whole, killed))
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def _wait_for_checkpoint(work: Path, process: "subprocess.Popen[bytes]") -> None:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s and process.poll() is None:
        if (work / "checkpoint.pt").exists() and len(_points(work.parent)) > 8:
            return
        time.sleep(0.005)
    raise AssertionError("no checkpoint was written")


def test_a_finished_run_is_not_repeated(target: str, data: Path, tmp_path: Path) -> None:
    first = distill(_options(target, tmp_path, num_steps=3), DataOptions(corpus=data), "", Told())
    points, told = _points(tmp_path), Told()
    again = distill(_options(target, tmp_path, num_steps=3), DataOptions(corpus=data), "", told)
    assert not told.steps and _points(tmp_path) == points
    assert again.acceptance == first.acceptance


def test_a_checkpoint_of_another_training_is_refused(target: str, data: Path, tmp_path: Path) -> None:
    distill(_options(target, tmp_path, num_steps=2), DataOptions(corpus=data), "", Told())
    with pytest.raises(InvalidArgument, match="another training"):
        distill(_options(target, tmp_path, num_steps=2, seed=1), DataOptions(corpus=data), "", Told())


def test_data_of_another_target_is_refused(data: Path, tmp_path: Path) -> None:
    other = save_target(tmp_path / "other")
    model = AutoModelForCausalLM.from_pretrained(other)
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    model.save_pretrained(other)
    with pytest.raises(InvalidArgument, match="was made with target"):
        distill(_options(other, tmp_path / "draft"), DataOptions(corpus=data), "", Told())


def test_a_target_with_a_bound_on_its_logits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match="behind the output layer"):
        Teacher(save_model(CONFIGS["gemma2-softcap-window"], tmp_path))


def test_which_layers_are_looked_at_and_copied() -> None:
    assert usual_feature_layers(30) == (2, 15, 27)
    assert usual_feature_layers(1) == (1, 0, 0)
    assert chosen_layers(30, 1) == [0] and chosen_layers(30, 2) == [0, 29] and chosen_layers(5, 3) == [0, 2, 4]
