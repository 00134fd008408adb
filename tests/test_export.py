"""Exports open in other programs with the run's tokens, logits and text, and come back as a run."""

import copy
import json
import math
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from conftest import POSIX, REPOSITORY, Cli, refusal, run_python, start_cli
from hypothesis import given, settings
from hypothesis import strategies as st
from noise import fill_with_noise

from chargpt import imports, sample
from chargpt.config import Config, ModelConfig
from chargpt.errors import ChargptError, ConfigError, OperationError, RunError
from chargpt.export import check, gguf, huggingface
from chargpt.export.check import ExportCheck, compare
from chargpt.export.gguf import LlamaRuntime, export_gguf
from chargpt.export.html import export_html
from chargpt.export.huggingface import TransformersRuntime, export_huggingface, model_card
from chargpt.export.onnx import OnnxRuntime, export_onnx
from chargpt.imports import import_huggingface
from chargpt.log import collected_notes
from chargpt.models import build_model
from chargpt.models.gpt import GPT
from chargpt.store.checkpoint import RunState
from chargpt.store.folder import RunFolder
from chargpt.store.run import Run, load_run
from chargpt.text.tokenizer import CharTokenizer

SIZES: dict[str, object] = {"n_layer": 2, "n_embd": 32, "n_head": 2, "block_size": 24}
TOKENIZERS = {
    "ascii": CharTokenizer.fit(
        "\t\n !\"#$%&'(),-.:;<>?@[\\]^_`{|}~0123 abcdefghijklmnopqrstuvwxyz"
    ),
    "russian": CharTokenizer.fit("\n абвгдежзийклмнопрстуфхцчшщъыьэюя,.!—«»"),
    "emoji": CharTokenizer.fit("\n aé\u0301\u0308\u200d字語漢的你佽😀🎉👩🏽 "),
    "hostile": CharTokenizer.fit("\0\n\r a</script>&\u2028\u2029\u202e\u200f\ufeff\ufffd'\"\\"),
    "documents": CharTokenizer("\n abcdeé", eos_token="\n"),
    "no newline": CharTokenizer.fit("абвгд"),
    "one character": CharTokenizer.fit("я"),
    "bytes": CharTokenizer("\n abcdeé字", has_bytes=True),
}
UNKNOWN = CharTokenizer("\n abcdeé", has_unknown=True)
EXPORTS: dict[str, Callable[..., Any]] = {
    "hf": export_huggingface,
    "gguf": export_gguf,
    "onnx": export_onnx,
    "html": export_html,
}
CHECKED_BY = pytest.mark.parametrize(
    ("kind", "package"),
    [
        ("hf", "transformers"),
        ("gguf", "xllamacpp"),
        pytest.param("onnx", "onnxruntime", marks=pytest.mark.slow),
    ],
)


def run_of(tokenizer: CharTokenizer, **changes: object) -> Run:
    """Return a run whose weights are random, so that predictions differ."""
    config = Config(model=ModelConfig(**{**SIZES, **changes}))  # type: ignore[arg-type]
    model = fill_with_noise(build_model(config.model, tokenizer.vocab_size)).eval()
    model.first_continuation_id = tokenizer.first_continuation_id
    state = RunState(7, best_step=7, best_nats_per_char=1.25, text="a 'text'.txt")
    return Run(Path("runs/a run"), config, tokenizer, model, 7, state)


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Let a package be missing."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)


def test_the_code_of_the_model_card_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    export_huggingface(run_of(TOKENIZERS["ascii"]), Path("FOLDER"))
    tokenizer = json.loads(Path("FOLDER", "tokenizer_config.json").read_text(encoding="utf-8"))
    assert tokenizer["model_input_names"] == ["input_ids", "attention_mask"]
    card = Path("FOLDER", "README.md").read_text(encoding="utf-8")
    code = card.partition("```python\n")[2].partition("```")[0]
    prompt = code.partition('tokenizer("')[2].partition('"')[0]
    capsys.readouterr()
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed.startswith(prompt)
    assert len(printed) > len(prompt) + 1


