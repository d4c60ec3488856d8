"""Native attention: the formula; bits that depend on a row and what it sees, and on nothing else; errors."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch

from outrider import native
from outrider.lm.attention.native import PAGE_LEN, lay_out
from outrider.lm.attention.rows import PassBranch, PassRows
from outrider.native import Variant

BEST = native.best_variant()
pytestmark = pytest.mark.skipif(BEST is None, reason="no native operators here")


@dataclass(frozen=True)
class Case:
    """Sizes of an attention layer, and what changes its scores."""

    num_heads: int = 9
    num_key_heads: int = 3
    key_dim: int = 64
    value_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    window: int = 0
    softcap: float = 0.0


CASES = [
    Case(),
    Case(dtype=torch.float32),
    Case(1, 1, 2, 1),
    Case(8, 1, 128, 128, window=40),
    Case(4, 4, 192, 128, softcap=2.0),
    Case(16, 2, 80, 72, torch.float32, window=7, softcap=5.0),
    Case(5, 1, 7, 17, torch.float32),
    Case(6, 2, 256, 256),
    Case(6, 2, 66, 40),
]


@dataclass
class Session:
    """Keys and values of some positions, [positions, key_heads, ...], and the pages that have them."""

    keys: torch.Tensor
    values: torch.Tensor
    table: tuple[int, ...]


@dataclass
class Layer:
    """Pages with sessions of some lengths, whose content is random; page 0 and the last one have no number."""

    case: Case
    lengths: tuple[int, ...]
    seed: int = 0
    sessions: list[Session] = field(default_factory=list)

    def __post_init__(self) -> None:
        case, generator = self.case, torch.Generator().manual_seed(self.seed)
        counts = [-(-length // PAGE_LEN) for length in self.lengths]
        order = (1 + torch.randperm(sum(counts), generator=generator)).tolist()
        slots = (sum(counts) + 2) * PAGE_LEN
        self.keys = torch.full((slots, case.num_key_heads, case.key_dim), torch.nan, dtype=case.dtype)
        self.values = torch.full((slots, case.num_key_heads, case.value_dim), torch.nan, dtype=case.dtype)
        for length, count in zip(self.lengths, counts, strict=True):
            table, order = tuple(order[:count]), order[count:]
            keys, values = (
                torch.randn(length, case.num_key_heads, dim, generator=generator).to(case.dtype)
                for dim in (case.key_dim, case.value_dim)
            )
            for stored, new in ((self.keys, keys), (self.values, values)):
                stored[self.slots(table, range(length))] = new
            self.sessions.append(Session(keys, values, table))

    @staticmethod
    def slots(table: tuple[int, ...], positions: range) -> list[int]:
        return [table[at // PAGE_LEN] * PAGE_LEN + at % PAGE_LEN for at in positions]

    def attend(self, rows: list[tuple[int, range]], variant: int, num_padding: int = 0) -> torch.Tensor:
        """Returns the outputs of some positions of sessions; each has a query of its own."""
        num = sum(len(positions) for _, positions in rows)
        laid_out, query, first = PassRows(num, [], [], []), self.queries(rows, num_padding), 0
        new_keys, new_values = (
            torch.zeros(1, self.case.num_key_heads, query.shape[2], dim, dtype=self.case.dtype)
            for dim in (self.case.key_dim, self.case.value_dim)
        )
        for number, positions in rows:
            session, numbers = self.sessions[number], tuple(range(first, first + len(positions)))
            laid_out.branches.append(PassBranch(session.table, numbers, tuple(positions)))
            laid_out.write_rows.extend(numbers)
            laid_out.write_slots.extend(self.slots(session.table, positions))
            index = slice(positions.start, positions.stop)
            new_keys[0, :, list(numbers)] = session.keys[index].transpose(0, 1)
            new_values[0, :, list(numbers)] = session.values[index].transpose(0, 1)
            first += len(positions)
        return run(query, new_keys, new_values, self.keys, self.values, lay_out(laid_out).layout, self.case, variant)

    def queries(self, rows: list[tuple[int, range]], num_padding: int = 0) -> torch.Tensor:
        parts = [self._query(number)[:, positions.start : positions.stop] for number, positions in rows]
        whole = torch.cat([*parts, torch.full_like(parts[0][:, :1], torch.nan).expand(-1, num_padding, -1)], 1)
        return whole.unsqueeze(0)

    def _query(self, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 + number)
        size = (self.case.num_heads, self.lengths[number], self.case.key_dim)
        return torch.randn(size, generator=generator).to(self.case.dtype)

    def expected(self, number: int, position: int) -> torch.Tensor:
        """Returns the formula's output in float64: [num_heads, value_dim]."""
        case, session = self.case, self.sessions[number]
        seen = slice(max(0, position + 1 - case.window) if case.window else 0, position + 1)
        keys, values = (
            stored[seen].double().repeat_interleave(case.num_heads // case.num_key_heads, 1)
            for stored in (session.keys, session.values)
        )
        scores = torch.einsum("hd,nhd->hn", self._query(number)[:, position].double(), keys) * scale(case)
        if case.softcap:
            scores = case.softcap * (scores / case.softcap).tanh()
        return torch.einsum("hn,nhd->hd", scores.softmax(-1), values)


def scale(case: Case) -> float:
    return case.key_dim**-0.5


def run(
    query: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layout: torch.Tensor,
    case: Case,
    variant: int,
) -> torch.Tensor:
    attend: Callable[..., torch.Tensor] = torch.ops.outrider.paged_attention.default
    options = (scale(case), case.window, case.softcap, variant)
    return attend(query, new_keys, new_values, pages(keys), pages(values), layout, *options)


def pages(stored: torch.Tensor) -> torch.Tensor:
    """Returns slots as pages: [pages, key_heads, page_len, dim]."""
    return stored.unflatten(0, (-1, PAGE_LEN)).transpose(1, 2) if stored.dim() == 3 else stored


@pytest.fixture(params=[item for item in Variant if BEST is not None and item <= BEST], ids=lambda item: item.name)
def variant(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_formula(case: Case, variant: int) -> None:
    layer = Layer(case, (100, 1, 33, 64))
    rows = [(0, range(60, 100)), (1, range(1)), (2, range(31, 33)), (3, range(64))]
    output = layer.attend(rows, variant, num_padding=3)[0]
    places = [(number, position) for number, positions in rows for position in positions]
    expected = torch.stack([layer.expected(*place) for place in places])
    error = 2e-6 if case.dtype == torch.float32 else 2**-8
    assert torch.allclose(output[: len(places)].double(), expected, rtol=error, atol=error)
    assert not output[len(places) :].any()


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_depend_on_neither_rows_nor_threads(case: Case, variant: int, num_threads: int) -> None:
    layer = Layer(case, (150, 70), seed=1)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        whole = layer.attend([(0, range(150)), (1, range(70))], variant)[0]
        for parts in (
            [(0, range(149, 150))],
            [(0, range(146, 150))],
            [(1, range(69, 70)), (0, range(141, 150))],
            [(1, range(3, 70)), (0, range(31, 34))],
            [(0, range(40, 77))],
        ):
            part = layer.attend(parts, variant, num_padding=1)[0]
            places = [150 * number + position for number, positions in parts for position in positions]
            assert torch.equal(part[: len(places)], whole[places])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_variants_have_equal_bits(case: Case, variant: int) -> None:
    if variant == Variant.AMX and case.dtype == torch.bfloat16:
        pytest.skip("it adds in an order of its own")
    rows = [(0, range(90)), (1, range(9, 10))]
    outputs = [Layer(case, (90, 10), seed=2).attend(rows, number) for number in (0, variant)]
    assert torch.equal(*outputs)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pages_may_be_stored_head_by_head(case: Case, variant: int) -> None:
    layer, other = (Layer(case, (90, 64, 40), seed=6) for _ in range(2))
    other.keys, other.values = pages(other.keys).contiguous(), pages(other.values).contiguous()
    for rows in ([(0, range(90))], [(0, range(89, 90)), (1, range(60, 64)), (2, range(39, 40))]):
        assert torch.equal(other.attend(rows, variant), layer.attend(rows, variant))


def test_new_keys_and_values_are_stored_in_their_slots(variant: int) -> None:
    layer = Layer(Case(), (40,), seed=7)
    stored = [torch.zeros(3, 3, PAGE_LEN, 64, dtype=torch.bfloat16) for _ in range(2)]
    new = [torch.randn(1, 3, 4, 64).bfloat16() for _ in range(2)]
    rows = PassRows(4, [PassBranch((2, 1), (0, 1, 2, 3), (30, 31, 32, 33))], [0, 1, 2, 3], [94, 95, 32, 33])
    run(torch.zeros(1, 9, 4, 64).bfloat16(), *new, *stored, lay_out(rows).layout, layer.case, variant)
    for given, kept in zip(new, stored, strict=True):
        assert torch.equal(kept[2, :, 30:], given[0, :, :2]) and torch.equal(kept[1, :, :2], given[0, :, 2:])
        assert not kept[0].any() and not kept[2, :, :30].any() and not kept[1, :, 2:].any()


def test_branches_that_share_pages_read_their_own_ends(variant: int) -> None:
    # Two branches behind the same 40 positions: their second pages differ from position 40 on.
    case = Case()
    layer = Layer(case, (50, 50), seed=3)
    one, other = layer.sessions
    for stored, own in ((layer.keys, other.keys), (layer.values, other.values)):
        taken = layer.slots(one.table, range(40))
        own[:40] = stored[taken]
        stored[layer.slots(other.table, range(40))] = stored[taken]
    alone = [layer.attend([(number, range(38, 50))], variant) for number in (0, 1)]
    layer.sessions[1] = replace(other, table=(one.table[0], other.table[1]))
    together = layer.attend([(0, range(38, 50)), (1, range(38, 50))], variant)
    assert torch.equal(together, torch.cat(alone, 1))


def test_a_row_without_a_number_affects_no_other(variant: int) -> None:
    layer = Layer(Case(), (60, 60), seed=4)
    clean = layer.attend([(0, range(60)), (1, range(60))], variant)
    layer.sessions[1].keys[50:] = torch.nan
    layer.sessions[1].values[50:] = torch.nan
    spoilt = layer.attend([(0, range(60)), (1, range(60))], variant)
    # Not even those of its session that come before it, in the same page.
    assert torch.equal(spoilt[:, :110], clean[:, :110])
    assert spoilt[:, 110:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_value_that_is_not_seen_changes_no_bit(variant: int, dtype: torch.dtype) -> None:
    layer = Layer(Case(dtype=dtype), (40,), seed=8)
    layer.sessions[0].values[:36] = -0.0
    layer.sessions[0].values[36:] = torch.inf
    together = layer.attend([(0, range(33, 40))], variant)[0]
    for position in range(33, 36):
        alone = layer.attend([(0, range(position, position + 1))], variant)[0]
        assert torch.equal(together[position - 33].view(torch.uint8), alone[0].view(torch.uint8))


def test_a_page_without_a_weight_and_one_that_is_no_number(variant: int) -> None:
    layer = Layer(Case(num_heads=1, num_key_heads=1, key_dim=16, value_dim=16, dtype=torch.float32), (40,), seed=9)
    query = torch.ones(1, 1, 1, 16)
    rows = PassRows(1, [PassBranch(layer.sessions[0].table, (0,), (39,))], [], [])
    new = torch.zeros(1, 1, 1, 16)
    first, second = (layer.slots(layer.sessions[0].table, places) for places in (range(32), range(32, 40)))
    layer.keys[first], layer.keys[second] = -torch.inf, 0.0
    layer.values[first], layer.values[second] = 5.0, 1.0

    def attended() -> torch.Tensor:
        case = layer.case
        return run(query, new, new, layer.keys, layer.values, lay_out(rows).layout, case, variant)

    assert torch.equal(attended(), torch.ones(1, 1, 1, 16))
    layer.keys[second[:1]] = torch.tensor(0x7FC00001, dtype=torch.int32).view(torch.float32)
    assert attended().isnan().all()


def test_queries_may_be_views(variant: int) -> None:
    layer = Layer(Case(), (40,), seed=5)
    query = layer.queries([(0, range(40))])
    rows = PassRows(40, [PassBranch(layer.sessions[0].table, tuple(range(40)), tuple(range(40)))], [], [])
    new = torch.zeros(1, 3, 40, 64, dtype=torch.bfloat16)
    views = [
        query,
        query.transpose(1, 2).contiguous().transpose(1, 2),
        query.transpose(2, 3).contiguous().transpose(2, 3),
        torch.cat((query[..., :1], query), -1)[..., 1:],
    ]
    outputs = [run(view, new, new, layer.keys, layer.values, lay_out(rows).layout, Case(), variant) for view in views]
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(1, 4, 2, 8, dtype=torch.float16)}, "bfloat16 or float32"),
        ({"query": torch.zeros(2, 4, 2, 8)}, "one batch"),
        ({"query": torch.zeros(1, 3, 2, 8)}, "divide"),
        ({"query": torch.zeros(1, 0, 2, 8)}, "divide"),
        ({"query": torch.zeros(1, 800, 2, 8)}, "more than 384 heads"),
        ({"new_keys": torch.zeros(0, 2, 2, 8)}, "one batch"),
        ({"new_values": torch.zeros(2, 2, 2, 8)}, "one batch"),
        ({"new_keys": torch.zeros(1, 2, 2, 8).bfloat16()}, "query's type"),
        ({"new_keys": torch.zeros(1, 2, 3, 8)}, "do not fit"),
        ({"keys": torch.zeros(64, 8)}, "four dimensions"),
        ({"keys": torch.zeros(4, 2, 16, 8)}, "pages of 32"),
        ({"keys": torch.zeros(2, 2, 8, 32).transpose(2, 3)}, "pages of 32"),
        ({"values": torch.zeros(4, 2, 32, 8)[::2]}, "pages of 32"),
        ({"values": torch.zeros(1, 2, 32, 8)}, "do not fit"),
        ({"layout": torch.zeros(3)}, "int32"),
        ({"layout": torch.tensor([], dtype=torch.int32)}, "ends too early"),
        ({"layout": torch.tensor([1, 2, 0, 0], dtype=torch.int32)}, "less than 2"),
        ({"layout": torch.tensor([1, 0, 64, 0], dtype=torch.int32)}, "less than 64"),
        ({"layout": torch.tensor([0, 1, 1, 1, 0, 32, 1], dtype=torch.int32)}, "less than 32"),
        ({"layout": torch.tensor([0, 1, 1, 1, 0, 0, 2], dtype=torch.int32)}, "less than 2"),
        ({"layout": torch.tensor([0, 1, 1, 1, 2, 0, 1], dtype=torch.int32)}, "less than 2"),
        ({"layout": torch.tensor([0, 1, 9, 1, 0], dtype=torch.int32)}, "ends too early"),
        ({"layout": torch.tensor([-1, 0], dtype=torch.int32)}, "ends too early"),
        ({"layout": torch.tensor([0, -1], dtype=torch.int32)}, "-1 branches"),
        ({"layout": torch.tensor([0, 1, 2, 1, 1, 1, 0, 0, 1], dtype=torch.int32)}, "row 1 twice"),
        ({"variant": 7}, "variant 7"),
    ],
)
def test_what_does_not_fit_is_an_error(change: dict[str, object], message: str) -> None:
    arguments = {
        "query": torch.zeros(1, 4, 2, 8),
        "new_keys": torch.zeros(1, 2, 2, 8),
        "new_values": torch.zeros(1, 2, 2, 8),
        "keys": torch.zeros(2, 2, 32, 8),
        "values": torch.zeros(2, 2, 32, 8),
        "layout": torch.tensor([0, 1, 1, 1, 0, 0, 1], dtype=torch.int32),
        "scaling": 1.0,
        "window": 0,
        "softcap": 0.0,
        "variant": 0,
    }
    with pytest.raises(RuntimeError, match=message):
        torch.ops.outrider.paged_attention.default(**arguments | change)
