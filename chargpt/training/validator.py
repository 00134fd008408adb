"""Validation during training: losses and samples, of the averaged weights if `train.ema` is on."""

from chargpt.config import Config
from chargpt.inference.evaluation import Evaluation, evaluate_tokens
from chargpt.text.corpus import Corpus, Split
from chargpt.text.display import end_sign
from chargpt.training.learner import Learner

SAMPLE_LENGTH = 200  # characters
N_DOCUMENTS = 5  # per sample, of a list of documents


class Validator:
    """Evaluates and samples a model while it trains; with EMA, its averaged weights."""

    def __init__(self, learner: Learner, corpus: Corpus, config: Config) -> None:
        self.learner, self.corpus = learner, corpus
        length = min(SAMPLE_LENGTH, config.sample.length)
        number = N_DOCUMENTS if corpus.tokenizer.eos_token else 1
        update = {"length": length, "num_samples": number, "seed": config.seed}
        self.sampling = config.sample.model_copy(update=update)

    def evaluate(self, split: Split, max_tokens: int | None = None) -> Evaluation:
        """Return the loss on a split, or on evenly spread blocks of `max_tokens` in all."""
        with self.learner.with_ema_weights():
            return evaluate_tokens(
                self.learner.model,
                self.corpus.split(split),
                split=split,
                max_tokens=max_tokens,
                dtype=self.learner.dtype,
            )

    def sample(self) -> str:
        """Return a short text, or some documents, generated with the run's sampling settings."""
        from chargpt.inference.generation import stream_pieces

        tokenizer, options = self.corpus.tokenizer, self.sampling
        prompt = tokenizer.encode(tokenizer.eos_token + options.prompt, unknown="replace")
        with self.learner.with_ema_weights():
            pieces = stream_pieces(
                self.learner.model,
                tokenizer,
                prompt,
                options,
                unigram=lambda: self.corpus.token_counts("train"),
            )
            texts = ["".join(each) for each in zip(*pieces, strict=True)]
        signs = [end_sign(len(text), options.length, tokenizer.eos_token) for text in texts]
        return "\n".join(
            options.prompt + text + sign for text, sign in zip(texts, signs, strict=True)
        )
