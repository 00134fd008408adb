"""Write the figures of README and docs/reliability.md from the records in `benchmarks/`.

    python scripts/bench/write_figures.py

A test holds both to what this writes, so no figure there is typed by hand.
"""

import json
import statistics
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PEER = "nanoGPT"  # its name in the records
START, END = "<!-- figures: written by scripts/bench/write_figures.py -->", "<!-- end -->"


def record(name: str) -> dict[str, Any]:
    """Return one benchmark's record."""
    content: dict[str, Any] = json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())
    return content


def command(found: dict[str, Any]) -> str:
    """Return the recorded command, with the path at which its script is now."""
    python, script, *arguments = found["command"].split(" ", 2)
    (path,) = (ROOT / "scripts").rglob(Path(script).name)
    return " ".join([python, str(path.relative_to(ROOT)), *arguments])


def training(found: dict[str, Any]) -> list[str]:
    """Return the lines on time and loss, whole processes side by side."""
    lines = [
        f"Tiny Shakespeare, {found['hardware']}, torch {found['torch']}, {found['date']}: whole "
        "processes from a cold start to the saved checkpoint, in turn; medians of "
        f"{len(found['results'][PEER]['runs'])}. Loss in nats per character on the "
        "validation part.",
        "",
        "| | seconds | `full` | `sliding` | of the matrix peak | beside nanoGPT's CPU recipe |",
        "|---|---|---|---|---|---|",
    ]
    for name, result in found["results"].items():
        sliding, share, against = "", "", ""
        if name != PEER:
            sliding = f"{result['sliding']:.4f}"
            share = f"{result['share_of_matrix_peak']:.0%}"
            faster, lower = result["time_against_nanogpt"], result["nats_below_nanogpt"]
            word = "lower" if lower > 0 else "higher"
            against = f"{faster:.1f} times as fast, {abs(lower):.3f} nats {word}"
            name = f"`{name}`"
        lines.append(
            f"| {name} | {result['seconds']:.1f} | {result['full']:.4f} | {sliding} | {share} "
            f"| {against} |"
        )
    peaks = [result["matrix_gflops"] for name, result in found["results"].items() if name != PEER]
    lines += [
        "",
        "The matrix peak is what large products reach on the same machine: "
        f"{statistics.median(peaks):,.0f} GFLOP/s.",
    ]
    lines += ["", "[Loss against time](benchmarks/train.svg), nanoGPT's own estimates beside ours."]
    return [*lines, "", f"`{command(found)}`"]


def other_times(*records: dict[str, Any]) -> list[str]:
    """Return the lines on other times, a row for each."""
    lines = ["| | seconds | `full` | `sliding` | `nanogpt` | runs |", "|---|---|---|---|---|---|"]
    for name, result in (item for found in records for item in found["results"].items()):
        if name == PEER:
            continue
        losses = []
        for protocol in ("full", "sliding", "nanogpt"):
            values = [run[protocol] for run in result["runs"] if protocol in run]
            if not values:
                losses.append("")
                continue
            spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
            losses.append(f"{statistics.mean(values):.4f}{spread}")
        runs = len(result["runs"])
        lines.append(f"| `{name}` | {result['seconds']:.1f} | {' | '.join(losses)} | {runs} |")
    head = "Other times; means, and standard deviations of several runs:"
    made = (f"\n`{command(found)}` ({found['hardware']}, {found['date']})" for found in records)
    return [head, "", *lines, *made]


def sampling(found: dict[str, Any]) -> list[str]:
    """Return the lines on characters a second."""
    speeds = found["characters_per_second"]
    parts = [f"{name}: {speed:,}" for name, speed in speeds.items()]
    firsts = [
        first
        for name, found_firsts in found["seconds_to_the_first_20"].items()
        if not name.startswith(PEER)
        for first in found_firsts
    ]
    return [
        f"Sampling from a model of `gpt`'s size, characters a second in all ({found['date']}): "
        f"{'; '.join(parts)}. Not counted: {max(firsts):.1f} s of compiling at the first time, and "
        f"{statistics.median(firsts):.1f} s of loading what was compiled at all others.",
        "",
        f"`{command(found)}`",
    ]