def test_the_model_card_says_how_the_loss_was_measured() -> None:
    run = run_of(TOKENIZERS["ascii"])
    assert "Loss: 1.250 nats per character on the validation split (at most " in model_card(run)
    other = RunState(7, best_step=5, best_nats_per_char=1.4)  # the loss of another checkpoint
    for state in (RunState(7), other):
        assert "Loss: not measured" in model_card(replace(run, state=state))


def test_the_model_card_has_a_prompt_of_the_text_or_else_of_the_vocabulary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for text, prompt in (('a "3"', "a"), ("1\n", "PROMPT")):
        assert f'tokenizer("{prompt}", return' in model_card(run_of(CharTokenizer.fit(text)))
    run = run_of(TOKENIZERS["ascii"])
    tokens = run.tokenizer.encode('within a line\n"he said"\n1 2\nit was\ttime\n')
    monkeypatch.setattr(Run, "corpus", lambda run: SimpleNamespace(split=lambda name: tokens))
    assert 'tokenizer("it was", return' in model_card(run)


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_an_export_samples_as_the_run_does(temperature: float) -> None:
    run = run_of(TOKENIZERS["ascii"])
    values: dict[str, object] = {"sample.temperature": temperature}
    written = huggingface.generation_config(replace(run, config=run.config.with_values(values)))
    assert written["do_sample"] == (temperature > 0)
    assert written.get("temperature", 0.0) == temperature
    assert written.get("top_k") == (0 if temperature else None)  # by default transformers takes 50
    values |= {"sample.top_k": 7, "sample.top_p": 0.9, "sample.min_p": 0.1}
    written = huggingface.generation_config(replace(run, config=run.config.with_values(values)))
    found = [written.get(name) for name in ("top_k", "top_p", "min_p")]
    assert found == ([7, 0.9, 0.1] if temperature else [None] * 3)
    content = gguf.modelfile_text("a.gguf", 16, temperature)
    assert f"PARAMETER temperature {temperature}\n" in content


def test_an_export_of_another_checkpoint_than_the_best_is_imported_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = RunState(7, best_step=5, best_nats_per_char=1.4)
    export_huggingface(replace(run_of(TOKENIZERS["ascii"]), state=state), tmp_path / "hf")
    imported = load_run(import_huggingface(tmp_path / "hf", tmp_path / "back"))
    assert (imported.step, imported.state.best_step) == (7, None)
    assert "missing" not in caplog.text


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Any]:
    """Run, path and check of exports by format and vocabulary, each made once."""
    folder = tmp_path_factory.mktemp("exports")

    @cache
    def make(kind: str, name: str) -> Any:
        run = run_of(TOKENIZERS.get(name, UNKNOWN), dropout=0.25)
        path = folder / f"{name}.{kind}"
        return run, path, EXPORTS[kind](run, path)

    return make


@pytest.mark.parametrize(
    ("kind", "name"), [*product(("hf", "gguf"), TOKENIZERS), ("hf", "unknown")]
)
def test_other_programs_read_the_same_model(kind: str, name: str, exported: Any) -> None:
    _, _, found = exported(kind, name)
    assert found.runtime.startswith({"hf": "transformers ", "gguf": "llama.cpp "}[kind])
    assert found.difference < 1e-4


def test_onnxruntime_reads_the_same_model_in_any_batch_and_with_its_cache(tmp_path: Path) -> None:
    run = run_of(TOKENIZERS["bytes"])
    found = export_onnx(run, tmp_path / "model.onnx")
    assert found.describe().startswith("checked with onnxruntime ")
    assert b"site-packages" not in (tmp_path / "model.onnx").read_bytes()  # no stack traces
    session = OnnxRuntime(tmp_path / "model.onnx").session
    generator = torch.Generator().manual_seed(0)
    for batch in (1, 3):
        tokens = torch.randint(run.model.vocab_size, (batch, 24), generator=generator)
        keys = values = np.zeros((2, batch, 2, 0, 16), np.float32)
        parts = []
        for part in tokens.split([1, 5, 1, 17], dim=1):
            given = {"tokens": part.numpy(), "past_keys": keys, "past_values": values}
            logits, keys, values = session.run(None, given)
            parts.append(torch.from_numpy(logits))
        assert keys.shape == values.shape == (2, batch, 2, 24, 16)
        with torch.no_grad():
            torch.testing.assert_close(torch.cat(parts, dim=1), run.model(tokens))


