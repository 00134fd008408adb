"""Write the measured results into the pages, from the records in `benchmarks/`.

    python scripts/bench/write_results.py

README.md gets one short table, benchmarks/README.md the full tables and docs/reliability.md the
results of the torture test, and docs/security.md the memory of commands. A test checks that the
pages match the records.
"""

import json
import math
import statistics
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
NANOGPT = "nanoGPT"  # its name in the records
START, END = "<!-- results: written by scripts/bench/write_results.py -->", "<!-- end -->"


def record(name: str) -> dict[str, Any]:
    """Return one benchmark's record."""
    content: dict[str, Any] = json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())
    return content


def command(found: dict[str, Any]) -> str:
    """Return the recorded command, with the script's present path."""
    python, script, *arguments = found["command"].split(" ", 2)
    (path,) = (ROOT / "scripts").rglob(Path(script).name)
    return " ".join([python, str(path.relative_to(ROOT)), *arguments])


def summary() -> list[str]:
    """Return the table of the README, at most eight rows."""
    train = record("train")
    nanogpt = train["results"][NANOGPT]
    peer = f"{nanogpt['blocks']:.3f} nats/char in {nanogpt['seconds']:.0f} s"
    lines = ["| task | chargpt | for comparison |", "|---|---|---|"]
    for found, time, other in (
        (train, "6s", f"nanoGPT's CPU recipe: {peer}"),
        (train, "80s", f"nanoGPT's CPU recipe: {peer}"),
        (record("ten-minutes"), "10m", ""),
    ):
        result = found["results"][f"chargpt train --budget {time}"]
        lines.append(
            f"| train with `--budget {time}` | {result['blocks']:.3f} nats/char in "
            f"{result['seconds']:.0f} s | {other} |"
        )
    gpu = record("gpu")
    result = gpu["train"]["results"]["chargpt train --budget 18s"]
    peer = gpu["nanogpt"]["results"][NANOGPT]
    lines.append(
        f"| the same on an H200 GPU, `--budget 18s` | {result['blocks']:.3f} nats/char in "
        f"{result['seconds']:.0f} s | nanoGPT's GPU recipe: {peer['blocks']:.3f} nats/char in "
        f"{peer['seconds']:.0f} s |"
    )
    speeds = record("sample")["characters_per_second"]
    for name, ours, theirs in (
        ("sample 2,000 characters", "1 sequence, 2,000 characters", "1 sequence"),
        ("sample 64 texts at once", "64 sequences", "64 sequences"),
    ):
        lines.append(
            f"| {name} | {speeds[ours]:,} characters/s "
            f"| nanoGPT: {speeds[f'{NANOGPT}, {theirs}']:,} characters/s |"
        )
    text = record("text")
    coded = record("compress")["runs"][0]
    lines += [
        f"| prepare a text of {text['text_bytes'] / 1e9:.0f} GB in the page cache "
        f"({text['hardware']}) "
        f"| {text['prepare_mb_per_second']['cached']:.0f} MB/s, "
        f"{text['memory_mb']:.0f} MB of memory | |",
        "| compress the validation split, `--adaptive` "
        f"| {coded['ours']['adaptive']['bytes']:,} bytes | after the training split: "
        f"`zpaq -m5` {coded['others']['zpaq -m5']['bytes']:,}, `xz -9` {coded['others']['xz']:,} |",
    ]
    about = (
        f"Tiny Shakespeare (1.1 MB) on {train['hardware']}, {train['date']}; loss of the "
        "validation split, protocol `blocks`; training times are those of the whole command."
    )
    return [about, "", *lines]


