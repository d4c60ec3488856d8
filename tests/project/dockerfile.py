"""The Dockerfile, parsed: stages with their instructions."""

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(slots=True)
class Stage:
    """A stage: its name, the stage or image that it begins with, and its instructions in order."""

    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def values(self, keyword: str) -> list[str]:
        """Returns what stands behind each instruction of a kind."""
        return [text for found, text in self.instructions if found == keyword]


def stages(text: str) -> dict[str, Stage]:
    """Returns the stages by name, in order."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    found: dict[str, Stage] = {}
    stage: Stage | None = None
    for line in re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines():
        keyword, _, rest = line.strip().partition(" ")
        if keyword == "FROM":
            base, _, name = rest.split()
            stage = found[name] = Stage(name, base)
        elif keyword and stage is not None:
            stage.instructions.append((keyword, rest.strip()))
    return found


DOCKERFILE = stages((ROOT / "Dockerfile").read_text())


def copied_from_tree() -> list[str]:
    """Returns the paths of the tree that the Dockerfile copies."""
    copies = [text for stage in DOCKERFILE.values() for text in stage.values("COPY")]
    return [source for text in copies if not text.startswith("--from") for source in text.split()[:-1]]


def chain(name: str) -> list[Stage]:
    """Returns a stage and those that it builds on, the first of them last."""
    stage = DOCKERFILE[name]
    return [stage, *(chain(stage.base) if stage.base in DOCKERFILE else [])]


def environment(name: str) -> dict[str, str]:
    """Returns the variables of a stage's image."""
    found: dict[str, str] = {}
    for stage in reversed(chain(name)):
        for text in stage.values("ENV"):
            found |= dict(item.split("=", 1) for item in shlex.split(text))
    return found


def last(name: str, keyword: str) -> str:
    """Returns the instruction of a kind that counts for a stage's image; empty for none."""
    return next((values[-1] for stage in chain(name) if (values := stage.values(keyword))), "")
