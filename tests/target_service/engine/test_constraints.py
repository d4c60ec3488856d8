"""Constraints at the target: the output follows them whatever is proposed, and is plain decoding's under `coupled`."""

import asyncio
import itertools
import random
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from outrider import wire
from outrider.constraint import Constraint
from outrider.errors import ConstraintFailed, InvalidArgument, Overloaded
from outrider.grammar import compiler
from outrider.grammar.compiler import GrammarCompiler, num_at_once
from outrider.lm.byte_tokenizer import EOS
from outrider.lm.embedded import ensure_embedded
from outrider.lm.tokenizer import TOKENIZER_NAME
from outrider.parameters import REPLAYABLE_RULES, AcceptanceRule, SamplingParameters
from outrider.speculation.acceptance import AcceptanceRates
from outrider.tokens import ROOT, Base, NodeKind, ProposalNode, ProposalTree, SparseDistribution
from outrider.v1 import target_pb2 as pb
from outrider.v1 import tokens_pb2
from target_service.engine import request_constraint
from target_service.engine.constraints import Constraints, Offered, with_forced
from target_service.engine.request_constraint import RequestConstraint
from tests.masks import allowed_by
from tests.proposals import chain
from tests.target_service.conversation import Caller, target

MODEL = "markov:text=1,seed=5,scale=2"
PROMPT = [40, 41, 42]
REGEX = "(ab|cd?|[x-z]{2}){2,9}-[0-9]{1,3}"
SCHEMA = """{"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string", "maxLength": 6}},
"required": ["n"]}"""


def ids_of(text: str) -> list[int]:
    """Return the tokens of printable text: byte-level tokenizers number these bytes in their order."""
    order = sorted(range(33, 127))
    known = {chr(byte): place for place, byte in enumerate(order)}
    return [known[char] for char in text]


def text_of(token_ids: Sequence[int]) -> str:
    return "".join(chr(33 + token_id) if token_id < 94 else "?" for token_id in token_ids)


Propose = Callable[[list[int]], list[ProposalNode]]


async def constrained(
    caller: Caller, handle: int, parameters: SamplingParameters, propose: Propose | None = None, **more: Any
) -> tuple[list[int], int]:
    """Return the output of a request, and how many rounds it took; `propose` gives nodes after an output."""
    num = 6 if propose else 0
    prompt = more.pop("prompt", PROMPT)
    prompt_len = more.get("prompt_len", len(prompt))
    opened = await caller.open(
        handle, prompt, parameters, num_speculative_tokens=num, stop_token_ids=(EOS, *parameters.stop_token_ids), **more
    )
    assert opened.WhichOneof("frame") == "opened", opened
    cached_len = opened.opened.cached_len
    await caller.span(handle, cached_len, prompt[cached_len:])
    output, num_rounds = list(prompt[prompt_len:]), 0
    if propose:
        await caller.propose(handle, Base(len(prompt), 1), propose(output))
    async for verdict in caller.verdicts(handle):
        output += verdict.token_ids
        num_rounds += 1
        if propose and not verdict.finish_reason:
            await caller.propose(handle, Base(prompt_len + len(output), 1), propose(output))
    await caller.send(handle, close=pb.VerifyClose(committed_len=prompt_len + len(output)))
    return output, num_rounds


def any_tree(draw: random.Random, right: Sequence[int]) -> Propose:
    """Return what proposes the right tokens often, others as often, and some that are not allowed."""

    def propose(output: list[int]) -> list[ProposalNode]:
        tree, number = ProposalTree(), ROOT
        for token_id in right[len(output) : len(output) + draw.randrange(5)]:
            number = tree.append(ProposalNode(number, token_id, NodeKind.GUESSED))
        for _ in range(draw.randrange(6)):
            parent, token_id = draw.randrange(len(tree) + 1), draw.choice([*ids_of("abcdxyz-019"), EOS])
            if tree.child(parent, token_id) is None:
                tree.append(ProposalNode(parent, token_id, NodeKind.GUESSED))
        return tree.nodes

    return propose


