"""The page of `chargpt play`: its text is the model's, it runs nothing else, and it is usable."""

import base64
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import WIDTHS, Cli
from noise import fill_with_noise

from chargpt import sample, suggest
from chargpt.cli import export as export_commands
from chargpt.config import Config
from chargpt.errors import OperationError
from chargpt.export import html
from chargpt.export.html import export_html, half_weights, make_page
from chargpt.models import build_model
from chargpt.models.gpt import GPT
from chargpt.store.checkpoint import RunState
from chargpt.store.folder import RunFolder
from chargpt.store.run import Run, load_run
from chargpt.text.corpus import count_pairs, count_tokens
from chargpt.text.tokenizer import CharTokenizer

SIZES: dict[str, object] = {"n_layer": 2, "n_embd": 32, "n_head": 2, "block_size": 24}
MARKUP = (
    "</script></title></textarea><script>window.ran = 1</script>"
    "<img src=x onerror='window.ran = 1'><!--"
)
HOSTILE = f'{MARKUP}"&\u2028\u2029\u202e\0\n{{{{ 7*7 }}}}'
LATIN = CharTokenizer.fit("\n abcdefghijklmnopqrstuvwxyz.,!")
TOKENIZERS = {
    "latin": LATIN,
    "russian": CharTokenizer.fit("\n абвгдежзийклмнопрстуфхцчшщъыьэюя,.!—«»"),
    "emoji": CharTokenizer.fit("\n aé\u0301\u0308\u200d字語漢的😀🎉👩🏽🇩🇪"),
    "hebrew": CharTokenizer.fit("\n שלוםעליכab\u05b8\u05bc\u200f"),
    "hostile": CharTokenizer.fit(HOSTILE),
    "line ends": CharTokenizer.fit("\r\n abc"),
    "no line end": CharTokenizer.fit("abcdef"),
    "documents": CharTokenizer("\n abcdeé", eos_token="\n"),
    "bytes": CharTokenizer("\n abcdeé字", has_bytes=True),
    "unknown": CharTokenizer("\n abcdeé", has_unknown=True),
    "signs": CharTokenizer.fit("\n \x1b\u200eab"),
    "large": CharTokenizer.fit("\n " + "".join(map(chr, range(0x4E00, 0x4E00 + 4000)))),
}
PROMPTS = {"russian": "дом", "hebrew": "שלום", "bytes": "aж😀", "emoji": "字😀", "hostile": MARKUP}
SLOW: dict[str, Any] = {"n_layer": 4, "n_embd": 128}  # ten seconds for 10,000 characters


def save_run(folder: Path, tokenizer: CharTokenizer = LATIN, **changes: object) -> Run:
    """Save a run with random weights that half precision holds exactly, and load it.

    Settings are those of the model, or of sampling, as `sample__...`.
    """
    named = {k if "__" in k else f"model__{k}": v for k, v in {**SIZES, **changes}.items()}
    config = Config().with_values({k.replace("__", "."): v for k, v in named.items()})
    model = fill_with_noise(build_model(config.model, tokenizer.vocab_size))
    run = RunFolder(folder)
    run.path.mkdir(parents=True, exist_ok=True)
    run.metrics.append({"step": 1, "loss": 1.0})
    run.save(
        config=config,
        tokenizer=tokenizer,
        state=RunState(1, best_step=1),
        model={name: tensor.half().float() for name, tensor in model.state_dict().items()},
        optimizer={"adamw.step": torch.tensor(1.0)},
    )
    return load_run(folder, device="cpu")


def use_text(monkeypatch: pytest.MonkeyPatch, tokenizer: CharTokenizer, text: str) -> None:
    """Give all runs a text, of which the page has the counts."""
    tokens, size = tokenizer.encode(text), tokenizer.vocab_size
    corpus = SimpleNamespace(
        pair_counts=lambda split: count_pairs(tokens, size),
        token_counts=lambda split: count_tokens(tokens, size),
    )
    monkeypatch.setattr(Run, "corpus", lambda run: corpus)


