"""How an evaluation is shown: Markdown for a model card, tables on a terminal, a picture; all of it from its JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from training.judging.lossless import OWN, SPECULATED

Row = Mapping[str, Any]
PASS = ("suite", "drafter", "shape", "temperature")


def markdown(result: Mapping[str, Any]) -> str:
    """Tables with all that one must know to compare the figures with others."""
    parts = [_about(result)]
    for title, header, rows in _tables(result):
        lines = ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]
        parts.append(f"**{title}**\n\n" + "\n".join(lines))
    parts.append(_losslessness(result))
    return "\n\n".join(part for part in parts if part) + "\n"


def show(result: Mapping[str, Any], console: Console) -> None:
    """The same on a terminal."""
    for title, header, rows in _tables(result):
        table = Table(title=title, title_justify="left")
        for index, name in enumerate(header):
            table.add_column(name, justify="left" if index == 0 else "right", no_wrap=index == 0)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for text in (_about(result), _losslessness(result)):
        console.print(text, markup=False, highlight=False)


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Acceptance length by category with intervals, at the greatest answer length; a panel for each file and temperature."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    longest = [row for row in result["figures"] if row["length"] == max(result["lengths"])]
    panels = _groups(longest, ("suite", "temperature"))
    figure = Figure(figsize=(9, 3.6 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (key, rows) in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
        series = _groups(rows, ("drafter", "shape"))
        names = list(dict.fromkeys(row["category"] for row in rows))
        for index, (of_one, points) in enumerate(series):
            at = [names.index(row["category"]) + 0.8 * (index + 0.5) / len(series) - 0.4 for row in points]
            lengths = [row["acceptance_length"] for row in points]
            spread = [
                [row["acceptance_length"] - row["low"] for row in points],
                [row["high"] - row["acceptance_length"] for row in points],
            ]
            axes.errorbar(at, lengths, yerr=spread, fmt="o", capsize=3, label=", ".join(map(str, of_one)))
        axes.set_xticks(range(len(names)), names, rotation=20, ha="right")
        axes.set_ylabel(f"acceptance length\n({max(result['lengths'])} tokens)")
        axes.set_title(f"{key[0]}, temperature {key[1]:g}", fontsize="medium")
        axes.grid(axis="y", linewidth=0.3)
        axes.legend(loc="best", fontsize="small")
    figure.savefig(path, dpi=120)


def _about(result: Mapping[str, Any]) -> str:
    model = result["model"]
    files = ", ".join(
        f"{each['name']} ({each['num_prompts']} prompts, sha256 {each['sha256'][:12]})" for each in result["prompts"]
    )
    machine = "; ".join(f"{name}: {value}" for name, value in result["machine"].items())
    return (
        f"Target {model['name']} ({model['fingerprint']}, {model['dtype']}), prompts of {files}. Acceptance length is 1 + "
        "accepted drafts / verification steps over the first so many tokens of each answer, with "
        f"{result['confidence']:.0%} intervals by a bootstrap over prompts. {machine}."
    )


def _losslessness(result: Mapping[str, Any]) -> str:
    lossless = result["lossless"]
    if not lossless["num_compared"]:
        return ""
    differing = lossless["deviations"]
    text = (
        f"{lossless['num_compared'] - len(differing)} of {lossless['num_compared']} greedy answers equal the target's own "
        "without a drafter, token by token."
    )
    for each in differing:
        gap = "not known" if each["gap"] is None else f"{each['gap']:.2g}"
        kind = "nearly a tie" if each["is_near_tie"] else "NO TIE"
        text += (
            f"\n- {each['suite']}/{each['question']} with {each['drafter']}, {each['shape']}: token {each['place']} is "
            f"{each['drafted']} and not {each['plain']}, in float32 up to {gap} below the best logit, and no token of the answer "
            f"more than {each['largest_gap']:.2g} ({kind})"
        )
    return text + _whose(differing)


def _whose(differing: Sequence[Row]) -> str:
    """Which answer is the odd one where it is no tie. Files of before do not say."""
    odd_ones = Counter(each.get("odd_one") for each in differing)
    own, speculated = odd_ones[OWN], odd_ones[SPECULATED]
    if not own and not speculated:
        return ""
    return (
        f"\n\nWhere it says NO TIE, what is off is the speculated answer {speculated} times, which alone would be a fault of "
        f"speculation, and the target's own, made without a drafter, {own} times."
    )


def _tables(result: Mapping[str, Any]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """(title, header, rows) of each pass over each file, then of differences."""
    lengths = result["lengths"]
    depths = {tuple(row[name] for name in PASS): row for row in result["depths"]}
    for key, rows in _groups(result["figures"], PASS):
        suite, drafter, shape, temperature = key
        header = ["category", "prompts", *(f"{length} tokens" for length in lengths), "covered", "8-gram loops", "tokens"]
        yield (
            f"{suite}: drafter {drafter}, {shape}, temperature {temperature:g}",
            header,
            [_line(category, of_one) for (category,), of_one in _groups(rows, ("category",))],
        )
        accepted = depths[key]["accepted"]
        if accepted:
            shares = [accepted, depths[key]["accepted_if_reached"]]
            names = ("of steps that drafted so deep", "of those that got so far")
            lines = [[name, *(f"{share:.3f}" for share in each)] for name, each in zip(names, shares, strict=True)]
            yield f"{suite}: accepted by depth", ["depth", *map(str, range(1, len(accepted) + 1))], lines
    for (suite, drafter, shape, temperature), rows in _groups(result["differences"], PASS):
        yield (
            f"{suite}: {drafter} minus {rows[0]['against']}, {shape}, temperature {temperature:g}, the same prompts",
            ["category", "prompts", *(f"{length} tokens" for length in lengths)],
            [
                [str(category), str(of_one[0]["num_prompts"]), *(f"{_signed(row)}" for row in of_one)]
                for (category,), of_one in _groups(rows, ("category",))
            ],
        )


def _line(category: str, rows: Sequence[Row]) -> list[str]:
    """One category, a row for each length, ascending."""
    longest = rows[-1]
    lengths = [f"{row['acceptance_length']:.3f} ({row['low']:.2f} to {row['high']:.2f})" for row in rows]
    shares = [_share(longest[name]) for name in ("covered", "repeated_8grams")]
    return [category, str(longest["num_prompts"]), *lengths, *shares, f"{longest['num_tokens']:,}"]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _signed(row: Row) -> str:
    return f"{row['difference']:+.3f} ({row['low']:+.2f} to {row['high']:+.2f})"


def _groups(rows: Sequence[Row], names: Sequence[str]) -> list[tuple[tuple[Any, ...], list[Row]]]:
    """Rows that share these values, in the order in which the values first appear."""
    order = list(dict.fromkeys(tuple(row[name] for name in names) for row in rows))
    places = {key: place for place, key in enumerate(order)}

    def place(row: Row) -> int:
        return places[tuple(row[name] for name in names)]

    return [(order[number], list(group)) for number, group in groupby(sorted(rows, key=place), key=place)]
