"""Exports open in other programs with the run's tokens, logits and text, and come back as a run."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, Cli, refusal
from hypothesis import given, settings
from hypothesis import strategies as st
from noise import fill_with_noise

from chargpt import sample
from chargpt.config import Config, ModelConfig, TextConfig
from chargpt.errors import ChargptError, ConfigError, OperationError
from chargpt.export import check, gguf, huggingface, onnx
from chargpt.export.check import N_GREEDY, check_export, exportable_model
from chargpt.export.gguf import LlamaRuntime, export_gguf
from chargpt.export.huggingface import (
    TransformersRuntime,
    export_huggingface,
    import_huggingface,
    model_card,
)
from chargpt.export.onnx import export_onnx
from chargpt.models import GPT, build_model
from chargpt.store.folder import RunFolder
from chargpt.store.run import Run, load_run
from chargpt.store.state import RunState
from chargpt.text.prepare import load_corpus
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


def run_of(tokenizer: CharTokenizer, **changes: object) -> Run:
    """Return a run whose weights are random, so that predictions differ."""
    config = Config(model=ModelConfig(**{**SIZES, **changes}))  # type: ignore[arg-type]
    model = fill_with_noise(build_model(config.model, tokenizer.vocab_size)).eval()
    model.first_continuation_id = tokenizer.first_continuation_id
    state = RunState(7, best_step=7, best_nats_per_char=1.25, text="a 'text'.txt")
    return Run(Path("runs/a run"), config, tokenizer, model, 7, state)


def without(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Let packages be missing."""
    found = importlib.util.find_spec
    for module in (check, gguf, huggingface, onnx):
        monkeypatch.setattr(
            module, "find_spec", lambda name: None if name in packages else found(name)
        )


def export(kind: str, run: Run, path: Path, **options: Any) -> check.ExportCheck:
    """Export by the name of the format."""
    by_name: dict[str, Callable[..., check.ExportCheck]] = {
        "hf": export_huggingface,
        "gguf": export_gguf,
        "onnx": export_onnx,
    }
    return by_name[kind](run, path, **options)


def test_the_code_of_the_model_card_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    export("hf", run_of(TOKENIZERS["ascii"]), Path("FOLDER"))
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
    assert (
        "Loss: 1.250 nats per character on the validation split (10% of the text, at its end"
        in (model_card(run))
    )
    listed = replace(run, config=run.config.with_values({"text.documents": "lines"}))
    assert "(10% of the documents, which are shuffled; at most" in model_card(listed)
    tested = replace(run, config=run.config.with_values({"text.test_fraction": 0.1}))
    assert "(10% of the text, before the test split; at most" in model_card(tested)
    assert "Loss: not measured" in model_card(replace(run, state=RunState(7)))
    other = RunState(7, best_step=5, best_nats_per_char=1.4)  # the loss of another checkpoint
    assert "Loss: not measured" in model_card(replace(run, state=other))


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("The light, é", "The "),
        ("床前明月光，疑是地上霜。The ", "地床明"),
        ("Привет, The мир", "еим"),
        ('12 "3"', "23"),
    ],
)
def test_the_prompt_of_the_model_card_is_of_the_main_script_of_its_vocabulary(
    text: str, prompt: str
) -> None:
    assert f'tokenizer("{prompt}", return' in model_card(run_of(CharTokenizer.fit(text)))


def test_the_prompt_of_the_model_card_is_of_the_validation_split(tmp_path: Path) -> None:
    path = tmp_path / "novel.txt"
    path.write_text('The light, "he said"\nIt was\ttime\n' * 200)
    corpus = load_corpus(TextConfig(path=str(path)))
    run = run_of(corpus.tokenizer)
    read = replace(run, state=replace(run.state, corpus_key=corpus.key))
    assert re.search(r'tokenizer\("(It was|The light,)", return', model_card(read))
    assert 'tokenizer("The ", return' in model_card(run)


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_an_export_samples_at_the_temperature_of_the_run(temperature: float) -> None:
    run = run_of(TOKENIZERS["ascii"])
    run = replace(run, config=run.config.with_values({"sample.temperature": temperature}))
    assert isinstance(run.model, GPT)
    written = json.loads(huggingface.files(run, run.model)["generation_config.json"])
    assert written["do_sample"] == (temperature > 0)
    assert written.get("temperature", 0.0) == temperature
    content = gguf.modelfile_text("a.gguf", 16, temperature)
    assert f"PARAMETER temperature {temperature}\n" in content


