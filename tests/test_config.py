"""Configuration: reading YAML and overrides, validation, and error messages."""

import contextlib
import re
import string
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from chargpt.config import (
    Config,
    ModelConfig,
    load_config,
    merge_settings,
    parse_override,
    shipped_configs,
)
from chargpt.errors import ConfigError
from chargpt.files import MAX_YAML_CHARACTERS, parse_yaml


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str | bytes) -> Path:
        path = tmp_path / "my.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write


def with_options(source: object, *options: str) -> Config:
    """Return a config with settings as `-s` takes them."""
    return load_config(source, dict(map(parse_override, options)))  # type: ignore[arg-type]


def message_of(source: object, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        with_options(source, *overrides)
    message = str(caught.value)
    assert message.isprintable()  # in one line
    return message


# -- shipped configs -------------------------------------------------------------------------


@pytest.mark.parametrize("name", shipped_configs())
def test_every_shipped_config_works_from_any_folder_and_has_only_what_differs_from_the_defaults(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (load_config(name).model.kind == "bigram") == (name in ("bigram", "notebook"))
    tree, _ = parse_yaml(shipped_configs()[name].read_text(encoding="utf-8"), name)
    defaults = Config().model_dump(mode="json")
    for section, values in tree.items():
        for key, value in values.items():
            is_explicit = key in ("kind", "batch_size", "block_size")  # although it is the default
            assert defaults[section][key] != value or is_explicit, f"{section}.{key}"


def test_the_notebook_config_has_the_values_of_the_notebooks() -> None:
    config = load_config("notebook")
    assert (config.model.block_size, config.train.batch_size) == (8, 32)
    assert (config.optim.name, config.optim.lr) == ("adamw", 1e-3)
    assert (config.train.max_steps, config.text.val_fraction) == (10_000, 0.2)


# -- reading YAML ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("optim:\n  lr: 1e-4\n", "optim.lr", 1e-4),
        ("optim:\n  lr: 1E3\n", "optim.lr", 1e3),
        ("optim:\n  lr: +2.5e-1\n", "optim.lr", 0.25),
        ("optim:\n  lr: .5\n", "optim.lr", 0.5),
        ("train:\n  max_steps: 1e4\n", "train.max_steps", 10_000),
        ("text:\n  path: 2024-01-01\n", "text.path", "2024-01-01"),
        ("text:\n  path: 1:30\n", "text.path", "1:30"),
        ("text:\n  path: 12345678901234567890.txt\n", "text.path", "12345678901234567890.txt"),
        ("text:\n  suffixes: [.tex, .rst]\n", "text.suffixes", (".tex", ".rst")),
        ("sample:\n  stop:\n  - END\n", "sample.stop", ("END",)),
        ("sample:\n  seed: 3\nseed: 4\n", "sample.seed", 3),
        (b"\xef\xbb\xbfseed: 5\r\ntrain:\r\n  max_steps: 3\r\n", "train.max_steps", 3),
    ],
)
def test_numbers_lists_and_texts_are_read(
    text: str | bytes, key: str, value: object, write
) -> None:
    assert load_config(write(text)).flatten()[key] == value


@pytest.mark.parametrize(
    "text", ["", "# nothing yet\n", "{}", "\ufeff", "train:\nmodel: # later\n"]
)
def test_an_empty_file_or_section_gives_the_defaults(text: str, write) -> None:
    assert load_config(write(text)) == Config()


def test_a_config_is_immutable() -> None:
    assert hash(Config())  # in depth
    with pytest.raises(ValidationError):
        Config().train.max_steps = 5  # type: ignore[misc]


# -- rejected input --------------------------------------------------------------------------