def greedy(run: Run, prompt: str) -> str:
    """Return a prompt and the 60 most likely characters after it."""
    return sample(run, prompt=prompt, temperature=0, length=60, num_samples=1, seed=1)[0]


class Player:
    """An open page, with everything that it reports and requests."""

    def __init__(self, page: Any, run: Run) -> None:
        self.page, self.run = page, run
        self.uri = (run.folder / "play.html").absolute().as_uri()
        self.reports: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.reports.append(message.text))
        page.on("pageerror", lambda error: self.reports.append(str(error)))
        page.on("dialog", lambda dialog: self.reports.append(dialog.message))
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(self.uri)

    def find(self, selector: str, **options: Any) -> Any:
        """Return the elements of a selector."""
        return self.page.locator(selector, **options)

    def set(self, **values: object) -> None:
        """Set fields by their id, with _ for -."""
        for name, value in values.items():
            self.find(f"#{name.replace('_', '-')}").fill(str(value))

    def wait(self, words: str = "per second|ends here") -> None:
        """Wait until the page's status matches."""
        status = self.find("#status").filter(has_text=re.compile(words))
        status.wait_for(timeout=20_000)

    def continue_by(self, key: str) -> str:
        """Return the text after pressing a key that lets the model continue it."""
        self.page.evaluate("() => { element('status').textContent = '' }")
        self.page.keyboard.press(key)
        self.wait()
        return self.text

    def write(self, prompt: str, **values: object) -> str:
        """Return a prompt and its continuation."""
        self.set(**{"temperature": 0, "length": 60, **values}, prompt=prompt)
        return self.continue_by("Control+Enter")

    @property
    def text(self) -> str:
        """The text, in which a text field would change the line ends."""
        written: str = self.page.evaluate("() => written")
        return written

    def choose(self, index: int) -> None:
        """Click on a character of the text, once there are predictions."""
        self.find(".alternatives button").first.wait_for()
        self.find("#view span").nth(index).click()

    @property
    def summary(self) -> str:
        return str(self.find("#predictions p").text_content())


Open = Callable[..., Player]


