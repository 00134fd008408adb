"""`chargpt explain`: numbers computed on the given text and run."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Cli, refusal

from chargpt.analysis.explain import SECTIONS, describe_heads, quoted, typical_line
from chargpt.models.kernels import explicit_attention
from chargpt.store.run import load_run
from chargpt.text.tokenizer import CharTokenizer

TINY = (
    "-s train.max_steps=3 -s train.batch_size=4 -s model.n_layer=2 -s model.n_head=2 "
    "-s model.n_embd=16 -s model.block_size=32 -s train.evaluation_tokens=300"
).split()
MIN_COUNT = ["-s", "text.min_count=3"]
RUSSIAN = (
    "Скажи-ка, дядя, ведь не даром\n"
    "Москва, спалённая пожаром,\n"
    "Французу отдана?\n"
    "Ведь были ж схватки боевые,\n"
    "Да, говорят, ещё какие!\n"
) * 8


def explain_json(cli: Cli, *words: object) -> dict[str, dict]:
    done = cli("explain", *words, "--json")
    assert done.returncode == 0, done.stderr
    return {section["name"]: section for section in json.loads(done.stdout)["sections"]}


def test_the_notebooks_inputs_give_the_notebooks_numbers(cli: Cli, verse: Path) -> None:
    found = explain_json(cli, verse)
    assert list(found) == list(SECTIONS)
    scaling = found["scaling"]
    assert scaling["notebook_variances"] == pytest.approx(
        [1.0449, 1.0700, 17.4690, 1.0918], abs=6e-5
    )
    assert scaling["softmax"] == pytest.approx([0.1925, 0.1426, 0.2351, 0.1426, 0.2872], abs=6e-5)
    assert scaling["softmax_of_eight_times"] == pytest.approx(
        [0.0326, 0.0030, 0.1615, 0.0030, 0.8000], abs=6e-5
    )
    means = found["averaging"]["notebook_means"]
    assert np.allclose(means, [[0.8823, 0.9150], [0.6326, 0.9372], [0.5519, 0.8251]], atol=6e-5)
    assert max(found["averaging"]["largest_difference"].values()) < 1e-6
    for size, measured in scaling["by_head_size"].items():
        assert measured["variance"] == pytest.approx(float(size), rel=0.1)
        assert measured["variance_scaled"] == pytest.approx(1, rel=0.1)
    sharpness = [m["largest_weight"] for m in scaling["by_head_size"].values()]
    assert sharpness == sorted(sharpness)


def test_the_given_text_is_explained(cli: Cli, verse: Path) -> None:
    Path("borodino.txt").write_text(RUSSIAN, encoding="utf-8")
    done = cli("explain", "borodino.txt")
    assert done.returncode == 0, done.stderr
    # the first whole line of a good length: its first eight characters, on both sides of the tables
    for character in "Москва, ".replace(" ", "␣"):
        assert done.stdout.count(f" {character} ") >= 3
    assert "17.4690" in done.stdout
    assert "0.1925, 0.1426, 0.2351, 0.1426" in " ".join(done.stdout.split())
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    assert done.stdout != cli("explain", verse).stdout


@pytest.mark.parametrize("scaled", ["true", "false"])
def test_a_runs_own_weights_are_shown(cli: Cli, verse: Path, scaled: str) -> None:
    cli("train", verse, *TINY, "-s", f"model.scale_attn_weights={scaled}", "--out", "mine")
    words = " ".join(cli("explain", "mine", "--section", "queries").stdout.split())
    assert ("divided by sqrt(8) = 2.83" in words) == (scaled == "true")
    found = explain_json(cli, "mine")
    run = load_run(Path("mine"), device="cpu")
    line = found["queries"]["line"]
    assert line in run.tokenizer.decode(run.corpus().split("val"))
    tokens = torch.from_numpy(run.tokenizer.encode(line[:8]).astype(np.int64))[None]
    first = run.model.attention_weights(tokens)[0][0, 0]
    np.testing.assert_allclose(found["mask"]["weights"], first.numpy(), atol=1e-6)
    _, _, values = run.model.first_layer_qkv(tokens)  # (1, H, T, D)
    outputs = first.numpy() @ values[0, 0].detach().numpy()
    np.testing.assert_allclose(found["mask"]["outputs"], outputs, rtol=1e-4, atol=1e-5)
    scores = torch.tensor(found["queries"]["scores"])
    causal = scores.masked_fill(torch.ones(8, 8).triu(1).bool(), -torch.inf).softmax(-1)
    torch.testing.assert_close(causal, first, rtol=1e-4, atol=1e-5)
    whole = torch.from_numpy(run.tokenizer.encode(line).astype(np.int64))[None]
    queries, keys, _ = (each[0, 0] for each in run.model.first_layer_qkv(whole))  # (T, D) each
    weights = (queries @ keys.T / (8**0.5 if scaled == "true" else 1)).softmax(-1)
    assert len(weights) > 8
    assert found["mask"]["future_without_mask"] == pytest.approx(
        weights.detach().triu(1).sum(-1)[:-1].mean().item(), abs=1e-5
    )
    assert len(found["attention"]["heads"]) == 2


def test_trained_heads_stand_beside_those_of_the_initial_weights(cli: Cli, verse: Path) -> None:
    cli("train", verse, *TINY, "-s", "train.max_steps=1", "-s", "optim.lr=1e-9", "--out", "fresh")
    cli("train", verse, *TINY, "-s", "model.qk_norm=false", "--out", "other")
    attention = explain_json(cli, "fresh")["attention"]
    assert attention["untrained_heads"][0].startswith("layer 1: head 1 ")
    assert attention["untrained_heads"] == attention["heads"]
    assert explain_json(cli, "other")["attention"]["untrained_heads"] == []
    tuned = cli("train", verse, "--from", "fresh", "-s", "train.max_steps=1", "--out", "tuned")
    assert tuned.returncode == 0, tuned.stderr
    assert explain_json(cli, "tuned")["attention"]["untrained_heads"] == []  # it began otherwise
    printed = " ".join(cli("explain", "fresh").stdout.split())
    assert "This head attended to the previous character before any training" in printed


def test_without_a_trained_attention_or_a_name_it_explains_a_text_or_the_newest_run(
    cli: Cli, verse: Path
) -> None:
    done = cli("explain", "--section", "attention")
    assert "`chargpt train TEXT --out RUN`" in " ".join(done.stdout.split())
    assert "Averaging" not in done.stdout
    cli("train", verse, "-c", "bigram", "-s", "train.max_steps=2", "--out", "pairs")
    done = cli("explain", "pairs")
    assert "of an untrained model" in " ".join(done.stdout.split())
    assert "pairs has no queries and keys: an untrained gpt is shown on its text" in done.stderr
    cli("train", verse, *TINY)
    assert "layer 2: head 1 " in cli("explain", "--section", "attention").stdout


def test_pictures_and_pages_are_written(cli: Cli, verse: Path) -> None:
    cli("train", verse, *TINY, "--out", "mine")
    done = cli("explain", "mine", "--plot", "heads.png", "--html", "tour.html")
    assert done.returncode == 0, done.stderr
    assert Path("heads.png").read_bytes().startswith(b"\x89PNG")
    page = Path("tour.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 2 * 2  # heads of layers
    for section in SECTIONS:
        assert f'id="{section}"' in page
    assert "written: heads.png" in done.stdout
    twice = ("--section", "attention", "--section", "attention", "--plot", "again.png")
    assert cli("explain", "mine", *twice).returncode == 0
    other = cli("explain", "mine", "--section", "mask", "--plot", "none.png")
    assert "the section attention of a trained gpt; name the run of one, and with" in refusal(other)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--section", "maths"], "there is no section 'maths'; there are averaging, queries"),
        (["--section", "mask", "--section", "maths"], "there is no section 'maths'"),
        (["--plot", "a.gif"], "a.gif must end in .svg or .png"),
        (
            ["--plot", "a.png", "--section", "attention"],
            "--plot draws the section attention of a trained gpt; name the run",
        ),
        (["--device", "cpu"], "--device applies to a run, not a text; drop it"),
    ],
)
def test_invalid_requests_are_rejected(
    cli: Cli, verse: Path, words: list[str], sentence: str
) -> None:
    assert sentence in refusal(cli("explain", verse, *words))


def test_a_text_too_short_to_explain_is_rejected(cli: Cli) -> None:
    Path("one.txt").write_text("a")
    assert "one.txt is too short to explain anything on" in refusal(cli("explain", "one.txt"))


def test_the_description_of_a_head_follows_from_its_weights() -> None:
    before = np.eye(6, k=-1, dtype=np.float32)
    before[0, 0] = 1
    q = torch.zeros(6, 4)
    _, even = explicit_attention(q, q, q)
    words = describe_heads(np.stack([np.eye(6, dtype=np.float32), before, even.numpy()]))
    assert words[0] == "head 1 attends to its own position (100%)"
    assert words[1] == "head 2 attends to the previous character (100%)"
    assert words[2] == "head 3 is spread out, most on its own position (41%)"


@pytest.mark.parametrize(
    ("text", "most", "line"),
    [
        ("a\n" + "bcdefghijk" * 3 + "\nc", 40, "bcdefghijk" * 3),
        ("-----|\n" + "-" * 30 + "\nthe first varied line\nc", 22, "the first varied line"),
        ("\na line longer than shown\nand a shorter one", 10, "a line lon"),
        ("cut, its end missing\nthe first whole line\nc", 22, "the first whole line"),
        ("x" * 100, 40, "x" * 40),
        ("\n\na\n", 1, "a"),
        ("f:\n\t    return the sum\n", 14, "return the sum"),
        ("\n\n\n", 40, "\n\n\n"),
    ],
)
def test_a_typical_line_is_chosen(text: str, most: int, line: str) -> None:
    tokenizer = CharTokenizer.fit(text)
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(typical_line(tokenizer, tokens, most)) == line


def test_a_quoted_line_shows_the_spaces_that_wrapping_would_lose() -> None:
    assert quoted(" a  b c") == '"␣a␣␣b c"'


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ("ab" * 30, []),
        ("ab\n" * 30, ["-s", "model.block_size=1"]),
        ("every word is rare: " + "aab\n" * 40, [*MIN_COUNT, "-s", "text.rare=unknown"]),
        ("\u20ac\u20ac is rare" + "aab\n" * 40, MIN_COUNT),
    ],
    ids=["two characters", "blocks of one", "unknown characters", "byte tokens"],
)
def test_runs_with_unusual_settings_can_be_explained_and_reported(
    cli: Cli, words: str, settings: list[str]
) -> None:
    Path("odd.txt").write_text(words)
    assert "Averaging" in cli("explain", "odd.txt").stdout
    done = cli("train", "odd.txt", *TINY, "-s", "model.block_size=4", *settings, "--out", "odd")
    assert done.returncode == 0, done.stderr
    for command in (["explain", "odd", "--html", "tour.html"], ["report", "odd"]):
        done = cli(*command)
        assert done.returncode == 0, done.stderr
        assert "Warning" not in done.stderr
