"""How the attention of a pass is divided: every row and head once, and no thread with much more to do than another."""

import subprocess
from collections import Counter
from pathlib import Path

import pytest

from outrider.native import build

COMPILER = build.find_compiler()
pytestmark = pytest.mark.skipif(COMPILER is None or not build.is_supported(), reason="no compiler, or not for here")
GROUP, KEY_HEADS = 3, 3

PROGRAM = """
#include <cstdio>
#include <cstdlib>
#include "attention_units.h"

// Arguments: threads, then of each session its first position and its number of rows. Prints how many heads are
// together, then of each unit its first row, its number of rows, its key head and its work.
int main(int num_arguments, char** arguments) {
  const int num_sessions = (num_arguments - 2) / 2;
  std::vector<int32_t> pages(num_sessions);
  std::vector<outrider::AttentionRow> rows;
  for (int session = 0; session < num_sessions; ++session) {
    pages[session] = 1000 * session;
    const int first = std::atoi(arguments[2 + 2 * session]), num = std::atoi(arguments[3 + 2 * session]);
    for (int row = 0; row < num; ++row) {
      rows.push_back({static_cast<int64_t>(rows.size()), first + row, &pages[session]});
    }
  }
  outrider::Attention attention{};
  attention.num_key_heads = %d;
  attention.group = %d;
  const auto units = outrider::divide(rows, attention, std::atoi(arguments[1]));
  std::printf("%%ld\\n", static_cast<long>(attention.heads_together));
  for (const auto& unit : units) {
    std::printf("%%ld %%ld %%ld %%ld\\n", static_cast<long>(unit.first->row), static_cast<long>(unit.last - unit.first),
                static_cast<long>(unit.key_head), static_cast<long>(unit.work));
  }
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, compiled."""
    folder = tmp_path_factory.mktemp("units")
    source, path = folder / "units.cpp", folder / "units"
    source.write_text(PROGRAM % (KEY_HEADS, GROUP))
    headers = Path(build.__file__).parent
    assert COMPILER is not None
    subprocess.run(
        [*COMPILER.split(), "-std=c++20", "-O1", f"-I{headers}", str(source), "-o", str(path)], check=True, timeout=60
    )
    return path


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "sessions",
    [
        [(160, 1)],
        [(1500, 8)],
        [(160, 1)] * 16,
        [(160 + 400 * index, 1) for index in range(16)],
        [(100, 1)] * 3 + [(1500, 1)],
        [(160, 1)] * 4 + [(1500, 4)],
        [(0, 512)],
        [(160, 1)] * 15 + [(0, 256)],
        [(100, 300), (3000, 300)],
    ],
    ids=lambda sessions: f"{len(sessions)}-{sessions[0][0]}-{sessions[-1][1]}",
)
def test_no_thread_waits_long_for_another(program: Path, sessions: list[tuple[int, int]], num_threads: int) -> None:
    arguments = [str(number) for session in sessions for number in session]
    printed = subprocess.run(
        [str(program), str(num_threads), *arguments], check=True, capture_output=True, text=True, timeout=10
    ).stdout.splitlines()
    together, units = int(printed[0]), [tuple(map(int, line.split())) for line in printed[1:]]
    seen = Counter(
        (row, head)
        for first, num, key_head, _ in units
        for row in range(first, first + num)
        for head in range(key_head, key_head + together)
    )
    num_rows = sum(num for _, num in sessions)
    assert seen == Counter((row, head) for row in range(num_rows) for head in range(KEY_HEADS))
    # Each thread takes the next unit when it is done with one.
    loads = [0] * num_threads
    for *_, work in units:
        loads[loads.index(min(loads))] += work
    mean = sum(loads) / num_threads
    # One row cannot be cut, and few rows are not cut for many threads: each part reads all pages.
    most = 1.3 if num_threads < 8 else 1.6
    largest_row = max((work for _, num, _, work in units if num == 1), default=0)
    assert max(loads) <= max(most * mean, mean + largest_row)
