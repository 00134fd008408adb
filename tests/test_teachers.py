"""Students: runs whose targets are the mean probabilities of other runs."""

import shutil
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY, Cli, refusal
from shared_runs import MIXED_SETTINGS, QUICK

import chargpt
from chargpt.config import Config, load_config
from chargpt.distributed import RankGroup
from chargpt.models.ensemble import Member
from chargpt.store.run import load_run
from chargpt.text.corpus import Corpus
from chargpt.text.prepare import load_corpus
from chargpt.training.api import new_request
from chargpt.training.deadline import Deadline
from chargpt.training.learner import Learner
from chargpt.training.planner import Planner

TEXT = REPOSITORY / "data" / "lighthouse.txt"


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs on the verse, with blocks of 32 and of 8; do not write into them."""
    folder = tmp_path_factory.mktemp("teachers")
    for name, block_size in (("wide", 32), ("narrow", 8)):
        settings = {**MIXED_SETTINGS, "seed": block_size, "model.block_size": block_size}
        chargpt.train(TEXT, settings=settings, out=folder / name)
    return [folder / "wide", folder / "narrow"]


def student_of(teachers: list[Path], **values: object) -> tuple[Learner, Config, Corpus]:
    settings = {**MIXED_SETTINGS, "text.path": str(TEXT), "text.mixture_characters": 0}
    paths = tuple(map(str, teachers))
    config = load_config("gpt", {**settings, "train.teachers": paths, **values})
    corpus = load_corpus(config.text)
    return Learner(config, corpus, RankGroup(), torch.device("cpu")), config, corpus


@pytest.mark.parametrize("ngram_weight", [0.0, 0.6])
def test_the_objective_holds_the_mean_probabilities_of_the_teachers(
    teachers: list[Path], ngram_weight: float
) -> None:
    values = {"train.teacher_weight": 0.7, "train.ngram_target_weight": ngram_weight}
    student, config, corpus = student_of(teachers, **values)
    alone = Learner(
        config.with_values({"train.teachers": ()}), corpus, RankGroup(), torch.device("cpu")
    )
    for model in (student.model, alone.model):
        torch.manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    batch = student.batches.at(0)[:, :9]  # the blocks of the narrow teacher
    objective, loss = student.objective(batch)
    without, plain_loss = alone.objective(batch)
    inputs = batch[:, :-1]
    runs = [load_run(path, device="cpu") for path in teachers]
    with torch.no_grad():
        probs = sum(run.model(inputs).softmax(dim=-1) for run in runs) / len(runs)
        log_probs = student.model(inputs).log_softmax(dim=-1)
    expected = 0.3 * without - 0.7 * (probs * log_probs).sum(dim=-1).mean()
    assert loss.item() == pytest.approx(plain_loss.item())
    assert objective.item() == pytest.approx(expected.item(), rel=1e-5)
    assert abs(objective.item() - without.item()) > 1e-3


def test_teachers_that_another_trial_has_loaded_are_moved_to_the_device(
    teachers: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    student, config, corpus = student_of(teachers)
    assert student.teachers is not None
    moved = list[object]()
    monkeypatch.setattr(Member, "to", lambda model, device: moved.append((model, device)))
    cpu = torch.device("cpu")
    Learner(config, corpus, RankGroup(), cpu, teachers=student.teachers)
    assert moved == [(model, cpu) for model in student.teachers.models]


def test_a_student_learns_what_its_teachers_predict(teachers: list[Path], tmp_path: Path) -> None:
    student, _, corpus = student_of(teachers)

    def divergence(run: chargpt.Run) -> float:
        batch = student.batches.at(99)[:, :-1]
        with torch.no_grad():
            _, probs = student.soft_targets(batch)[-1]
            log_probs = run.model(batch).log_softmax(dim=-1)
        return float((probs * (probs.log() - log_probs)).sum(dim=-1).mean())

    shared = {**MIXED_SETTINGS, "text.mixture_characters": 0, "train.max_steps": 80}
    divergences = []
    for name, paths in (("plain", ()), ("student", teachers)):
        settings = {**shared, "train.teachers": list(map(str, paths)), "train.teacher_weight": 1}
        divergences.append(divergence(chargpt.train(TEXT, settings=settings, out=tmp_path / name)))
    assert len(corpus.split("train")) > 32
    assert divergences[1] < 0.7 * divergences[0]


def test_a_resumed_student_ends_with_the_same_weights_and_needs_the_same_teachers(
    teachers: list[Path], cli: Cli
) -> None:
    for path in teachers:
        shutil.copytree(path, path.name)
    given = "-s", "train.teachers=[wide, narrow]", "-s", "train.ngram_target_weight=0.6"
    train = ("train", TEXT, *QUICK, *given)
    assert cli(*train, "--out", "whole").returncode == 0
    assert cli(*train, "--out", "parts").returncode == 0
    # so that a resume elsewhere finds them
    saved = load_config("parts/config.yaml").train.teachers
    assert saved == tuple(str(Path(name).absolute()) for name in ("wide", "narrow"))
    last = Path("parts/checkpoints/step-00000006")
    shutil.rmtree(last)
    resume = ("train", "--resume", "parts")
    Path("narrow").rename("moved")
    assert "narrow" in refusal(cli(*resume))
    shutil.copytree("wide", "narrow")
    for other in ("[wide, narrow]", "[]", "[wide]", "[moved, wide]"):
        message = refusal(cli(*resume, "-s", f"train.teachers={other}"))
        assert "train.teachers are not those that the run was started with" in message
    done = cli(*resume, "-s", "train.teachers=[wide, moved]")
    assert done.returncode == 0, done.stderr
    weights = last / "model.safetensors"
    whole = Path("whole/checkpoints/step-00000006/model.safetensors")
    assert weights.read_bytes() == whole.read_bytes()


def test_a_teacher_that_lacks_characters_of_the_text_is_rejected(
    teachers: list[Path], cli: Cli
) -> None:
    Path("other.txt").write_text("ß" * 50 + TEXT.read_text(encoding="utf-8"), encoding="utf-8")
    message = refusal(cli("train", "other.txt", *QUICK, "-s", f"train.teachers=[{teachers[0]}]"))
    assert f"{teachers[0]} of train.teachers lacks characters of the text, such as ß" in message
    assert not Path("runs").exists()
    # characters of a base run that the text lacks need no teacher
    base = ("-s", "text.extra_characters=ß", "--out", "base")
    assert cli("train", TEXT, *QUICK, *base).returncode == 0
    given = ("--from", "base", "-s", f"train.teachers=[{teachers[0]}]")
    done = cli("train", TEXT, *QUICK, "-s", "text.mixture_characters=800", *given, "--out", "tuned")
    assert done.returncode == 0, done.stderr


def test_a_teacher_that_may_have_seen_the_validation_split_is_named(
    teachers: list[Path], cli: Cli
) -> None:
    same = "text.mixture_characters=800"
    for setting in (same, f"{same} text.val_fraction=0.2", "text.mixture_characters=0"):
        given = [word for each in setting.split() for word in ("-s", each)]
        given += ["-s", f"train.teachers={teachers[0]}", "--force", "--out", "run"]
        done = cli("train", TEXT, *QUICK, *given)
        assert done.returncode == 0, done.stderr
        is_named = f"{teachers[0]} of train.teachers had another text" in done.stderr
        assert is_named == (setting != same)


def test_a_comparison_has_plain_baselines_and_is_resumed(teachers: list[Path], cli: Cli) -> None:
    shutil.copytree(teachers[0], "wide")
    command = ("compare", TEXT, *QUICK, "-s", "train.teachers=[wide]", "--out", "compared")
    done = cli(*command)
    assert done.returncode == 0, done.stderr
    configs = Path("compared").glob("*/config.yaml")
    assert sorted("wide" in path.read_text() for path in configs) == [False, True]
    assert cli(*command, "--resume").returncode == 0


def test_a_student_has_the_default_budget_and_no_dropout(teachers: list[Path]) -> None:
    request = new_request(TEXT, None, None, {"train.teachers": teachers}, None, None, None, None)
    assert request.deadline()[0] is not None
    config, _ = request.resolved
    corpus = load_corpus(config.text)
    dropout = []
    for given in (config.train.teachers, ()):
        planned = Planner(
            config.with_values({"train.teachers": given}),
            corpus,
            Deadline.from_budget(3600.0),
            (),
            lambda config, seconds: 1e5,
        ).plan()
        dropout.append(planned.config.model.dropout)
    assert dropout[0] == 0 < dropout[1]
