"""Every benchmark returns its figures, on models so small that it takes seconds."""

from pathlib import Path

import pytest

from bench import (
    agents,
    capacity,
    commits,
    context,
    distance,
    drafts,
    engine,
    fleet,
    grammar,
    load,
    orchestrator,
    outage,
    rollout,
    sweep,
    takeover,
)
from outrider.errors import InvalidArgument
from tests.training.models import save_target, save_tokenizer

pytestmark = pytest.mark.slow


async def test_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Every round waits for its proposal, so that there are enough to measure acceptance.
    monkeypatch.setenv("OUTRIDER_ADAPTIVE_SPECULATION", "false")
    monkeypatch.setenv("OUTRIDER_DRAFT_MAX_WAIT_S", "5")
    options = load.Options(
        sessions="1,16",
        prompt_lens="4,9",
        num_tokens=24,
        model="shape:tiny",
        draft="shape:tiny",
        draft_layers=1,
        prefill_len=300,
    )
    result = await load.measure(options)
    assert result.config["generate_batch"] == "measured"
    assert [(row["sessions"], row["mode"]) for row in result.rows] == [
        (1, "generate"),
        (1, "plain"),
        (1, "speculation"),
        (16, "plain"),
        (16, "speculation"),
        (16, "generate_batch"),
    ]
    assert {
        "throughput_16_over_1",
        "throughput_16_over_transformers",
        "throughput_16_over_generate_batch",
        "speculation_over_plain_worst",
        "itl_p99_under_prefill_over_p50",
    } <= result.figures.keys()
    assert all(value > 0 for value in result.figures.values())
    assert result.rows[4]["acceptance"] == pytest.approx(0.8, abs=0.15)
    load.plot(result, tmp_path / "load.png")
    assert (tmp_path / "load.png").stat().st_size > 1000


async def test_engine(tmp_path: Path) -> None:
    options = engine.Options(
        part="speed,passes,prefix,memory",
        model="shape:tiny",
        first_token_lens="40,70",
        num_rounds=1,
        num_tokens=12,
        num_sharing=3,
        prefix_len=200,
        num_sessions=40,
        num_warm=10,
    )
    result = await engine.measure(options)
    figures = result.figures
    assert len(result.rows) == 1
    assert figures["plain_over_transformers"] > 0
    assert 0 < figures["roofline_share"] < 1
    assert figures["prefix_kv_bytes_over_one"] < 2
    assert figures["prefix_prefill_over_one"] > 1
    assert figures["num_pages_left"] == 0
    assert 0.8 < figures["rss_after_over_warm"] < 1.3
    engine.plot(result, tmp_path / "engine.png")


async def test_distance(tmp_path: Path) -> None:
    options = distance.Options(
        rtts_ms="0,20",
        ends="",
        num_repeats=1,
        num_rounds=12,
        model="shape:tiny",
        draft="shape:tiny",
        prompt_len=8,
        num_speculative_tokens=3,
    )
    result = await distance.measure(options)
    modes = ["plain", "colocated", "colocated, both cores", *["synchronous", "streaming"] * 2]
    assert [row["mode"] for row in result.rows] == modes
    assert all(row["num_rounds"] >= 12 and row["tokens_per_s"] > 0 for row in result.rows)
    assert all(row["predicted_tokens_per_s"] > 0 for row in result.rows)
    assert {
        "streaming_over_synchronous_rtt_0ms",
        "streaming_over_synchronous_rtt_20ms",
        "streaming_over_colocated_rtt_20ms",
        "streaming_over_plain_worst",
        "prediction_error_median",
        "prediction_error_worst",
    } <= result.figures.keys()
    distance.plot(result, tmp_path / "distance.png")
    assert (tmp_path / "distance.png").stat().st_size > 1000


async def test_context(tmp_path: Path) -> None:
    result = await context.measure(context.Options("16,64", num_steps=3, model="shape:tiny", compiles="no"))
    assert result.figures["kv_bytes_over_formula"] == pytest.approx(1, abs=0.05)
    assert result.figures["time_64_over_16"] > 0
    context.plot(result, tmp_path / "context.png")