@pytest.mark.parametrize(
    ("kind", "size"),
    [("hf", 1), ("hf", 2), ("gguf", 2), pytest.param("onnx", 1, marks=pytest.mark.slow)],
)  # llama.cpp wants room for a token after the prompt
def test_the_shortest_blocks_are_exported(kind: str, size: int, tmp_path: Path) -> None:
    run = run_of(TOKENIZERS["bytes"], block_size=size, n_layer=1)
    assert EXPORTS[kind](run, tmp_path / "x").difference < 1e-3


@CHECKED_BY
def test_without_the_program_that_opens_it_an_export_is_written_and_said_to_be_not_checked(
    kind: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, package)
    with collected_notes() as notes:
        assert EXPORTS[kind](run_of(TOKENIZERS["ascii"], n_layer=1), tmp_path / "x") is None
    assert notes[0].startswith(f"not checked: pip install -U {package} ")
    assert (tmp_path / "x").exists()


@pytest.mark.parametrize(("precision", "bits"), [("f16", 16), ("q8_0", 8.5)])
def test_lower_precision_makes_a_smaller_file_of_nearly_the_same_loss(
    precision: Any, bits: float, tmp_path: Path
) -> None:
    run = run_of(TOKENIZERS["ascii"], n_embd=64)
    export_gguf(run, tmp_path / "f32.gguf")
    found = export_gguf(run, tmp_path / "low.gguf", precision)
    assert 0 < found.divergence < 0.005
    saved = (tmp_path / "f32.gguf").stat().st_size - (tmp_path / "low.gguf").stat().st_size
    matrices = sum(t.numel() for t in run.model.state_dict().values() if t.dim() == 2)
    assert saved == pytest.approx(matrices * (32 - bits) / 8, rel=0.02)


def test_precision_that_costs_too_much_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "MAX_DIVERGENCE", 1e-9)
    with pytest.raises(OperationError, match=r"nats .*Kullback.* use .* --precision f32"):
        export_gguf(run_of(TOKENIZERS["ascii"]), tmp_path / "low.gguf", "q8_0")
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def readers(exported: Any) -> dict[tuple[str, str], Any]:
    """Exports as other programs open them, by format and vocabulary."""
    found: dict[tuple[str, str], Any] = {}
    for name in TOKENIZERS:
        found["hf", name] = TransformersRuntime(exported("hf", name)[1])
        found["gguf", name] = LlamaRuntime(exported("gguf", name)[1])
    return found


@given(data=st.data())
@settings(max_examples=30)
def test_any_text_of_the_vocabulary_has_the_same_tokens(readers: Any, data: st.DataObject) -> None:
    for (kind, name), runtime in readers.items():
        tokenizer = TOKENIZERS[name]
        characters = tokenizer.characters
        if tokenizer.has_bytes:
            characters += "zß→😀\0"
        text = data.draw(st.text(st.sampled_from(characters), min_size=1, max_size=30))
        ids = runtime.encode(text)
        assert ids == tokenizer.encode(text).tolist()
        if kind == "hf":
            assert runtime.tokenizer.decode(ids) == text


def test_llama_cpp_never_ends_a_text_and_never_samples_its_own_token(readers: Any) -> None:
    request = {"prompt": "ab", "n_predict": 300, "temperature": 5, "seed": 1, "top_k": 0}
    answer = readers["gguf", "ascii"].post("completion", **request)
    assert answer["stop_type"] == "limit"
    assert "endoftext" not in answer["content"]
    assert set(answer["content"]) <= set(TOKENIZERS["ascii"].characters)


def test_a_document_ends_the_text_in_other_programs(readers: Any) -> None:
    assert readers["hf", "documents"].model.generation_config.eos_token_id == 0
    request = {"prompt": "ab", "n_predict": 500, "temperature": 2, "seed": 1}
    answer = readers["gguf", "documents"].post("completion", **request)
    assert answer["stop_type"] == "eos"