def training(found: dict[str, Any]) -> list[str]:
    """Return the lines on training time and loss beside nanoGPT."""
    lines = [
        f"Tiny Shakespeare, {found['hardware']}, torch {found['torch']}, {found['date']}. Time of "
        "the whole command, from a cold start to the saved checkpoint; medians of "
        f"{len(found['results'][NANOGPT]['runs'])} runs of each, interleaved. Loss in nats per "
        "character on the validation split.",
        "",
        "| | seconds | `blocks` | `sliding` | MFU | against nanoGPT's CPU recipe |",
        "|---|---|---|---|---|---|",
    ]
    for name, result in found["results"].items():
        sliding, fraction, against = "", "", ""
        if name != NANOGPT:
            sliding = f"{result['sliding']:.4f}"
            fraction = f"{result['share_of_matrix_peak']:.0%}"
            faster, lower = result["time_against_nanogpt"], result["nats_below_nanogpt"]
            word = "lower" if lower > 0 else "higher"
            against = f"{faster:.1f} times as fast, {abs(lower):.3f} nats {word}"
            name = f"`{name}`"
        lines.append(
            f"| {name} | {result['seconds']:.1f} | {result['blocks']:.4f} | {sliding} | {fraction} "
            f"| {against} |"
        )
    peaks = [
        result["matrix_gflops"] for name, result in found["results"].items() if name != NANOGPT
    ]
    lines += [
        "",
        "MFU (model FLOPs utilisation): fraction of the measured speed of large matrix products on "
        "the same machine, "
        f"{statistics.median(peaks):,.0f} GFLOP/s.",
    ]
    lines += ["", "[Loss against time](train.svg) of both; nanoGPT's losses are its own estimates."]
    return [*lines, "", f"`{command(found)}`"]


def other_times(*records: dict[str, Any]) -> list[str]:
    """Return the lines on other time budgets, one row each."""
    lines = ["| | seconds | `blocks` | `sliding` | `nanogpt` | runs |", "|---|---|---|---|---|---|"]
    for name, result in (item for found in records for item in found["results"].items()):
        if name == NANOGPT:
            continue
        losses = []
        for protocol in ("blocks", "sliding", "nanogpt"):
            values = [run[protocol] for run in result["runs"] if protocol in run]
            if not values:
                losses.append("")
                continue
            spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
            losses.append(f"{statistics.mean(values):.4f}{spread}")
        runs = len(result["runs"])
        lines.append(f"| `{name}` | {result['seconds']:.1f} | {' | '.join(losses)} | {runs} |")
    head = "Other time budgets: median seconds; means and standard deviations of the losses."
    commands = (f"\n`{command(found)}` ({found['hardware']}, {found['date']})" for found in records)
    return [head, "", *lines, *commands]


def busy(found: dict[str, Any]) -> list[str]:
    """Return the table of time budgets beside busy processes."""
    ranks = found["rows"][0].get("ranks", 1)
    which = "Beside" if ranks == 1 else f"{ranks} ranks beside"
    rank_1 = {"ahead": "clocks a minute ahead", "slow": "five times as slow"}
    rows = []
    for row in found["rows"]:
        outcome = ["refused", "", ""]
        if "refused" not in row:
            steps = [f"{each:,}" for each in row.get("steps_of_ranks", [row["steps"]])]
            threads = str(row["threads"] or "one each")  # of ranks
            outcome = [" and ".join(steps), threads, f"{row['nats_per_char']:.3f}"]
        beside = [str(row["busy_processes"])]
        beside += [rank_1.get(row["rank_1"], "")] if ranks > 1 else []
        seconds = [f"{row['announced']:g} s", f"{row['seconds']:.1f}"]
        rows.append([*beside, row["budget"], *seconds, *outcome])
    head = ["busy processes", *(["rank 1"] if ranks > 1 else []), "budget", "announced", "seconds"]
    head += ["steps", "threads at the end"]
    return [
        f"{which} processes that loop without end ({found['hardware']}, {found['date']}):",
        "",
        *table([*head, "`blocks`"], rows),
        "",
        f"`{command(found)}`",
    ]


def rank_speeds(found: dict[str, Any]) -> list[str]:
    """Return the table of the speed of one process and of two ranks."""
    speeds = found["characters_per_second"]
    rows = [
        [way, *(", ".join(f"{each:,}" for each in speeds[size][way]) for size in speeds)]
        for way in next(iter(speeds.values()))
    ]
    return [
        f"Characters per second, in turn ({found['hardware']}, {found['date']}):",
        "",
        *table(["", *speeds], rows),
        "",
        f"`{command(found)}`",
    ]