def preparing(found: dict[str, Any]) -> list[str]:
    """Return the lines on long texts."""
    return [
        f"A text of {found['text_bytes'] / 1e9:.1f} GB is prepared at "
        f"{found['cold_mb_per_second']:.0f} MB/s with {found['memory_growth_mb']:.0f} MB of memory "
        f"({found['date']}), and opened again in {max(found['warm_seconds']):.3f} s. In memory, on",
        "one thread, characters become ids at "
        + ", ".join(
            f"{speed:.2f} ({name})"
            for name, speed in found["encode_gigacharacters_per_second"].items()
        )
        + " billion a second.",
        "",
        f"`{command(found)}`",
    ]


def torture(found: dict[str, Any]) -> list[str]:
    """Return the table of all harm done, and of what came of it."""
    lines = [
        f"{found['date']}, commit {found['commit']}, {found['hardware']}:",
        "",
        "| what must hold | cases | failed | seconds |",
        "|---|---|---|---|",
    ]
    for row in found["rows"]:
        skipped = f", {row['skipped']} skipped" if row["skipped"] else ""
        lines.append(
            f"| {row['claim']} | {row['cases']:,} | {len(row['failed'])}{skipped} "
            f"| {row['seconds']:,.0f} |"
        )
    return [*lines, "", f"`{command(found)}`"]


def saving(found: dict[str, Any]) -> list[str]:
    """Return the lines on what a save costs."""
    seconds = found["seconds"]
    return [
        f"A save of {found['parameters'] / 1e6:.1f}M parameters ({found['bytes'] / 1e6:.0f} MB "
        f"with the optimizer) takes {seconds['ours']:.2f} s, medians of "
        f"{len(found['all']['ours'])} in turn ({found['date']}): the same tensors as plain "
        f"safetensors files {seconds['plain']:.2f} s, and {seconds['plain, flushed']:.2f} s if "
        "they are flushed to disk. What is added is the sums (sha256 of all of it takes one core "
        f"{found['sha256_on_one_core']:.2f} s here: this processor has no instructions for it), in "
        "part beside the writing.",
        "",
        f"`{command(found)}`",
    ]


def fuzzing(found: dict[str, Any]) -> list[str]:
    """Return the table of what the fuzzer tried."""
    lines = ["| reader | executions | branches reached | crashes | |", "|---|---|---|---|---|"]
    for name, result in found.items():
        lines.append(
            f"| {name} | {result['runs']:,} | {result['branches_covered']:,} "
            f"| {result['crashes']} | {result['date']}, commit {result['commit']} |"
        )
    made = "python scripts/torture/fuzz.py --runs 1000000 --json benchmarks/fuzz.json"
    return [*lines, "", f"`{made}`"]
        *lines,
        "",
        "`python scripts/torture/fuzz.py --runs 1000000 --json benchmarks/fuzz.json`",
    ]


def mutation(found: dict[str, Any]) -> list[str]:
    """Return the lines on how many changed lines of code the tests notice."""
    return [
        f"Of {found['mutants']:,} small changes to the code of `chargpt/store/`, its tests notice "
        f"{found['noticed']:,}: {found['share']:.1%} ({found['date']}, commit {found['commit']}).",
        "",
        f"`{command(found)}`",
    ]


def reliability() -> str:
    """Return the figures of docs/reliability.md."""
    return framed(
        torture(record("torture")),
        fuzzing(record("fuzz")),
        mutation(record("mutation")),
        saving(record("save")),
    )


def section() -> str:
    """Return the README's whole section, its markers included."""
    parts = [
        training(record("train")),
        other_times(record("short-budgets"), record("budgets"), record("ten-minutes")),
        sampling(record("sample")),
        preparing(record("text")),
        [
            "How time and memory grow with text, parameters, block and batch: "
            "[picture](benchmarks/scale.png).",
            "",
            f"`{command(record('scale'))}`",
        ],
    ]
    return framed(*parts)


def framed(*parts: list[str]) -> str:
    """Return paragraphs between the markers."""
    body = "\n\n".join("\n".join(lines) for lines in parts)
    return f"{START}\n{body}\n{END}"


def replaced(page: str, figures: str) -> str:
    """Return a page with its figures written anew."""
    before, _, rest = page.partition(START)
    return before + figures + rest.partition(END)[2]


def pages() -> dict[Path, str]:
    """Return each page that has figures, as it should be."""
    figures = {ROOT / "README.md": section(), ROOT / "docs" / "reliability.md": reliability()}
    return {path: replaced(path.read_text(encoding="utf-8"), f) for path, f in figures.items()}


def main() -> None:
    for path, content in pages().items():
        path.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
