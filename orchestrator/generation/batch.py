"""Output that is committed and emitted together."""

from dataclasses import dataclass, field

from orchestrator.text.output import Absorbed
from orchestrator.text.parts import Part
from outrider import wire
from outrider.parameters import FinishReason
from outrider.v1 import target_pb2, tokens_pb2


@dataclass(slots=True)
class Batch:
    """The tokens of one or more verdicts that belong to the output, with what is known of each.

    Attributes:
        token_ids: the tokens.
        origins: how each token came to be.
        logprobs: of each token, where requested.
        drafters: of each token the drafter that proposed it, empty where none is named.
        text: what became certain with the tokens.
        texts: the part of `text` that became certain with each token.
        parts: the parts of the output that became certain with the tokens.
        finish_reason: why the output ends with them; None where it goes on.
        stopped: whether a stop string ended it.
    """

    token_ids: list[int] = field(default_factory=list)
    origins: list[tokens_pb2.TokenOrigin.ValueType] = field(default_factory=list)
    logprobs: list[tokens_pb2.TokenLogprobs] = field(default_factory=list)
    drafters: list[str] = field(default_factory=list)
    text: str = ""
    texts: list[str] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stopped: bool = False

    def add(self, verdict: target_pb2.Verdict, absorbed: Absorbed) -> None:
        """Append those of a verdict's tokens that belong to the output."""
        num = absorbed.num_tokens
        self.token_ids += verdict.token_ids[:num]
        self.origins += verdict.origins[:num]
        self.logprobs += verdict.logprobs[:num]
        drafters = verdict.drafters[:num]
        # A verdict none of whose nodes names a drafter has no element; one beside it in the batch may have.
        self.drafters += [*drafters, *("" for _ in range(num - len(drafters)))]
        self.text += absorbed.text
        self.texts += absorbed.texts
        self.parts += absorbed.parts
        self.stopped = absorbed.stopped
        self.finish_reason = FinishReason.STOP if absorbed.stopped else wire.finish_from_number(verdict.finish_reason)

    @property
    def known_drafters(self) -> list[str]:
        """The drafters, as many as tokens; no element where no token has one."""
        return self.drafters if any(self.drafters) else []