def on_gpu(found: dict[str, Any]) -> list[str]:
    """Return the lines on training and sampling on a GPU, one run of each."""
    train, peer = found["train"], found["nanogpt"]
    lines = [
        f"Tiny Shakespeare, one {train['gpu'].partition(',')[0].removeprefix('name ')} and "
        f"{train['hardware']}, torch {train['torch']}, {train['date']}, commit {train['commit']}. "
        "Time of the whole command; one run of each.",
        "",
        "| | seconds | `blocks` | parameters | steps | MFU |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| `{name}` | {result['seconds']:.1f} | {result['blocks']:.4f} "
        f"| {result['parameters']:,} | {result['steps']:,} | {result['share_of_matrix_peak']:.1%} |"
        for name, result in train["results"].items()
    ]
    nanogpt = peer["results"][NANOGPT]
    best_seconds, best = min(peer["nanogpt_curve"], key=lambda point: float(point[1]))
    lines += [
        f"| nanoGPT's GPU recipe | {nanogpt['seconds']:.1f} | {nanogpt['blocks']:.4f} | "
        f"| {nanogpt['iterations']:,} | |",
        "",
        f"nanoGPT's loss is that of its best checkpoint, {best:.4f} by its own estimate after "
        f"{best_seconds:.0f} s, of which {peer['nanogpt_curve'][0][0]:.0f} s precede its first "
        "step.",
        "",
        f"`scripts/gpu_suite.sh`, of it `{command(train)}` and `{command(peer)}`",
        "",
    ]
    return [*lines, *sampling(found["sample"])]


def sampling(found: dict[str, Any]) -> list[str]:
    """Return the lines on the speed of sampling."""
    speeds = found["characters_per_second"]
    parts = [f"{name}: {speed:,}" for name, speed in speeds.items()]
    return [
        f"Characters per second of all sequences together, model of the config `gpt`, "
        f"{found['date']}: {'; '.join(parts)}.",
        "",
        f"`{command(found)}`",
    ]


