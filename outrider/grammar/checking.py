"""A process that compiles constraints to check them: `python -m outrider.grammar.checking`.

Some schemas take llguidance minutes and gigabytes to compile, and a thread cannot be ended. This process can: it has a
bound on its memory, and the system ends it where a constraint takes too much of the CPU's time. It reads lines of JSON
from standard input, the first with the tokenizer and the bound on that time, each other with a constraint, and writes a
line for each: null, or what is wrong with it. It ends with its input.
"""

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any, Final

from llguidance import LLMatcher

from outrider.constraint import Constraint
from outrider.errors import OutriderError
from outrider.grammar.compilation import compiled, load_tokenizer
from outrider.grammar.matcher import OutputMatcher

_MAX_MORE_BYTES: Final = 256 << 20
"""Of memory that compiling takes beside the tokenizer; schemas of thousands of properties take 20 MB."""
_MAX_WALL_S: Final = 20.0
_NICENESS: Final = 10
_NUM_STEPS: Final = 8


def main() -> None:
    """Check constraints until standard input ends."""
    # Behind what serves on the same cores.
    os.nice(_NICENESS)
    first: dict[str, Any] = json.loads(sys.stdin.readline())
    try:
        tokenizer = load_tokenizer(first["tokenizer"], first["vocabulary_size"], first["eos_token_ids"])
    except OutriderError as error:
        _answer(error.message)
        return
    most = _address_space() + _MAX_MORE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    _answer(None)
    for line in sys.stdin:
        # By default these signals end a process, whatever it is doing.
        signal.setitimer(signal.ITIMER_PROF, first["max_cpu_s"])
        signal.setitimer(signal.ITIMER_REAL, _MAX_WALL_S)
        try:
            _walk(compiled(Constraint.from_dict(json.loads(line)), tokenizer))
            problem = None
        except OutriderError as error:
            problem = error.message
        except Exception as error:
            problem = f"cannot be compiled: {error}"
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _answer(problem)


def _walk(matcher: LLMatcher) -> None:
    """Go some tokens along an output; raise `ConstraintFailed` where the matcher exceeds a bound already.

    What forces hundreds of thousands of characters shows here, and holds up no target's engine.
    """
    own = OutputMatcher(matcher.deep_copy)
    output: list[int] = []
    for _ in range(_NUM_STEPS):
        own.follow(output)
        own.forced()
        own.check()
        mask = int.from_bytes(own.native.compute_bitmask(), "little")
        own.check()
        if not mask or own.native.is_stopped():
            return
        output.append((mask & -mask).bit_length() - 1)


def _address_space() -> int:
    """Return the bytes of this process's address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _answer(problem: str | None) -> None:
    sys.stdout.write(json.dumps(problem) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