ALIASES = "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 20))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (
            "train:\n  max_steps: 5\n  clip_norm: 1.0\n  max_steps: 6\n",
            ", line 4 is not valid YAML (train.max_steps is set twice, first on line 2)",
        ),
        ("a: &x 1\nb: *x\n", ", line 2 is not valid YAML (an alias"),
        ("a: 1\nb: *x\n", ", line 2 is not valid YAML (an alias"),
        pytest.param("a0: &a0 [1]\n" + ALIASES, "an alias", id="nested aliases"),
        ("seed: 1\nmodle: {}\n", "line 2: modle is not a setting; did you mean model?"),
        ('"a\\nb": 1\n', "'a\\nb' is not a setting"),
        ('"\\e[31m": 1\n', "'\\x1b[31m' is not a setting"),
        ("schedule:\n  qqqqqqqq: 1\n", "the keys are schedule.kind, schedule.warmup"),
        ("train.max_steps: 5\n", "line 1: train.max_steps is not a setting; write max_steps on"),
        ("train: 5\n", "line 1: train: expected a section"),
        *((each, "no `key: value` lines") for each in ("- a\n- b\n", "42\n", "just words\n", "[]")),
        ("a: [1\n", "is not valid YAML"),
        ("a: 'x\n", "is not valid YAML"),
        ("a: b: c\n", "is not valid YAML"),
        ("\ta: 1\n", "is not valid YAML"),
        ("a: 1\n---\nb: 2\n", "is not valid YAML"),
        ("a: \x00\n", "is not valid YAML"),
        ("a: @x\n", "is not valid YAML"),
        ("seed: !!bool foo\n", ""),
        ("seed: !!int x\n", ""),
        ("seed: !!int ''\n", ""),
        ("seed: !!float x\n", ""),
        ("seed: !!binary é\n", ""),
        ("seed: !!timestamp 1\n", ""),
        (b"\xff\xfe\x00\x01" * 9, "cannot be read as UTF-8 text"),
        pytest.param("#" * (MAX_YAML_CHARACTERS + 1), "over 200,000 characters", id="too long"),
    ],
)
def test_a_wrong_file_is_rejected_by_name(text: str | bytes, part: str, write) -> None:
    path = write(text)
    message = message_of(path)
    assert str(path) in message
    assert part in message


def test_all_errors_are_reported_at_once_with_their_lines(write) -> None:
    message = message_of(
        write("seed: -1\ntrain:\n  batch_size: 0\n  patiense: 3\noptim:\n  name: sgd\n")
    )
    for part in (
        "line 1: seed",
        "line 3: train.batch_size",
        "line 4: train.patiense",
        "did you mean train.patience?",
        "line 6: optim.name",
        "'adamw' or 'muon'",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("train.max_steps", ["abc", "'100'", "true", "2.5", "null", "[1]", "{a: 1}", "1:30"]),
        ("train.clip_norm", ["true"]),
        ("optim.lr", [".nan", ".inf", "1e999"]),
        ("model.scale_attn_weights", ["1", "'yes'"]),
        ("text.suffixes", ["5", "[1]", "[]"]),
        ("seed", ["0x" + "f" * 5000, "9" * 5000, str(2**63)]),
        ("text.val_fraction", ["1.0"]),
        ("model.dropout", ["1"]),
    ],
)
def test_a_value_of_the_wrong_type_is_rejected(key: str, values: list[str]) -> None:
    for value in values:
        message = message_of("gpt", f"{key}={value}")
        assert key in message
        assert len(message) < 6000


WRONG = "true null x -1 1.5 1e400 [1] [[1]] [[1,2,3]] {a: 1} 9999999999999999999999 '5' .nan"


@pytest.mark.parametrize("key", Config().flatten())
def test_the_messages_are_in_our_own_words(key: str) -> None:
    for value in WRONG.replace("{a: 1}", "{a:1}").split():
        with contextlib.suppress(ConfigError):
            with_options("gpt", f"{key}={value.replace(':', ': ')}")
            continue
        message = message_of("gpt", f"{key}={value.replace(':', ': ')}")
        assert not re.search(r"[Ii]nput|should|type=|tuple|dictionary|True|None", message), message


def test_a_single_text_is_a_list_of_one() -> None:
    assert with_options("gpt", "text.suffixes=.py").text.suffixes == (".py",)
    assert with_options("gpt", "text.suffixes=.py,.md").text.suffixes == (".py", ".md")
    assert with_options("gpt", "text.suffixes=[.py, .md]").text.suffixes == (".py", ".md")
    assert with_options("gpt", "sample.stop='a, b'").sample.stop == ("a, b",)