def preparing(found: dict[str, Any]) -> list[str]:
    """Return the lines on preparing and encoding texts."""
    files = f" in {found['files']:,} files" if found["files"] > 1 else ""
    size, medians = found["text_bytes"] / 1e6, found["prepare_mb_per_second"]
    cached, evicted = (
        f"{', '.join(f'{size / each:.0f}' for each in found['prepare_seconds'][state])} MB/s "
        f"(median {medians[state]:.0f}; `cat` to a file and fsync: "
        f"{size / found['copy_seconds'][state]:.0f})"
        for state in ("cached", "evicted")
    )

    def resumed(what: str) -> str:
        cached, evicted = (
            statistics.median(each[what] for each in found["resume_seconds"][state])
            for state in ("cached", "evicted")
        )
        return f"{cached:.1f} s ({evicted:.1f} s if the prepared text is not in the page cache)"

    killed = ""
    if found.get("same_files"):
        killed = f" Killed {found['kills']} times on the way, it ends with the same files."
    flush, read = (statistics.median(found[f"{what}_seconds"]) for what in ("flush", "read"))
    return [
        f"A text of {size / 1e3:.1f} GB{files} is prepared at {cached} if it is in the page cache, "
        f"and at {evicted} if not, with {found['memory_mb']:.0f} MB of memory of all processes "
        f"({found['hardware']}, {found['date']}). Until it is on disk, for which the first "
        f"checkpoint waits, it takes {flush:.1f} s more; reading it again with its checksums takes "
        f"{read:.1f} s.{killed} From the command that resumes "
        f"a run of it to the first batch it takes {resumed('first_batch')}, to the end of the "
        f"first step {resumed('first_step')}, medians of five.",
        "",
        f"`{command(found)}`",
    ]


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Return a table in Markdown."""
    cells = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(row) + " |" for row in cells]


def ensembles(*records: dict[str, Any]) -> list[str]:
    """Return the table of ensembles and their students."""
    rows = [
        [r["text"], r["model"], f"{r['gpt']:.4f}", f"{r['mixture']:.4f}", f"{r['s']:,.0f} s"]
        for found in records
        for r in found["rows"]
    ]
    found = records[0]
    batched = found["batched_step"]
    return [
        "Nats per character of 60,000 characters before and after the 100,000 that the models are "
        f"trained on; 4 x 64, blocks of 128, one thread ({found['hardware']}, {found['date']}). "
        "The time is that of all training for it.",
        "",
        *table(["text", "model", "GPT", "mixture", "time"], rows),
        "",
        f"One batched step of {batched['models']} such models (`torch.func.vmap`), forward and "
        f"backward: losses equal a loop's within {batched['largest_difference_of_losses']:.0e}, "
        f"gradients within {batched['largest_difference_of_gradients']:.0e}; "
        f"{batched['batched_ms']:.0f} ms, the loop {batched['loop_ms']:.0f} ms.",
        "",
        ", ".join(f"`{command(each)}`" for each in records) + ", at the same time",
    ]


def compression(found: dict[str, Any]) -> list[str]:
    """Return the table of compressed sizes."""
    rows = []
    for run in found["runs"]:
        trained = f"{run['text']}, {run['training_seconds']:.0f} s of training"
        for name, ours in run["ours"].items():
            times = f"{ours['compress_seconds']:.0f} and {ours['decompress_seconds']:.0f}"
            rows.append(
                [trained, name, f"{ours['bytes']:,}", f"{ours['nats_per_char']:.4f}", times]
            )
            trained = ""
        for name, size in run["others"].items():
            if size is None:
                continue
            n_bytes = size if isinstance(size, int) else size["bytes"]
            nats = 8 * math.log(2) * n_bytes / run["validation_characters"]
            seconds = "" if isinstance(size, int) else f"{size['seconds']:.0f}"
            rows.append(["", f"`{name}`", f"{n_bytes:,}", f"{nats:.4f}", seconds])
    n_texts = sum(run["random_texts"] for run in found["runs"])
    n_lost = sum(run["differences"] for run in found["runs"])
    return [
        "Validation split, given the training split: by a run of it, or what the split adds to the "
        "archive of the training split, for zpaq and PPMd padded to the length of both "
        f"({found['date']}). Of {n_texts} random texts {n_lost} came back changed.",
        "",
        *table(["text", "coder", "bytes", "nats/char", "seconds to compress and decompress"], rows),
        "",
        f"`{command(found)}`",
    ]


def mixture(*records: dict[str, Any]) -> list[str]:
    """Return the table of mixtures, by text and budget."""
    rows = []
    cases = [(mean, found) for found in records for mean in found["means"]]
    for mean, found in cases:
        losses = [mean["6-gram"], mean["gpt"], mean.get("gpt before"), mean["gpt + n-grams"]]
        cells = ["" if loss is None else f"{loss:.4f}" for loss in losses]
        gain = min(mean["6-gram"], mean["gpt"]) - mean["gpt + n-grams"]
        case = [mean["text"], mean["budget"], str(mean["seeds"])]
        rows.append([*case, *cells, f"{gain:.3f}", found["commit"], found["hardware"]])
    rows.sort(key=lambda row: row[0])
    models = ["6-gram", "gpt", "gpt before", "gpt + n-grams"]
    gain = "gain over the better of 6-gram and gpt"
    head = ["text", "budget", "seeds", *models, gain, "commit", "hardware"]
    return [
        "Nats per character of the whole validation splits, protocol `blocks`, means of the seeds "
        f"({records[-1]['date']}). *gpt before* is commit 1f6a672, without mixtures, trained in "
        "turn with the others. [LOG.md](LOG.md) describes the texts, and has both versions at the "
        "same time, since the machine's speed varies.",
        "",
        *table(head, rows),
        "",
        ", ".join(f"`{command(found)}`" for found in records),
    ]


def vocabulary(found: dict[str, Any], same_size: dict[str, Any]) -> list[str]:
    """Return the table of the open vocabulary, with sizes as planned and of one size."""
    rows = [
        [f"`{row['setting']}`", f"{row['nats_per_char']:.4f}", f"{row['chars_per_second']:,.0f}"]
        for row in (*found["means"], *same_size["means"])
    ]
    checked = found["checked"]
    n_seeds, n_fixed = (len(each["rows"]) // len(each["means"]) for each in (found, same_size))
    return [
        f"{found['bytes'] / 1e6:.0f} MB of Python sources with over 5,000 different characters, "
        f"`--budget {found['budget']}`, means of {n_seeds} seeds, of {n_fixed} with a fixed model "
        f"({found['date']}). Of {checked['strings']:,} random Unicode strings {checked['exact']:,} "
        f"come back exactly; of {checked['samples']:,} samples {checked['broken']} are broken.",
        "",
        *table(["setting", "nats/char", "characters per second"], rows),
        "",
        f"`{command(found)}`, `{command(same_size)}`",
    ]


def documents(found: dict[str, Any]) -> list[str]:
    """Return the table of a list of names."""
    keys = ("well_formed", "new", "distinct", "all_three", "real_of_the_new")
    rows = [
        [name, f"{mean['loss']:.4f}", *(f"{mean[key]:.1%}" for key in keys)]
        for name, mean in found["means"].items()
    ]
    head = ["model", "loss of unseen names", "well-formed", "new", "distinct", "all three"]
    return [
        f"{found['names']:,} names, one a line, one minute each, 1,000 samples at temperature 1, "
        f"means of {len(found['rows']) // len(rows)} seeds ({found['date']}).",
        "",
        *table([*head, "real names among the new"], rows),
        "",
        f"`{command(found)}`",
    ]


def finetuning(found: dict[str, Any]) -> list[str]:
    """Return the table of fine-tuning."""
    rows = [[r["texts"], r["run"], f"{r['new']:.4f}", f"{r['old']:.4f}"] for r in found["means"]]
    return [
        "Loss in nats per character on the validation splits of both texts; runs from scratch on "
        f"the characters of the old text that they know ({found['date']}).",
        "",
        *table(["old text, new text", "run", "new text", "old text"], rows),
        "",
        f"`{command(found)}`",
    ]


def exports(found: dict[str, Any], imported: dict[str, Any], speed: dict[str, Any]) -> list[str]:
    """Return the tables of exports, imports and the page."""
    rows = [
        [
            row["run"],
            f"{row['parameters']:,}",
            row["format"],
            row["reader"],
            f"{row['difference']:.1e}",
            "the same" if row["greedy"] else "differs",
            f"{row['loss']:.6f}",
            f"{row['loss of the run']:.6f}",
        ]
        for row in found["rows"]
    ]
    head = ["run", "parameters", "format", "read by", "largest difference", "greedy text"]
    losses = [
        f"{row['model']}, step {row['steps']}: {row['nanoGPT']:.7f} and {row['chargpt']:.7f}"
        for row in imported["rows"]
    ]
    speeds = [
        f"{name}: {each['characters_per_second']:,.0f} characters/s, the first one after "
        f"{each['open_to_first_character_seconds']:.2f} s, {each['page_bytes'] / 1e6:.1f} MB"
        for name, each in speed["models"].items()
    ]
    return [
        "Exported models beside their runs, by the programs that open them: the largest difference "
        "of a log-probability on 64 prompts, the greedy text of 200 characters, and the loss of "
        "20,000 validation characters in nats per character, protocol `blocks` "
        f"({found['date']}).",
        "",
        *table([*head, "loss", "loss of the run"], rows),
        "",
        "Checkpoints of nanoGPT, on all non-overlapping blocks of the validation split, by its own "
        f"code and imported: {'; '.join(losses)}.",
        "",
        f"The page of `chargpt play` in headless Chromium, medians: {'; '.join(speeds)}.",
        "",
        ", ".join(f"`{command(each)}`" for each in (found, imported, speed)),
    ]


def torture(found: dict[str, Any]) -> list[str]:
    """Return the table of the torture test."""
    lines = [
        f"{found['date']}, commit {found['commit']}, {found['hardware']}:",
        "",
        "| requirement | cases | failed | seconds |",
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
    """Return the lines on the time of a save."""
    seconds = found["seconds"]
    return [
        f"A save of {found['parameters'] / 1e6:.1f}M parameters ({found['bytes'] / 1e6:.0f} MB "
        f"with the optimizer) takes {seconds['ours']:.2f} s, the same tensors as plain safetensors "
        f"files {seconds['plain']:.2f} s, or {seconds['plain, flushed']:.2f} s flushed to disk "
        f"(medians of {len(found['all']['ours'])}, interleaved, {found['date']}). The difference "
        "is the sha256 checksums, computed partly while writing: "
        f"{found['sha256_on_one_core']:.2f} s on one core of this CPU, which has no SHA "
        "instructions.",
        "",
        f"`{command(found)}`",
    ]


def fuzzing(found: dict[str, Any]) -> list[str]:
    """Return the table of the fuzzer's executions."""
    lines = ["| reader | executions | branches reached | crashes | |", "|---|---|---|---|---|"]
    for name, result in found.items():
        lines.append(
            f"| {name} | {result['runs']:,} | {result['branches_covered']:,} "
            f"| {result['crashes']} | {result['date']}, commit {result['commit']} |"
        )
    script = "python scripts/torture/fuzz.py --runs 1000000 --json benchmarks/fuzz.json"
    return [*lines, "", f"`{script}`"]