class Exported(NamedTuple):
    """An export, its run, and what its check found."""

    run: Run
    path: Path
    check: check.ExportCheck


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Exported]:
    """Exports by format and vocabulary, each made once."""
    folder = tmp_path_factory.mktemp("exports")

    @cache
    def make(kind: str, name: str) -> Exported:
        run = run_of(TOKENIZERS.get(name, UNKNOWN), dropout=0.25)
        path = folder / f"{name}.{kind}"
        return Exported(run, path, export(kind, run, path))

    return make


@pytest.mark.parametrize("name", [*TOKENIZERS, "unknown"])
def test_transformers_reads_the_same_model(name: str, exported: Any) -> None:
    found = exported("hf", name).check
    assert found.runtime.startswith("transformers ")
    assert found.difference < 1e-4


@pytest.mark.parametrize("name", list(TOKENIZERS))
def test_llama_cpp_reads_the_same_model(name: str, exported: Any) -> None:
    found = exported("gguf", name).check
    assert found.runtime.startswith("llama.cpp ")
    assert found.difference < 1e-3


@pytest.mark.parametrize("name", ["ascii", "no newline", "one character", "bytes"])
def test_onnxruntime_reads_the_same_model(name: str, tmp_path: Path) -> None:
    run = run_of(TOKENIZERS[name])
    found = export_onnx(run, tmp_path / "model.onnx")
    assert found.runtime.startswith("onnxruntime ")
    assert found.difference < 1e-4


@pytest.mark.parametrize("size", [1, 2])
def test_the_shortest_blocks_are_exported(size: int, tmp_path: Path) -> None:
    run = run_of(TOKENIZERS["bytes"], block_size=size)
    checks = [
        export_huggingface(run, tmp_path / "hf"),
        export_onnx(run, tmp_path / "model.onnx"),
    ]
    if size > 1:  # llama.cpp wants room for a token after the prompt
        checks.append(export_gguf(run, tmp_path / "model.gguf"))
    for found in checks:
        assert ("greedy text" in found.describe()) == (size > 1)
        assert found.n_greedy == min(N_GREEDY, check.N_PROMPTS * (size - 1))


@pytest.mark.slow
def test_the_same_export_passes_with_our_own_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "transformers", "xllamacpp", "onnxruntime")
    run = run_of(TOKENIZERS["bytes"])
    assert export_huggingface(run, tmp_path / "a").runtime.startswith(
        "tokenizers and chargpt's own"
    )
    without(monkeypatch, "transformers", "tokenizers", "xllamacpp", "onnxruntime")
    for name in ("emoji", "bytes"):
        run = run_of(TOKENIZERS[name])
        assert export_huggingface(run, tmp_path / name).runtime.startswith("chargpt's own runtime")
        assert "own runtime" in export_gguf(run, tmp_path / f"{name}.gguf").runtime
    assert "own runtime" in export_huggingface(run_of(UNKNOWN), tmp_path / "unknown").runtime
    runtime = export_onnx(run_of(TOKENIZERS["ascii"], n_layer=1), tmp_path / "model.onnx").runtime
    assert "reference evaluator" in runtime


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
    with pytest.raises(OperationError, match=r"nats .*Kullback.* use --precision f32"):
        export_gguf(run_of(TOKENIZERS["ascii"]), tmp_path / "low.gguf", "q8_0")
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def readers(exported: Any) -> list[tuple[Run, Any]]:
    """Runs with every vocabulary, as other programs open them."""
    found: list[tuple[Run, Any]] = []
    for name in TOKENIZERS:
        run, path, _ = exported("hf", name)
        found.append((run, TransformersRuntime(path)))
        run, path, _ = exported("gguf", name)
        found.append((run, LlamaRuntime(path, run.model.vocab_size, run.model.block_size)))
    return found


@given(data=st.data())
@settings(max_examples=30)
def test_any_text_of_the_vocabulary_has_the_same_tokens(readers: Any, data: st.DataObject) -> None:
    for run, runtime in readers:
        characters = run.tokenizer.characters
        if run.tokenizer.has_bytes:
            characters += "zß→😀\0"
        text = data.draw(st.text(st.sampled_from(characters), min_size=1, max_size=30))
        ids = runtime.encode(text)
        assert ids == run.tokenizer.encode(text).tolist()
        if isinstance(runtime, TransformersRuntime):
            assert runtime.tokenizer.decode(ids) == text


