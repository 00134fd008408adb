"""A run that is planned for a time budget and fitted to what is left of it."""

import math
from dataclasses import dataclass, replace

from chargpt.config import Config
from chargpt.device import ThreadTuner, choose_device, default_threads, measure_threads
from chargpt.log import logger
from chargpt.text.corpus import MAX_MIXTURE_FRACTION, Corpus
from chargpt.training.deadline import MIN_STEPS, Deadline, mixture_seconds, scoring_seconds
from chargpt.training.mixing import MIN_CHARACTERS
from chargpt.training.pace import Pace, replanned_config
from chargpt.training.planner import RECIPE, Plan, plan
from chargpt.training.trials import Trials

MAX_MIXTURE_TIME = 0.2  # fraction of the remaining time: if fitting takes longer, no mixture


@dataclass(frozen=True)
class PlannedBudget:
    """A run that was planned for a deadline.

    Attributes:
        plan: of the run.
        deadline: of the command.
        token_seconds: measured time of scoring a token.
        may_shrink: whether the user has set the size of the model.
        thread_tuner: None leaves the number of threads as it is.
    """

    plan: Plan
    deadline: Deadline
    token_seconds: float
    may_shrink: bool = False
    thread_tuner: ThreadTuner | None = None


def plan_run(
    config: Config,
    corpus: Corpus,
    deadline: Deadline,
    fixed_keys: frozenset[str],
    thread_tuner: ThreadTuner | None = None,
) -> tuple[PlannedBudget, Corpus]:
    """Return the plan of a run for a deadline, and the corpus with its mixture split.

    The user has set the dotted keys `fixed_keys`. Errors are those of `plan`.
    """
    config = with_mixture_split(config, corpus, deadline, fixed_keys)
    corpus = replace(corpus, settings=config.text)
    if len(corpus.split("mixture")):
        seconds = deadline.scoring_seconds + mixture_seconds(corpus, deadline.slowdown)
        deadline = replace(deadline, scoring_seconds=seconds)
    trials = Trials(corpus)
    planned = plan(config, corpus, deadline, fixed_keys, trials)
    may_shrink = not planned.size_was_chosen and config.model.kind == "gpt"
    may_shrink = may_shrink and config.train.from_run is None
    seconds = trials.measure_scoring()
    return PlannedBudget(planned, deadline, seconds, may_shrink, thread_tuner), corpus


def with_mixture_split(
    config: Config, corpus: Corpus, deadline: Deadline, fixed_keys: frozenset[str]
) -> Config:
    """Return the config with a mixture split, unless the user has fixed its length.

    There is none, which is logged, if the text is too short for it, or if fitting the mixture would
    take too much of the time that is left.
    """
    key = "text.mixture_characters"
    if key in fixed_keys or config.model.kind != "gpt":
        return config
    seconds, remaining = mixture_seconds(corpus, deadline.slowdown), deadline.remaining
    with_split = corpus.with_settings(mixture_characters=RECIPE.mixture_characters)
    max_fraction = 2 * MAX_MIXTURE_FRACTION  # of a split that ends with a whole document
    if MAX_MIXTURE_FRACTION * corpus.n_characters < MIN_CHARACTERS:
        logger.warning(
            f"without a mixture: {MAX_MIXTURE_FRACTION:.0%} of the text is too little to fit "
            "its weights to"
        )
    elif seconds > MAX_MIXTURE_TIME * remaining:
        logger.warning(
            f"without a mixture: fitting one would take about {seconds:.1f} s, over "
            f"{MAX_MIXTURE_TIME:.0%} of the {max(0.0, remaining):.1f} s that are left; "
            "give a longer --budget"
        )
    elif len(with_split.split("mixture")) > max_fraction * len(corpus.tokens):
        logger.warning(
            "without a mixture: its split, of whole documents, would be over "
            f"{max_fraction:.0%} of the text; -s {key}=20000 makes one all the same"
        )
    else:
        return config.with_values({key: RECIPE.mixture_characters})
    return config


def fit_to_deadline(
    budget: PlannedBudget, config: Config, corpus: Corpus
) -> tuple[Config, Pace, float]:
    """Return config and pace of a planned run, and the expected time of its steps, in seconds.

    Time for scoring at the end is reserved. A budget that is too short for the fewest useful steps
    is extended, which is logged, or an OperationError says how much it lacks.
    """
    deadline, train, step_seconds = budget.deadline, config.train, budget.plan.step_seconds
    scoring = scoring_seconds(deadline, corpus, config, budget.token_seconds)
    deadline = replace(deadline, scoring_seconds=scoring)
    n_scored = min(train.evaluation_tokens, len(corpus.split("val")))
    validation_seconds = budget.token_seconds * n_scored
    n_steps = min(MIN_STEPS, train.max_steps)
    validations = (math.ceil(n_steps / train.evaluate_every) + 1) * validation_seconds
    missing = deadline.missing_seconds(
        n_steps, n_steps * step_seconds + validations, may_shrink=budget.may_shrink
    )
    deadline = deadline.extended(missing)
    if deadline.extension:
        logger.warning(deadline.announcement(n_steps))
        remaining = deadline.remaining - validations
        config = replanned_config(config, 0, step_seconds, remaining)
    planned_seconds = config.train.max_steps * step_seconds / RECIPE.initial_fraction
    pace = Pace(
        deadline,
        step_limit=budget.plan.step_limit,
        validation_seconds=validation_seconds,
        thread_tuner=budget.thread_tuner,
    )
    return config, pace, min(deadline.remaining, planned_seconds + validations)


def with_measured_threads(config: Config) -> tuple[Config, ThreadTuner | None]:
    """Return the config with the number of CPU threads that is fastest now, unless it is fixed.

    If it was measured, so is what measures it again.
    """
    max_threads = default_threads()
    device, _ = choose_device(config.device)
    threads = measure_threads(device) if config.threads is None else None
    if threads is None:
        return config, None
    return config.with_values({"threads": threads}), ThreadTuner(max_threads)
