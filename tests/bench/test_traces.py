import pytest

from bench.traces import KINDS, Trace, traces


def _share_seen(trace: Trace, before: str, size: int = 4) -> float:
    """Returns the share of the output's words that end words which stood before in this order."""
    words = [*before.split(), *trace.prompt.split(), *trace.output.split()]
    seen, num, num_output = set[tuple[str, ...]](), 0, len(trace.output.split())
    for end in range(size, len(words) + 1):
        ngram = tuple(words[end - size : end])
        num += end > len(words) - num_output and ngram in seen
        seen.add(ngram)
    return num / num_output


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_the_same_traces_and_another_one_others(kind: str) -> None:
    first = traces(kind, 3, seed=1)
    assert first == traces(kind, 3, seed=1) == traces(kind, 5, seed=1)[:3]
    assert len({trace.output for trace in first}) == 3
    assert {trace.output for trace in first}.isdisjoint(trace.output for trace in traces(kind, 3, seed=2))


@pytest.mark.parametrize("kind", KINDS)
def test_much_is_said_again_and_some_is_new(kind: str) -> None:
    *earlier, last = traces(kind, 6)
    alone, after = _share_seen(last, ""), _share_seen(last, "\n".join(one.prompt + one.output for one in earlier))
    assert 0.15 < alone <= after < 0.98
    assert after > 0.5
