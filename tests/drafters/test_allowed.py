"""A draft proposes only what the session's constraint allows, once that is compiled."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from outrider.constraint import Constraint
from outrider.drafters.allowed import AllowedTokens
from outrider.drafters.choices import Place, RankedChoices, SampledChoices, TreeOptions
from outrider.drafters.drafter import OpenProposal
from outrider.drafters.model import ModelDrafter, load_model_drafter
from outrider.drafters.options import DrafterKind, DrafterOptions
from outrider.grammar.compiler import GrammarCompiler, num_at_once
from outrider.lm.byte_tokenizer import EOS, VOCABULARY_SIZE, byte_tokenizer
from outrider.lm.heads.vocabulary import DraftVocabulary
from outrider.lm.tokenizer import TOKENIZER_NAME
from outrider.parameters import REPLAYABLE_RULES, AcceptanceRule, SamplingParameters
from outrider.speculation.randomness import KeyedSource
from tests.draft_service.conftest import draft, proposal, running_draft, terms
from tests.masks import allowed_by

A, B, C, X = 64, 65, 66, 87
WHOLE = DraftVocabulary(torch.arange(VOCABULARY_SIZE), VOCABULARY_SIZE)


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(byte_tokenizer().files[TOKENIZER_NAME].decode(), VOCABULARY_SIZE, [EOS])
    yield made
    made.close()


def constrained(
    compiler: GrammarCompiler, regex: str, rule: AcceptanceRule = AcceptanceRule.COUPLED, text: tuple[int, ...] = (1,)
) -> OpenProposal:
    """Return a proposal after a prompt of one token, with a constraint that is compiled."""
    grammar = compiler.begin(Constraint(regex=regex))
    assert grammar.matcher is grammar.matcher
    return OpenProposal("s", text, replace(terms(SamplingParameters(seed=3), rule), grammar=grammar), 4)


def test_what_is_allowed_follows_the_text_and_the_paths(compiler: GrammarCompiler) -> None:
    allowed = AllowedTokens(constrained(compiler, "a(b|cx)", text=(1, A)), VOCABULARY_SIZE)
    found = [None if mask is None else allowed_by(mask) for mask in allowed.after([(), (B,), (C,), (C, X), (X,)])]
    assert found == [{B, C}, {EOS}, {X}, {EOS}, set()]


def test_all_is_allowed_without_a_grammar_or_before_it_is_compiled(compiler: GrammarCompiler) -> None:
    free = OpenProposal("s", (1,), terms(), 4)
    assert AllowedTokens(free, VOCABULARY_SIZE).after([(), (B,)]) == [None, None]
    hold = threading.Event()
    for _ in range(num_at_once()):
        compiler._threads.submit(lambda: hold.wait(20))
    free.terms = replace(free.terms, grammar=compiler.begin(Constraint(regex="a")))
    assert AllowedTokens(free, VOCABULARY_SIZE).after([()]) == [None]
    hold.set()
    wrong = compiler.begin(Constraint(regex="a("))
    ready = threading.Event()
    wrong.on_ready(ready.set)
    assert ready.wait(20)
    free.terms = replace(free.terms, grammar=wrong)
    assert AllowedTokens(free, VOCABULARY_SIZE).after([()]) == [None]
    off = constrained(compiler, "a", text=(1, X))
    allowed = AllowedTokens(off, VOCABULARY_SIZE)
    assert [allowed.after([()]) for _ in range(2)] == [[None], [None]]


@pytest.mark.parametrize("rule", REPLAYABLE_RULES)
def test_choices_are_allowed_ones(compiler: GrammarCompiler, rule: AcceptanceRule) -> None:
    item = constrained(compiler, "a[bc]|x", rule)
    make = RankedChoices if rule is AcceptanceRule.COUPLED else None
    choices = make(item, TreeOptions(), WHOLE) if make else SampledChoices(item, TreeOptions(), WHOLE, KeyedSource(3))
    logits = torch.randn(3, VOCABULARY_SIZE, generator=torch.Generator().manual_seed(2))
    found = choices.after([Place((), 0), Place((A,), 0), Place((X,), 0)], logits, 8)
    assert [{choice.token_id for choice in row} for row in found] == [{A, X}, {B, C}, {EOS}]
    for row, token_ids in zip(found, ({A, X}, {B, C}, {EOS}), strict=True):
        sampled = row[0].distribution
        assert (sampled is None) == (rule is AcceptanceRule.COUPLED)
        assert sampled is None or set(sampled.token_ids) == token_ids


@pytest.mark.parametrize(
    "given", [{}, {"temperature": 0.0}, {"top_p": 0.8}, {"top_k": 2, "top_p": 0.5}, {"min_p": 0.1}]
)
@pytest.mark.parametrize("rule", REPLAYABLE_RULES)
def test_a_draft_that_cannot_predict_what_is_allowed_ends_the_branch(
    compiler: GrammarCompiler, rule: AcceptanceRule, given: dict[str, float]
) -> None:
    item = constrained(compiler, "ab|xc", rule)
    item.terms = replace(item.terms, parameters=SamplingParameters(seed=3, **given))
    few = DraftVocabulary(torch.tensor([A, C, EOS]), VOCABULARY_SIZE)
    choices = (
        RankedChoices(item, TreeOptions(), few)
        if rule is AcceptanceRule.COUPLED
        else SampledChoices(item, TreeOptions(), few, KeyedSource(3))
    )
    found = choices.after([Place((), 0), Place((A,), 0)], torch.zeros(2, 3), 4)
    assert [[choice.token_id for choice in row] for row in found] == [[A], []]


def model_drafter() -> ModelDrafter:
    return load_model_drafter(DrafterOptions(model="markov:text=1,seed=5", drafter=DrafterKind.MODEL))


@pytest.mark.parametrize("rule", REPLAYABLE_RULES)
def test_a_model_drafts_within_the_constraint(rule: AcceptanceRule) -> None:
    drafter = model_drafter()
    assert drafter.compiler is not None
    grammar = drafter.compiler.begin(Constraint(choice=["abcabc"]))
    assert grammar.matcher.forced()
    given = replace(terms(SamplingParameters(seed=3), rule), grammar=grammar)
    [drafted] = draft(drafter, proposal((1,), 6, given=given))
    assert drafted == (A, B, C, A, B, C)
    drafter.compiler.close()


async def test_a_draft_service_compiles_the_constraint_of_a_request() -> None:
    drafter = model_drafter()
    assert drafter.compiler is not None
    constraint = Constraint(choice=["cba"])
    async with running_draft(drafter) as running:
        client = running.stream()
        parameters = SamplingParameters(seed=5, constraint=constraint)
        handle, opened = await client.open(parameters=parameters, prompt_len=1)
        assert opened.WhichOneof("frame") == "opened"
        # Until it is compiled, drafts have no mask.
        async with asyncio.timeout(20):
            while await client.drafted(handle, (1,), num=3) != (C, B, A):
                await asyncio.sleep(0.01)
        await client.call.done_writing()
    drafter.compiler.close()