def mutation(found: dict[str, Any]) -> list[str]:
    """Return the lines on mutation testing."""
    return [
        f"Mutation testing of `chargpt/store/`: its tests kill {found['killed']:,} of "
        f"{found['mutants']:,} mutants, {found['mutation_score']:.1%} "
        f"({found['date']}, commit {found['commit']}).",
        "",
        f"`{command(found)}`",
    ]


def memory(found: dict[str, Any]) -> list[str]:
    """Return the table of the peak memory of each command, over all hostile runs."""
    by_command: dict[str, list[dict[str, Any]]] = {}
    for each in found["results"]:
        by_command.setdefault(each["command"], []).append(each)
    rows = []
    for words, results in by_command.items():
        largest = max(results, key=lambda each: int(each["peak_mb"]))
        codes = ", ".join(map(str, sorted({each["code"] for each in results})))
        wrong = [f"{each['run']}: {', '.join(each['problems'])}" for each in results]
        wrong = [each for each in wrong if not each.endswith(": ")]
        peak = f"{largest['peak_mb']:,} MB"
        rows.append([f"`{words}`", peak, largest["run"], codes, "; ".join(wrong)])
    return [
        f"{found['date']}, commit {found['commit']}, {found['hardware']}:",
        "",
        *table(["command", "peak memory", "run", "exit codes", "beyond the limits"], rows),
        "",
        f"`{command(found)}`",
    ]