def drafted(draw: random.Random) -> Propose:
    """Return what samples a chain from a distribution of its own, whatever is allowed."""

    def propose(output: list[int]) -> list[ProposalNode]:
        nodes = []
        for parent in range(4):
            token_ids = tuple(draw.sample(ids_of("abcdxyz-019"), 4))
            sparse = SparseDistribution(token_ids, (0.4, 0.3, 0.2, 0.1))
            token_id = draw.choices(token_ids, sparse.probabilities)[0]
            nodes.append(ProposalNode(parent, token_id, NodeKind.DRAFTED, sparse))
        return nodes

    return propose


PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 1.5, "top_k": 4},
    {"top_p": 0.7, "repetition_penalty": 1.3, "logprobs": 2},
    {"temperature": 0.7, "min_p": 0.1, "min_tokens": 7, "presence_penalty": 0.5},
    {"logit_bias": {ids_of("a")[0]: -50.0, ids_of("-")[0]: 5.0}},
]


@pytest.mark.parametrize("given", PARAMETERS)
async def test_the_output_follows_the_constraint_and_no_proposal_changes_it(given: dict[str, Any]) -> None:
    num_rounds = num_tokens = 0
    async with target(MODEL) as (_, caller):
        for seed in range(6):
            draw = random.Random(seed)
            parameters = SamplingParameters(**given, seed=seed, max_tokens=40, constraint=Constraint(regex=REGEX))
            plain, _ = await constrained(caller, 4 * seed + 1, parameters)
            assert plain[-1] == EOS and re.fullmatch(REGEX, text_of(plain[:-1]))
            assert len(plain) >= parameters.min_tokens
            rounds = [await constrained(caller, 4 * seed + 2 + k, parameters, any_tree(draw, plain)) for k in range(2)]
            assert [output for output, _ in rounds] == [plain, plain]
            num_rounds += sum(num for _, num in rounds)
            num_tokens += 2 * len(plain)
    assert num_rounds < num_tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_under_rejection_drafts_that_do_not_know_the_constraint_are_judged_too(temperature: float) -> None:
    async with target(MODEL) as (_, caller):
        draw = random.Random(3)
        for handle in range(1, 12):
            parameters = SamplingParameters(
                temperature=temperature, seed=handle, max_tokens=40, constraint=Constraint(regex=REGEX)
            )
            output, _ = await constrained(caller, handle, parameters, drafted(draw), rule=AcceptanceRule.REJECTION)
            assert output[-1] == EOS and re.fullmatch(REGEX, text_of(output[:-1]))


