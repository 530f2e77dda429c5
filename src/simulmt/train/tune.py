"""Tune blank penalties and collect the target lexicon for a CTC bundle."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from simulmt.data.dataset import Dataset
from simulmt.model.ctc import CTCModel
from simulmt.runtime.rules import NO_RULES, DecodingRules, frequent_words
from simulmt.train.batches import DeviceStore
from simulmt.train.decode import scores_by_blank_penalty

# Candidates for the penalty on the blank's logit; the more confident a model, the larger its best penalty.
BLANK_PENALTIES = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0)


def tune_blank_penalties(
    model: CTCModel,
    dataset: Dataset,
    delays: Sequence[int],
    rules: DecodingRules = NO_RULES,
    report: Callable[[str], None] = lambda _: None,
) -> tuple[float, ...]:
    """Return, for each delay, the blank penalty with the best BLEU on the development set; ties go to the smallest.

    `rules` are those that the bundle will decode with.
    """
    dev = DeviceStore(dataset.dev, torch.device("cpu"))
    chosen = []
    for delay in delays:
        scores = scores_by_blank_penalty(
            model, dev, delay, BLANK_PENALTIES, dataset.dev_references, dataset.target_tokenizer, rules=rules
        )
        chosen.append(max(scores, key=lambda penalty: (scores[penalty], -penalty)))
        shown = ", ".join(f"{penalty:g}: {score:.2f}" for penalty, score in scores.items())
        report(f"k={delay}: development BLEU by blank penalty {shown}")
    return tuple(chosen)


def target_lexicon(dataset: Dataset) -> list[str]:
    """Return the words that are too frequent in the training targets to be errors.

    Targets without spaces have no lexicon: their Latin words are copied from the source, whose words are always known,
    and a list would admit any prefix of its entries.
    """
    if not dataset.target_tokenizer.spaced:
        return []
    decode, train = dataset.target_tokenizer.decode, dataset.train
    return frequent_words(decode(train.pair(index)[1].tolist()) for index in range(len(train)))