@pytest.fixture
def player(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Open the page of a new run; in the end it has reported nothing and requested only itself."""
    opened = []

    def open_page(
        kind: str = "latin", context: Any = None, name: str = "mine", **changes: Any
    ) -> Player:
        run = save_run(tmp_path / name, TOKENIZERS[kind], **changes)
        export_html(run, run.folder / "play.html")
        opened.append(Player(browser.new_context(**(context or {})).new_page(), run))
        return opened[-1]

    yield open_page
    for page in opened:
        assert page.reports == []
        assert [url for url in page.requests if not url.startswith("blob:")] == [page.uri]
        page.page.context.close()


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        *((kind, {}) for kind in TOKENIZERS),
        ("latin", {"n_embd": 6, "n_head": 3, "n_inner": 7, "block_size": 5}),
        ("latin", {"block_size": 1}),
        ("latin", {"block_size": 7, "n_layer": 1, "rope_theta": 100.0}),
    ],
)
def test_greedy_text_equals_that_of_sample_within_and_beyond_the_block(
    player: Open, monkeypatch: pytest.MonkeyPatch, kind: str, sizes: dict[str, object]
) -> None:
    if kind == "no line end":  # it begins with the most frequent character
        use_text(monkeypatch, TOKENIZERS[kind], "abcddde")
    page = player(kind, **sizes)
    run = page.run
    assert kind != "no line end" or greedy(run, "")[0] == "d"
    characters = re.sub(r"[\r\n]", "", run.tokenizer.characters)
    given = PROMPTS.get(kind, characters[:2])
    for prompt in ("", given, ((given + characters) * 51)[:51]):  # bytes: cut within a character
        expected = greedy(run, prompt)
        assert page.write(prompt) == expected
        assert len(expected) == len(prompt) + 60 or kind == "documents"
    assert len(set(expected[51:])) > 1 or kind == "documents" or sizes


@pytest.mark.parametrize("line_end", ["\r\n", "\r"])
def test_a_typed_line_end_is_that_of_the_training_text(
    player: Open, monkeypatch: pytest.MonkeyPatch, line_end: str
) -> None:
    monkeypatch.setitem(TOKENIZERS, "own", CharTokenizer.fit(f"{line_end} abc"))
    page = player("own")
    assert page.write("ab\nc") == greedy(page.run, f"ab{line_end}c")
    assert page.find("#missing").text_content() == ""


def test_the_seed_decides_a_text_however_often_it_is_continued(player: Open) -> None:
    page = player()
    whole = page.write("ab", temperature=1, length=80, seed=3)
    page.write("ab", length=40, temperature=1, seed=3)
    assert page.continue_by("Control+Enter") == whole
    assert page.write("ab", length=80, temperature=1, seed=4) != whole
    assert page.write("ab", temperature=2, top_k=1) == page.write("ab", temperature=0)
    without = [page.write("ab", temperature=2, seed="", top_k="") for _ in range(2)]
    assert without[0] != without[1]


@pytest.mark.parametrize("k", [1, 7, 40, 4000, 4002])
def test_top_k_keeps_the_most_probable_tokens_and_the_first_of_equal_ones(
    player: Open, k: int
) -> None:
    page = player("large")
    page.find(".alternatives button").first.wait_for()
    probs = np.random.default_rng(k).integers(0, 30, 4002)  # each about 130 times
    kept = np.zeros_like(probs)
    best = np.argsort(-probs, kind="stable")[:k]
    kept[best] = probs[best]
    script = """([probs, k]) => {
        const kept = Float64Array.from(probs);
        keepHighest(kept, k);
        return [...kept];
    }"""
    assert page.page.workers[0].evaluate(script, [probs.tolist(), k]) == kept.tolist()


def test_the_uniform_numbers_of_sampling_are_uniform_and_independent(player: Open) -> None:
    page = player()
    page.find(".alternatives button").first.wait_for()
    rows = np.array(
        page.page.workers[0].evaluate(
            "() => [0, 1, 4294967295].map((seed) => "
            "Array.from({ length: 20000 }, (_, index) => uniform(seed, index)))"
        )
    )  # (seeds, indices)
    assert rows.min() >= 0
    assert rows.max() < 1
    counts = np.array([np.histogram(row, bins=50, range=(0, 1))[0] for row in rows])
    assert (((counts - 400) ** 2 / 400).sum(axis=1) < 100).all()  # chi-square of 49 degrees
    pairs = [(rows[0], rows[1]), *((row[:-1], row[1:]) for row in rows)]
    assert max(abs(np.corrcoef(*pair)[0, 1]) for pair in pairs) < 0.03


def test_each_character_shows_its_surprisal_and_the_most_likely_ones(player: Open) -> None:
    page, prompt = player(), "so it is.\n"
    run = page.run
    page.find("#prompt").press_sequentially(prompt)
    spans = page.find("#view span:not(#end)")
    spans.nth(len(prompt) - 1).wait_for()  # a part may be read while the rest is typed
    page.find("#view .s1, #view .s2, #view .s3, #view .s4").first.wait_for()
    assert spans.all_text_contents() == [*prompt[:-1], "⏎\n"]
    probs = run.logits(prompt).double().softmax(dim=-1)
    for index in (1, 4, len(prompt)):
        page.choose(index)
        expected = []
        for token in probs[index - 1].argsort(descending=True)[:8].tolist():
            character = run.tokenizer.characters[token]
            name = {" ": "space", "\n": "line end"}.get(character, character)
            expected.append(f"{name} {100 * probs[index - 1, token]:.1f}%")
        assert page.find(".alternatives button").all_inner_texts() == expected
        if index < len(prompt):
            prob = float(probs[index - 1, run.tokenizer.encode(prompt[index])[0]])
            assert f"{-math.log2(prob):.2f} bits ({100 * prob:.1f}%)" in page.summary
    page.choose(0)
    assert "read nothing before it" in page.summary


def test_text_streams_and_escape_and_typing_stop_it(player: Open) -> None:
    page = player(**SLOW)
    field, stop = page.find("#prompt"), page.find("#stop")
    page.set(prompt="ab", length=10_000)
    field.press("Control+Enter")
    while len(field.input_value()) < 200:
        page.page.wait_for_timeout(30)
    assert stop.is_enabled()
    page.page.keyboard.press("Escape")
    page.wait("Stopped")
    stopped = field.input_value()
    page.page.wait_for_timeout(100)
    assert len(stopped) < 10_000
    assert field.input_value() == stopped
    assert stop.is_disabled()
    field.press("Control+Enter")
    page.page.wait_for_timeout(100)
    page.page.keyboard.type("zzzz")
    page.page.wait_for_timeout(200)
    assert field.input_value().endswith("zzzz")


def test_a_preview_leaves_the_field_alone_and_is_what_continuing_writes(player: Open) -> None:
    page = player()
    page.set(length=30, temperature=1)
    page.find("#live").check()
    page.find("#prompt").press_sequentially("so")
    page.page.wait_for_function(  # a preview of the first letter alone may come before
        "() => document.querySelectorAll('#view .typed').length === 2"
        " && document.querySelectorAll('#view .preview').length === 30"
    )
    assert page.find("#prompt").input_value() == "so"
    shown = page.find("#view span:not(#end)").all_text_contents()
    assert page.continue_by("Control+Enter") == "".join(shown).replace("⏎", "")
    assert page.find("#view .preview").count() == 0
    assert page.find("#view .typed").all_text_contents() == ["s", "o"]


def test_another_character_branches_by_pointer_and_by_keys(player: Open) -> None:
    page = player()
    run = page.run
    before = page.write("abcd ")
    page.choose(12)
    chosen = page.find(".alternatives button").nth(3)
    other = chosen.inner_text().split()[0]
    chosen.click()
    page.find("#view .at").wait_for()
    page.wait()
    prompt = before[:12] + {"space": " ", "line": "\n"}.get(other, other)
    assert prompt[12] != before[12]
    assert page.text == greedy(run, prompt)
    # the focus is in the text, at the character that was chosen
    assert page.summary.startswith(f"{'line end' if other == 'line' else other}: ")
    page.page.keyboard.press("ArrowLeft")
    page.page.keyboard.press("ArrowDown")
    page.page.keyboard.press("ArrowRight")
    second = page.find(".alternatives button:focus").inner_text().split()[0]
    prompt = prompt[:11] + {"space": " ", "line": "\n"}.get(second, second)
    assert page.continue_by("Enter") == greedy(run, prompt)


def test_a_byte_token_can_be_chosen_and_only_valid_ones(player: Open) -> None:
    page = player("bytes")
    page.write("ab c")
    for index in range(3, 30):
        page.choose(index)
        byte = page.find(".alternatives button:enabled", has_text="byte").first
        if byte.count():
            break
    value = int(byte.inner_text().split()[1], 16)
    byte.click()
    page.find("#view .at").wait_for()
    page.wait()
    assert page.text[index].encode()[0] == value
    assert "\ufffd" not in page.text


def test_attention_is_that_of_the_model(player: Open) -> None:
    page = player()
    run = page.run
    text = page.write("so it is ", length=10)
    tokens = torch.from_numpy(run.tokenizer.encode(text).astype("int64"))[None]
    assert isinstance(run.model, GPT)
    maps = torch.stack(run.model.attention_weights(tokens))[:, 0]  # (L, H, T, T)
    page.choose(15)
    everything = slice(None)
    for layer, head in ((everything, everything), ([1], [0]), ([0], everything)):
        for name, chosen in (("#layer", layer), ("#head", head)):
            index = 0 if chosen == everything else 1 + chosen[0]
            page.find(name).select_option(index=index)
        expected = maps[layer][:, head].mean(dim=(0, 1))[14, :15]
        page.page.wait_for_timeout(50)
        shown = page.page.evaluate(
            "() => spans.map((span) => Number(span.node.style.getPropertyValue('--weight')))"
        )
        np.testing.assert_allclose(shown[:15], expected / expected.max(), atol=0.02)
        assert not any(shown[15:])
        percent = re.findall(r"(\d+)%", page.find("#attention-words").inner_text())
        assert abs(int(percent[0]) - 100 * float(expected.max())) < 1


@pytest.mark.parametrize(
    ("kind", "shown", "said"),
    [
        ("latin", "ab", "left out.*Ж"),
        ("unknown", "a\ufffd\ufffdb", "read as unknown.*Ж"),
        ("bytes", "aЖ\ufffdb", "^$"),
    ],
)
def test_characters_outside_the_vocabulary_are_named(
    player: Open, kind: str, shown: str, said: str
) -> None:
    page = player(kind)
    page.set(prompt="aЖ\u202eb")
    page.find("#view span").nth(len(shown)).wait_for()
    assert page.find("#view").text_content() == shown
    assert re.search(said, page.find("#missing").text_content())


def test_graphemes_stay_whole_and_each_of_their_characters_can_be_chosen(player: Open) -> None:
    page = player("emoji")
    page.set(prompt="a\u0301🇩🇪👩🏽\u200d😀a")
    page.find("#view span").nth(4).wait_for()
    spans = page.find("#view span:not(#end)").all_text_contents()
    assert spans == ["a\u0301", "🇩🇪", "👩🏽\u200d😀", "a"]
    page.choose(2)
    for character in ("👩", "🏽", "ZWJ", "😀", "a"):
        assert page.summary.startswith(f"{character}: ")
        assert page.find("#view .at").text_content() in ("👩🏽\u200d😀", "a")
        page.find("#view").press("ArrowRight")


def test_control_and_format_characters_are_shown_by_name_whatever_the_fonts_hold(
    player: Open,
) -> None:
    page = player("signs")
    page.set(prompt="a\x1b\u200eb")
    page.find("#view span").nth(4).wait_for()
    assert page.find("#view span:not(#end)").all_text_contents() == ["a", "␛", "\u200e", "b"]
    script = "(nodes) => nodes.map((node) => getComputedStyle(node, '::before').content)"
    assert page.find("#view .sign").evaluate_all(script) == ['"ESC"', '"U+200E"']
    page.choose(1)
    assert page.find("#predictions p .sign").evaluate_all(script) == ['"ESC"']


def test_texts_and_names_run_nothing(player: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "<img src=x onerror=window.ran=1>'\"&\u202e\u2028{{ 7*7 }}"
    use_text(monkeypatch, TOKENIZERS["hostile"], "<i>" * 100)
    page = player("hostile", name=name, sample__prompt=HOSTILE)
    title = f"Play: {name}".translate({0x202E: "\ufffd", 0x2028: "\ufffd"})
    assert page.find("h1").text_content() == title
    for prompt in (HOSTILE.replace("\0", ""), MARKUP):
        page.write(prompt)
        page.choose(5)
    assert page.find("#view").text_content().startswith(MARKUP)
    page.write("<i>")
    bigram = page.find("#bigram-text")  # what the bigram of the text writes
    assert bigram.text_content() == "<i>" * 20
    assert bigram.locator("*").count() == 0
    assert page.page.evaluate("() => window.ran") is None
    assert page.find("img").count() == 0
    assert page.find("script").count() == 3  # facts, worker, and the page's own


@pytest.mark.parametrize(("width", "scheme"), [("desktop", "light"), ("phone", "dark")])
def test_a_browser_finds_no_barrier(
    player: Open, monkeypatch: pytest.MonkeyPatch, width: str, scheme: str
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    size = dict(zip(("width", "height"), WIDTHS[width], strict=True))
    use_text(monkeypatch, LATIN, "the light of a lamp.\n")
    page = player(context={"viewport": size, "color_scheme": scheme})
    page.write("the light", length=300, temperature=1, seed=1)
    page.choose(20)
    page.find(".alternatives button").first.wait_for()
    assert page.page.evaluate("document.documentElement.scrollWidth") == size["width"]
    found = axe.Axe().run(page.page).response["violations"]
    assert [(each["id"], each["impact"], each["nodes"][0]["html"]) for each in found] == []


def test_everything_is_reached_by_the_tab_key(player: Open) -> None:
    page, reached = player(), []
    page.find(".alternatives button").first.wait_for()
    for _ in range(30):
        page.page.keyboard.press("Tab")
        reached.append(page.page.evaluate("() => document.activeElement.id"))
    fields = "prompt length temperature top-k seed continue live view".split()
    assert [name for name in dict.fromkeys(reached) if name in fields] == fields
    assert {"layer", "head"} <= set(reached)


def test_a_page_holds_the_weights_and_the_tokenizer(tmp_path: Path) -> None:
    run = save_run(tmp_path, TOKENIZERS["hostile"])
    assert isinstance(run.model, GPT)
    page = make_page(run, half_weights(run.model))
    blocks = dict(re.findall(r'<script type="[^"]*" id="(.*?)">(.*?)</script>', page, re.DOTALL))
    data, expected = json.loads(blocks["page-data"]), run.model.state_dict()
    assert data["tensors"] == [[name, tensor.numel()] for name, tensor in expected.items()]
    weights = np.frombuffer(base64.b64decode(blocks["weights"]), "<f2")
    np.testing.assert_array_equal(weights, torch.cat([w.flatten() for w in expected.values()]))
    assert CharTokenizer.from_json(json.dumps(data["tokenizer"]), "page") == run.tokenizer


def test_weights_that_half_precision_does_not_hold_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = save_run(tmp_path)
    assert isinstance(run.model, GPT)
    with torch.no_grad():
        run.model.head.weight *= 1 + torch.rand_like(run.model.head.weight)
    monkeypatch.setattr(html, "MAX_DIVERGENCE", 1e-12)
    with pytest.raises(OperationError, match="rounding the weights"):
        export_html(run, tmp_path / "play.html")
    with torch.no_grad():
        run.model.norm.weight /= 1e6
        run.model.head.weight *= 1e6
    with pytest.raises(OperationError, match="not finite"):
        export_html(run, tmp_path / "play.html")
    assert not (tmp_path / "play.html").exists()


def test_the_command_writes_the_page_into_the_run_and_opens_it(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_run(tmp_path / "mine")
    opened: list[str] = []
    monkeypatch.setattr(export_commands.webbrowser, "open", lambda url: bool(opened.append(url)))
    done = cli("play", "mine", "--no-open")
    assert (done.returncode, done.stdout) == (0, "mine/play.html\n")
    assert "checked with chargpt's own runtime" in done.stderr
    assert opened == []
    done = cli("play", "mine")
    assert opened == [(tmp_path / "mine" / "play.html").as_uri()]
    assert "no browser opened" in done.stderr
    assert cli("verify", "mine").returncode == 0


def suggestions(page: Player) -> list[tuple[str, float]]:
    """Return the suggested texts with their probabilities, once there are some for this text."""
    page.page.wait_for_function("() => suggestedFor === suggestion")
    found = page.page.evaluate("() => suggested.map((each) => [textOf(each.tokens), each.prob])")
    return [(text, prob) for text, prob in found]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("latin", "the li"),
        ("russian", "дом "),
        ("emoji", "字a的 "),
        ("bytes", "aж "),
        ("latin", ""),
        ("large", "上下"),
    ],
)
def test_suggestions_are_those_of_the_library(player: Open, kind: str, text: str) -> None:
    page = player(kind, block_size=64)
    page.set(prompt=text)
    found = suggestions(page)
    expected = suggest(page.run, text, 5, words=2)
    assert [each for each, _ in found] == [each for each, _ in expected]
    assert [prob for _, prob in found] == pytest.approx([prob for _, prob in expected], rel=1e-4)


def test_a_suggestion_is_appended_by_a_click_or_key_and_undone(player: Open) -> None:
    page = player(block_size=32)
    page.set(prompt="the light")
    first = suggestions(page)
    page.find("#suggestions button").nth(1).click()
    text = "the light" + first[1][0]
    assert page.find("#prompt").input_value() == text
    second = suggestions(page)
    page.find("#others").click()
    others = suggestions(page)
    assert len(others) == 5
    assert not {each for each, _ in second} & {each for each, _ in others}
    page.find("#suggestions button").first.focus()
    page.page.keyboard.press("Enter")
    text += others[0][0]
    assert page.find("#prompt").input_value() == text
    suggestions(page)  # those of the new text have the focus
    assert page.page.evaluate("() => document.activeElement.parentElement.id") == "suggestions"
    with page.page.expect_download() as download:
        page.find("#save").click()
    assert download.value.path().read_text(encoding="utf-8") == text
    for _ in range(2):
        page.find("#undo").click()
    assert page.find("#prompt").input_value() == "the light"
    assert suggestions(page) == first
    assert page.find("#undo").is_disabled()


def test_a_suggestion_for_another_text_is_not_appended(player: Open) -> None:
    page = player()
    page.set(prompt="the light")
    suggestions(page)
    page.page.evaluate(
        """() => {
            const [button] = element("suggestions").children;
            button.focus();
            prompt.value = "the lamp";
            prompt.dispatchEvent(new InputEvent("input", { bubbles: true }));
            button.click();
        }"""
    )
    assert page.find("#prompt").input_value() == "the lamp"


@pytest.mark.parametrize("block_size", [1, 5, 60])
def test_suggesting_changes_nothing_that_the_model_writes(player: Open, block_size: int) -> None:
    page = player(block_size=block_size)
    prompt = "the light of a lamp, the light of a lamp, the light of a lamp."
    page.set(prompt=prompt)
    assert bool(suggestions(page)) == (block_size > 1)  # one token ahead takes a place
    assert page.write(prompt) == greedy(page.run, prompt)
    page.page.evaluate("() => askSuggestions()")  # and those of the new text are not disturbed
    assert bool(suggestions(page)) == (block_size > 1)


def test_the_page_says_that_it_searches_until_there_are_suggestions_or_another_request(
    player: Open,
) -> None:
    page = player()
    page.set(prompt="the light")
    suggestions(page)
    script = """() => {
        const notice = element("searching"), hidden = [notice.hidden];
        askSuggestions();
        hidden.push(notice.hidden);
        form.requestSubmit();
        return [...hidden, notice.hidden];
    }"""
    assert page.page.evaluate(script) == [True, False, True]
    page.wait()
    suggestions(page)
    assert page.find("#searching").is_hidden()


def test_requests_are_received_between_the_steps_of_a_search_and_of_the_bigram(
    player: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_text(monkeypatch, TOKENIZERS["large"], "上下\n" * 20)
    page = player("large")
    page.set(prompt="上")
    suggestions(page)
    script = """() => {
        const sampling = { length: 50, seed: 1, temperature: 1, topK: Infinity };
        const request = { tokens, excluded: [], count: 5, ...sampling };
        return [search, generateBigram].map((steps) => [...steps(request)].length);
    }"""
    n_search, n_bigram = page.page.workers[0].evaluate(script)
    assert n_search >= 1 + 15 + 15  # passes over the vocabulary, and over the model between them
    assert n_bigram == 50
