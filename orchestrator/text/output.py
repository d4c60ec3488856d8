"""A request's output on its way to the client: tokens to text, stop strings, and the deltas of a stream."""

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.text.stop_strings import StopStrings
from orchestrator.text.tokenizer import Tokenizer
from outrider.errors import InvalidArgument
from outrider.parameters import SamplingParameters


@dataclass(frozen=True, slots=True)
class Absorbed:
    """What of some tokens belongs to the output.

    Attributes:
        num_tokens: how many; the last one completed a stop string where `stopped`.
        text: what became certain with them.
        stopped: whether a stop string ended the output.
    """

    num_tokens: int
    text: str
    stopped: bool


class OutputText:
    """The text of one request's output; a pure function of its tokens, so that a resumed stream continues exactly.

    Args:
        tokenizer: None gives no text.
        parameters: stop strings and `min_tokens`.
    """

    def __init__(self, tokenizer: Tokenizer | None, parameters: SamplingParameters) -> None:
        if tokenizer is None and parameters.stop:
            raise InvalidArgument("the model has no tokenizer, so there is no text to stop at", "stop")
        self._detokenizer = tokenizer.detokenizer() if tokenizer else None
        self._stops = StopStrings(parameters.stop)
        self._min_tokens = parameters.min_tokens
        self.num_tokens = 0

    def absorb(self, token_ids: Sequence[int]) -> Absorbed:
        """Takes tokens, up to the one that completes a stop string."""
        if self._detokenizer is None:
            self.num_tokens += len(token_ids)
            return Absorbed(len(token_ids), "", False)
        text = ""
        for num, token_id in enumerate(token_ids, start=1):
            self.num_tokens += 1
            piece = self._detokenizer.push(token_id)
            if self.num_tokens <= self._min_tokens:
                text += self._stops.skip(piece)
                continue
            passed = self._stops.push(piece)
            text += passed.text
            if passed.stopped:
                return Absorbed(num, text, True)
        return Absorbed(len(token_ids), text, False)

    def finish(self, *, stopped: bool) -> str:
        """Returns the text that becomes certain with the end; none behind a stop string."""
        if stopped or self._detokenizer is None:
            return ""
        passed = self._stops.push(self._detokenizer.flush())
        return passed.text if passed.stopped else passed.text + self._stops.flush()
