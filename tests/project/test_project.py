"""What people and machines that begin with the project read first: it names targets, tools and files that there are."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.project.distribution import PROJECT, ROOT

PAGES = ("CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "examples/README.md")
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("page", PAGES)
def test_links_and_targets_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    for link in re.findall(r"\]\(([^)]+)\)", text):
        path, _, heading = link.partition("#")
        file = (ROOT / page).parent / path
        assert file.is_file(), link
        assert not heading or re.search(rf"^#+ {heading}$", file.read_text(), re.MULTILINE | re.IGNORECASE), link
    named = re.findall(r"`make ([a-z-]+)|^make ([a-z-]+)", text, re.MULTILINE)
    assert {first or second for first, second in named} <= TARGETS


def test_the_contributors_page_is_one_page() -> None:
    assert len((ROOT / "CONTRIBUTING.md").read_text().split()) < 600


def test_the_workflow_only_calls_make() -> None:
    jobs = load(ROOT / ".github" / "workflows" / "test.yml")["jobs"]
    called = [step["run"].split() for job in jobs.values() for step in job["steps"] if "run" in step]
    assert {words[0] for words in called} == {"make"}
    assert {words[1] for words in called} == {"test", "wheel"} <= TARGETS


def test_hooks_call_what_lint_calls() -> None:
    (repository,) = load(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    tools = {re.split(r"[>=]", requirement)[0] for requirement in PROJECT["project"]["optional-dependencies"]["dev"]}
    called = [hook["entry"] for hook in repository["hooks"]]
    lint = subprocess.run(["make", "-n", "lint"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for entry in called:
        if entry.startswith("make "):
            assert entry.split()[1] in TARGETS
            continue
        (tool,) = {"ruff", "lint-imports"} & set(re.split(r"[ /]", entry))
        assert {"ruff": "ruff", "lint-imports": "import-linter"}[tool] in tools
        assert tool in lint
    for check in ("buf breaking proto --against proto/released.binpb", "vendor.compose-spec compose.yaml"):
        assert check in lint


def test_the_licence_is_what_the_project_declares() -> None:
    assert PROJECT["project"]["license"] == "Apache-2.0"
    words = " ".join((ROOT / "LICENSE").read_text().split())
    assert words.startswith("Apache License Version 2.0, January 2004")
    assert words.endswith(
        "See the License for the specific language governing permissions and limitations under the License."
    )
    notice = (ROOT / "NOTICE").read_text()
    assert "SmolLM2-135M-Instruct" in notice
    for path in re.findall(r"outrider/\S+\.safetensors", notice):
        assert (ROOT / path).is_file()
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "outrider").rglob("*.safetensors")} == set(
        re.findall(r"outrider/\S+\.safetensors", notice)
    )