@pytest.mark.parametrize("rule", REPLAYABLE_RULES)
async def test_another_target_goes_on_within_the_constraint(rule: AcceptanceRule) -> None:
    """After a failover the output so far comes with the span; the constraint begins where the output does."""
    parameters = SamplingParameters(seed=8, max_tokens=40, constraint=Constraint(regex=REGEX))
    async with target(MODEL) as (_, caller):
        plain, _ = await constrained(caller, 1, parameters, rule=rule)
    for num in {1, len(plain) // 2, len(plain) - 1}:
        async with target(MODEL) as (_, caller):
            prompt = [*PROMPT, *plain[:num]]
            output, _ = await constrained(caller, 1, parameters, rule=rule, prompt=prompt, prompt_len=len(PROMPT))
            assert output[-1] == EOS and re.fullmatch(REGEX, text_of(output[:-1]))
            if rule is AcceptanceRule.COUPLED:
                assert output == plain


async def test_sessions_beside_each_other_have_their_own_constraints() -> None:
    """A session goes back to an earlier text, others have another constraint or none; all share passes."""
    constraints_of = [Constraint(regex=REGEX), Constraint(json_schema=SCHEMA), Constraint(choice=["yes", "no"]), None]
    async with target(MODEL) as (_, caller):
        wanted = [SamplingParameters(seed=4, max_tokens=30, constraint=item) for item in constraints_of]
        alone = [(await constrained(caller, 1 + k, item))[0] for k, item in enumerate(wanted)]
        for handle, parameters in enumerate(wanted, start=11):
            await caller.open(handle, PROMPT, parameters, stop_token_ids=(EOS,))
        for handle in range(11, 15):
            await caller.span(handle, 0, PROMPT)
        for handle, expected in enumerate(alone, start=11):
            found = [token_id async for verdict in caller.verdicts(handle) for token_id in verdict.token_ids]
            assert found == expected


async def test_what_is_forced_is_proposed_without_a_draft() -> None:
    text = "abcdefghijklmnopqrstuvwxyz"
    parameters = SamplingParameters(seed=1, max_tokens=60, constraint=Constraint(choice=[text]))
    async with target(MODEL) as (_, caller):
        plain, num_plain = await constrained(caller, 1, parameters)
        output, num_rounds = await constrained(caller, 2, parameters, forced_tokens=True)
        assert text_of(output[:-1]) == text and output == plain
        assert num_plain == len(text) + 1 and num_rounds <= 3
        # No further than the request may go.
        short = parameters.replace(max_tokens=5)
        assert (await constrained(caller, 3, short, forced_tokens=True))[0] == plain[:5]
        assert (await constrained(caller, 4, parameters, forced_tokens=True, rule=AcceptanceRule.REJECTION))[0] == plain


@dataclass(slots=True)
class Alone:
    """A request without an engine."""

    parameters: SamplingParameters
    output: list[int] = field(default_factory=list)
    stop_token_ids: frozenset[int] = frozenset({2})
    rule: AcceptanceRule = AcceptanceRule.COUPLED
    constraint: RequestConstraint | None = None


@pytest.mark.embedded
@pytest.mark.parametrize("text", ["\U0001f642's mood", "\u4e2d\u200d's, it's", "a plain text of several words"])
def test_forced_tokens_are_but_a_proposal(text: str) -> None:
    """In the middle of what is forced the library may want other tokens for it than at its beginning."""
    definition = (Path(ensure_embedded()) / TOKENIZER_NAME).read_text()
    made = Constraints(GrammarCompiler(definition, 49152, [2]), 49152, [2])
    parameters = SamplingParameters(constraint=Constraint(choice=[f"0{text}", f"1{text}"]))

    def at(output: list[int], *, forced: bool = False) -> Alone:
        request = Alone(parameters)
        grammar = made.begin(parameters)
        assert grammar is not None and grammar.matcher
        made.attach(request, grammar, lambda: None)
        for end in range(1, len(output) + 1) if forced else [len(output)]:
            request.output = output[:end]
            assert request.constraint is not None
            request.constraint.follow()
        return request

    def allowed(request: Alone, tree: ProposalTree | None = None) -> tuple[list[set[int]], int]:
        [found] = made.masked([Offered(request, tree or ProposalTree())])
        assert found is not None and found[1] is not None
        kept, masks = found
        return [allowed_by(masks.masks[number]) for number in range(1 + len(kept))], len(kept)

    plain: list[int] = []
    while 2 not in (tokens := allowed(at(plain, forced=True))[0][0]):
        plain.append(min(tokens))
        # One that took over here allows the same.
        assert allowed(at(plain[:-1]))[0][0] == tokens
    masks, num_kept = allowed(at([]), chain(tuple(plain)))
    assert num_kept == len(plain)
    assert masks == [allowed(at(plain[:end]))[0][0] for end in range(len(plain) + 1)]


async def test_forced_tokens_and_a_draft_go_together() -> None:
    parameters = SamplingParameters(seed=2, max_tokens=40, constraint=Constraint(json_schema=SCHEMA))
    async with target(MODEL) as (_, caller):
        plain, _ = await constrained(caller, 1, parameters)
        for handle in range(2, 8):
            propose = any_tree(random.Random(handle), plain)
            output, num = await constrained(caller, handle, parameters, propose, forced_tokens=True)
            assert output == plain and num < len(plain)


async def test_where_only_the_end_is_allowed_it_comes_before_min_tokens() -> None:
    async with target(MODEL) as (_, caller):
        for handle, rule in enumerate(REPLAYABLE_RULES, start=1):
            parameters = SamplingParameters(seed=1, min_tokens=9, max_tokens=20, constraint=Constraint(regex="a|bcd"))
            output, _ = await constrained(caller, handle, parameters, rule=rule)
            assert text_of(output[:-1]) in ("a", "bcd") and output[-1] == EOS
        # Where something else is allowed too, the end waits.
        parameters = SamplingParameters(seed=1, min_tokens=9, max_tokens=20, constraint=Constraint(regex="a*"))
        assert len((await constrained(caller, 9, parameters))[0]) >= 9


async def refusal(caller: Caller, handle: int, parameters: SamplingParameters, **more: Any) -> Exception:
    """Return the error that ends a request, at its opening or later."""
    frame = await caller.open(handle, PROMPT, parameters, stop_token_ids=(EOS, *parameters.stop_token_ids), **more)
    if frame.WhichOneof("frame") == "opened":
        await caller.span(handle, 0, PROMPT)
        while frame.WhichOneof("frame") != "refusal":
            frame = await caller.receive(handle)
    return wire.refusal_from_message(frame.refusal)


@pytest.mark.parametrize("rule", REPLAYABLE_RULES)
async def test_where_nothing_is_allowed_the_request_ends_with_a_named_error(rule: AcceptanceRule) -> None:
    async with target(MODEL) as (_, caller):
        stops = SamplingParameters(
            seed=1, min_tokens=5, max_tokens=9, stop_token_ids=ids_of("b"), constraint=Constraint(regex="aab")
        )
        error = await refusal(caller, 1, stops, rule=rule)
        assert isinstance(error, ConstraintFailed) and "no token" in error.message
        # The session goes on, and others do.
        free = SamplingParameters(seed=1, max_tokens=5, constraint=Constraint(regex="aab"))
        assert text_of((await constrained(caller, 2, free))[0][:-1]) == "aab"


async def test_where_the_model_finds_nothing_possible_the_request_ends_with_a_named_error() -> None:
    """The model writes ASCII only: every other token has a logit of minus infinity."""
    async with target(MODEL) as (_, caller):
        error = await refusal(caller, 1, SamplingParameters(seed=1, constraint=Constraint(regex="a\u00e9")))
        assert isinstance(error, ConstraintFailed) and "no token possible" in error.message


async def test_wrong_constraints_are_refused_with_the_reason() -> None:
    async with target(MODEL) as (engine, caller):
        error = await refusal(caller, 1, SamplingParameters(seed=1, constraint=Constraint(regex="a(")))
        assert isinstance(error, InvalidArgument) and "unclosed group" in error.message
        assert engine.load.num_active_sessions == 0
        output, _ = await constrained(caller, 2, SamplingParameters(seed=1, constraint=Constraint(regex="a")))
        assert text_of(output[:-1]) == "a"


DEAD = Constraint(regex="a\u00e9|b{3}")
"""Nothing that the model writes can follow `a`."""


async def test_a_node_that_nothing_can_follow_matters_only_where_it_is_output() -> None:
    """The model writes ASCII only: after `a` no token is possible, and the target does not go there."""
    parameters = SamplingParameters(temperature=0, seed=1, constraint=DEAD, logit_bias={ids_of("b")[0]: 100.0})
    lines = [chain(tuple(ids_of("a"))).nodes, drafted(random.Random(1))([])]
    async with target(MODEL) as (_, caller):
        for handle, (rule, nodes) in enumerate(itertools.product(REPLAYABLE_RULES, lines), start=1):
            output, _ = await constrained(caller, handle, parameters, lambda _, nodes=nodes: nodes, rule=rule)
            assert text_of(output[:-1]) == "bbb"


async def test_a_request_that_is_refused_for_its_constraint_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with target(MODEL) as (engine, caller):
        monkeypatch.setattr(compiler, "_MAX_PENDING", 0)
        error = await refusal(caller, 1, SamplingParameters(seed=1, constraint=Constraint(regex="a")))
        assert isinstance(error, Overloaded) and engine.requests.num_residents == 0 and not len(engine.requests)


async def test_a_closed_request_is_compiled_no_more() -> None:
    hold = threading.Event()
    async with target(MODEL) as (engine, caller):
        found = engine._scheduler._constraints._compiler
        assert found is not None
        for _ in range(num_at_once()):
            found._threads.submit(lambda: hold.wait(20))
        await caller.open(
            1, PROMPT, SamplingParameters(seed=1, constraint=Constraint(regex="a")), stop_token_ids=(EOS,)
        )
        await caller.send(1, close=pb.VerifyClose(committed_len=0))
        async with asyncio.timeout(10):
            while found._threads.num_pending > num_at_once():
                await asyncio.sleep(0.005)
        hold.set()


async def test_requests_that_are_taken_over_wait_once_for_the_compiling_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A long output is followed where the grammar is compiled, not behind the grammars of all others."""
    hold, num_followed = threading.Event(), 0
    follow = compiler.CompiledGrammar.follow

    def counted(grammar: compiler.CompiledGrammar, output: Sequence[int]) -> None:
        nonlocal num_followed
        num_followed += 1
        follow(grammar, output)

    monkeypatch.setattr(compiler.CompiledGrammar, "follow", counted)
    parameters = SamplingParameters(seed=8, max_tokens=320, constraint=Constraint(regex="[ab]{400}"))
    async with target(MODEL) as (engine, caller):
        plain, _ = await constrained(caller, 1, parameters)
    async with target(MODEL) as (engine, caller):
        found = engine._scheduler._constraints._compiler
        assert found is not None
        for _ in range(num_at_once()):
            found._threads.submit(lambda: hold.wait(20))
        span = [*PROMPT, *plain[:300]]
        await caller.open(1, span, parameters, stop_token_ids=(EOS,), prompt_len=len(PROMPT))
        await caller.span(1, 0, span)
        await caller.open(2, PROMPT, SamplingParameters(seed=8, max_tokens=4), stop_token_ids=(EOS,))
        await caller.span(2, 0, PROMPT)
        # The engine has taken the first span when it answers the second one.
        assert [verdict async for verdict in caller.verdicts(2)]
        hold.set()
        output = [token_id async for verdict in caller.verdicts(1) for token_id in verdict.token_ids]
        assert output == plain[300:] and not num_followed


async def test_forced_tokens_keep_within_the_rows_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = SamplingParameters(seed=1, max_tokens=60, constraint=Constraint(choice=["abcdefghijklmnopqrstuvwxyz"]))
    async with target(MODEL) as (engine, caller):
        engine._scheduler._max_rows = 20
        num_rows: list[int] = []
        forward = engine._model.forward
        monkeypatch.setattr(
            engine._model,
            "forward",
            lambda steps: num_rows.append(sum(step.num_rows for step in steps)) or forward(steps),
        )
        found = await asyncio.gather(*(constrained(caller, n, parameters, forced_tokens=True) for n in range(1, 7)))
        assert {text_of(output[:-1]) for output, _ in found} == {"abcdefghijklmnopqrstuvwxyz"}
        # A prompt has four rows whatever else there is.
        assert 10 < max(num_rows) <= 24


async def test_nothing_is_learnt_about_drafts_from_forced_tokens() -> None:
    text = "abcdefghijklmnopqrstuvwxyz"
    parameters = SamplingParameters(seed=1, max_tokens=60, constraint=Constraint(choice=[text]))
    async with target(MODEL) as (engine, caller):
        whole = ids_of(text)

        def propose(output: list[int]) -> list[ProposalNode]:
            return chain(tuple(whole[len(output) : len(output) + 4])).nodes

        for handle in range(1, 4):
            await constrained(caller, handle, parameters, propose, forced_tokens=True)
        rates = engine.requests._statistics.rates
        assert all(rates.value(depth, 1) == AcceptanceRates().value(depth, 1) for depth in range(1, 5))


async def test_a_proposal_that_leads_beyond_a_bound_costs_itself_only() -> None:
    parameters = SamplingParameters(
        temperature=0,
        seed=1,
        max_tokens=9,
        constraint=Constraint(regex="b{3}|a{1000000}"),
        logit_bias={ids_of("b")[0]: 100},
    )
    async with target(MODEL) as (_, caller):
        beyond = chain((*ids_of("aa"),)).nodes
        output, _ = await constrained(caller, 1, parameters, lambda _: beyond)
        assert text_of(output[:-1]) == "bbb"
        error = await refusal(caller, 2, parameters.replace(logit_bias={ids_of("a")[0]: 100}))
        assert isinstance(error, ConstraintFailed) and "lexer error" in error.message


@pytest.mark.parametrize("rule", REPLAYABLE_RULES)
async def test_a_proposal_that_leads_beyond_a_bound_fails_no_request(rule: AcceptanceRule) -> None:
    """It is allowed, and what it makes the lexer compute counts for the request too, until that is compiled anew."""
    parameters = SamplingParameters(
        temperature=0,
        seed=1,
        max_tokens=9,
        constraint=Constraint(choice=["cbbbb", "ca" + "ax" * 30_000]),
        logit_bias={ids_of("b")[0]: 100},
    )
    async with target(MODEL) as (_, caller):
        output, _ = await constrained(
            caller, 1, parameters, lambda output: chain(tuple(ids_of("aax"))).nodes if output else [], rule=rule
        )
        assert text_of(output[:-1]) == "cbbbb"
        # Forced tokens are no exception: they are taken up again with the next request.
        again, _ = await constrained(caller, 2, parameters, forced_tokens=True, rule=rule)
        assert again == output


async def test_drafted_tokens_beyond_a_bound_are_judged_in_their_round() -> None:
    """Under `rejection` they count whatever they are, so the round that failed has them still; none after it has."""
    constraint = Constraint(regex="cb(b{2}|a{60000})")
    parameters = SamplingParameters(temperature=0, seed=1, constraint=constraint, logit_bias={ids_of("b")[0]: 100})
    [a], [b] = ids_of("a"), ids_of("b")
    sparse = SparseDistribution((a, b), (0.5, 0.5))
    nodes = [ProposalNode(parent, token_id, NodeKind.DRAFTED, sparse) for parent, token_id in enumerate([b, a, a, a])]
    async with target(MODEL) as (_, caller):
        output, num_rounds = await constrained(
            caller, 1, parameters, lambda output: nodes if len(output) == 1 else [], rule=AcceptanceRule.REJECTION
        )
        assert text_of(output[:-1]) == "cbbb" and num_rounds == 4


@pytest.mark.parametrize("rule", REPLAYABLE_RULES)
async def test_a_target_that_takes_over_may_do_the_work_of_the_first(rule: AcceptanceRule) -> None:
    constraint = Constraint(regex="[ab]*a[ab]{300}")
    parameters = SamplingParameters(seed=8, max_tokens=700, logit_bias={EOS: -100.0}, constraint=constraint)
    async with target(MODEL) as (_, caller):
        plain, _ = await constrained(caller, 1, parameters, rule=rule)
    assert len(plain) == 700
    async with target(MODEL) as (_, caller):
        span = [*PROMPT, *plain[:640]]
        output, _ = await constrained(caller, 1, parameters, rule=rule, prompt=span, prompt_len=len(PROMPT))
        assert output == plain


@pytest.mark.parametrize("regex", ["d(ab|c{8})", "d(a\u00e9|c{8})"])
async def test_what_is_drafted_below_a_node_that_nothing_can_follow_does_not_count(regex: str) -> None:
    """Under `rejection` a chain is weighed as a whole: it ends with such a node, which is rarely output."""
    nodes = []
    for parent, text in enumerate("ax"):
        [token_id] = ids_of(text)
        nodes.append(ProposalNode(parent, token_id, NodeKind.DRAFTED, SparseDistribution((token_id,), (1.0,))))
    num_failed = {True: 0, False: 0}
    async with target(MODEL) as (_, caller):
        for seed, has_draft in itertools.product(range(40), (True, False)):
            parameters = SamplingParameters(
                seed=seed, min_tokens=5, max_tokens=12, stop_token_ids=ids_of("b"), constraint=Constraint(regex=regex)
            )
            propose = (lambda output: nodes if len(output) == 1 else []) if has_draft else None
            handle = 2 * seed + has_draft + 1
            _, error = await until_refused(caller, handle, parameters, propose, AcceptanceRule.REJECTION)
            num_failed[has_draft] += error is not None
    assert num_failed[True] <= num_failed[False] + 8


async def until_refused(
    caller: Caller, handle: int, parameters: SamplingParameters, propose: Propose | None, rule: AcceptanceRule
) -> tuple[list[int], Exception | None]:
    """Return the output of a request, and the error that ended it; None where none did."""
    num = 6 if propose else 0
    stops = (EOS, *parameters.stop_token_ids)
    await caller.open(
        handle, PROMPT, parameters, num_speculative_tokens=num, stop_token_ids=stops, rule=rule, forced_tokens=not num
    )
    await caller.span(handle, 0, PROMPT)
    output: list[int] = []
    while True:
        frame = await caller.receive(handle)
        match frame.WhichOneof("frame"):
            case "verdict":
                output += frame.verdict.token_ids
                if frame.verdict.finish_reason:
                    await caller.send(handle, close=pb.VerifyClose(committed_len=len(PROMPT)))
                    return output, None
                if propose:
                    await caller.propose(handle, Base(len(PROMPT) + len(output), 1), propose(output))
            case "refusal":
                return output, wire.refusal_from_message(frame.refusal)


@pytest.mark.parametrize("rule", REPLAYABLE_RULES)
async def test_what_comes_before_a_dead_end_is_output(rule: AcceptanceRule) -> None:
    dead = SamplingParameters(seed=1, max_tokens=20, constraint=Constraint(regex="abcdefgh\u00e9"))
    stopped = dead.replace(
        constraint=Constraint(regex="abcdefghx"), min_tokens=15, stop_token_ids=ids_of("x"), temperature=0
    )
    async with target(MODEL) as (_, caller):
        for handle, parameters in enumerate((dead, stopped), start=1):
            output, error = await until_refused(caller, handle, parameters, None, rule)
            assert text_of(output) == "abcdefgh" and isinstance(error, ConstraintFailed)
            output, error = await until_refused(
                caller,
                10 + handle,
                parameters,
                lambda output: chain(tuple(ids_of("abcdefgh")[len(output) :])).nodes,
                rule,
            )
            assert text_of(output) == "abcdefgh" and isinstance(error, ConstraintFailed)


async def test_models_without_text_take_no_constraint() -> None:
    async with target() as (_, caller):
        parameters = SamplingParameters(seed=1, constraint=Constraint(regex="a"))
        frame = await caller.open(1, [1, 2], parameters)
        error = wire.refusal_from_message(frame.refusal)
        assert isinstance(error, InvalidArgument) and "no tokenizer" in error.message


async def test_a_request_waits_for_its_grammar_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_constraint, "_MAX_COMPILE_S", 0.3)
    hold = threading.Event()
    async with target(MODEL) as (engine, caller):
        compiler = engine._scheduler._constraints._compiler
        assert compiler is not None
        for _ in range(num_at_once()):
            compiler._threads.submit(lambda: hold.wait(20))
        error = await refusal(caller, 1, SamplingParameters(seed=1, constraint=Constraint(regex="late")))
        # Another target may be free.
        assert isinstance(error, Overloaded) and "not compiled within" in error.message
        # Without a constraint nothing waits.
        output, _ = await constrained(caller, 2, SamplingParameters(seed=1, max_tokens=4))
        assert len(output) == 4
        hold.set()
        assert (
            text_of((await constrained(caller, 3, SamplingParameters(constraint=Constraint(regex="late"))))[0])
            == "late?"
        )


async def test_a_speculate_frame_before_the_grammar_is_there_is_no_problem() -> None:
    parameters = SamplingParameters(seed=1, max_tokens=9, constraint=Constraint(choice=["abcdefg", "x"]))
    async with target(MODEL) as (_, caller):
        await caller.open(1, PROMPT, parameters, stop_token_ids=(EOS,))
        await caller.send(1, speculation=pb.SpeculationSettings(forced_tokens=True))
        await caller.send(1, span=tokens_pb2.TokenSpan(start=0, token_ids=PROMPT))
        output = [token_id async for verdict in caller.verdicts(1) for token_id in verdict.token_ids]
        assert text_of(output[:-1]) in ("abcdefg", "x")


def test_forced_tokens_join_a_tree() -> None:
    tree = chain((5, 6))
    assert with_forced(tree, ()) is tree
    longer = with_forced(tree, (5, 7, 8))
    assert [(node.parent, node.token_id, node.kind) for node in longer.nodes][2:] == [
        (1, 7, NodeKind.GUESSED),
        (3, 8, NodeKind.GUESSED),
    ]
    empty = ProposalTree()
    assert len(with_forced(empty, (1, 2))) == 2 and not empty