async def test_drafts(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")
    save_tokenizer(tmp_path / "target")
    # The target is its own draft: every token is accepted, also by transformers.
    options = drafts.Options("model", draft=target, model=target, num_prompts=1, num_tokens=24)
    result = await drafts.measure(options)
    assert [(row["kind"], row["temperature"], row["proposal"]) for row in result.rows] == [
        (kind, temperature, shape)
        for temperature in (0.0, 1.0)
        for shape in ("chain", "tree")
        for kind in ("code", "chat", "creative", "documentation")
    ]
    for suffix, least in (("", 1.5), ("_chain", 3)):
        assert result.figures[f"acceptance_rate_pos_1_greedy{suffix}"] == 1.0
        assert result.figures[f"mean_acceptance_length_greedy{suffix}"] > least
        assert result.figures[f"mean_acceptance_length_t1{suffix}"] > least
        assert result.figures[f"shipped_over_plain_greedy{suffix}"] > 0
        assert result.figures[f"shipped_over_transformers_assisted{suffix}"] > 0
    # A proposal that came late continues where the target is, and is shorter then. So few tokens may be over before a
    # draft has opened the session: then nothing was drafted.
    assert {row["pos 1"] for row in result.rows if row["proposal"] == "chain"} <= {1.0, None}
    drafts.plot(result, tmp_path / "drafts.png")


async def test_agents(tmp_path: Path) -> None:
    result = await agents.measure(agents.Options(num_rounds=1, num_sessions=1))
    assert [(row["kind"], row["mode"]) for row in result.rows] == [
        (kind, mode) for kind in ("tools", "edits", "quotes") for mode in ("plain", "ngram", "suffix")
    ]
    for row in result.rows:
        assert row["tokens/pass"] == 1 if row["mode"] == "plain" else row["tokens/pass"] > 1.5
    assert result.figures["suffix_over_plain"] > 1
    agents.plot(result, tmp_path / "agents.png")


@pytest.mark.embedded
async def test_grammar(tmp_path: Path) -> None:
    result = await grammar.measure(grammar.Options(num_rounds=1, num_tokens=12, sessions="1,2", num_prompts=1))
    assert [(row["what"], row["mode"]) for row in result.rows] == [
        ("1 sessions", "free"),
        ("1 sessions", "schema"),
        ("2 sessions", "free"),
        ("2 sessions", "schema"),
        ("extraction 0", "schema, plain"),
        ("extraction 0", "schema, speculation"),
        ("grammars", "in this process"),
    ]
    # Names of properties are forced, and verified together.
    assert result.rows[4]["tokens/pass"] == 1 < result.rows[5]["tokens/pass"]
    assert result.figures["schema_over_free_2"] > 0 and result.figures["mask_us"] < result.figures["mask_p99_us"]
    grammar.plot(result, tmp_path / "grammar.png")


async def test_capacity(tmp_path: Path) -> None:
    timed = "markov:vocabulary=64;order=1;step_s=0.01;row_s=0.0005"
    options = capacity.Options(rate=1e6, sessions="1,2", drafts="1", num_tokens=12, model=timed, draft=timed)
    result = await capacity.measure(options)
    # No load reaches this rate: each deployment ends after the first one.
    assert [(row["deployment"], row["sessions"]) for row in result.rows] == [("colocated", 1), ("1 drafts", 1)]
    assert result.figures["gain_expected"] == pytest.approx(1 + 4 * 0.0105 / 0.0125)
    assert result.figures["sessions_colocated"] == result.figures["sessions_1_drafts"] == 0
    assert all(row["rate"] > 0 and row["tokens_per_round"] >= 1 for row in result.rows)
    capacity.plot(result, tmp_path / "capacity.png")


async def test_sweep(tmp_path: Path) -> None:
    timed = "markov:vocabulary=64;order=1;step_s=0.01;row_s=0.0005"
    options = sweep.Options(sessions="1,3", num_tokens=24, num_repeats=2, model=timed, draft=timed)
    result = await sweep.measure(options)
    assert [(row["sessions"], row["mode"]) for row in result.rows] == [
        (num_sessions, mode) for num_sessions in (1, 3) for mode in ("controller", "always on", "always off")
    ]
    modes = {row["mode"]: row for row in result.rows if row["sessions"] == 1}
    assert modes["always off"]["tokens_per_round"] == 1 < modes["always on"]["tokens_per_round"]
    assert set(result.figures) == {f"controller_over_better_{which}" for which in (1, 3, "worst")}
    assert result.figures["controller_over_better_worst"] == min(result.figures.values()) > 0
    sweep.plot(result, tmp_path / "sweep.png")


async def test_outage(tmp_path: Path) -> None:
    timed = "markov:vocabulary=256;order=1;step_s=0.01;row_s=0.0005"
    options = outage.Options(num_tokens=60, num_before=20, num_repeats=1, model=timed, draft=timed)
    result = await outage.measure(options)
    assert [row["draft"] for row in result.rows] == ["nothing", "killed", "stopped", "slow"]
    assert result.figures["same_texts"] == 1
    assert all(row["tokens_per_s"] > 0 and row["longest_gap_s"] < 2 for row in result.rows)
    assert set(result.figures) == {"killed_over_plain", "stopped_over_plain", "slow_over_plain", "same_texts"}
    outage.plot(result, tmp_path / "outage.png")


async def test_rollout() -> None:
    timed = "markov:vocabulary=512,order=1,step_s=0.02,row_s=0.0005"
    options = rollout.Options(
        num_clients=6, num_tokens=120, num_drafts=1, num_orchestrators=2, drain_budget_s=2.0, model=timed
    )
    result = await rollout.measure(options)
    assert [row["process"] for row in result.rows] == [
        "target-0",
        "target-1",
        "draft-ngram-0",
        "orchestrator-0",
        "orchestrator-1",
    ]
    assert result.figures["failed_requests"] == result.figures["lost_tokens"] == result.figures["unclean_exits"] == 0
    assert result.figures["num_requests"] >= 6
    assert result.figures["new_replica_takes_session_s"] < 5


async def test_fleet() -> None:
    options = fleet.Options(orchestrators="1,2", num_workers=2, sessions_each=4, duration_s=1.0, num_repeats=1)
    result = await fleet.measure(options)
    assert [row["orchestrators"] for row in result.rows] == [1, 2]
    for row in result.rows:
        assert 30 < row["rounds/s"] < 100
        assert row["processor ms/round"] > 0
        assert 1 <= row["redis operations/round"] < 12
    assert result.figures["redis_operations_spread"] < 1.5


@pytest.mark.embedded
async def test_distance_of_a_real_pair(tmp_path: Path) -> None:
    options = distance.Options(
        rtts_ms="0", num_repeats=1, num_rounds=8, model="embedded", draft="", drafter="eagle3", num_speculative_tokens=2
    )
    result = await distance.measure(options)
    assert [row["mode"] for row in result.rows] == ["plain", "synchronous", "streaming"]
    assert all(row["acceptance"] is None and row["tokens_per_s"] > 0 for row in result.rows)
    assert result.figures["streaming_over_plain_rtt_0ms"] > 0
    assert not any("colocated" in name for name in result.figures)
    distance.plot(result, tmp_path / "distance.png")


async def test_takeover(tmp_path: Path) -> None:
    options = takeover.Options(context_len=200, num_rounds=1, links="0", model="shape:tiny")
    result = await takeover.measure(options)
    assert [(row["link MB/s"], row["blocks"]) for row in result.rows] == [
        ("any", "never"),
        ("any", "always"),
        ("any", "auto"),
    ]
    assert result.figures.keys() == {"prefill_over_restore", "next_token_after_kill_s", "auto_over_best"}
    assert all(0 < value < 100 for value in result.figures.values())
    takeover.plot(result, tmp_path / "takeover.png")
    assert (tmp_path / "takeover.png").stat().st_size > 1000
    with pytest.raises(InvalidArgument, match="links is"):
        await takeover.measure(takeover.Options(links="fast"))


async def test_commits(tmp_path: Path) -> None:
    result = await commits.measure(commits.Options(num_sessions=100, num_rounds=128, prompt_len=20))
    figures = result.figures
    assert 0 < figures["commit_p50_s"] <= figures["commit_p99_s"] < 1
    assert 0 < figures["commit_of_64_p50_s"] <= figures["commit_of_64_p99_s"] < 2
    assert 500 < figures["redis_bytes_per_session"] < 20_000
    assert figures["orchestrator_bytes_per_idle_session"] < 100_000
    commits.plot(result, tmp_path / "commits.png")
    assert (tmp_path / "commits.png").stat().st_size > 1000


async def test_orchestrator(tmp_path: Path) -> None:
    result = await orchestrator.measure(orchestrator.Options(sessions="1,4", duration_s=0.5))
    assert [(row["sessions"], row["requested rounds/s"] == "any") for row in result.rows] == [
        (1, True),
        (4, True),
        (result.rows[2]["sessions"], False),
        (result.rows[2]["sessions"], False),
    ]
    assert all(row["rounds/s"] > 0 for row in result.rows)
    figures = result.figures
    assert figures["rounds_per_second_together"] == max(row["a core sustains"] for row in result.rows[:2])
    assert figures["rounds_per_second"] == result.rows[2]["a core sustains"]
    assert 0 < figures["added_latency_p50_s"] <= figures["added_latency_p99_s"]
    orchestrator.plot(result, tmp_path / "orchestrator.png")
    assert (tmp_path / "orchestrator.png").stat().st_size > 1000
    for sessions in ("many", "0"):
        with pytest.raises(InvalidArgument, match="sessions"):
            await orchestrator.measure(orchestrator.Options(sessions=sessions))
