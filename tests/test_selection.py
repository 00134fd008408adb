"""Choosing among samples: new and distinct ones, the best of many; their facts as JSON lines."""

import itertools
import json
import logging
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli, run_here
from formula import longest_common
from noise import noisy_run_on
from shared_runs import QUICK

from chargpt.analysis import report
from chargpt.cli import console
from chargpt.cli import sample as cli_sample
from chargpt.config import SampleConfig
from chargpt.errors import ConfigError
from chargpt.inference import generation, selection
from chargpt.inference.generation import sample, stream, stream_pieces
from chargpt.inference.selection import Sample
from chargpt.store.run import Run

# half of all texts of one to three letters
NAMES = ["".join(each) for n in (1, 2, 3) for each in itertools.product("abc", repeat=n)][::2]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run on a list of names, many of which a noisy model writes."""
    values = {"text.documents": "lines", "text.val_fraction": 0.3, "sample.seed": 5}
    values |= {"sample.length": 12, "sample.temperature": 2.0}
    return noisy_run_on(tmp_path, "\n".join(NAMES), **values)


def is_new(text: Sample) -> bool:
    return text.ended == "document" and text.strip() != "" and text not in NAMES


@pytest.mark.parametrize("group", [1, 3, 64])
@pytest.mark.parametrize("kinds", [("new",), ("distinct",), ("new", "distinct")])
def test_the_first_sequences_that_are_new_or_distinct_are_returned_whatever_the_groups(
    kinds: tuple[str, ...], group: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = sample(run, num_samples=400)
    known = {text for text in everything if text in NAMES}
    val = set(run.tokenizer.decode(run.corpus().split("val")).split())
    assert val & known
    assert known - val
    assert "" in everything
    assert any(text.ended == "length" and text not in NAMES for text in everything)
    expected: list[Sample] = []
    for text in everything:
        if ("new" not in kinds or is_new(text)) and (
            "distinct" not in kinds or text not in expected
        ):
            expected.append(text)
    n_values = 2 * run.model.new_cache(1).keys.numel() + run.model.vocab_size
    monkeypatch.setattr(generation, "MAX_GROUP_BYTES", group * 4 * n_values)
    monkeypatch.setattr(selection, "MIN_GROUP", group // 2)
    calls: list[tuple[int, int]] = []
    found = sample(
        run,
        num_samples=20,
        on_progress=lambda *call: calls.append(call),
        **dict.fromkeys(kinds, True),
    )
    assert found == expected[:20]
    assert [each.sequence_id for each in found] == [each.sequence_id for each in expected[:20]]
    assert [everything[each.sequence_id] for each in found] == found
    assert calls == sorted(calls)
    assert {total for _, total in calls} == {20}


def test_a_new_document_includes_the_prompt_but_not_the_documents_before(run: Run) -> None:
    listed = next(name for name in NAMES if len(name) == 3)
    for prompt, before in ((listed[:1], ""), (f"cc\n{listed[:1]}", "cc\n")):
        everything = [
            text.removeprefix(before) for text in sample(run, prompt=prompt, num_samples=300)
        ]
        assert set(everything) & set(NAMES)
        found = sample(run, prompt=prompt, num_samples=20, new=True)
        assert len(found) == 20
        assert not {text.removeprefix(before) for text in found} & set(NAMES)


def test_the_search_ends_after_too_many_rejections_in_a_row_not_in_all(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = sample(run, num_samples=20, new=True, distinct=True)
    numbers = [-1, *(text.sequence_id for text in found)]
    in_a_row = [after - before - 1 for before, after in itertools.pairwise(numbers)]
    assert sum(in_a_row) > max(in_a_row) + 1
    for limit, n_found in ((max(in_a_row) + 1, 20), (max(in_a_row), in_a_row.index(max(in_a_row)))):
        monkeypatch.setattr(selection, "MAX_REJECTED", limit)
        assert sample(run, num_samples=20, new=True, distinct=True) == found[:n_found]


@pytest.mark.parametrize("group", [1, 64])
def test_too_few_samples_are_returned_with_a_warning(
    group: int, run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(selection, "MIN_GROUP", group)
    monkeypatch.setattr(selection, "MAX_REJECTED", 30)
    with caplog.at_level(logging.WARNING):
        found = sample(run, num_samples=3, temperature=0, distinct=True)
    assert len(found) == 1
    assert "found 1 of 3 distinct samples in 31 sequences, none in the last 30" in caplog.text
    assert "raise the temperature" in caplog.text
    with caplog.at_level(logging.WARNING):
        cut = sample(run, num_samples=9, length=1, new=True)
    assert len(cut) < 9
    assert "raise the length, which cut most of them" in caplog.text


def test_the_best_samples_are_those_of_the_lowest_surprisal_among_the_accepted(run: Run) -> None:
    for kinds in ({}, {"new": True, "distinct": True}):
        everything = sample(run, num_samples=30, **kinds)
        best = sample(run, num_samples=30, best=4, **kinds)
        assert best == sorted(everything, key=lambda text: text.surprisal)[:4]
        assert [each.surprisal for each in best] == sorted(each.surprisal for each in everything)[
            :4
        ]


def test_a_stopped_search_returns_what_is_found(run: Run) -> None:
    expected = {text.sequence_id: text for text in sample(run, num_samples=500, new=True)}
    calls = itertools.count()
    found = sample(run, num_samples=500, new=True, is_stopped=lambda: next(calls) > 5)
    assert 0 < len(found) < 500
    assert found == [expected[text.sequence_id] for text in found]


def test_a_stream_and_the_samples_of_others_are_not_chosen_among(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {"new": True, "distinct": True, "best": 1, "num_samples": 2}
    values = {f"sample.{name}": value for name, value in chosen.items()}
    choosy = replace(run, config=run.config.with_values(values))
    assert "".join(stream(choosy)) == sample(run)[0]
    pieces, plain = (  # as in training
        list(stream_pieces(run.model, run.tokenizer, run.tokenizer.encode("a"), options))
        for options in (
            choosy.config.sample,
            SampleConfig(**run.config.sample.model_dump() | {"num_samples": 2}),
        )
    )
    assert pieces == plain
    assert str(report.overlap(choosy, run.corpus())) == str(report.overlap(run, run.corpus()))


def test_new_is_rejected_before_sampling_where_there_are_no_documents(tmp_path: Path) -> None:
    run = noisy_run_on(tmp_path, "the sea and the light")
    with pytest.raises(ConfigError, match="is no list of them"):
        sample(run, new=True, on_progress=lambda *_: pytest.fail("it was sampled"))


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run on a list of names."""
    folder = tmp_path_factory.mktemp("names")
    (folder / "names.txt").write_text("\n".join(NAMES * 20))
    run_here("train", "names.txt", *QUICK, "-s", "text.documents=lines", "--out", "run", cwd=folder)
    return folder / "run"


