"""Draw docs/pictures/takeover-tokens.svg: `make docs-picture`.

It records a real run: a stack of two targets and the embedded model's draft, `outrider generate --color` as a process
of its own, and `kill -9` of the target that serves it, in the middle of the answer. The answer is compared with that of
the same command with `--no-speculation`; where they differ, nothing is drawn.
"""

import asyncio
import io
import re
import sys
import time
from asyncio.subprocess import PIPE, Process
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from bench.worker import Worker
from outrider.client import DraftOptions, LocalStack, StackOptions
from outrider.local.process import ServiceProcess

PICTURE: Final = Path(__file__).parents[1] / "docs" / "pictures" / "takeover-tokens.svg"
_PROMPT: Final = "Write a short story about the keeper of a lighthouse."
_OPTIONS: Final = ("--chat", "--temperature", "0", "--max-tokens", "150")
_KILL_AFTER: Final = 0.45
_WIDTH: Final = 96
_COLOR: Final = re.compile(rb"\x1b\[\d+m")
# The SVG must load nothing from elsewhere, and rich's names a font on a server.
_FONT_FACE: Final = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
_FONT: Final = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


@dataclass(slots=True)
class _Run:
    """What a run printed, and how its target was killed.

    Attributes:
        before: the answer up to the pause.
        after: the rest of it.
        figures: what it printed on standard error.
        process_id: of the target.
        pause_s: longest time without output since the kill.
    """

    before: bytes = b""
    after: bytes = b""
    figures: bytes = b""
    process_id: int = 0
    pause_s: float = 0.0

    @property
    def text(self) -> str:
        """The answer without colours."""
        return _COLOR.sub(b"", self.before + self.after).decode()


async def _generate(addresses: tuple[str, ...], *more: str) -> Process:
    options = [part for address in addresses for part in ("--address", address)]
    command = ("-m", "outrider", "generate", _PROMPT, *_OPTIONS, *options, *more)
    return await asyncio.create_subprocess_exec(sys.executable, *command, stdout=PIPE, stderr=PIPE)


async def _plain(stack: LocalStack) -> str:
    """Return the text that the target gives without a draft."""
    output, _ = await (await _generate(stack.addresses, "--no-speculation")).communicate()
    return output.decode()


async def _serving(stack: LocalStack) -> ServiceProcess:
    """Return the target with the session."""
    for process in stack.targets:
        async with Worker(process) as worker:
            if (await worker.load()).num_active_sessions:
                return process
    raise SystemExit("the answer ended before its target was killed")


async def _killed(stack: LocalStack, length: int) -> _Run:
    """Generate the answer, of about `length` bytes, and kill its target before the middle."""
    process, run = await _generate(stack.addresses, "--color"), _Run()
    assert process.stdout is not None and process.stderr is not None
    while len(_COLOR.sub(b"", run.before)) < _KILL_AFTER * length:
        run.before += await process.stdout.read(4096)
    victim = await _serving(stack)
    run.process_id = victim.pid
    victim.kill()
    latest_s = time.perf_counter()
    while part := await process.stdout.read(4096):
        now_s = time.perf_counter()
        if now_s - latest_s > run.pause_s:
            # What came before the longest pause was on its way already.
            run.pause_s, run.before, run.after = now_s - latest_s, run.before + run.after, b""
        latest_s = now_s
        run.after += part
    run.figures = await process.stderr.read()
    if b"recomputed" not in run.figures:
        raise SystemExit(f"no other target took over: {run.figures.decode()}")
    return run


async def record() -> Console:
    """Run everything and return a console that has recorded it."""
    drafts = (DraftOptions(drafter="eagle3", model="embedded"),)
    async with LocalStack(StackOptions(num_targets=2, drafts=drafts)) as stack:
        plain = await _plain(stack)
        run = await _killed(stack, len(plain))
    if run.text != plain:
        raise SystemExit(f"the answers differ:\n{run.text}\n{plain}")
    console = Console(record=True, width=_WIDTH, force_terminal=True, color_system="truecolor", file=io.StringIO())
    console.print(Text(f'$ outrider generate "{_PROMPT}" {" ".join(_OPTIONS)} --color\n', style="bold"))
    console.print(Text.from_ansi(run.before.decode()))
    console.print(
        Text(f"$ kill -9 {run.process_id}    # the target that serves this answer", style="bold white on red")
    )
    console.print(Text.from_ansi(run.after.decode()))
    console.print(Text.from_ansi(run.figures.decode().strip()))
    console.print(Text(f"\nlongest pause {run.pause_s:.2f} s; the text is that of --no-speculation", style="bold"))
    return console


def main() -> None:
    """Record a run and write the picture."""
    console = asyncio.run(record())
    svg = console.export_svg(title="a target killed in the middle of an answer", theme=MONOKAI, unique_id="takeover")
    svg = _FONT_FACE.sub("", svg).replace("font-family: Fira Code, monospace", f"font-family: {_FONT}")
    PICTURE.write_text(svg)


if __name__ == "__main__":
    main()
