"""The Python interface: train, sample, evaluate, logits."""

import ast
import errno
import inspect
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, run_python
from saving import failing

import chargpt
from chargpt.config import SampleConfig, TextConfig
from chargpt.distributed import RankGroup
from chargpt.errors import (
    ConfigError,
    DeviceError,
    FinishedError,
    OperationError,
    RunError,
    TextError,
)
from chargpt.files import quoted
from chargpt.log import in_python, logger
from chargpt.store.folder import RunFolder
from chargpt.training.start import Request, StartMode
from chargpt.training.trainer import StepReport, Trainer

TINY = {
    "model.n_layer": 1,
    "model.n_embd": 16,
    "model.block_size": 16,
    "train.max_steps": 4,
    "train.batch_size": 4,
    "train.sample_every": 0,
}


@pytest.fixture
def tiny_run(verse: Path, tmp_path: Path) -> chargpt.Run:
    return chargpt.train(verse, settings=TINY, out=tmp_path / "tiny", device="cpu")


def interrupt_step(step: int, patch: pytest.MonkeyPatch, real: Any = Trainer.train_step) -> None:
    """Send Ctrl-C at the start of a step, counted from 0."""

    def interrupted(trainer: Trainer) -> StepReport:
        if trainer.state.step == step:
            signal.raise_signal(signal.SIGINT)
        report: StepReport = real(trainer)
        return report

    patch.setattr(Trainer, "train_step", interrupted)