def test_llama_cpp_never_ends_a_text_and_never_samples_its_own_token(readers: Any) -> None:
    run, runtime = readers[1]
    answer = runtime.post("completion", prompt="ab", n_predict=300, temperature=5, seed=1, top_k=0)
    assert answer["stop_type"] == "limit"
    assert "endoftext" not in answer["content"]
    assert set(answer["content"]) <= set(run.tokenizer.characters)


def test_a_document_ends_the_text_in_other_programs(readers: Any) -> None:
    by_name = dict(zip(TOKENIZERS, zip(readers[::2], readers[1::2], strict=True), strict=True))
    (_, transformers), (_, llama) = by_name["documents"]
    assert transformers.model.generation_config.eos_token_id == 0
    answer = llama.post("completion", prompt="ab", n_predict=500, temperature=2, seed=1)
    assert answer["stop_type"] == "eos"


@pytest.mark.parametrize("kind", ["hf", "gguf", "onnx"])
@pytest.mark.parametrize(
    ("setting", "value"),
    [("attention", "none"), ("scale_attn_weights", False), ("qk_norm", False), ("mlp", "none")],
)
def test_a_model_that_a_format_cannot_hold_is_refused_by_name(
    kind: str, setting: str, value: object, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"model.{setting}={value}"):
        export(kind, run_of(TOKENIZERS["ascii"], **{setting: value}), tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_a_bigram_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.kind=bigram"):
        export_huggingface(run_of(TOKENIZERS["ascii"], kind="bigram"), tmp_path / "x")


@pytest.mark.parametrize(
    ("tokenizer", "cause"),
    [(UNKNOWN, "no unknown token"), (CharTokenizer.fit("a \u2581"), "U\\+2581")],
)
def test_a_vocabulary_that_gguf_cannot_hold_is_refused(
    tokenizer: CharTokenizer, cause: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=cause):
        export_gguf(run_of(tokenizer), tmp_path / "x.gguf")


def test_q8_0_needs_rows_of_whole_blocks(tmp_path: Path) -> None:
    for key, sizes in (("n_embd", {"n_embd": 40}), ("n_inner", {"n_inner": 40})):
        with pytest.raises(ConfigError, match=f"multiples of 32, and the model's {key} is 40"):
            export_gguf(run_of(TOKENIZERS["ascii"], **sizes), tmp_path / "x.gguf", "q8_0")


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize(("kind", "module"), [("hf", huggingface), ("gguf", gguf), ("onnx", onnx)])
def test_an_export_that_reads_back_differently_is_not_kept(
    kind: str, module: Any, installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer makes a mistake that loads without an error: one row of the head differs."""
    run = run_of(TOKENIZERS["ascii"], n_layer=1)
    if not installed:
        without(monkeypatch, "transformers", "xllamacpp", "onnxruntime")
    original = module.exportable_model

    def mistaken(run: Run, target: str) -> GPT:
        model = original(run, target)
        other = build_model(run.config.model, model.vocab_size)
        assert isinstance(other, GPT)
        other.load_state_dict(model.state_dict())
        with torch.no_grad():
            other.head.weight[3] += 0.1
        return other.eval()

    monkeypatch.setattr(module, "exportable_model", mistaken)
    with pytest.raises(OperationError, match="does not read back"):
        export(kind, run, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_greedy_text_of_200_characters_is_compared() -> None:
    run = run_of(TOKENIZERS["ascii"])
    found = list(check.greedy_prompts(run, check.prompts(run)))
    assert sum(length for _, length in found) == N_GREEDY
    for tokens, length in found:
        assert len(tokens) + length <= run.model.block_size


class Tampered:
    """A runtime of a run with one answer changed."""

    name = "a runtime"

    def __init__(self, run: Run, changed: str) -> None:
        self.run, self.changed, self.calls = run, changed, 0

    def encode(self, text: str) -> list[int]:
        self.calls += 1
        ids = check.encode(self.run.tokenizer, text)
        return [*ids[::-1], 0] if self.changed == "tokens" and self.calls == 64 else ids

    def logits(self, tokens: list[int]) -> check.Logits:
        found = check.logits(self.run.model, tokens)
        found[-1, 2] += 0.01 if self.changed == "logits" and self.calls == 64 else 0
        if self.changed == "nan" and self.calls == 64:
            found[-1, 2] = np.nan
        return found

    def greedy(self, tokens: list[int], length: int) -> list[int]:
        model = exportable_model(self.run, "x")
        found = check.greedy(model, tokens, length)
        return [*found[:-1], (found[-1] + 1) % 5] if self.changed == "greedy" else found


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ("tokens", "to other tokens"),
        ("logits", r"log-probability differs by 0\.0"),
        ("nan", "not finite"),
        ("greedy", "greedy text differs"),
    ],
)
def test_the_check_notices_one_different_answer(changed: str, cause: str) -> None:
    run = run_of(TOKENIZERS["ascii"])
    assert check_export(run, Tampered(run, "nothing")).difference == 0
    with pytest.raises(OperationError, match=cause):
        check_export(run, Tampered(run, changed))


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


def corruptions(folder: Path) -> list[tuple[str, bytes]]:
    """Return hostile contents of files of an export."""
    tree = json.loads((folder / "chargpt.json").read_text())
    weights = (folder / "model.safetensors").read_bytes()

    def changed(**values: Any) -> bytes:
        return json.dumps({**tree, **values}).encode()

    def model(**values: Any) -> bytes:
        return changed(config={**tree["config"], "model": {**tree["config"]["model"], **values}})

    origins = [
        b"",
        b"[]",
        b"[" * 100_000,
        b"\xff\xfe",
        b"{}",
        changed(config=None),
        changed(config=[1]),
        changed(config={"model": 3}),
        changed(tokenizer=3),
        changed(tokenizer='{"format": "x"}'),
        changed(state=None),
        changed(state='{"step": -1}'),
        model(n_layer=10**9),
        model(n_embd=65536, n_layer=256),
        model(n_embd=64),
        model(block_size=0),
        model(kind="bigram"),
        model(kind="gpt2"),
        # few weights, and rotary tables of 100 GB
        model(attention="none", mlp="none", n_head=1, n_embd=65536, block_size=65536),
    ]
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
    monkeypatch.setattr(huggingface, "require_memory", lambda n_bytes, _: asked.append(n_bytes))
    os.truncate(folder / "model.safetensors", 60 << 30)  # a sparse file
    with pytest.raises(ChargptError, match="larger than"):
        import_huggingface(folder, tmp_path / "run")
    assert asked[-1] < 1 << 24  # no more than the settings allow is read
    assert not (tmp_path / "run").exists()


def test_the_commands_say_what_they_wrote_and_how_it_was_checked(cli: Cli, tmp_path: Path) -> None:
    run = run_of(TOKENIZERS["ascii"])
    weights = run.model.state_dict()
    RunFolder(tmp_path / "run").create_from_weights(run.config, run.tokenizer, run.state, weights)
    for kind, out in (("hf", "folder"), ("gguf", "model.gguf"), ("onnx", "model.onnx")):
        done = cli("export", kind, "run", out)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{out}\n"
        assert "64 prompts" in done.stderr
        assert "the same greedy text of 200 tokens" in done.stderr
        message = refusal(cli("export", kind, "run", out))
        assert "exists" in message
        assert ("--force" in message) == (kind != "hf")
    assert (tmp_path / "model.gguf.Modelfile").read_text().splitlines()[1] == "FROM ./model.gguf"
    assert cli("export", "gguf", "run", "model.gguf", "--force").returncode == 0
    done = cli("import", "hf", "folder", "back")
    assert done.returncode == 0, done.stderr
    assert cli("sample", "back", "-n", "5").returncode == 0
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


@pytest.mark.slow
def test_the_recipes_run(tmp_path: Path) -> None:
    run = run_of(CharTokenizer.fit("\n It was abcdefg"))
    export_huggingface(run, tmp_path / "novel-hf")
    export_onnx(run, tmp_path / "novel.onnx")
    page = (REPOSITORY / "docs" / "take-it-anywhere.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    for block in blocks:
        done = subprocess.run(
            [sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("It was")
        assert len(done.stdout.rstrip("\n")) > len("It was")


@pytest.mark.parametrize(("kind", "package"), [("gguf", "gguf"), ("onnx", "onnx")])
def test_a_missing_package_is_named_with_its_remedy(
    kind: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, package)
    with pytest.raises(ConfigError, match=r"pip install '.\[export\]'"):
        export(kind, run_of(TOKENIZERS["ascii"]), tmp_path / "x")
