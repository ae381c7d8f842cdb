"""The page of a run of benchmarks/engine.py: a table a section, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
MAX_PARTINGS = 20


def page(result: Row) -> str:
    prompts = result["prompts"]
    head = (
        f"{result['model']} in {result['dtype']} on {result['device']} ({result['backend']}, {result['numerics']} numerics, "
        f"{result['threads']} threads), drafter {result['drafter_version']}, adaptive to depth {result['adaptive_depth']}, "
        f"greedy, {prompts['used']} prompts of {', '.join(prompts['files'])} ({prompts['too_long']} too long)"
    )
    parts = [head, *(SECTIONS[name](section, result["plan"]) for name, section in result["sections"].items())]
    parts.append("\n".join(f"- {name}: {value}" for name, value in result["machine"].items()))
    return "\n\n".join(parts)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(_cell(value) for value in line) + " |" for line in lines)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"
    return "-" if value is None else str(value)


def single(section: Row, plan: Row) -> str:
    arms = section["arms"]
    baselines = [name for name in arms if name.startswith("HF") or name.endswith("plain")]
    header = [
        "one request at a time",
        "decode tok/s",
        "ms a step",
        "whole request tok/s",
        "acceptance length",
        *(f"x {name}" for name in baselines),
    ]
    rows = [[name, *_rates(arm), *(arm["ratio"][other] for other in baselines)] for name, arm in arms.items()]
    parts = [
        f"Answers of at most {plan['max_tokens']} tokens; rates and paired ratios are medians over prompts.",
        table(header, rows),
    ]
    last = list(arms)[-2:]
    plain = next(name for name in arms if name.endswith("plain"))
    rows = [
        [
            domain,
            *(
                cell
                for name in last
                for cell in (arms[name]["domains"][domain]["ratio"][plain], arms[name]["domains"][domain]["acceptance_length"])
            ),
        ]
        for domain in arms[plain]["domains"]
    ]
    parts.append(table(["domain", *(column for name in last for column in (f"{name}: x plain", "acceptance length"))], rows))
    parts.append(correctness(section["correctness"]))
    again = section["repeats"]
    parts.append(f"Asked again, {again['arm']!r} said the same {again['equal']} times of {again['asked_again']}.")
    return "\n\n".join(parts)


def _rates(arm: Row) -> list[object]:
    return [arm["decode_tokens_per_s"], arm["step_ms"], arm["request_tokens_per_s"], arm["acceptance_length"]]


def correctness(section: Row) -> str:
    rows = [[name, arm["tokens"], arm["not_the_best"], arm["largest_gap"]] for name, arm in section["arms"].items()]
    verdict = "all within it" if section["ok"] else "NOT all within it"
    parts = [
        f"Each token against the float32 model; limit {section['limit']:g} below the best logit: {verdict}.",
        table(["arm", "tokens", "not the best", "largest gap"], rows),
    ]
    return "\n\n".join([*parts, _partings(section)]).rstrip()


def equality(section: Row, plan: Row) -> str:
    arms = section["arms"]
    header = ["in random batches, speculated for", "answers", "equal to those alone and plain", "tokens"]
    num_answers = arms["alone"]["answers"]
    rows = [[name, num_answers, equal, arms[name]["tokens"]] for name, equal in section["equal"].items()]
    rule = f"may part within {section['limit']:g} of the best logit" if section["limit"] else "may part nowhere"
    return f"Answers {rule}: {'kept' if section['ok'] else 'NOT kept'}.\n\n{table(header, rows)}\n\n{_partings(section)}".rstrip()


def _partings(section: Row) -> str:
    if not (partings := section["partings"]):
        return ""
    rows = [[one["arm"], one["prompt"], one["token"], one["gap"], one["gap_of_reference"]] for one in partings[:MAX_PARTINGS]]
    found = table(["arm", "prompt", "token", "gap", f"gap of {section['reference']}"], rows)
    return f"{len(partings)} answers part from those of {section['reference']!r}:\n\n{found}"


def forward(section: Row, plan: Row) -> str:
    rows = [[size, 1000 * row["seconds"], row["v"]] for size, row in section.items()]
    return table(["tokens in one forward", "ms", "v"], rows)


def batch(section: Row, plan: Row) -> str:
    rows = [
        [way, size, row["tokens_per_s"], row["times"], row["step_ms"]]
        for way, sizes in section.items()
        for size, row in sizes.items()
    ]
    return table(["way", "sessions", "tok/s", "times one", "ms a step"], rows)


def never(section: Row, plan: Row) -> str:
    arms = list(section["cells"][0]["tokens_per_s"])
    header = [
        "domain",
        "at once",
        *(arm if arm == "adaptive" else f"depth {arm}" for arm in arms),
        "drafts a step",
        "same text",
        "rounds",
        "adaptive / best",
        "±",
    ]
    rows = [
        [
            cell["domain"],
            cell["concurrency"],
            *(cell["tokens_per_s"][arm] for arm in arms),
            cell["drafted_per_step"],
            min(cell["same"].values()),
            len(cell["rounds"]["adaptive"]),
            cell["ratio"],
            cell["error"],
        ]
        for cell in section["cells"]
    ]
    return f"{table(header, rows)}\n\nSmallest ratio: {section['smallest_ratio']:.3f}"


def flat(section: Row, plan: Row) -> str:
    peak = section["peak_mib"]
    return (
        f"{section['requests']} short requests, {section['concurrency']} at once, {section['requests_per_s']:.1f} a second. K/V "
        f"from {section['kv_bytes_before']} to {section['kv_bytes_after']} bytes. Peak memory {peak[0]:.0f} MiB after a tenth, "
        f"{peak[len(peak) // 2 - 1]:.0f} after half of them, {peak[-1]:.0f} after all."
    )


SECTIONS = {"single": single, "equality": equality, "forward": forward, "batch": batch, "never": never, "flat": flat}
