"""Writes the Grafana dashboard of `components/monitoring`: `make k8s-config`."""

import json
from pathlib import Path
from typing import Any, Final

PATH: Final = Path(__file__).parent / "components" / "monitoring" / "dashboard.json"
_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_WHERE: Final = '{namespace=~"$namespace"}'
_OVER: Final = "[$__rate_interval]"
_WIDTH: Final = 8
_HEIGHT: Final = 8
_COLUMNS: Final = 3

Line = tuple[str, str]
"""A query, and the name of what it gives."""


def rate(metric: str, by: str = "", where: str = "") -> str:
    """Return the query for how fast the sum of a counter grows, by the values of a label where one is given."""
    found = _WHERE if not where else f"{_WHERE[:-1]},{where}}}"
    return f"sum {f'by ({by}) ' if by else ''}(rate(outrider_{metric}{found}{_OVER}))"


def now(metric: str) -> str:
    """Return the query for a gauge, by pod."""
    return f"outrider_{metric}{_WHERE}"


def ratio(part: str, whole: str) -> str:
    """Return the query for the ratio of two counters' growth."""
    return f"{rate(part)} / {rate(whole)}"


def share(metric: str, label: str, whole: str) -> str:
    """Return the query for the shares that a label's values have in the growth of a counter."""
    return f"{rate(metric, label)} / scalar({rate(whole)})"


def quantiles(metric: str, *shares: float) -> list[Line]:
    """Return lines for quantiles of a histogram."""
    return [
        (f"histogram_quantile({q}, {rate(f'{metric}_bucket', 'le')})", f"p{round(100 * q)}") for q in sorted(shares)
    ]


SPECULATION: Final = "spec_decode_num"
ROWS: Final[dict[str, list[tuple[str, str, list[Line]]]]] = {
    "What clients see": [
        ("Output tokens a second", "short", [(rate("generation_tokens_total"), "tokens")]),
        ("Time to first token", "s", quantiles("time_to_first_token_seconds", 0.5, 0.95, 0.99)),
        ("Time per output token", "s", quantiles("request_time_per_output_token_seconds", 0.5, 0.95, 0.99)),
        ("Requests by outcome", "reqps", [(rate("requests_total", "outcome"), "{{outcome}}")]),
        (
            "Requests open",
            "short",
            [
                (f"sum({now('num_requests_running')})", "running"),
                (f"sum({now('num_requests_waiting')})", "waiting"),
            ],
        ),
        (
            "Workers, as orchestrators see them",
            "short",
            [(f"max by (role, in_rotation) ({now('workers')})", "{{role}}, in rotation: {{in_rotation}}")],
        ),
    ],
    "Speculation": [
        (
            "Acceptance rate",
            "percentunit",
            [(ratio(f"{SPECULATION}_accepted_tokens_total", f"{SPECULATION}_draft_tokens_total"), "of drafted tokens")],
        ),
        (
            "Mean acceptance length",
            "short",
            [(f"1 + {ratio(f'{SPECULATION}_accepted_tokens_total', f'{SPECULATION}_drafts_total')}", "tokens a round")],
        ),
        (
            "Rounds whose own token had been proposed",
            "percentunit",
            [(ratio(f"{SPECULATION}_hits_total", "target_rounds_total"), "hits")],
        ),
        (
            "Accepted, by position",
            "percentunit",
            [
                (
                    share(f"{SPECULATION}_accepted_tokens_per_pos_total", "position", f"{SPECULATION}_drafts_total"),
                    "{{position}}",
                )
            ],
        ),
        (
            "What passes the time of rounds",
            "percentunit",
            [(share("target_round_seconds_total", "cause", "target_round_seconds_total"), "{{cause}}")],
        ),
        (
            "Asked of drafts, a round",
            "short",
            [
                (ratio(f"{SPECULATION}_wanted_tokens_total", "target_rounds_total"), "tokens wanted"),
                (ratio(f"{SPECULATION}_rounds_without_total", "target_rounds_total"), "rounds without a proposal"),
            ],
        ),
        (
            "Plain decoding in place of speculation",
            "short",
            [(rate("fallbacks_total", "reason"), "{{reason}}")],
        ),
    ],
    "Targets": [
        ("Passes", "s", quantiles("target_pass_seconds", 0.5, 0.99)),
        ("KV cache held", "percentunit", [(now("kv_cache_usage_ratio"), "{{pod}}")]),
        ("Tokens of prompts that wait", "short", [(now("target_queued_tokens"), "{{pod}}")]),
        ("Sessions", "short", [(now("target_sessions_running"), "{{pod}}")]),
        ("Prompt tokens found instead of computed", "short", [(rate("prefix_cache_hit_tokens_total"), "tokens")]),
        (
            "Sessions that were moved",
            "short",
            [
                (rate("target_preemptions_total"), "made room"),
                (rate("target_changes_total", "reason"), "to another target: {{reason}}"),
            ],
        ),
    ],
    "Drafts, orchestrators, Redis": [
        (
            "Drafts",
            "percentunit",
            [
                (now("draft_busy_ratio"), "busy {{pod}}"),
                (now("draft_shared_ratio"), "for more than one session {{pod}}"),
                (now("draft_late_ratio"), "late {{pod}}"),
            ],
        ),
        ("Commits to Redis", "s", quantiles("commit_seconds", 0.5, 0.99)),
        ("KV blocks in Redis", "short", [(rate("kv_blocks_total", "outcome"), "{{outcome}}")]),
        (
            "Streams taken over",
            "short",
            [
                (rate("resumes_total"), "resumed"),
                (rate("requests_total", where='outcome="FENCED"'), "fenced off"),
            ],
        ),
        ("CPU", "short", [(f"sum by (pod) (rate(process_cpu_seconds_total{_WHERE}{_OVER}))", "{{pod}}")]),
        ("Memory", "bytes", [(f"process_resident_memory_bytes{_WHERE}", "{{pod}}")]),
    ],
}


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it."""
    return {
        "title": "Outrider",
        "uid": "outrider",
        "schemaVersion": 39,
        "tags": ["outrider"],
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "timezone": "browser",
        "templating": {"list": [_datasource(), _namespace()]},
        "panels": _panels(),
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _namespace() -> dict[str, Any]:
    return {
        "name": "namespace",
        "label": "Namespace",
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": "label_values(outrider_build_info, namespace)", "refId": "A"},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panels() -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, graphs in ROWS.items():
        panels.append({"type": "row", "title": title, "gridPos": {"h": 1, "w": 24, "x": 0, "y": y}, "panels": []})
        y += 1
        for number, (name, unit, lines) in enumerate(graphs):
            line, column = divmod(number, _COLUMNS)
            place = {"h": _HEIGHT, "w": _WIDTH, "x": column * _WIDTH, "y": y + line * _HEIGHT}
            panels.append(_graph(name, unit, lines, place))
        y += -(-len(graphs) // _COLUMNS) * _HEIGHT
    return [{"id": number, **panel} for number, panel in enumerate(panels, start=1)]


def _graph(title: str, unit: str, lines: list[Line], place: dict[str, int]) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": title,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + number), "expr": query, "legendFormat": legend}
            for number, (query, legend) in enumerate(lines)
        ],
    }


if __name__ == "__main__":
    PATH.write_text(json.dumps(dashboard(), indent=1) + "\n")