def reliability() -> str:
    """Return the results of docs/reliability.md."""
    return with_markers(
        torture(record("torture")),
        ["The rows of several processes again, later:"],
        torture(record("torture-ranks")),
        fuzzing(record("fuzz")),
        mutation(record("mutation")),
        saving(record("save")),
    )


def benchmarks() -> str:
    """Return the results of benchmarks/README.md."""
    return with_markers(
        ["### Training"],
        training(record("train")),
        other_times(record("short-budgets"), record("budgets"), record("ten-minutes")),
        busy(record("busy")),
        ["### Several processes"],
        busy(record("ranks")),
        busy(record("rank-1")),
        rank_speeds(record("ranks-speed")),
        ["### On a GPU"],
        on_gpu(record("gpu")),
        ["### Sampling"],
        sampling(record("sample")),
        sampling(record("sample-llama")),
        ["### Preparing a text"],
        *map(preparing, map(record, ("text", "text-10gb", "text-files"))),
        [
            "Encoding in memory, on one thread: "
            + ", ".join(
                f"{speed:.2f} ({name})"
                for name, speed in record("text")["encode_gigacharacters_per_second"].items()
            )
            + " billion characters per second."
        ],
        ["### Mixture"],
        mixture(record("mixture-10s"), record("mixture-80s"), record("mixture-3m")),
        ["### Ensembles and their students"],
        ensembles(record("ensemble"), record("ensemble-russian")),
        ["### Open vocabulary"],
        vocabulary(record("vocabulary"), record("vocabulary-size")),
        ["### Documents"],
        documents(record("documents")),
        ["### Fine-tuning"],
        finetuning(record("finetune")),
        ["### Compression"],
        compression(record("compress")),
        ["### Exports"],
        exports(record("export"), record("import"), record("play")),
    )


def with_markers(*paragraphs: list[str]) -> str:
    """Return paragraphs between the start and end markers."""
    body = "\n\n".join("\n".join(lines) for lines in paragraphs)
    return f"{START}\n{body}\n{END}"


def replace_results(page: str, results: str) -> str:
    """Return a page with the text between its markers replaced."""
    before, _, rest = page.partition(START)
    return before + results + rest.partition(END)[2]


def pages() -> dict[Path, str]:
    """Return the expected content of each page that has results."""
    results = {
        ROOT / "README.md": with_markers(summary()),
        ROOT / "benchmarks" / "README.md": benchmarks(),
        ROOT / "docs" / "reliability.md": reliability(),
        ROOT / "docs" / "security.md": with_markers(memory(record("memory"))),
    }
    return {path: replace_results(path.read_text("utf-8"), text) for path, text in results.items()}


def main() -> None:
    """Write the pages."""
    for path, content in pages().items():
        path.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