@pytest.mark.parametrize(
    "call", ["!!python/object/apply:os.mkdir [made]", "!!python/name:os.mkdir ''"]
)
def test_yaml_cannot_run_code(
    call: str, write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    message_of(write(f"seed: {call}\n"))
    assert not (tmp_path / "made").exists()


@given(st.text(max_size=60) | st.from_regex(r"\A(a: )?(!!\w+|&x|\*x|\? )?[ '\"\[{:#\-0-9xe.]*\Z"))
@settings(max_examples=80, deadline=None)
def test_any_text_is_read_as_a_mapping_or_rejected(text: str) -> None:
    try:
        tree, lines = parse_yaml(text, "a file")
    except ConfigError:
        return  # any other error fails
    assert isinstance(tree, dict)
    assert set(tree) <= set(lines)


@pytest.mark.parametrize(
    "text",
    [
        "a: " + "[" * 20_000,
        "a: " + "{a: " * 40_000,
        "".join("  " * depth + "a:\n" for depth in range(30)),
        "a: " + "[" * 25 + "]" * 25,
        "seed: " + ":".join(["59"] * 60_000),
    ],
    ids=["lists", "maps", "indents", "closed lists", "base 60"],
)
def test_deep_or_very_long_values_are_rejected_quickly(text: str, write) -> None:
    start = time.process_time()
    message_of(write(text))
    assert time.process_time() - start < 10


def test_a_thousand_errors_give_a_short_message(write) -> None:
    message = message_of(write("".join(f"k{i}: 1\n" for i in range(1000))))
    assert "line 1: k0 is not a setting" in message
    assert len(message) < 10_000


@pytest.mark.parametrize("source", ["gtp", "", "nowhere.yaml", "x" * 5000, "a\0b", ".", "/"])
def test_a_missing_config_is_rejected_with_the_available_ones(source: str) -> None:
    message = message_of(source)
    assert message.startswith("there is no config")
    assert (
        "did you mean gpt?" in message or "bigram, gpt-baby, gpt, head, ladder, notebook" in message
    )


# -- overrides -------------------------------------------------------------------------------


def test_overrides_take_precedence_over_the_file_and_the_file_over_defaults(write) -> None:
    path = write("seed: 2\ntrain:\n  max_steps: 20\n")
    defaults = {"seed": 1, "train.max_steps": 10, "text.path": "book.txt"}
    config, fixed_keys = merge_settings(path, {"seed": 3}, defaults)
    assert (config.seed, config.train.max_steps, config.text.path) == (3, 20, "book.txt")
    assert fixed_keys == {"seed", "train.max_steps"}
    assert merge_settings(None, {"optim.lr": 0.5})[1] == {"optim.lr"}
    assert with_options("gpt", "seed=1", "seed=2").seed == 2


@pytest.mark.parametrize(
    ("written", "key", "value"),
    [
        ("seed=5", "seed", 5),
        (" seed =5", "seed", 5),
        ("train.clip_norm=null", "train.clip_norm", None),
        ("train.clip_norm=", "train.clip_norm", None),
        ("sample.stop=[a, b]", "sample.stop", ["a", "b"]),
        ("sample.prompt=x=y", "sample.prompt", "x=y"),
        ("sample.prompt='1e5'", "sample.prompt", "1e5"),
        ("model.scale_attn_weights=false", "model.scale_attn_weights", False),
        ("text.documents=%", "text.documents", "%"),
        ("text.documents= @@ ", "text.documents", " @@ "),
        ("text.documents=\\n# ", "text.documents", "\\n# "),
        ('text.documents=[Event "', "text.documents", '[Event "'),
        ("text.documents=null", "text.documents", None),
        ("text.path=5", "text.path", "5"),
        ("text.suffixes=*.cmake", "text.suffixes", "*.cmake"),
        ("text.documents=,", "text.documents", ","),
    ],
)
def test_an_override_is_read_as_yaml_or_as_text(written: str, key: str, value: object) -> None:
    assert parse_override(written) == (key, value)


@pytest.mark.parametrize(
    ("written", "part"),
    [
        *((each, "not of the form section") for each in ("seed", "=5", " =5", "", "seed:5")),
        ("seed=[", "not valid YAML"),
        ("seed=1\ntrain: 2", "more than one key"),
        ("seed.deep=1", "(it is {'deep': 1})"),
        ("train.max_steps.deep=1", "train.max_steps"),
        ("train..max_steps=1", "is not a setting"),
        ("train.lr=5", "did you mean optim.lr?"),
        ("block_size=5", "did you mean model.block_size?"),
        ("optimizer.weight_decay=1", "did you mean optim?"),
        ("train.batch=1", "did you mean train.batch_size?"),
        ("batch=1", "did you mean train.batch_size?"),
        ("trian.max_steps=1", "did you mean train"),
        ("train=5", "expected a section"),
        ("sample.stop=a: b", "quote it if it is text: -s 'sample.stop='\"'\"'a: b'\"'\"''"),
        ("model.n_head=3", "n_embd 128 must be divisible by 2 * n_head = 6"),
        ("model={n_embd: 6, n_head: 2}", "divisible by 2 * n_head = 4"),
        ("train.micro_batches=3", "train.batch_size 16 must be divisible by train.micro_batches 3"),
        ("text={val_fraction: 0.5, test_fraction: 0.5}", "must be less than 1"),
        ("schedule.decay_points=[[30, 30]]", "each step must be less than its end"),
        ("schedule.decay_points=[[30, 90], [30, 80]]", "the steps must be strictly increasing"),
        ("schedule.decay_points=[[-1, 90]]", "schedule.decay_points"),
        ("device=tpu", "expected one of auto, cpu, cuda, cuda:N, xpu, xpu:N, mps (it is 'tpu')"),
        ("device=cuda:x", "expected one of"),
    ],
)
def test_an_invalid_override_or_one_in_conflict_is_rejected(written: str, part: str) -> None:
    assert part in message_of("gpt" if "deep" not in written else "notebook", written)


def test_an_error_in_an_override_has_no_line_of_the_file(write) -> None:
    path = write("train:\n  batch_size: 32\n  max_steps: 4\n")
    assert "line" not in message_of(path, "train.max_steps=abc").replace(str(path), "")
    assert "line" not in message_of(path, "train={max_steps: abc}").replace(str(path), "")
    assert "line" not in message_of(path, "train={max_steps").replace(str(path), "")


# -- rules between settings ------------------------------------------------------------------


def test_a_bigram_ignores_the_head_size() -> None:
    assert with_options("bigram", "model.n_head=3").model.n_head == 3


@settings(deadline=None)
@given(st.integers(2, 5000))
def test_the_mlp_width_is_8_3_n_embd_rounded_up_to_64(n_embd: int) -> None:
    width = ModelConfig(kind="bigram", n_embd=n_embd).mlp_width
    assert width % 64 == 0
    assert 0 <= width * 3 - n_embd * 8 < 64 * 3
    assert ModelConfig(kind="bigram", n_embd=n_embd, n_inner=7).mlp_width == 7


# -- round trip ------------------------------------------------------------------------------

texts = st.text(max_size=40) | st.sampled_from(
    ["1e5", "1_0e5", "null", "~", "yes", "2024-01-01", "1:30", "*a", "&a", "!!int", "- x", "a: b",
     "# x", " ", "\n", "\r\n", "\t", "\u2028", "\x85", "\ufeff", "\0", "'", '"', "<<", "=", "0x1f"]
)  # fmt: skip
positive = st.floats(0, exclude_min=True, allow_infinity=False, allow_nan=False)


def has_suffix(suffixes: list[str]) -> bool:
    return bool("".join(suffixes).replace(",", "").strip())


@st.composite
def configs(draw: st.DrawFn) -> Config:
    return Config().with_values(
        {
            "seed": draw(st.integers(0, 2**63 - 1)),
            "deterministic": draw(st.booleans()),
            "text.path": draw(st.none() | texts),
            "text.encoding": draw(texts),
            "text.suffixes": draw(st.lists(texts, min_size=1, max_size=3).filter(has_suffix)),
            "text.val_fraction": draw(st.floats(1e-12, 0.9)),
            "model.rope_theta": draw(positive),
            "model.n_inner": draw(st.none() | st.integers(1, 9999)),
            "optim.lr": draw(positive),
            "train.clip_norm": draw(st.none() | positive),
            "sample.prompt": draw(texts | st.text(string.printable, min_size=90, max_size=300)),
            "sample.stop": draw(st.lists(texts.filter(bool), max_size=3)),
        }
    )


@given(configs())
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_a_config_written_as_yaml_is_read_back_equal(
    tmp_path_factory: pytest.TempPathFactory, config: Config
) -> None:
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8", newline="")
    assert load_config(path) == config


def test_a_section_that_the_caller_passes_is_not_changed() -> None:
    section = {"n_layer": 2}
    config = load_config("gpt", {"model": section, "model.n_head": 3, "model.n_embd": 48})
    assert (config.model.n_layer, config.model.n_head) == (2, 3)
    assert section == {"n_layer": 2}