def test_train_sample_and_evaluate_print_nothing_but_a_bar_on_request(
    verse: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = chargpt.train(verse, settings=TINY, out=tmp_path / "run", device="cpu")
    assert run.step == 4
    assert chargpt.sample(run, prompt="The ", length=5, seed=1)[0].startswith("The ")
    assert 0 < chargpt.evaluate(run).nats_per_char < 5
    printed = capfd.readouterr()
    assert printed.out == printed.err == ""
    real: Any = Trainer.train_step

    def noted(trainer: Trainer) -> Any:
        logger.warning("a note")
        return real(trainer)

    monkeypatch.setattr(Trainer, "train_step", noted)
    chargpt.train(verse, settings=TINY, out=tmp_path / "other", device="cpu", progress=True)
    printed = capfd.readouterr()
    assert "4/4" in printed.err
    assert printed.err.count("\ra note\n") == 4  # above the bar
    assert printed.out == ""


def test_the_command_line_trains_the_same_model(verse: Path, tmp_path: Path, cli: object) -> None:
    run = chargpt.train(verse, settings=TINY, out=tmp_path / "a", device="cpu")
    args = [word for key, value in TINY.items() for word in ("-s", f"{key}={value}")]
    assert cli("train", verse, *args, "--out", "b", "--device", "cpu").returncode == 0  # type: ignore[operator]
    other = chargpt.load_run(tmp_path / "b", device="cpu")
    assert run.fingerprint() == other.fingerprint()  # of the weights


def test_an_interrupt_lets_the_step_end_saves_and_can_be_resumed(
    verse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    with monkeypatch.context() as patched:
        interrupt_step(1, patched)
        with pytest.raises(
            KeyboardInterrupt, match=r"stopped at step 2 and saved in .*run; start="
        ):
            chargpt.train(verse, settings=TINY, out=out, device="cpu")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    resumed = chargpt.train(out=out, start="resume")
    assert resumed.step == 4
    whole = chargpt.train(verse, settings=TINY, out=tmp_path / "whole", device="cpu")
    assert whole.fingerprint() == resumed.fingerprint()  # of the weights


@pytest.mark.parametrize(
    ("name", "given", "sentence"),
    [
        ("train", {"lr": 0.1}, "lr=0.1 is settings={'optim.lr': 0.1}"),
        ("train", {"seed": 3}, "seed=3 is settings={'seed': 3}"),
        ("train", {"gpu": 0}, "gpu=0 is device='cuda'"),
        ("train", {"verbose": True}, "verbose=True is progress=True"),
        ("train", {"bugdet": "3m"}, "bugdet='3m': did you mean budget='3m'?"),
        (
            "train",
            {"epochs": 3},
            "there are no epochs: give settings={'train.max_steps': 500} or budget='10m'",
        ),
        ("sample", {"n": 3}, "n=3 is num_samples=3"),
        ("sample", {"max_new_tokens": 9}, "max_new_tokens=9 is length=9"),
        ("stream", {"temp": 1}, "temp=1 is temperature=1"),
        ("sample", {"temprature": 1}, "temprature=1: did you mean temperature=1?"),
        ("evaluate", {"max_chars": 9}, "max_chars=9 is max_characters=9"),
        ("compare", {"steps": 3}, "steps=3 is settings={'train.max_steps': 3}"),
        ("load_config", {"lr": 0.1}, "lr=0.1 is settings={'optim.lr': 0.1}"),
    ],
)
def test_a_keyword_of_other_tools_is_rejected_with_the_one_here(
    name: str, given: dict[str, Any], sentence: str, trained: Path
) -> None:
    with pytest.raises(ConfigError) as rejected:
        getattr(chargpt, name)(trained, **given)
    assert str(rejected.value) == sentence


@pytest.mark.parametrize("disk_is_full", [False, True])
def test_an_interrupt_in_the_last_step_says_what_is_saved(
    disk_is_full: bool, verse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_step(3, monkeypatch)
    error: type[BaseException] = KeyboardInterrupt
    expected = "^all steps are done and saved in .*run"
    if disk_is_full:
        monkeypatch.setattr(RunFolder, "save", failing(errno.ENOSPC))
        error, expected = OperationError, r"cannot save step 4 .* \(No space left on device\)"
    with pytest.raises(error, match=expected):
        chargpt.train(verse, settings=TINY, out=tmp_path / "run", device="cpu")


def test_a_refused_resume_leaves_the_run_unlocked(tiny_run: chargpt.Run) -> None:
    with pytest.raises(FinishedError) as refused:  # its traceback holds what was opened
        chargpt.train(tiny_run.folder, start="resume")
    settings = {"train.max_steps": 5}
    assert chargpt.train(tiny_run.folder, settings=settings, start="resume").step == 5
    del refused


def test_a_second_interrupt_ends_the_step(
    verse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice(trainer: Trainer) -> StepReport:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the second one did not interrupt")

    monkeypatch.setattr(Trainer, "train_step", twice)
    with pytest.raises(KeyboardInterrupt):
        chargpt.train(verse, settings=TINY, out=tmp_path / "run", device="cpu")


def test_compare_takes_what_train_takes_or_runs(verse: Path, tmp_path: Path) -> None:
    text, given = verse.read_text(encoding="utf-8"), {"settings": TINY, "device": "cpu"}
    compared = chargpt.compare(text=text, out=str(tmp_path / "both"), **given)  # type: ignore[arg-type]
    trained = {row.model: row.nats_per_char for row in compared.rows if row.run}
    assert list(trained) == ["bigram (trained)", "gpt (trained)"]
    folders = [str(tmp_path / "both" / "gpt"), chargpt.load_run(tmp_path / "both" / "bigram")]
    again = {row.model: row.nats_per_char for row in chargpt.compare(folders).rows if row.run}
    assert list(again.values()) == list(trained.values())[::-1]
    config = chargpt.load_config("gpt", {**TINY, "text.path": verse})
    run = chargpt.train(verse, config="gpt", settings=TINY, out=tmp_path / "run", device="cpu")
    assert {*config.differing_keys(run.config)} <= {"device", "dtype", "threads", "text.documents"}


def test_compare_trains_several_values_and_seeds_and_reports(verse: Path) -> None:
    settings = {**TINY, "train.max_steps": [1, 2], "text.test_fraction": 0.1, "device": "cpu"}
    steps = list[int]()
    compared = chargpt.compare(
        verse, settings=settings, seeds=2, split="test", on_report=lambda r: steps.append(r.step)
    )
    assert steps == [*(0, 1) * 2, *(0, 1, 2) * 2]
    trained = {name: group for name, group in compared.groups.items() if group.is_run}
    assert {name: [row.seed for row in group.rows] for name, group in trained.items()} == {
        "max_steps=1": [1337, 1338],
        "max_steps=2": [1337, 1338],
    }
    assert {row.evaluation.split for row in trained["max_steps=1"].rows} == {"test"}


def test_a_config_stands_for_its_name(verse: Path, tmp_path: Path) -> None:
    settings = {"train.max_steps": 2, "model.block_size": 16}
    config = chargpt.load_config("bigram", settings)
    runs = [
        chargpt.train(verse, config=config, out=tmp_path / "a", device="cpu"),
        chargpt.train(verse, config="bigram", settings=settings, out=tmp_path / "b", device="cpu"),
    ]
    assert runs[0].fingerprint() == runs[1].fingerprint()  # of the weights
    assert chargpt.load_config(config, {"seed": 3}).model == config.model


def test_a_report_that_is_answered_by_true_ends_training_after_its_step(
    verse: Path, tmp_path: Path
) -> None:
    reports, out = list[StepReport](), tmp_path / "run"

    def stop(report: StepReport) -> bool:
        reports.append(report)
        return report.step == 2

    run = chargpt.train(verse, settings=TINY, out=out, device="cpu", on_report=stop)
    assert (run.step, [report.step for report in reports]) == (2, [0, 1, 2])
    resumed = chargpt.train(out=out, start="resume", on_report=stop)
    assert (resumed.step, [report.step for report in reports][3:]) == (4, [3, 4])
    whole = chargpt.train(verse, settings=TINY, out=tmp_path / "whole", device="cpu")
    assert whole.fingerprint() == resumed.fingerprint()  # of the weights
    train, validation = resumed.metrics["train"], resumed.metrics["validation"]
    assert train["step"].tolist() == [1, 2, 3, 4]
    assert train["loss"].tolist() == [float(report.loss) for report in reports if report.loss]
    measured = [report.validation for report in reports if report.validation]
    assert validation["loss"].tolist() == [each.nats_per_char for each in measured]
    for columns in (train, validation):  # as pandas.DataFrame takes them
        assert len({len(column) for column in columns.values()}) == 1
        assert all(np.isfinite(column).all() for column in columns.values())


USER_FILE = """\
import chargpt
from chargpt.training.trainer import StepReport

def stop(report: StepReport) -> bool:
    return report.step == 3

run = chargpt.train("novel.txt", budget="3m", settings={"train.max_steps": 5}, on_report=stop)
chargpt.train(text="abc", config="gpt", start="new or resume", out="runs/a", progress=True)
chargpt.train("novel.txt", start="again")  # wrong
chargpt.train("novel.txt", settings=["seed=1"])  # wrong
chargpt.train("novel.txt", on_report=3)  # wrong
first = chargpt.sample(run, prompt="It", temperature=0.5, top_k=None, stop=["."], seed=None)[0]
text: str = first.text + first.continuation + first.ended
facts: tuple[bool, float] = (first.finished, first.surprisal)
chargpt.sample(run, temperature="hot")  # wrong
chargpt.sample(run, heat=1)  # wrong
chargpt.sample("runs/a", num_samples=None)  # wrong
pieces: list[str] = list(chargpt.stream(run, prompt="It", length=20, seed=1))
chargpt.stream(run, num_samples=2)  # wrong
loss: float = chargpt.evaluate(run, split="train", protocol="sliding").bits_per_char
chargpt.evaluate(run, split="dev")  # wrong
loss = chargpt.score(run, "It was", unknown="skip").bits_per_char
chargpt.score(run, unknown="skip")  # wrong
rows = chargpt.compare("novel.txt", config="gpt", budget=60, out="runs/b").rows
rows += chargpt.compare([run, "runs/a"], device="cpu", split="test").rows
rows += chargpt.compare("a", settings={"optim.lr": [0.1]}, seeds=3, on_report=stop).rows
chargpt.compare("novel.txt", steps=3)  # wrong
steps: int = chargpt.load_config("gpt", {"train.max_steps": 5}).train.max_steps
chargpt.train("novel.txt", config=chargpt.load_config("bigram"))
chargpt.evaluate(run, length=3)  # wrong
chargpt.load_config("gpt", ["seed=1"])  # wrong
losses = chargpt.load_run("runs/a", device="cpu").metrics["train"]["loss"].mean()
"""


def test_types_of_a_users_file_are_checked(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER_FILE)
    # without the libraries, whose types take far longer to read
    options = "--strict --config-file= --no-site-packages --ignore-missing-imports"
    command = [sys.executable, "-m", "mypy", *options.split(), "--follow-imports=silent", "user.py"]
    environment = {**os.environ, "MYPYPATH": str(REPOSITORY)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    found = set(map(int, re.findall(r"^user\.py:(\d+): error", done.stdout, re.MULTILINE)))
    lines = enumerate(USER_FILE.splitlines(), 1)
    assert found == {number for number, line in lines if line.endswith("# wrong")}, done.stdout


def test_dir_is_the_api_and_functions_keep_their_signatures() -> None:
    assert {name for name in dir(chargpt) if not name.startswith("__")} == set(chargpt.__all__)
    parameters = inspect.signature(chargpt.sample).parameters
    assert {*SampleConfig.model_fields} <= set(parameters)
    assert repr(parameters["top_k"].default) == "<of the run>"
    assert pickle.loads(pickle.dumps(chargpt.sample)) is chargpt.sample


def test_messages_name_arguments_of_python(tiny_run: chargpt.Run, tmp_path: Path) -> None:
    api: Any = chargpt
    folder, text = tiny_run.folder, "the cat sat on the mat\n" * 100
    for message, call in (
        ("out=$", lambda: api.train(text=text, out=__file__)),
        (r"start='resume', replace it with start='replace'", lambda: api.train("-", out=folder)),
        (r"settings=\{'train.max_steps': N\}", lambda: api.train(folder, start="resume")),
        (r"drop the config \(start", lambda: api.train(config="a", start="resume")),
        ("unknown='skip' or 'replace'", lambda: api.sample(tiny_run, prompt="é")),
        (r"a longer budget=, or with settings=\{", lambda: api.with_mixture(folder)),
        (r"`chargpt\.train`", lambda: api.load_run(tmp_path / "none")),
        ("a file, not a run; name the run's folder", lambda: api.score(__file__, "a")),
        (r"settings=\{'text.test_fraction': 0.1\}", lambda: api.evaluate(folder, "test")),
    ):
        with pytest.raises(chargpt.ChargptError, match=message) as raised:
            call()
        assert not re.search(OPTION, str(raised.value))


OPTION = r"(?<![\w-])(--[a-z]|-s )"


def test_no_sentence_of_the_library_keeps_an_option() -> None:
    without_a_function, left = "soffice|compress --keep|import it again with --text", []
    for folder in "training text store inference models".split():
        for path in (Path(chargpt.__file__).parent / folder).glob("*.py"):
            nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
            formatted = [node.values for node in nodes if isinstance(node, ast.JoinedStr)]
            inner = {id(part) for parts in formatted for part in parts}
            inner |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
            plain = [[node] for node in nodes if isinstance(node, ast.Constant)]
            texts = [
                "".join(str(part.value) if type(part) is ast.Constant else "x=1" for part in parts)
                for parts in [*formatted, *(each for each in plain if id(each[0]) not in inner)]
            ]
            left += [text for text in map(in_python, texts) if re.search(OPTION, text)]
    assert [text for text in left if not re.search(without_a_function, text)] == []
    command = f"`chargpt train --resume {quoted('a b')} --from {quoted(chr(39))} -s seed=1,2`"
    expected = """`chargpt.train('a b', start='resume', from_run="'", settings={'seed': '1,2'})`"""
    assert in_python(command) == expected


def test_the_same_command_resumes_a_run_whose_decay_was_planned_again() -> None:
    settings = {"schedule.cooldown": 0.5, "seed": 5}
    planned = Request(path="novel.txt", settings=settings, budget="30s")
    assert set(planned.repeated_settings()) == {"text.path", "seed"}
    fixed = Request(path="novel.txt", settings=settings)
    assert set(fixed.repeated_settings()) == {"text.path", "seed", "schedule.cooldown"}


def test_the_same_command_says_that_a_resumed_run_uses_no_budget(
    verse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: Any = {"out": tmp_path / "run", "device": "cpu"}
    with monkeypatch.context() as patched:
        interrupt_step(0, patched)
        with pytest.raises(KeyboardInterrupt):
            chargpt.train(verse, settings=TINY, **given)
    run = chargpt.train(verse, budget="1h", start="new or resume", **given)
    assert "a resumed one keeps its own plan of 4 steps" in " ".join(run.notes)


def test_a_section_of_comments_in_a_config_fixes_no_key(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("train:\n  # max_steps: 5\nmodel: {}\noptim:\n  lr: 0.1\n")
    assert Request(config=str(tmp_path / "c.yaml")).resolved[1] == {"optim.lr"}


def test_a_run_is_resumed_with_its_own_content_only(verse: Path, tmp_path: Path) -> None:
    out, text = tmp_path / "run", "the cat sat on the mat\n" * 100

    def train(content: str, steps: int, out: Path = out) -> int:
        settings = {**TINY, "train.max_steps": steps}
        start = StartMode.NEW_OR_RESUME
        return chargpt.train(text=content, settings=settings, out=out, start=start).step

    assert train(text, 4) == 4
    with pytest.raises(TextError, match="is not the text that the run was trained on"):
        train(text.upper(), 6)
    assert train(text, 6) == 6
    with pytest.raises(TextError, match="is not the text that the run was trained on"):
        chargpt.train(settings=TINY, out=out, start="new or resume")  # the built-in text
    with pytest.raises(ConfigError, match="give out="):
        chargpt.train(text=text, start="new or resume")
    chargpt.train(verse, settings=TINY, out=tmp_path / "file", device="cpu")
    assert train(verse.read_text(encoding="utf-8"), 6, tmp_path / "file") == 6
    for given in ({"text": text}, {"path": "novel.txt"}):
        with pytest.raises(ConfigError, match="keeps its text and settings"):
            chargpt.train(**given, out=out, start="resume")  # type: ignore[arg-type]


def test_several_processes_need_a_folder_and_a_device_that_has_them(
    verse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="several processes need the run's folder; give out="):
        chargpt.train(verse, settings=TINY)
    mps = torch.device("mps"), ""
    monkeypatch.setattr("chargpt.training.trainer.choose_device", lambda _: mps)
    corpus = chargpt.load_corpus(TextConfig(path=str(verse)))
    with pytest.raises(DeviceError, match="an Apple GPU trains with one process"):
        chargpt.Trainer(chargpt.load_config("gpt", TINY), corpus, group=RankGroup(0, 2))


def test_ranks_with_different_devices_say_so_instead_of_waiting(
    verse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RankGroup, "broadcast_text", lambda group, text: "cuda")  # of rank 0
    monkeypatch.setattr(RankGroup, "all_reduce_any", lambda group, flag: flag)
    corpus = chargpt.load_corpus(TextConfig(path=str(verse)))
    with pytest.raises(DeviceError, match="different devices, such as cuda of rank 0"):
        chargpt.Trainer(chargpt.load_config("gpt", TINY), corpus, group=RankGroup(1, 2))


def test_two_ranks_on_one_gpu_are_a_sentence(verse: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = "NCCL error: ncclInvalidUsage\nDuplicate GPU detected : rank 0 and rank 1 both on CUDA"
    new_run = Mock(side_effect=RuntimeError(error))
    monkeypatch.setattr("chargpt.training.start.new_run", new_run)
    with pytest.raises(DeviceError, match="two processes have the same GPU; start no more than"):
        chargpt.train(verse, settings=TINY)


def test_a_budget_begins_with_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = Mock(side_effect=OperationError("stop"))
    monkeypatch.setattr("chargpt.training.api.open_session", stop)
    before = time.perf_counter()
    with pytest.raises(OperationError):
        chargpt.train(budget="5s")
    assert before <= stop.call_args.args[0].started <= time.perf_counter()


def test_importing_changes_nothing_in_the_host_program() -> None:
    program = (
        "import os, logging, torch; before = dict(os.environ), torch.get_num_threads(),"
        " torch.backends.cuda.cudnn_sdp_enabled(); import importlib, pkgutil, chargpt;"
        "[importlib.import_module(m.name) for m in pkgutil.walk_packages(chargpt.__path__, "
        "'chargpt.') if m.name != 'chargpt.__main__'];"
        "after = dict(os.environ), torch.get_num_threads(),"
        " torch.backends.cuda.cudnn_sdp_enabled(); assert before == after, (before, after);"
        "assert not logging.root.handlers and not logging.getLogger('chargpt').handlers"
    )
    done = run_python(program, Path())
    assert done.returncode == 0, done.stderr


def test_notes_go_where_the_programs_logging_sends_them(
    verse: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "short.txt").write_text(verse.read_text()[:5000])
    run = chargpt.train(tmp_path / "short.txt", settings=TINY, out=tmp_path / "run", device="cpu")
    assert any("too few" in note for note in run.notes)
    assert [each.getMessage() for each in caplog.records] == list(run.notes)
    assert {each.name for each in caplog.records} == {"chargpt"}
    caplog.clear()
    resumed = chargpt.train(out=tmp_path / "run", settings={"train.max_steps": 6}, start="resume")
    assert any("resuming" in note for note in resumed.notes)
    assert not any("resuming" in each.getMessage() for each in caplog.records)  # an info


def test_an_error_in_the_last_preparations_leaves_the_run_unlocked(
    verse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, interrupted = tmp_path / "run", Mock(side_effect=KeyboardInterrupt)
    saved = chargpt.train(verse, settings=TINY, out=out, device="cpu")
    with monkeypatch.context() as patched:
        patched.setattr("chargpt.training.start.expected_seconds", interrupted)
        with pytest.raises(KeyboardInterrupt) as interrupt:  # its traceback holds what was opened
            chargpt.train(verse, settings=TINY, out=out, device="cpu", start="replace")
    assert chargpt.load_run(out).step == saved.step
    assert chargpt.train(verse, settings=TINY, out=out, device="cpu", start="replace").step == 4
    del interrupt


@pytest.mark.parametrize("existed", [False, True])
@pytest.mark.parametrize(
    "interrupted_call",
    [
        "chargpt.text.prepare._encode",  # while the text is prepared
        "chargpt.training.start.expected_seconds",  # before the run is created
        "chargpt.text.tokenizer.write_atomically",  # within
        "chargpt.training.trainer.Trainer.steps",  # in the session
    ],
)
def test_an_interrupted_start_leaves_no_folder(
    verse: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    interrupted_call: str,
    existed: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "run"
    if existed:
        out.mkdir()
    monkeypatch.setattr(interrupted_call, Mock(side_effect=KeyboardInterrupt))
    for folder in (out, None):
        with pytest.raises(KeyboardInterrupt):
            chargpt.train(verse, settings=TINY, out=folder, device="cpu")
    assert not list(tmp_path.glob("run*/*"))
    assert out.exists() == existed


def test_a_run_is_returned_also_if_its_mixture_cannot_be_saved(
    verse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chargpt.store.mixture.write_atomically", failing(errno.ENOSPC))
    settings = {**TINY, "text.mixture_characters": 800}
    run = chargpt.train(verse, settings=settings, out=tmp_path / "run", device="cpu")
    assert run.step == 4
    assert any("the mixture of" in note and "No space left" in note for note in run.notes)


def test_start_modes_create_replace_and_resume_runs(verse: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"

    def train(start: StartMode, **changes: object) -> int:
        settings = {**TINY, **changes}
        return chargpt.train(verse, settings=settings, out=out, device="cpu", start=start).step

    assert train(StartMode.NEW) == 4
    with pytest.raises(RunError, match="exists"):
        train(StartMode.NEW)
    assert train(StartMode.REPLACE, seed=5) == 4
    assert chargpt.load_run(out).config.seed == 5
    longer = {"seed": 5, "train.max_steps": 6}
    assert train(StartMode.NEW_OR_RESUME, **longer) == 6
    assert train(StartMode.NEW_OR_RESUME, **longer) == 6  # no steps are left
    resumed = chargpt.train(out, settings={"train.max_steps": 8}, start=StartMode.RESUME)
    assert resumed.step == 8
    with pytest.raises(ConfigError, match="start='new or resume'"):
        chargpt.train(out, config="gpt", start=StartMode.RESUME)


def test_run_logits_have_one_row_per_character(tiny_run: chargpt.Run) -> None:
    logits = tiny_run.logits("The sea")
    assert logits.shape == (7, tiny_run.tokenizer.vocab_size)
    assert torch.allclose(tiny_run.logits("The")[-1], logits[2], atol=1e-5)
    for text, message in (("x" * 17, "block size"), ("", "0 characters")):
        with pytest.raises(TextError, match=message):
            tiny_run.logits(text)


def test_a_model_takes_the_ids_of_its_tokenizer(tiny_run: chargpt.Run) -> None:
    ids = torch.from_numpy(tiny_run.tokenizer.encode("The light"))
    assert ids.dtype == torch.uint8
    logits = tiny_run.model(ids[None])
    for dtype in (torch.int16, torch.int32, torch.int64, torch.uint16):
        assert torch.equal(tiny_run.model(ids[None].to(dtype)), logits)
    assert torch.equal(tiny_run.model(tiny_run.tokenizer.encode("The light")[None]), logits)
    assert torch.equal(logits[0], tiny_run.logits("The light"))


def test_a_text_in_memory_trains_evaluates_and_resumes(verse: Path, tmp_path: Path) -> None:
    out, text = tmp_path / "run", verse.read_text(encoding="utf-8")
    run = chargpt.train(text=text, settings=TINY, out=out, device="cpu")
    other = chargpt.train(verse, settings=TINY, out=tmp_path / "other", device="cpu")
    assert run.state.text_name == "text in memory"
    assert chargpt.evaluate(run).nats_per_char == chargpt.evaluate(other).nats_per_char
    resumed = chargpt.train(out, settings={"train.max_steps": 6}, start=StartMode.RESUME)
    assert resumed.step == 6
    with pytest.raises(ConfigError, match="not both"):
        chargpt.train(verse, text=text)
    for mistaken in (text, "x" * 5000):
        with pytest.raises(ConfigError, match="give it as text="):
            chargpt.train(mistaken)
    with pytest.raises(TextError, match="lone surrogate at index 3"):
        chargpt.train(text="abc\ud800", settings=TINY, out=tmp_path / "bad")


def test_another_text_is_evaluated_and_its_path_is_not_taken_for_it(
    tiny_run: chargpt.Run, tmp_path: Path
) -> None:
    path, text = tmp_path / "other.txt", "the light, the sea"
    path.write_text(text)
    assert chargpt.evaluate(tiny_run, text=text) == chargpt.evaluate(tiny_run, path=path)
    with pytest.raises(ConfigError, match="give one of path, text and tokens"):
        chargpt.evaluate(tiny_run, path=path, text=text)
    with pytest.raises(TextError, match="is a file, not a text; give its content"):
        chargpt.evaluate(tiny_run, text=str(path))
    with pytest.raises(TextError, match="is a file, not a text"):
        chargpt.train(text=str(path))
    with pytest.raises(TextError, match=r"expected a string .* the file as path="):
        chargpt.evaluate(tiny_run, text=path)  # type: ignore[arg-type]


def test_pieces_are_streamed_as_they_are_sampled(tiny_run: chargpt.Run) -> None:
    pieces = chargpt.stream(tiny_run, prompt="The ", length=20, seed=1)
    first = next(pieces)
    assert len(first) == 1
    (text,) = chargpt.sample(tiny_run, prompt="The ", length=20, seed=1)
    assert "The " + first + "".join(pieces) == text
    pieces = chargpt.stream(tiny_run, prompt="The ", length=20, seed=1, stop=[text[10:12]])
    assert all(pieces)  # none while a stop string is unfinished, nor one at it
    with pytest.raises(ConfigError, match=r"heat is not an argument; there are run, options, "):
        chargpt.stream(tiny_run, heat=1)


def test_a_trainer_without_a_folder_trains_but_does_not_save(verse: Path) -> None:
    config = chargpt.load_config("gpt", TINY)
    trainer = chargpt.Trainer(config, chargpt.load_corpus(TextConfig(path=str(verse))))
    assert [report.step for report in trainer.steps()][-1] == 4
    with pytest.raises(RunError, match="no folder to save in; create it with folder="):
        trainer.save()


def test_threads_train_what_their_seeds_say(verse: Path) -> None:
    text = verse.read_text(encoding="utf-8")[:8000]
    given = TINY | {"model.dropout": 0.2, "model.n_layer": 3, "threads": 1, "train.max_steps": 12}

    def losses(_: object) -> list[float]:
        trainer = chargpt.Trainer(chargpt.load_config("gpt", given), chargpt.load_corpus(text=text))
        return [float(each.loss) for each in trainer.steps() if each.loss is not None]

    alone = losses(None)
    with ThreadPoolExecutor(4) as pool:
        assert all(each == alone for each in pool.map(losses, range(4)))


def test_a_folder_stands_for_its_run(tiny_run: chargpt.Run) -> None:
    folder = str(tiny_run.folder)
    assert chargpt.evaluate(folder) == chargpt.evaluate(tiny_run)
    assert chargpt.sample(folder, length=20, seed=1) == chargpt.sample(tiny_run, length=20, seed=1)
    assert list(chargpt.stream(folder, length=5, seed=1))
    assert repr(tiny_run).startswith(f"Run({folder!r}, gpt, ")
    assert "\n" not in repr(tiny_run)


def test_runs_and_results_show_themselves_in_a_notebook(
    verse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Mock()
    monkeypatch.setattr("chargpt.analysis.compare.notebook_view", lambda: shown)
    text, folder = tmp_path / "<b>&.txt", tmp_path / "<i>"
    text.write_text(verse.read_text(encoding="utf-8")[:8000], encoding="utf-8")
    compared = chargpt.compare(text, settings=TINY, out=folder, device="cpu", models=["gpt"])
    assert shown.show_plan.call_count == 1
    assert chargpt.compare(folder / "gpt").rows[-1].parameters == compared.rows[-1].parameters
    again = {"settings": TINY, "out": folder, "device": "cpu", "models": ["gpt"]}
    with pytest.raises(ConfigError, match="continue the comparison with start='resume'"):
        chargpt.compare(text, **again)
    assert chargpt.compare(text, **again, start="resume").rows == compared.rows
    run = chargpt.load_run(folder / "gpt", device="cpu")
    result = chargpt.evaluate(run)
    loss = f"{result.nats_per_char:.4f}"
    assert repr(result).startswith(f"Evaluation({loss} nats/char, ")
    assert repr(compared).startswith("Comparison('<b>&.txt', nats/char: uniform ")
    assert f"gpt (trained) {compared.rows[-1].nats_per_char:.4f}" in str(compared)
    assert loss in result._repr_html_()
    for page in (run._repr_html_(), compared._repr_html_()):
        assert "&lt;b&gt;&amp;.txt" in page
        assert "<b>" not in page
        assert "<i>" not in page
        assert "<svg" in page
        assert "<style" not in page  # it would hold for the whole notebook
    (run.folder / "metrics.jsonl").unlink()
    (run.folder / "metrics.jsonl").mkdir()  # unreadable
    assert f"{run.model.num_parameters():,}" in run._repr_html_()


def test_mistakes_in_a_call_are_said_in_a_sentence(tiny_run: chargpt.Run) -> None:
    api: Any = chargpt  # the calls are wrong also by their types
    for message, call in (
        (
            "^protocol: expected 'blocks', 'sliding' or 'nanogpt'",
            lambda: api.evaluate(tiny_run, protocol="fast"),
        ),
        ("^split: .*'val' or 'test' .it is 'dev'", lambda: api.evaluate(tiny_run, "dev")),
        ("^split: .* 'val' or 'test'", lambda: api.compare([tiny_run], split="train")),
        ("^unknown: .* 'error', ", lambda: api.score(tiny_run, "The", unknown="drop")),
        ("at least 1 .it is 0", lambda: api.evaluate(tiny_run, max_characters=0)),
        ("at least 1 .it is -5", lambda: api.evaluate(tiny_run, max_characters=-5)),
        ("at least 0 .it is -1", lambda: api.evaluate(tiny_run, protocol="nanogpt", seed=-1)),
        ("fractional part", lambda: api.evaluate(tiny_run, protocol="sliding", stride=0.5)),
        ("expected a number .it is '10'", lambda: api.evaluate(tiny_run, max_characters="10")),
        ("^seeds: expected at least 1", lambda: api.compare(text="a" * 99, seeds=0)),
        ("expected a function .it is 3", lambda: api.train(on_report=3)),
        ("expected a function .it is 'a'", lambda: api.sample(tiny_run, on_progress="a")),
        ("^seeds, several values .* a budget", lambda: api.compare(budget=9, seeds=2)),
        ("^models names no model", lambda: api.compare(models=" , ")),
        ("no config .{'seed': 1}", lambda: api.load_config({"seed": 1})),
        ("give only them", lambda: api.compare([tiny_run], models=["gpt"])),
        ("by name, as in sample", lambda: api.sample(tiny_run, "The ")),
        ("by name, as in sample", lambda: api.sample(tiny_run, {"temperature": 1})),
        ("there is no file", lambda: api.load_corpus("nowhere.txt")),
        (r"give chargpt\.with_mixture\(run\) as", lambda: api.stream(tiny_run, mixture=True)),
        ("'force' is not one of 'new', 'resume'", lambda: api.train(start="force")),
        ("has no mixture", lambda: api.with_mixture(tiny_run.folder)),
        ("expected", lambda: api.sample(7)),
        ("expected", lambda: api.evaluate(None)),
        ("expected", lambda: api.Run.logits(tiny_run, 3)),
        ("expected", lambda: api.Run.logits(tiny_run, ["a"])),
        ("expected", lambda: api.train(text=b"abc")),
        ("expected", lambda: api.train(settings=["seed=1"])),
    ):
        with pytest.raises(chargpt.ChargptError, match=message):
            call()
