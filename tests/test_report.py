"""The report: its content, its figures, escaping of texts, and the page in a browser."""

import base64
import errno
import hashlib
import html
import itertools
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from conftest import POSIX, REPOSITORY, WIDTHS, Cli, run_here, run_python, start_cli
from saving import failing

from chargpt.analysis import predictions
from chargpt.analysis import report as module
from chargpt.analysis.report import split_at, write_report
from chargpt.analysis.result import (
    RunScores,
    changes_in_second_half,
    describe_mixture,
    evaluate_run,
    summarize,
)
from chargpt.cli import report as report_command
from chargpt.inference.evaluation import BaselineLoss, Baselines, Evaluation, evaluate_tokens
from chargpt.inference.selection import new_sample
from chargpt.models.ngram import NGRAM
from chargpt.store.folder import RunFolder
from chargpt.store.metrics import validation_curve
from chargpt.store.run import Run, load_run
from chargpt.text.describe import SplitDifference
from chargpt.text.display import display_text

TINY = (
    "-s train.max_steps=6 -s train.batch_size=4 -s model.n_layer=2 -s model.n_head=2 "
    "-s model.n_embd=16 -s model.block_size=32 -s train.evaluation_tokens=300 "
    "-s train.evaluate_every=2 -s train.sample_every=3"
).split()
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> &amp; {{ 7*7 }} \"'`\n"


class Page(HTMLParser):
    """What a page holds: its ids, what it would fetch, and its text."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.feed(content)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        facts = dict(attrs)
        if "id" in facts:
            self.ids.append(str(facts["id"]))
        for name in ("src", "href", "xlink:href", "action", "data", "srcset"):
            value = facts.get(name) or ""
            if value and not value.startswith(("#", "data:image/png")):
                self.fetched.append(value)

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def reported(folder: Path, text: Path, *settings: str) -> Path:
    """Train a run, `mine`, in a folder; write its report and a tour of its attention."""
    run_here("train", text, *TINY, *settings, "--out", "mine", cwd=folder)
    run_here("report", "mine", cwd=folder)
    run_here("explain", "mine", "--html", "tour.html", cwd=folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run on the verse, its report and a tour of its attention."""
    return reported(tmp_path_factory.mktemp("reported"), REPOSITORY / "data" / "lighthouse.txt")