def test_the_command_prints_new_and_distinct_names_and_ends_with_1_if_too_few(
    names: Path, cli: Cli
) -> None:
    args = ("sample", names, "--seed", 1, "--new", "--distinct", "--num-samples")
    done = cli(*args, 30)
    assert done.returncode == 0, done.stderr
    found = done.stdout.splitlines()
    assert len(set(found)) == 30
    assert not set(found) & set(NAMES)
    few = cli(*args, 30, "--temperature", 0)
    assert few.returncode == 1
    assert len(few.stdout.splitlines()) <= 1
    assert "of 30 new and distinct samples in 1,00" in few.stderr
    assert few.stderr.count("\nchargpt: ") + few.stderr.startswith("chargpt: ") == 1
    stops = ("--stop", "a", "--stop", "b", "--stop", "c")  # no whole document but a blank one
    none = cli(*args, 2, *stops, "--overlap", "--json")
    assert none.returncode == 1
    assert json.loads(none.stdout)["samples"] == []


@pytest.mark.parametrize("kind", ["documents", "text"])
def test_json_lines_have_the_facts_of_each_sample(
    kind: str, names: Path, trained: Path, cli: Cli
) -> None:
    folder = names if kind == "documents" else trained
    args = ("sample", folder, "--seed", 1, "--num-samples", 5, "--best", 3, "-n", 30)
    lines = [json.loads(line) for line in cli(*args, "--format", "jsonl").stdout.splitlines()]
    whole: dict[str, Any] = json.loads(cli(*args, "--format", "json").stdout)
    assert whole == json.loads(cli(*args, "--json").stdout)
    run = generation.as_run(folder)
    texts = sample(run, seed=1, num_samples=5, best=3, length=30)
    training = run.tokenizer.decode(run.corpus().split("train"))
    assert lines == [
        {
            "prompt": "",
            "continuation": text.continuation,
            "ended": text.ended,
            "finished": text.finished,
            "surprisal": pytest.approx(text.surprisal),
            "longest_copied": longest_common(text.continuation, training),
            "seed": 1,
            "sample": text.sequence_id + 1,
        }
        for text in texts
    ]
    for name in ("surprisal", "sample", "ended", "finished"):
        assert whole[name] == [line[name] for line in lines]
    assert "longest_copied" not in whole
    measured = json.loads(cli(*args, "--json", "--overlap").stdout)
    assert measured["longest_copied"] == [line["longest_copied"] for line in lines]


def test_json_lines_are_printed_after_each_group(
    trained: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    work = generation.sample_groups

    def watched(*args: Any, **others: Any) -> Any:
        for group in work(*args, **others):
            events.append("group")
            yield group

    monkeypatch.setattr(generation, "MAX_GROUP_BYTES", 0)
    monkeypatch.setattr(cli_sample, "sample_groups", watched)
    monkeypatch.setattr(console, "out_json", lambda _: events.append("line"))
    assert cli("sample", trained, "--num-samples", 3, "--format", "jsonl").returncode == 0
    assert events == ["group", "line"] * 3


def test_a_signal_ends_json_lines_with_those_so_far(
    trained: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = generation.sample_groups

    def interrupted(*args: Any, **others: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return work(*args, **others)

    monkeypatch.setattr(cli_sample, "sample_groups", interrupted)
    done = cli("sample", trained, "--num-samples", 3, "--format", "jsonl", "-n", 900)
    assert done.returncode == 130
    assert {json.loads(line)["ended"] for line in done.stdout.splitlines()} == {"stopped"}


def test_without_its_text_a_run_has_no_copies_to_look_up(
    trained: Path, tmp_path: Path, cli: Cli
) -> None:
    shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "text")
    done = cli("sample", "run", "--format", "jsonl", "-n", 9)
    assert done.returncode == 0
    assert json.loads(done.stdout)["longest_copied"] is None
    assert "longest_copied is null: " in done.stderr
