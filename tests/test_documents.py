"""Documents: texts made of items are marked, shuffled, split and sampled by whole items."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli, run_here
from hypothesis import given, settings
from hypothesis import strategies as st
from noise import fill_with_noise, noisy_run

import chargpt
from chargpt.config import Config, TextConfig
from chargpt.errors import ConfigError, TextError
from chargpt.inference import generation
from chargpt.inference.evaluation import evaluate
from chargpt.store.run import load_run
from chargpt.text import corpus as module
from chargpt.text.corpus import Corpus
from chargpt.text.describe import warn_of_length, warn_of_list
from chargpt.text.prepare import load_corpus
from chargpt.text.source import RECORD_SEPARATOR, mark_documents
from chargpt.training.trainer import Trainer

NAMES = [f"{a}{b}{c}" for a in ("an", "be", "car") for b in "lmnr" for c in ("a", "ie", "o", "us")]
QUICK = ("-s", "train.max_steps=30", "-s", "model.n_layer=1", "-s", "model.n_embd=32")
QUICK = (*QUICK, "-s", "model.block_size=16", "-s", "text.documents=lines", "--seed", "1")


def documents_of(corpus: Corpus, split: str) -> list[str]:
    text = corpus.tokenizer.decode(corpus.split(split))
    assert text.endswith(corpus.tokenizer.eos_token) or not text
    return text.split(corpus.tokenizer.eos_token)[:-1]


@given(st.lists(st.lists(st.text("ab\n\r", max_size=6), max_size=4), max_size=3))
def test_lines_are_documents_and_empty_ones_are_left_out(files: list[list[str]]) -> None:
    marked = "".join(mark_documents(map(iter, files), "lines"))
    lines = [line for pieces in files for line in "".join(pieces).splitlines() if line]
    assert marked == "".join(line + "\n" for line in lines)


@given(
    st.lists(st.lists(st.text("ab-", max_size=6), max_size=4), max_size=3),
    st.text("ab-", min_size=1, max_size=3),
)
def test_separators_may_lie_across_pieces(files: list[list[str]], separator: str) -> None:
    marked = "".join(mark_documents(map(iter, files), separator))
    found = [each for pieces in files for each in "".join(pieces).split(separator) if each]
    assert marked == "".join(each + RECORD_SEPARATOR for each in found)


@given(
    st.lists(st.text("ab\n\r\u2028%", max_size=9), max_size=5),
    st.sampled_from(["\n\n", "\n%\n", "\n\n\n", "%\n"]),
)
def test_separators_match_line_ends_of_every_kind_and_whole_runs_of_them(
    pieces: list[str], separator: str
) -> None:
    marked = "".join(mark_documents([iter(pieces)], separator))
    text = re.sub("\r\n?|\u2028", "\n", "".join(pieces))
    pattern = re.escape(separator) if "%" in separator else separator + "\n*"
    items = [item.lstrip("\n") for item in re.split(pattern, text)]
    assert marked == "".join(item + RECORD_SEPARATOR for item in items if item)


def word(number: int, syllables: str = "ka ro mi te lu sa no vi be da") -> str:
    return "".join(syllables.split()[int(digit)] for digit in str(number * 7919 % 99991)).title()


@pytest.mark.parametrize(
    ("text", "documents"),
    [
        ("\n".join(map(word, range(2000))), "lines"),
        ("\r".join(f"{word(i)} {word(i + 1)}" for i in range(2000)), "lines"),
        ("\u2028".join(map(word, range(2000))), "lines"),
        ("\n".join(chr(0x4E00 + i) + chr(0x5E00 + 7 * i) for i in range(500)), "lines"),
        ("One quote here.\r\n\tsaid A\r\n%\r\nAnother quote there.\r\n%\r\n" * 300, "\n%\n"),
        ("A story.\n<|endoftext|>\nOnce more.\n<|endoftext|>\n" * 99, "\n<|endoftext|>\n"),
        ("\n".join(f"{word(i)} the {word(3 * i)} of a" for i in range(999)), None),  # verse
        ("\n".join(chr(0x4E00 + i * 37 % 500) * 5 for i in range(500)), None),  # verse
        ("\n".join(f"{word(i)},{i},{i % 7}.5" for i in range(999)), None),  # records
        ("\n".join(f"{word(i % 150)}" for i in range(999)), None),  # a text, one word a line
        ("\n".join(f"{i:05} {word(i)}" for i in range(999)), None),  # a log in its order
        (("Chapter\n\n" + "A line of it, long enough to be prose\n" * 9 + "\n***\n\n") * 99, None),
    ],
)
def test_auto_takes_as_documents_only_what_is_surely_a_list(
    text: str, documents: str | None, notes: list[str]
) -> None:
    corpus = load_corpus(TextConfig(), text=text)
    assert corpus.settings.documents == documents
    assert ("(text.documents=null: one text in its order)" in "".join(notes)) == bool(documents)
    assert load_corpus(TextConfig(documents=None), text=text).n_documents == 0
    assert corpus.n_documents > 100 or documents is None


def test_each_file_is_a_document(tmp_path: Path) -> None:
    poems = [f"poem {i}\n\nof a few lines\n" for i in range(20)]
    for i, poem in enumerate(poems):
        (tmp_path / f"{i}.py").write_text(poem)
    text = TextConfig(path=str(tmp_path), documents="files", suffixes=(".py",))
    corpus = load_corpus(text)
    assert corpus.n_documents == 20
    assert sorted(documents_of(corpus, "train") + documents_of(corpus, "val")) == sorted(poems)
    run = noisy_run(corpus.tokenizer)
    result = evaluate(replace(run, config=Config(text=text)), path=tmp_path)
    n_characters = sum(map(len, poems)) + 20
    assert result.characters == n_characters - 1
    assert result.nats_per_document == pytest.approx(result.nats_per_char * n_characters / 20)


@pytest.mark.parametrize("chunk", [1, 50, module.CHUNK])
def test_documents_are_shuffled_and_split_whole(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    content = "\n".join(NAMES)
    fractions = {"val_fraction": 0.3, "test_fraction": 0.2, "mixture_characters": 5}
    corpus = load_corpus(TextConfig(documents="lines", **fractions), text=content)
    splits = [documents_of(corpus, split) for split in ("mixture", "train", "val", "test")]
    together = [document for documents in splits for document in documents]
    assert all(splits)
    assert sorted(together) == sorted(NAMES) != together
    other = load_corpus(TextConfig(documents="lines", seed=2, **fractions), text=content)
    assert documents_of(other, "val") != splits[2]


@pytest.mark.parametrize(
    ("lengths", "settings", "sizes"),
    [
        ([10] * 9 + [17], {}, [0, 90, 17]),  # the end of the training split, 96, is nearer to 90
        ([10] * 8 + [17, 10], {}, [0, 97, 10]),
        ([10] * 8 + [27], {}, [0, 107, 0]),
        ([10] * 9 + [17], {"mixture_characters": 1}, [10, 80, 17]),
        ([80, 40], {"mixture_characters": 1}, [80, 40, 0]),
        ([110, 10], {"mixture_characters": 1, "val_fraction": 0.6}, [110, 0, 10]),
    ],
)
def test_the_training_split_ends_at_the_nearest_document(
    lengths: list[int], settings: dict[str, Any], sizes: list[int]
) -> None:
    content = "".join("a" * (length - 1) + "\n" for length in lengths)
    corpus = load_corpus(TextConfig(documents="lines"), text="a\n")
    corpus = replace(corpus, tokens=corpus.tokenizer.encode(content)).with_settings(**settings)
    assert [len(corpus.split(name)) for name in ("mixture", "train", "val")] == sizes


def test_a_seed_gives_the_same_order_in_every_version() -> None:
    corpus = load_corpus(TextConfig(documents="lines"), text="\n".join("abcdefghij"))
    assert corpus.tokenizer.decode(corpus.tokens).split() == list("cefgjhdiab")


def test_rare_boundaries_stay_characters() -> None:
    content = "".join(map(chr, range(0x4E00, 0x4E00 + 300))) * 50 + "%%" + "一" * 100
    corpus = load_corpus(TextConfig(documents="%%", min_count=10), text=content)
    assert RECORD_SEPARATOR in corpus.tokenizer.characters
    assert corpus.n_documents == 2


def test_a_text_that_holds_the_eos_token_is_refused() -> None:
    with pytest.raises(TextError, match=r"holds the character U\+001E"):
        load_corpus(TextConfig(documents="%"), text="a\x1eb % c")
    assert load_corpus(TextConfig(documents="\x1e"), text="a\x1eb b\x1ec").n_documents == 3


@settings(max_examples=25)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=40), st.integers(9, 60))
def test_the_fraction_advised_for_too_few_documents_suffices(
    lengths: list[int], block_size: int
) -> None:
    content = "\n".join("a" * length for length in lengths)
    corpus = load_corpus(TextConfig(documents="lines"), text=content)
    try:
        corpus.require_blocks(block_size)
    except TextError as error:
        advised = re.search(r"text\.val_fraction to ([0-9.]+)", str(error))
        if advised:
            corpus.with_settings(val_fraction=float(advised[1])).require_blocks(block_size)


@pytest.mark.parametrize("documents", ["lines", "files"])
def test_one_document_cannot_be_split(documents: str) -> None:
    corpus = load_corpus(TextConfig(documents=documents), text="the sea " * 1000)
    with pytest.raises(TextError, match=r"\(documents: 1\), .*or correct text.documents \('"):
        corpus.require_blocks(8)


def test_a_separator_that_a_text_lacks_is_named_as_the_cause(tmp_path: Path) -> None:
    path, other = tmp_path / "a.txt", tmp_path / "b.txt"

    def load() -> Corpus:
        return load_corpus(TextConfig(path=str(tmp_path), documents="\n***\n"))

    path.write_text("the sea " * 2000)
    found = load()
    message = (
        rf"text.documents='\n***\n' separates nothing in {tmp_path.name}/; set it to null for one "
        "text in its order, or to what separates its documents"
    )
    assert warn_of_list(found) == message
    assert not warn_of_length(found)
    with pytest.raises(TextError, match=f"^{re.escape(message)}$"):
        found.require_blocks(20_000)
    other.write_text("the sea " * 2000)
    assert "within the files of" in warn_of_list(load())
    with pytest.raises(TextError, match=r"give a longer text, or correct text\.documents"):
        load().require_blocks(20_000)
    path.write_text("the sea\n***\nthe sea")
    for content in ("the light", ""):  # an empty file is no document
        other.write_text(content)
        assert not load().unused_separator


def test_a_separator_alone_on_its_lines_is_advised_with_their_ends() -> None:
    poems = "\n***\n".join(f"poem {i}\nby the sea" for i in range(100))
    advice = warn_of_list(load_corpus(TextConfig(documents="***"), text=poems))
    (setting,) = re.findall("-s text.documents='(.*)'", advice)
    found = load_corpus(TextConfig(documents=setting), text=poems)
    assert not warn_of_list(found)
    assert found.tokenizer.decode(found.tokens).count("\n") == 100
    assert not warn_of_list(load_corpus(TextConfig(documents="***"), text=poems.replace("\n", "")))


def test_separators_are_written_with_escapes() -> None:
    written = Config().with_values({"text.documents": "\\n\\n"})
    assert written.text.documents == "\n\n"
    assert Config().with_values({"text.documents": "\\n"}).text.documents == "lines"
    for documents in ("line", "Files", "lines\\n", "None", "paragraphs", ""):
        with pytest.raises(
            ConfigError, match=r"`auto`, `lines`, `files`, null or a separator such as"
        ):
            Config().with_values({"text.documents": documents})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a list of names, with its mixture."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "names.txt").write_text("\n".join(NAMES * 20))
    words = (*QUICK, "-s", "text.mixture_characters=200", "--out", "run")
    run_here("train", "names.txt", *words, cwd=folder)
    return folder / "run"


def test_a_sample_in_training_has_the_context_of_the_command(trained: Path) -> None:
    run = load_run(trained, "latest")
    assert (run.corpus().n_documents, run.tokenizer.eos_token) == (960, "\n")
    fill_with_noise(run.model)  # so that every token of the context matters
    trainer = Trainer(run.config.with_values({"sample.prompt": "be"}), run.corpus())
    trainer.model.load_state_dict(run.model.state_dict())
    expected = generation.sample(run, prompt="be", length=200, num_samples=5, seed=1)
    assert trainer.learner.sample(trainer.config.sample).split("\n") == expected


def test_samples_of_a_list_are_whole_items(trained: Path, cli: Cli) -> None:
    sample = ("sample", trained, "--num-samples", "30", "--seed", "1", "-n")
    items = cli(*sample, "50").stdout.splitlines()
    assert len(items) == 30
    assert max(map(len, items)) < 50  # the text ended before its length
    prompted = cli(*sample, "50", "-p", "be").stdout.splitlines()
    assert [item[:2] for item in prompted] == ["be"] * 30
    after = cli(*sample, "5", "-p", "be\nan")
    assert "holds the end of a document (⏎): what follows it begins a new one" in after.stderr
    for length in (50, 5):
        report = json.loads(cli(*sample, length, "--overlap", "--json").stdout)
        finished = [len(item) <= length for item in items]
        assert report["samples"] == [item[:length] for item in items]
        assert report["finished"] == finished
        assert report["ended"] == ["document" if each else "length" for each in finished]
        copied = [item in NAMES if len(item) <= length else None for item in items]
        assert report["copied"] == copied
        assert report["new"] == [None if each is None else not each for each in copied]
    stopped = json.loads(cli(*sample, 50, "--stop", "a", "--overlap", "--json").stdout)
    assert {*stopped["ended"]} == {"stop", "document"}
    is_cut = [ended == "stop" for ended in stopped["ended"]]  # within an item
    assert [new is None for new in stopped["new"]] == is_cut
    assert [copied is None for copied in stopped["copied"]] == is_cut
    n_new, n_cut = sum(item not in NAMES for item in items), finished.count(False)
    assert 0 < n_cut < 30
    checked = cli(*sample, "50", "--overlap").stdout
    assert re.search(rf"sampled +30 +{n_new} +{30 - n_new} +0", checked)
    n_distinct_new = len(set(items) - set(NAMES))
    assert re.search(rf"distinct +{len(set(items))} +{n_distinct_new} ", checked)
    assert sum(line == f"⟦{name}⟧" for line in checked.splitlines() for name in NAMES) == 30 - n_new
    said = cli(*sample, "5").stderr
    assert f"cut at 5 characters: {n_cut} of 30; a higher -n finishes them" in said
    assert "cut at" not in cli(*sample, "50").stderr


def test_the_loss_of_a_document_is_that_of_its_characters(trained: Path, cli: Cli) -> None:
    Path("other.txt").write_text("\r\n\r\n".join(NAMES))
    run = load_run(trained)
    result = evaluate(run, path="other.txt")
    mean_length = sum(len(name) + 1 for name in NAMES) / len(NAMES)
    assert result.nats_per_document == pytest.approx(result.nats_per_char * mean_length)
    mixed = evaluate(chargpt.with_mixture(run), path="other.txt")
    shown = cli("evaluate", trained, "--text", "other.txt").stdout
    assert f"{result.nats_per_document:.2f} nats/document (gpt, step " in shown
    assert f"{mixed.nats_per_document:.2f} nats/document (gpt + n-grams)" in shown
    assert "with the documents before each as context; chargpt score " in shown
    Path("unix.txt").write_text("\n\n".join(NAMES))
    scored = [cli("score", trained, name).stdout for name in ("other.txt", "unix.txt")]
    assert scored[0] == scored[1] != ""