@pytest.fixture
def page(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Page:
    monkeypatch.chdir(folder)
    return Page(Path("mine/report.html").read_text(encoding="utf-8"))


@pytest.fixture
def run(page: Page) -> Run:
    """The run whose page is `page`, in the current folder."""
    return load_run(Path("mine"), device="cpu")


def test_the_page_has_all_sections_and_loads_nothing(page: Page) -> None:
    assert Path("mine/report.html").stat().st_size < 5_000_000
    assert len(page.ids) == len(set(page.ids))
    assert page.fetched == []
    assert "link" not in page.tags
    content = Path("mine/report.html").read_text(encoding="utf-8")
    sections = re.findall(r'<li><a href="#(\w+)">', content)
    assert len(sections) == 9
    assert set(sections) == set(re.findall(r'<h2 id="(\w+)">', content))
    script = re.findall(r"<script>(.*?)</script>", content, re.DOTALL)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', content)
    digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
    assert policy == (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'"
    )
    # losses, optimization curves, calibration, and two heads of two layers
    assert page.tags.count("svg") == 3 + 2 * 2


def test_the_figures_are_those_of_the_run(page: Page, run: Run) -> None:
    result = evaluate_run(run, run.corpus())
    assert f"{result.evaluations['val'].nats_per_char:.4f}" in page.text
    assert f"{result.evaluations['train'].nats_per_char:.4f}" in page.text
    for nats in result.baseline_losses.values():
        assert f"{nats:.4f}" in page.text
    records = RunFolder(run.folder).metrics.records()
    samples = {r["step"]: r["sample"] for r in records if "sample" in r}
    assert list(samples) == [3, 6]
    for step, words in samples.items():
        assert f"step {step}" in page.text
        assert " ".join(words.split()) in page.text
    for sentence in summarize(run, result, records):
        assert sentence in page.text
    assert "chargpt train -c mine/config.yaml" in page.text
    piped = replace(run, config=run.config.with_values({"text.path": "-"}))
    assert "chargpt train TEXT -c mine/config.yaml" in module.reproduction(piped)["command"]
    assert "n_embd: 16" in page.text


def test_each_character_of_the_passage_has_its_surprisal_and_predictions(run: Run) -> None:
    content = Path("mine/report.html").read_text(encoding="utf-8")
    match = re.search(r'<script type="application/json" id="predictions">(.*?)</script>', content)
    assert match
    places = [place for grapheme in json.loads(match[1]) for place in grapheme]
    text = run.tokenizer.decode(run.corpus().split("val")[1 : predictions.PASSAGE + 1])
    assert len(places) == len(text) == predictions.PASSAGE
    assert [predictions.name_of(character) for character in text] == [place[0] for place in places]
    for _, bits, best in places:
        shares = [share for _, share in best]
        assert shares == sorted(shares, reverse=True)
        assert len(best) == 5
        assert sum(shares) <= 1.001
        assert bits >= 0


def test_markup_in_a_text_is_escaped(tmp_path: Path) -> None:
    path = tmp_path / "odd.txt"
    path.write_text(HOSTILE * 40)
    reported(tmp_path, path)
    for name, scripts in (("mine/report.html", 2), ("tour.html", 0)):
        page = Page((tmp_path / name).read_text(encoding="utf-8"))
        assert page.tags.count("script") == scripts
        assert "img" not in page.tags
        assert page.fetched == []


def test_a_bigram_has_a_report_without_attention(cli: Cli, verse: Path) -> None:
    words = ("-c", "bigram", "-s", "train.max_steps=4", "-s", "train.sample_every=0")
    assert cli("train", verse, *words, "--out", "pairs").returncode == 0
    assert cli("report", "pairs").returncode == 0
    page = Page(Path("pairs/report.html").read_text(encoding="utf-8"))
    assert "attention" not in page.ids
    assert "samples" not in page.ids
    assert "3 samples of 400 characters from the bigram at temperature 0.8" in page.text
    assert "surprisal" in page.ids


def test_of_a_text_without_a_known_character_no_attention_is_shown(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "typical_line", lambda *_: np.array([], np.uint8))
    assert module.attention(run, run.corpus()) == {"maps": []}


@pytest.mark.parametrize("n_samples", [0, 1, 50, 51, 1000])
def test_a_report_shows_at_most_fifty_samples_and_the_last_of_a_long_training(
    n_samples: int,
) -> None:
    records = [{"step": step, "sample": f"text {step}"} for step in range(n_samples)]
    shown = module.training_samples(records)
    assert len(shown) == n_samples if n_samples <= 50 else 25 < len(shown) <= 50
    assert shown[-1:] == ([(f"step {n_samples - 1:,}", f"text {n_samples - 1}")] if shown else [])
    steps = [int(text.split()[1]) for _, text in shown]
    assert steps == sorted(steps)
    assert len({second - first for first, second in itertools.pairwise(steps)}) <= 1


@pytest.mark.slow
def test_a_long_training_writes_its_report(
    cli: Cli, verse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brief = cli("train", verse, *TINY, "--out", "brief")
    assert "chargpt report brief" in brief.stdout
    assert not Path("brief/report.html").exists()
    monkeypatch.setattr(report_command, "MIN_REPORT_BUDGET", 0)
    long = cli("train", verse, *TINY, "--out", "long")
    assert "report: long/report.html" in long.stdout
    assert Path("long/report.html").exists()
    # it is the run's own file: --force replaces the run, report and all
    assert cli("train", verse, *TINY, "--out", "long", "--force").returncode == 0


def test_no_picture_depends_on_the_backend_that_jupyter_names(
    folder: Path, verse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.not_installed")
    run, quick = folder / "mine", "report.MIN_REPORT_BUDGET = 0"  # a page after any training
    for name, words in {
        "run/report.html": ["train", verse, *TINY, "--out", "run"],
        "compare.svg": ["compare", run, "--plot", "compare.svg"],
        "explain.svg": ["explain", run, "--plot", "explain.svg"],
    }.items():
        program = f"from chargpt.cli import main, report; {quick}; main.run()"
        done = run_python(program, tmp_path, *words)
        assert f"{name}\n" in done.stdout, done.stderr
        assert "<svg" in (tmp_path / name).read_text(encoding="utf-8")


def test_a_failed_report_does_not_fail_the_training(
    cli: Cli, verse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_command, "MIN_REPORT_BUDGET", 0)

    monkeypatch.setattr("chargpt.outputs.write_atomically", failing(errno.ENOSPC))
    done = cli("train", verse, *TINY, "--out", "mine")
    assert done.returncode == 0
    assert "chargpt sample mine" in done.stdout
    assert "no report: mine/report.html cannot be written (No space left on device)" in done.stderr


def test_overlap_is_left_out_for_a_long_training_split(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SEARCHED", 10)
    path = write_report(run, tmp_path / "page.html")
    assert "<code>chargpt sample --overlap</code> searches it" in path.read_text(encoding="utf-8")


@POSIX
@pytest.mark.slow
def test_a_report_on_standard_output_is_the_page_alone(page: Page) -> None:
    with open("page.html", "wb") as file:
        process = start_cli("report", "mine", "--out", "/dev/stdout", cwd=Path.cwd(), stdout=file)
        assert process.wait() == 0
    content = Path("page.html").read_bytes()
    assert content.startswith(b"<!doctype html>")
    assert content.rstrip().endswith(b"</html>")


def report_of(path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    """Train on a text and return the report page in which these texts are the samples."""
    run_here("train", path, *TINY, *words, "--out", "mine", cwd=Path.cwd())
    samples = [new_sample("", text, "document" if len(text) < 400 else "length") for text in texts]
    monkeypatch.setattr(module, "sample", lambda *_, **__: samples)
    return write_report(load_run(Path("mine"), device="cpu")).read_text(encoding="utf-8")


def test_the_longest_verbatim_match_is_shown_with_its_place(
    cli: Cli, tmp_path: Path, verse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = verse.read_text(encoding="utf-8")
    path = tmp_path / "verse.txt"
    path.write_text(text, encoding="utf-8")
    start = text.index("\n", 1000) - 20
    texts = ["xx" * 99 + text[start : start + 60] + "xx" * 99] * 3
    page = report_of(path, texts, monkeypatch)
    line = 1 + text.count("\n", 0, start)
    shown = display_text(text[start : start + 60])
    page = html.unescape(page).replace("<bdi>", "").replace("</bdi>", "")
    assert f"60 characters, verse.txt, line {line}: “{shown}”. In" in page
    assert re.search(r"validation text: [\d,]+ of the [\d,]+ characters of the validation", page)


def test_of_a_list_the_sampled_documents_are_new_or_marked(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{a}{b}n" for a in "abcdefghij" for b in "aeiou"]
    path = tmp_path / "names.txt"
    path.write_text("\n".join(names * 20))
    sampled = [*names[:37], "new", "newer", "x" * 400]
    page = report_of(path, sampled, monkeypatch, "-s", "text.documents=lines")
    found = (
        r"Documents sampled .*: 39, of which new \(not in the text\): 2, in its training split: 37"
    )
    assert re.search(found, page)
    assert "1 more was cut at 400 characters" in page
    section = page[page.index('id="overlap"') : page.index('id="reproduce"')]
    assert len(re.findall(r'<div dir="auto">(.*?)</div>', section)) == 40
    assert re.findall(r"<mark>(.+?)</mark>", section) == names[:37]
    assert "Longest match: under 20 characters" in page


def test_matches_in_documents_that_were_cut_are_marked(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poem = "The lamp is lit, the sea is calm tonight.\n"
    (tmp_path / "poems").mkdir()
    for number in range(20):
        (tmp_path / f"poems/{number}.txt").write_text(poem * 12)
    texts = [("x" * 9 + poem * 10)[:400]] * 40
    page = report_of(tmp_path / "poems", texts, monkeypatch, "-s", "text.documents=files")
    assert page.count(f"xxxxxxxxx<mark>{poem}") == 40
    assert "Longest match: 391 characters, " in page


def test_of_documents_of_several_lines_the_beginnings_and_ends_are_shown(
    cli: Cli, tmp_path: Path
) -> None:
    path = tmp_path / "poems.txt"
    path.write_text("".join(f"poem {n}\nend%" for n in range(400)))
    settings = ("-s", "text.documents=%", "-s", "sample.length=20")
    done = cli("train", path, *TINY, *settings, "--out", "mine")
    assert "-- sample at step 6 (■: end of a document) --" in done.stderr
    run = load_run(Path("mine"), device="cpu")
    shown = predictions.surprisal(run, run.corpus())["passage"]
    assert "".join(each["text"] for each in shown[:5]) == "poem "
    assert [each["text"] for each in shown if each["ends_line"]][:2] == ["⏎", "■"]
    page = Page(write_report(run).read_text(encoding="utf-8")).text
    assert "By context length; the context includes the documents before" in page
    signs = re.compile("[■…]")
    for record in RunFolder(run.folder).metrics.records():
        assert len(signs.findall(record.get("sample", "■" * 5))) == 5
    assert len(signs.findall(page[page.index("the document ends; …: it was cut") :])) >= 40


def test_verbatim_matches_are_marked_at_their_position() -> None:
    parts = [("a", False), ("bc", True), ("d", False), ("ef", True), ("", False)]
    assert split_at("abcdef", [(1, 3), (4, 6)]) == parts


def test_a_sorted_list_is_said_to_have_unlike_splits_instead_of_over_fitting(
    cli: Cli, tmp_path: Path
) -> None:
    words = sorted(f"{'abcdefghij'[n % 10] * 3}{n:03d}" for n in range(1000))
    path = tmp_path / "list.txt"
    path.write_text("\n".join(words))
    done = cli("train", path, *TINY, "-s", "train.max_steps=40", "--out", "mine")
    shown = " ".join(done.stdout.split())
    assert "The validation split, the end of the text, differs from the training" in shown
    assert "text.documents=lines, =files or =SEPARATOR shuffles them" in shown
    assert "over-fits" not in done.stdout
    path.write_text("\n".join(np.random.default_rng(0).permutation(words)))
    done = cli("train", path, *TINY, "--out", "other")
    assert "differs from the training" not in done.stdout


@pytest.mark.parametrize("over_fits", [False, True])
def test_more_steps_are_suggested_unless_the_run_over_fits(
    over_fits: bool, cli: Cli, verse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunScores, "over_fits", lambda *_: over_fits)
    done = cli("train", verse, *TINY, "--out", "mine")
    hint = "chargpt train --resume mine -s train.max_steps=12"
    assert (hint in done.stdout) == (not over_fits)


def test_all_rows_of_the_closing_table_score_the_same_characters(run: Run) -> None:
    corpus = run.corpus()
    val = corpus.split("val")
    scored = 300 // run.model.block_size * run.model.block_size
    result = evaluate_run(run, corpus)
    assert result.evaluations["val"].characters == scored
    assert result.scored_on.startswith(f"{scored} of {len(val):,} validation characters")
    fitted = Baselines(corpus)
    span = run.model.block_size
    assert result.baseline_losses == fitted.losses(val, max_tokens=300, span=span)
    assert result.baseline_losses != fitted.losses(val)
    last = validation_curve(RunFolder(run.folder).metrics.records())[-1][1]  # of training
    assert result.evaluations["val"].nats_per_char == pytest.approx(last, abs=2e-3)


@pytest.mark.parametrize(
    ("settings", "scored"),
    [
        ("dtype=float32", ["train"]),
        ("dtype=bfloat16", ["train", "val"]),  # training validates in it, the table does not
        # the best is not the last: the learning rates rise until then
        ("schedule.warmup=6 -s optim.lr=3 -s optim.matrix_lr=3", ["train", "val"]),
    ],
)
def test_the_closing_table_takes_the_last_validation_where_it_can(
    settings: str, scored: list[str], cli: Cli, verse: Path
) -> None:
    words = f"-s dtype=float32 -s {settings} --out mine --json".split()
    with mock.patch("chargpt.analysis.result.evaluate_tokens", wraps=evaluate_tokens) as evaluate:
        done = cli("train", verse, *TINY, *words)
    assert [call.kwargs["split"] for call in evaluate.call_args_list] == scored
    run = load_run(Path("mine"), "best", device="cpu")
    val = run.corpus().split("val")
    expected = evaluate_tokens(run.model, val, max_tokens=run.config.train.evaluation_tokens)
    assert json.loads(done.stdout)["losses"]["val"]["nats_per_char"] == expected.nats_per_char


def test_over_fitting_is_reported_from_the_recorded_losses(run: Run) -> None:
    result = replace(evaluate_run(run, run.corpus()), epochs=2.0)
    run = replace(run, state=replace(run.state, best_nats_per_char=2.0, best_step=run.step))
    records = [{"step": run.step, "val_nats_per_char": 2.0}]
    assert not any("It over-fits" in words for words in summarize(run, result, records))
    records += [{"step": run.step + n, "val_nats_per_char": 2.0 + n} for n in (1, 2)]
    words = " ".join(summarize(run, result, records))
    assert f"lowest at step {run.step}" in words
    assert "rose to 4.000 nats. More text, model.dropout or fewer steps may help." in words
    steps = range(run.step - 9, run.step + 3)
    losses = [{"step": n, "loss": 2.0 - 0.1 * (n > run.step)} for n in steps]
    for epochs, expected in ((2.0, "It over-fits"), (0.4, "The validation loss")):
        said = summarize(run, replace(result, epochs=epochs), records + losses)
        assert [words.startswith(expected) for words in said].count(True) == 1
    early = replace(run, step=1, state=replace(run.state, best_step=1))
    losses = [{"step": n, "loss": 3.0 - n} for n in range(1, run.step + 3)]  # read since then
    said = summarize(early, replace(result, epochs=0.2), records + losses)
    assert any(words.startswith("It over-fits") for words in said)
    rising = [{"step": n, "loss": 1.0 + n - min(steps)} for n in steps]
    (said,) = (words for words in summarize(run, result, records + rising) if "rose to" in words)
    assert "So did the training loss: try lower learning rates, such as -s optim.lr=" in said
    patient = replace(run, config=run.config.with_values({"train.patience": 2}))
    sentence = "Early stopping: 2 evaluations without a new best."
    assert sentence in summarize(patient, result, records)


@pytest.mark.parametrize(("width", "scheme"), [("desktop", "light"), ("phone", "dark")])
@pytest.mark.parametrize("name", ["mine/report.html", "tour.html"])
def test_a_browser_reports_no_error_for_the_page(
    browser: Any, folder: Path, name: str, width: str, scheme: str
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    size = dict(zip(("width", "height"), WIDTHS[width], strict=True))
    page = browser.new_page(viewport=size, color_scheme=scheme)
    errors, requests = [], []
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    address = (folder / name).as_uri()
    page.goto(address)
    assert requests == [address]
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    heights = page.evaluate("[...document.querySelectorAll('.text')].map(x => x.clientHeight)")
    assert max(heights, default=0) <= 24 * 16 + 30  # a text of many short lines scrolls
    found = axe.Axe().run(page).response["violations"]
    assert [(each["id"], each["impact"], each["nodes"][0]["html"]) for each in found] == []
    assert errors == []


def test_a_page_runs_no_script_but_its_own(browser: Any, folder: Path, tmp_path: Path) -> None:
    content = (folder / "mine/report.html").read_text(encoding="utf-8")
    injected = "<script>document.title = 'mine'</script><img src='http://127.0.0.1:9/x.png'>"
    path = tmp_path / "bad.html"
    path.write_text(content.replace("<main>", f"<main>{injected}"), encoding="utf-8")
    page = browser.new_page()
    failed: list[tuple[str, str]] = []
    page.on("requestfailed", lambda request: failed.append((request.url, request.failure)))
    page.goto(path.as_uri())
    assert page.title() == "gpt on lighthouse.txt"
    assert failed == [("http://127.0.0.1:9/x.png", "csp")]


def test_pointer_and_arrow_keys_show_the_predictions(browser: Any, folder: Path) -> None:
    page = browser.new_page()
    page.goto((folder / "mine/report.html").as_uri())
    places = json.loads(page.locator("#predictions").text_content())
    guesses = page.locator("#top-characters")

    def expected(index: int) -> None:
        ((target, bits, best),) = places[index]
        assert guesses.locator("p").text_content().startswith(f"{target}: {bits:.2f} bits")
        shown = guesses.locator("li").all_text_contents()
        assert shown == [f"{character}  {100 * share:.1f}%" for character, share in best]

    page.locator("#passage span").nth(40).hover()
    expected(40)
    page.locator("#passage").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expected(43)
    page.keyboard.press("ArrowUp")
    expected(33)


FAMILY, FLAG, KEYCAP = "👨\u200d👩\u200d👧", "🇩🇪", "1\ufe0f\u20e3"
JOINED = (FAMILY, FLAG, "👋🏿", KEYCAP, "e\u0301")


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run on a text of joined emoji, its report and a tour of its attention."""
    folder = tmp_path_factory.mktemp("joined")
    text = folder / "emoji.txt"
    text.write_text(f"We {' '.join(JOINED)} ok.\n" * 60, encoding="utf-8")
    return reported(folder, text, "-s", "model.n_head=4")


def test_joined_emoji_stay_whole_wherever_a_page_shows_text(joined: Path) -> None:
    content = (joined / "mine/report.html").read_text(encoding="utf-8")
    tour = (joined / "tour.html").read_text(encoding="utf-8")
    for sign in JOINED:
        assert re.search(f'<span class="s[0-6]">{sign}</span>', content)
        assert f">{sign}</text>" in content  # an axis of an attention map
        assert f">{sign}</text>" in tour
        assert not re.search(f"{sign[0]}<[^>]*>{sign[1]}", content + tour)
    assert "\\u200d" not in re.sub(r"<script.*?</script>", "", content + tour, flags=re.DOTALL)


def test_each_character_of_a_joined_emoji_keeps_its_predictions(browser: Any, joined: Path) -> None:
    page = browser.new_page()
    page.goto((joined / "mine/report.html").as_uri())
    places = json.loads(page.locator("#predictions").text_content())
    spans = page.locator("#passage span")
    assert spans.count() == len(places)
    index = spans.all_text_contents().index(FAMILY)
    assert [name for name, _, _ in places[index]] == ["👨", "ZWJ", "👩", "ZWJ", "👧"]
    level = sum(max(bits for _, bits, _ in places[index]) >= n for n in predictions.SURPRISAL_BITS)
    assert spans.nth(index).get_attribute("class") == f"s{level}"
    spans.nth(index - 1).hover()
    before = spans.nth(index).bounding_box()
    spans.nth(index).hover()
    shown = page.locator("#top-characters p").all_text_contents()
    assert shown == [f"{name}: {bits:.2f} bits; most likely:" for name, bits, _ in places[index]]
    assert page.locator("#top-characters li").count() == 5 * len(shown)
    assert spans.nth(index).bounding_box() == before  # the text stays under the pointer


def test_letters_written_to_the_left_do_not_move_the_numbers(browser: Any, joined: Path) -> None:
    page = browser.new_page()
    page.goto((joined / "mine/report.html").as_uri())
    cell = page.locator("td:has(bdi)").first
    cell.evaluate("cell => cell.querySelectorAll('bdi').forEach((e) => e.textContent = 'ف')")
    places = [each.bounding_box()["x"] for each in cell.locator("bdi, span").all()]
    assert places == sorted(places)


@pytest.mark.parametrize("name", ["mine/report.html", "tour.html"])
def test_what_is_wider_than_a_phone_scrolls_in_its_own_box(
    browser: Any, joined: Path, name: str
) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto((joined / name).as_uri())
    page.evaluate("document.querySelectorAll('details').forEach((each) => each.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    cut_off = page.evaluate(
        """[...document.querySelectorAll("main *")].filter((each) =>
          each.getBoundingClientRect().right > 390 && !each.closest(".wide, pre"))
        .map((each) => each.outerHTML.slice(0, 80))"""
    )
    assert cut_off == []


@pytest.mark.parametrize(
    ("nats", "gpt_nats", "expected"),
    [
        (1.5, 1.6, "0.100 ± 0.050 nats better than the gpt; chargpt sample --mixture uses it."),
        (1.599, 1.6, "not distinguishable from the gpt (0.001 ± 0.050 nats better)."),
        (1.7, 1.6, "0.100 ± 0.050 nats worse than the gpt."),
        # better than the gpt, but not than the n-grams alone
        (1.7, 2.6, "not distinguishable from the 6-gram (0.000 ± 0.042 nats worse); chargpt "),
    ],
)
def test_a_gain_has_its_sign_and_is_none_within_twice_its_standard_error(
    nats: float, gpt_nats: float, expected: str
) -> None:
    gpt = Evaluation(gpt_nats, 0.5, 1000, 0.02, "blocks", "val", 128)
    mixture = replace(gpt, nats_per_char=nats, standard_error=0.015)
    # two blocks of 100 characters, whose losses are 3 / sqrt(2) above and below the mean
    losses = np.array([170.0, 170.0]) + np.array([1, -1]) * 1.5 * 2**0.5
    ngram = BaselineLoss(1.7, np.array([losses, [100, 100]]))
    assert ngram.standard_error == pytest.approx(0.015)
    scores = RunScores({NGRAM: ngram}, {"val": gpt}, 1000, mixture)
    sentence = describe_mixture(scores, mixture)
    assert sentence.startswith(f"The mixture of gpt and n-gram models is {expected}")
    assert scores.has_better_mixture == ("--mixture" in sentence)


def learning(*points: tuple[int, float, float]) -> list[dict[str, Any]]:
    """Return metrics of a run: at each step validation loss and training loss of the last steps."""
    records: list[dict[str, Any]] = []
    for step, validation, training in points:
        records += [{"step": n, "loss": training} for n in range(step - 9, step + 1)]
        records.append({"step": step, "val_nats_per_char": validation})
    return records


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        (((50, 2.0, 1.9), (100, 1.7, 1.4)), (-0.3, -0.5)),
        (((50, 1.6, 1.9), (95, 1.9, 1.6), (100, 1.7, 1.6)), (0.1, -0.3)),
        (((10, 3.0, 3.0), (60, 2.0, 1.9), (100, 1.9, 1.4)), (-0.1, -0.5)),  # from the middle on
        (((100, 1.7, 1.4),), None),
        ((), None),
    ],
)
def test_the_changes_of_both_losses_are_those_of_the_second_half(
    points: tuple[tuple[int, float, float], ...], expected: tuple[float, float] | None
) -> None:
    changes = changes_in_second_half(learning(*points))
    assert changes == (None if expected is None else pytest.approx(expected))
    validations = [record for record in learning(*points) if "loss" not in record]
    assert changes_in_second_half(validations) is None


def gap_scores(val: float = 1.5, train: float = 1.0, **facts: Any) -> RunScores:
    """Return scores whose bigram has a loss of 2.4 nats."""
    losses = {
        split: Evaluation(nats, 0.5, 1000, 0.02, "blocks", split, 128)
        for split, nats in (("train", train), ("val", val))
    }
    baselines = {
        name: BaselineLoss(nats, np.array([[1000 * nats], [1000]]))
        for name, nats in (("uniform", 4.0), ("bigram", 2.4), (NGRAM, 1.6))
    }
    return RunScores(baselines, losses, 1000, **facts)


@pytest.mark.parametrize(
    ("facts", "reason", "words"),
    [
        ({}, "over-fitting", "nats: it over-fits; more text or a higher model.dropout"),
        ({"epochs": 0.4}, "unlike splits", "After 0.4 epochs the generalisation gap"),
        ({"split_difference": 0.06}, "over-fitting", "nats: it over-fits; more text or a"),
        ({"split_difference": 0.2}, "unlike splits", "the validation split is harder"),
        ({"val": 1.2}, None, ""),
        ({"val": 3.0, "train": 2.5}, None, ""),  # it has learnt less than a bigram
    ],
)
def test_a_gap_is_over_fitting_if_neither_too_few_epochs_nor_unlike_splits_explain_it(
    facts: dict[str, Any], reason: str | None, words: str, run: Run
) -> None:
    if "split_difference" in facts:
        difference = SplitDifference(facts["split_difference"], "the splits differ")
        facts = {**facts, "split_difference": difference}
    scores = gap_scores(**facts)
    assert scores.gap_reason([]) == reason
    sentences = summarize(run, scores, [])
    assert any(words in sentence for sentence in sentences), sentences
    assert any("over-fits" in each for each in sentences) == (reason == "over-fitting")
    assert ("The splits differ." in sentences) == ("split_difference" in facts)
    # while the validation loss falls at 0.4 of the speed of the training loss, it still learns
    best = run.state.best_nats_per_char or 0.0
    for fall, is_learning in ((0.21, True), (0.19, False), (-0.01, False)):
        records = learning((50, best + fall, 1.9), (100, best, 1.4))
        over_fits = reason == "over-fitting"
        assert scores.over_fits(records) == (over_fits and not is_learning)
        printed = " ".join(summarize(run, scores, records))
        changes = f"the validation loss changed by {-fall:+.2f} nats, the training loss by -0.50: "
        advice = "more steps may help the gpt." if is_learning else "it over-fits; more text or a"
        assert (changes + advice in printed) == over_fits


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run on lines of both directions, with control characters and CR LF."""
    folder = tmp_path_factory.mktemp("mixed")
    lines = ("a\x1b[1mb", "שלום, a line", "\0 and \u200e", "Latin, a line")
    (folder / "mixed.txt").write_bytes(("\r\n".join(lines) + "\r\n").encode() * 40)
    return reported(folder, folder / "mixed.txt")


def test_control_and_format_characters_are_shown_by_name_whatever_the_fonts_hold(
    browser: Any, mixed: Path
) -> None:
    page = browser.new_page()
    page.goto((mixed / "mine/report.html").as_uri())
    spans = page.locator("#passage span")
    names = {"␛": "ESC", "␀": "NUL", "␍": "CR", "\u200e": "U+200E"}
    for sign, name in names.items():
        index = spans.all_text_contents().index(sign)
        drawn = (
            spans.nth(index)
            .locator(".sign")
            .evaluate("(node) => getComputedStyle(node, '::before').content")
        )
        assert drawn == f'"{name}"'
        spans.nth(index).hover()
        assert page.locator("#top-characters p").text_content().startswith(f"{name}: ")
    # in samples and tables too
    script = """(signs) => {
        const main = document.querySelector("main"), bare = [];
        const texts = document.createTreeWalker(main, NodeFilter.SHOW_TEXT);
        while (texts.nextNode()) {
            const { parentElement: parent, data } = texts.currentNode;
            const hasSign = signs.some((sign) => data.includes(sign));
            if (hasSign && !parent.matches(".sign, svg *")) bare.push(data);
        }
        return bare;
    }"""
    assert page.evaluate(script, list(names)) == []


def test_each_line_of_a_passage_or_sample_has_its_own_direction(browser: Any, mixed: Path) -> None:
    page = browser.new_page()
    page.goto((mixed / "mine/report.html").as_uri())
    content = page.locator("#passage span").all_text_contents()
    box = page.locator("#passage").bounding_box()
    middle = box["x"] + box["width"] / 2
    for character, is_right in (("ש", True), ("L", False)):
        first = page.locator("#passage span").nth(content.index(character)).bounding_box()
        assert (first["x"] > middle) == is_right
    blocks = page.locator(".text, .text div").all()
    assert len(blocks) > 3
    for block in blocks:
        assert block.evaluate("(node) => getComputedStyle(node).unicodeBidi") == "plaintext"