@pytest.mark.parametrize("kind", EXPORTS)
@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("kind", ["bigram", "gpt2"]),
        ("attention", ["average", "none"]),
        ("scale_attn_weights", [False]),
        ("qk_norm", [False]),
        ("mlp", ["none"]),
    ],
)
def test_a_model_that_a_format_cannot_hold_is_refused_by_name(
    kind: str, setting: str, values: list[object], tmp_path: Path
) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=f"model.{setting}={value}"):
            EXPORTS[kind](run_of(TOKENIZERS["ascii"], **{setting: value}), tmp_path / "x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("tokenizer", "sizes", "cause"),
    [
        (UNKNOWN, {}, "no unknown token"),
        (CharTokenizer.fit("a \u2581"), {}, "U\\+2581"),
        (TOKENIZERS["ascii"], {"n_embd": 40}, "multiples of 32, and the model's n_embd is 40"),
        (TOKENIZERS["ascii"], {"n_inner": 40}, "multiples of 32, and the model's n_inner is 40"),
    ],
)
def test_a_vocabulary_or_size_that_gguf_cannot_hold_is_refused(
    tokenizer: CharTokenizer, sizes: dict[str, object], cause: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=cause):
        export_gguf(run_of(tokenizer, **sizes), tmp_path / "x.gguf", "q8_0")


