"""Output of a generation: streamed text, coloured by origin if requested; one JSON object; one line of figures."""

import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import click

from outrider.client.events import Delta, Event, Finished, Generation
from outrider.client.statistics import Statistics
from outrider.tokens import TokenOrigin

_COLORS = {TokenOrigin.ACCEPTED: "green", TokenOrigin.RECOVERED: "yellow", TokenOrigin.BONUS: "cyan"}
_MEANINGS = {
    TokenOrigin.ACCEPTED: "drafted and accepted",
    TokenOrigin.RECOVERED: "the target's own in place of a rejected one",
    TokenOrigin.BONUS: "the target's own, nothing was drafted",
}
_WORD = re.compile(r"\s*\S+|\s+")


class TextPrinter:
    """Prints a generation's text on standard output as it comes."""

    def __init__(self, *, color: bool) -> None:
        self._color = color

    def print(self, event: Event) -> None:
        """Print what the event adds."""
        if isinstance(event, Delta) and self._color and event.origins:
            for word, origin in origins_of_words(event.text, event.origins):
                click.secho(word, fg=_COLORS[origin], nl=False, color=True)
        elif isinstance(event, Delta | Finished):
            click.echo(event.text, nl=False)

    def end(self, generation: Generation) -> None:
        """End the line; print the token ids where a model without a tokenizer gave no text."""
        if not generation.text:
            click.echo(" ".join(str(token_id) for token_id in generation.token_ids), nl=False)
        click.echo()
        self.print_legend()

    def print_legend(self) -> None:
        """Print what the colours mean, on standard error; nothing without colours."""
        if self._color:
            entries = (click.style(_MEANINGS[origin], fg=color) for origin, color in _COLORS.items())
            click.echo(" · ".join(entries), err=True, color=True)


def origins_of_words(text: str, origins: tuple[TokenOrigin, ...]) -> Iterator[tuple[str, TokenOrigin]]:
    """Yield the text in words, each with the origin of the token that ends it.

    A delta has the origin of each token, not which characters each of them gave. Words stand for tokens in the same
    proportion; the last word is the last token's, and in a verdict only the last token can differ from the others.
    """
    words = _WORD.findall(text)
    for number, word in enumerate(words, start=1):
        yield word, origins[max(0, number * len(origins) // len(words) - 1)]


def as_json(generation: Generation, *, with_logprobs: bool) -> dict[str, Any]:
    """Return the object that `generate --json` prints."""
    reason = generation.finish_reason
    answer: dict[str, Any] = {
        "text": generation.text,
        "token_ids": generation.token_ids,
        "finish_reason": reason.value if reason else None,
        "session_id": generation.session_id,
        "seed": generation.seed,
        "stats": statistics_as_json(generation.statistics),
    }
    if with_logprobs:
        pairs = zip(generation.token_ids, generation.logprobs, strict=False)
        answer["logprobs"] = [{"token_id": token_id, **asdict(logprobs)} for token_id, logprobs in pairs]
    return answer


def statistics_as_json(statistics: Statistics) -> dict[str, Any]:
    """Return the figures under the names that `generate --json` documents."""
    return {
        "num_drafts": statistics.num_drafts,
        "num_draft_tokens": statistics.num_draft_tokens,
        "num_accepted_tokens": statistics.num_accepted_tokens,
        "num_accepted_tokens_per_pos": list(statistics.num_accepted_tokens_per_pos),
        "num_accepted_tokens_by_drafter": statistics.num_accepted_tokens_by_drafter,
        "acceptance_rate": statistics.acceptance_rate,
        "mean_acceptance_length": statistics.mean_acceptance_length,
        "tokens_per_second": statistics.tokens_per_second,
        "time_to_first_token_s": statistics.time_to_first_token_s,
        "num_target_passes": statistics.num_target_passes,
        "drafter": statistics.drafter,
        "draft_at": statistics.draft_at,
        "acceptance_rule": statistics.acceptance_rule.value if statistics.acceptance_rule else None,
        "varying_numerics": statistics.varying_numerics,
        "feature_bytes": statistics.feature_bytes,
        "num_recomputed_tokens": statistics.num_recomputed_tokens,
        "num_proposed_nodes": statistics.num_proposed_nodes,
        "num_wasted_nodes": statistics.num_wasted_nodes,
        "hit_rate": statistics.hit_rate,
        "duration_s": statistics.duration_s,
        "target_time_s": statistics.target_time_s,
        "wait_time_s": statistics.wait_time_s,
        "queue_time_s": statistics.queue_time_s,
        "predicted_tokens_per_second": statistics.predicted_tokens_per_second,
    }


def summary(generation: Generation) -> str:
    """Return one line of figures for a person."""
    statistics = generation.statistics
    parts = [f"{len(generation.token_ids)} tokens in {statistics.num_target_passes} target passes"]
    if generation.finish_reason:
        parts.append(generation.finish_reason.value)
    parts.append(
        f"{statistics.tokens_per_second:.1f} tokens/s, the first after {statistics.time_to_first_token_s:.2f} s"
    )
    if statistics.drafter:
        parts.append(f"drafted by {statistics.drafter} ({statistics.draft_at})")
    if statistics.num_draft_tokens:
        parts.append(f"acceptance rate {statistics.acceptance_rate:.0%}")
        parts.append(f"mean acceptance length {statistics.mean_acceptance_length:.2f}")
    if statistics.num_accepted_tokens_by_drafter:
        parts.append(f"accepted: {_by_drafter(statistics.num_accepted_tokens_by_drafter)}")
    if statistics.num_hits:
        parts.append(f"hit rate {statistics.hit_rate:.0%}")
    parts += [f"{num} x {reason}" for reason, num in sorted(statistics.num_fallbacks.items())]
    if statistics.num_recomputed_tokens:
        parts.append(f"{statistics.num_recomputed_tokens} tokens recomputed")
    if statistics.varying_numerics:
        parts.append("varying numerics")
    return " · ".join([*parts, f"session {generation.session_id}"])


def _by_drafter(nums: dict[str, int]) -> str:
    """Return numbers of tokens by drafter, such as `41 eagle3, 30 suffix, 12 both`; those of several together last."""
    is_pair = len({drafter for name in nums for drafter in name.split("+")}) == 2
    words = {name: "both" if is_pair and "+" in name else name for name in nums}
    return ", ".join(f"{nums[name]} {words[name]}" for name in sorted(nums, key=lambda name: ("+" in name, name)))