@CHECKED_BY
def test_an_export_that_reads_back_differently_is_not_kept(
    kind: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer makes a mistake that loads without an error: one row of the head differs."""
    run = run_of(TOKENIZERS["ascii"], n_layer=1)
    mistaken = copy.deepcopy(run.model)
    assert isinstance(mistaken, GPT)
    with torch.no_grad():
        mistaken.head.weight[3] += 0.1
    monkeypatch.setattr(check, "exportable_model", lambda run, target: mistaken)
    with pytest.raises(OperationError, match="does not read back"):
        EXPORTS[kind](run, tmp_path / "out")
    assert not list(tmp_path.iterdir())


class Tampered:
    """A runtime of a run that answers the last prompt with another token or logit."""

    name = "a runtime"

    def __init__(self, run: Run, added_tokens: list[int], added_logit: float) -> None:
        self.run, self.added_tokens, self.added_logit = run, added_tokens, added_logit
        self.calls = 0

    def encode(self, text: str) -> list[int]:
        self.calls += 1
        tokens = check.encode(self.run.tokenizer, text)
        return tokens + self.added_tokens if self.calls == check.N_PROMPTS else tokens

    def logits(self, tokens: list[int]) -> check.Logits:
        found = check.logits(self.run.model, tokens)
        found[-1, 2] += self.added_logit if self.calls == check.N_PROMPTS else 0
        return found


@pytest.mark.parametrize(
    ("added_tokens", "added_logit", "cause"),
    [
        ([0], 0, "to other tokens"),
        ([], 0.01, r"log-probability differs by 0\.0"),
        ([], math.nan, "not finite"),
    ],
)
def test_the_check_notices_one_different_answer(
    added_tokens: list[int], added_logit: float, cause: str
) -> None:
    run = run_of(TOKENIZERS["ascii"])
    assert compare(run, Tampered(run, [], 0)).difference == 0
    with pytest.raises(OperationError, match=cause):
        compare(run, Tampered(run, added_tokens, added_logit))


def test_a_run_comes_back_from_its_hugging_face_folder_bit_for_bit(
    exported: Any, tmp_path: Path
) -> None:
    for name, tokenizer in {**TOKENIZERS, "unknown": UNKNOWN}.items():
        run, path, _ = exported("hf", name)
        back = load_run(import_huggingface(path, tmp_path / name))
        assert back.fingerprint() == run.fingerprint()
        assert (back.config, back.tokenizer, back.state) == (run.config, tokenizer, run.state)
        for ours, theirs in zip(run.model.parameters(), back.model.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        options: dict[str, Any] = {"prompt": "", "seed": 1, "length": 40}
        assert sample(back, **options) == sample(run, **options)


def test_an_export_that_was_changed_is_imported_only_without_its_checksum(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    export_huggingface(run_of(TOKENIZERS["ascii"]), folder)
    weights, origin = folder / "model.safetensors", folder / "chargpt.json"
    content, tree = bytearray(weights.read_bytes()), json.loads(origin.read_text())
    content[-1] ^= 1
    changed = (
        (weights, bytes(content)),
        (origin, json.dumps({**tree, "state": tree["state"].replace("7", "8")}).encode()),
    )
    for path, damaged in changed:
        intact = path.read_bytes()
        path.write_bytes(damaged)
        with pytest.raises(RunError, match=r"has changed since the export; export the run again"):
            import_huggingface(folder, tmp_path / "run")
        assert not (tmp_path / "run").exists()
        path.write_bytes(intact)
    weights.write_bytes(content)
    lines = origin.read_text().splitlines()
    kept = [line for line in lines if '"sha256"' not in line]  # as in exports of earlier versions
    assert len(kept) == len(lines) - 1
    origin.write_text("\n".join(kept))
    import_huggingface(folder, tmp_path / "run")


def corruptions(folder: Path) -> list[tuple[str, bytes]]:
    """Return hostile contents of files of an export."""
    tree = json.loads((folder / "chargpt.json").read_text())
    weights = (folder / "model.safetensors").read_bytes()

    changes: list[dict[str, object]] = [
        *({"config": each} for each in (None, [1], {"model": 3})),
        *({"tokenizer": each} for each in (3, '{"format": "x"}')),
        *({"state": each} for each in (None, '{"step": -1}')),
    ]
    models: list[dict[str, object]] = [
        {"n_layer": 10**9},
        {"n_embd": 65536, "n_layer": 256},
        {"n_embd": 64},
        {"block_size": 0},
        {"kind": "bigram"},
        {"kind": "gpt2"},
        # few weights, and rotary tables of 100 GB
        {"attention": "none", "mlp": "none", "n_head": 1, "n_embd": 65536, "block_size": 65536},
    ]
    config = tree["config"]
    changes += [{"config": {**config, "model": {**config["model"], **each}}} for each in models]
    origins = [b"", b"[]", b"[" * 100_000, b"\xff\xfe", b"{}"]
    origins += [json.dumps({**tree, **each}).encode() for each in changes]
    weight_files = [b"", weights[:-4], b"\xff" * 8 + weights[8:], b"\x80\x02cos\nsystem\n."]
    return [
        *(("chargpt.json", content) for content in origins),
        *(("model.safetensors", content) for content in weight_files),
    ]


def test_a_hostile_folder_is_refused_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "hf"
    export_huggingface(run_of(TOKENIZERS["ascii"]), folder)
    found = corruptions(folder)
    for name, content in found:
        intact = (folder / name).read_bytes()
        (folder / name).write_bytes(content)
        with pytest.raises(ChargptError) as error:
            import_huggingface(folder, tmp_path / "run")
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 500
        (folder / name).write_bytes(intact)
    assert len(found) == 23
    asked: list[int] = []
    monkeypatch.setattr(imports, "require_memory", lambda n_bytes, _: asked.append(n_bytes))
    os.truncate(folder / "model.safetensors", 60 << 30)  # a sparse file
    with pytest.raises(ChargptError, match="larger than"):
        import_huggingface(folder, tmp_path / "run")
    assert asked[-1] < 1 << 24  # no more than the settings allow is read
    assert not (tmp_path / "run").exists()


def test_the_commands_say_what_they_wrote_and_how_it_was_checked(cli: Cli, tmp_path: Path) -> None:
    run = run_of(TOKENIZERS["ascii"])
    weights = run.model.state_dict()
    RunFolder(tmp_path / "run").create(run.config, run.tokenizer).save(
        config=run.config, tokenizer=run.tokenizer, state=run.state, model=weights, optimizer={}
    )
    for kind, out in (("hf", "folder"), ("gguf", "model.gguf"), ("onnx", "model.onnx")):
        done = cli("export", kind, "run", out)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{out}\n"
        lines = done.stderr.splitlines()
        assert len(lines) == 2, lines
        assert "64 prompts" in lines[1]
        message = refusal(cli("export", kind, "run", out))
        assert "exists" in message
        assert ("--force" in message) == (kind != "hf")
    assert (tmp_path / "model.gguf.Modelfile").read_text().splitlines()[1] == "FROM ./model.gguf"
    assert cli("export", "gguf", "run", "model.gguf", "--force").returncode == 0
    done = cli("import", "hf", "folder", "back")
    assert done.returncode == 0, done.stderr
    assert cli("sample", "back", "-n", "5").returncode == 0
    assert "back was imported without its text; name one" in refusal(cli("evaluate", "back"))
    message = refusal(cli("train", "back", "--resume", "-s", "train.max_steps=9"))
    assert "--from" in message
    assert "back exists; delete it, or name another" in refusal(
        cli("import", "hf", "folder", "back")
    )
    Path("file").touch()
    for kind in ("hf", "gguf", "onnx", "html"):
        message = refusal(cli("export", kind, "run", "file/inside"))
        assert "file/inside cannot be written (" in message
    Path("link.gguf").symlink_to("model.gguf")
    assert "link.gguf exists" in refusal(cli("export", "gguf", "run", "link.gguf", "--force"))
    assert "is not a folder" in refusal(cli("import", "hf", "run", "other"))


@pytest.mark.parametrize("kind", EXPORTS)
def test_what_is_made_during_the_check_stays(
    kind: str, trained: Path, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"

    def interfere(*_: object) -> ExportCheck:
        path.write_text("my own")
        return ExportCheck("a program", 1, 0, 0)

    for module in ("check", "html"):
        monkeypatch.setattr(f"chargpt.export.{module}.compare", interfere)
    for name in ("huggingface.TransformersRuntime", "gguf.LlamaRuntime", "onnx.OnnxRuntime"):
        monkeypatch.setattr(f"chargpt.export.{name}", lambda _, **__: None)
    before = {*os.listdir(tmp_path)}
    assert "x exists; " in refusal(cli("export", kind, trained, "x"))
    assert path.read_text() == "my own"
    assert {*os.listdir(tmp_path)} == before | {"x"}
    if kind != "hf":
        assert cli("export", kind, trained, "x", "--force").returncode == 0
        assert path.read_bytes() != b"my own"


@POSIX
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_in_an_export_leaves_no_file(name: str, trained: Path, tmp_path: Path) -> None:
    number = signal.Signals[name]
    program = """-c import time
from chargpt.cli import main
from chargpt.export import huggingface
def check(folder):
    print("checking", flush=True)
    time.sleep(60)
huggingface.TransformersRuntime = check
main.run()"""
    process = start_cli("export", "hf", trained, "x", cwd=tmp_path, program=program)
    assert process.stdout is not None
    assert process.stdout.readline() == "checking\n"
    assert len(os.listdir(tmp_path)) == 1
    process.send_signal(number)
    if number != signal.SIGINT:  # a closed terminal may send several
        process.send_signal(signal.SIGTERM)
    _, message = process.communicate(timeout=30)
    assert process.returncode in (128 + number, 128 + signal.SIGTERM)
    assert message.splitlines()[-1] == "stopped"
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_the_recipes_run(tmp_path: Path) -> None:
    run = run_of(CharTokenizer.fit("\n It was abcdefg"))
    export_huggingface(run, tmp_path / "novel-hf")
    export_onnx(run, tmp_path / "novel.onnx")
    page = (REPOSITORY / "docs" / "take-it-anywhere.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    for block in blocks:
        done = run_python(block, tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("It was")
        assert len(done.stdout.rstrip("\n")) > len("It was")


@pytest.mark.parametrize(("kind", "package"), [("gguf", "gguf"), ("onnx", "onnxscript")])
def test_a_missing_package_is_named_with_its_remedy(
    kind: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, package)
    with pytest.raises(ConfigError, match=r"pip install '.\[export\]'"):
        EXPORTS[kind](run_of(TOKENIZERS["ascii"]), tmp_path / "x")


def test_prompts_of_a_check_are_bounded_by_vocabulary_layers_and_block() -> None:
    def bounds(vocab_size: int, n_layer: int, block_size: int) -> int:
        config = Config().with_values({"model.n_layer": n_layer})
        model = SimpleNamespace(vocab_size=vocab_size, block_size=block_size)
        return check.max_prompt_tokens(cast(Run, SimpleNamespace(model=model, config=config)))

    assert bounds(65, 6, 256) == 255
    assert bounds(5000, 12, 2048) == 2047
    assert bounds(200_000, 12, 2048) == 100
    assert bounds(65, 250, 65_536) == 400
    assert bounds(65, 6, 1) == 1
