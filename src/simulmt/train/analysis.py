"""Translate with a model in training, to validate it, and analyse its sorting network.

Validation translates whole sentences in batches and still scores what a live stream would have written: a causal
encoder gives the same states whether it reads a sentence at once or word by word.

Analyses of the sorting network (oracle order, heat maps of Z, word alignments) need the reference: they explain a model
but do not translate. Their results are plain arrays.

Axis letters: B batch, S source with END, T target with END, U = S * mu frames, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import sacrebleu
import sentencepiece
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from simulmt.config import require
from simulmt.data.alignment import Link
from simulmt.data.store import Dataset
from simulmt.errors import CheckpointError
from simulmt.model.asn import SortedCTCModel, SortingStatistics
from simulmt.model.beam import BeamConfig, beam_search
from simulmt.model.ctc import CTCModel
from simulmt.model.layers import Batch
from simulmt.model.seq2seq import Seq2SeqModel, proportional_rates
from simulmt.model.transducer import TransducerModel
from simulmt.text import BLANK, END, PAD, Tokenizer
from simulmt.train.batches import DeviceStore
from simulmt.train.systems import InferenceModel, check_vocabularies, evaluation_mode, load_model

GREEDY = BeamConfig(beam=1, length_penalty=0.0, reads_on=True)
# Candidates for the penalty on the blank's logit; the more confident a model, the larger its best penalty.
_BLANK_PENALTIES = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0)
BATCH_TOKENS = 1024  # source tokens in one forward pass; its logits over 32,000 pieces take a quarter of a gigabyte
BLANK_LABEL = "·"  # of a blank frame

FloatArray = NDArray[np.float32]
Words = Sequence[str]
_Pieces = Sequence[tuple[int, list[int]]]  # tokens of a sentence without END, and the 1-based words each is part of


@torch.inference_mode()
def translate_store(
    model: InferenceModel,
    store: DeviceStore,
    delay: int | None,
    batch_tokens: int = 16_384,
    blank_penalty: float = 0.0,
    shard: tuple[int, int] = (0, 1),
) -> dict[int, list[int]]:
    """Return target ids by sentence number; with shard (i, n), of every n-th batch starting at the i-th."""
    results: dict[int, list[int]] = {}
    with evaluation_mode(model):
        for number, (rows, batch) in enumerate(store.by_length(batch_tokens)):
            if number % shard[1] == shard[0]:
                hypotheses = translate_batch(model, batch, delay, blank_penalty)
                results.update(zip(rows.tolist(), hypotheses, strict=True))
    return results


def translate_batch(
    model: InferenceModel, batch: Batch, delay: int | None, blank_penalty: float = 0.0
) -> list[list[int]]:
    """Return greedy target ids of a batch; `blank_penalty` is subtracted from the blank's logit."""
    if isinstance(model, TransducerModel):
        frames = model.frames(model.encode(batch.source, batch.source_lengths, delay or 1))
        rows, lengths = model.write(frames, blank_penalty)[:, 0].tolist(), (batch.source_lengths * model.mu).tolist()
        # Unlike CTC, a transducer does not collapse repeated symbols.
        return [[symbol for symbol in row[:n] if symbol != BLANK] for row, n in zip(rows, lengths, strict=True)]
    if isinstance(model, CTCModel):
        logits = model(batch.source, batch.source_lengths, delay or 1)
        logits[:, :, BLANK] -= blank_penalty
        return collapse(logits.argmax(-1), (batch.source_lengths * model.mu).tolist())
    # Layers are compiled for training batches; beam search has other shapes at every step and would recompile.
    eager = torch.compiler.set_stance("force_eager") if batch.source.is_cuda else nullcontext()
    with eager:
        searched = beam_search(model, batch.source, batch.source_lengths, GREEDY, delay)
    return [hypotheses[0].tokens for hypotheses in searched]


@torch.inference_mode()
def scores_by_blank_penalty(
    model: CTCModel,
    store: DeviceStore,
    delay: int,
    penalties: Sequence[float],
    references: Sequence[Sequence[str]],
    tokenizer: Tokenizer,
    batch_tokens: int = 4096,
) -> dict[float, float]:
    """Return the greedy BLEU of a store for every blank penalty, from one forward pass.

    A transducer needs one pass per penalty, because its symbols depend on each other.
    """
    if isinstance(model, TransducerModel):
        found = {penalty: translate_store(model, store, delay, batch_tokens, penalty) for penalty in penalties}
        return {
            penalty: bleu([tokenizer.decode(ids[row]) for row in range(len(store))], references, tokenizer)
            for penalty, ids in found.items()
        }
    texts: dict[float, dict[int, str]] = {penalty: {} for penalty in penalties}
    for rows, batch in store.by_length(batch_tokens):
        logits = model(batch.source, batch.source_lengths, delay)
        blank = logits[:, :, BLANK].clone()
        logits[:, :, BLANK] = -torch.inf
        best, symbols = logits.max(-1)
        for penalty, translated in texts.items():
            written = symbols.masked_fill(blank - penalty > best, BLANK)
            for row, ids in zip(rows, collapse(written, (batch.source_lengths * model.mu).tolist()), strict=True):
                translated[int(row)] = tokenizer.decode(ids)
    in_order = {penalty: [translated[row] for row in range(len(store))] for penalty, translated in texts.items()}
    return {penalty: bleu(hypotheses, references, tokenizer) for penalty, hypotheses in in_order.items()}


def collapse(symbols: Tensor, frame_lengths: Sequence[int]) -> list[list[int]]:
    """Collapse repeated symbols and drop blanks."""
    frames: NDArray[np.int64] = symbols.cpu().numpy()
    changed = np.ones_like(frames, dtype=bool)
    changed[:, 1:] = frames[:, 1:] != frames[:, :-1]
    counts = changed & (frames != BLANK)
    return [row[:n][kept[:n]].tolist() for row, kept, n in zip(frames, counts, frame_lengths, strict=True)]


def bleu(hypotheses: Sequence[str], references: Sequence[Sequence[str]], tokenizer: Tokenizer) -> float:
    """Return lower-cased corpus BLEU; text without spaces is scored by characters."""
    metric = sacrebleu.BLEU(lowercase=True, tokenize="13a" if tokenizer.spaced else "zh", force=True)
    return float(metric.corpus_score(list(hypotheses), [list(each) for each in references]).score)


def tune_blank_penalties(
    model: CTCModel,
    dataset: Dataset,
    delays: Sequence[int],
    report: Callable[[str], None] = lambda _: None,
) -> tuple[float, ...]:
    """Return, for each delay, the blank penalty with the best BLEU on the development set; ties go to the smallest."""
    dev = DeviceStore(dataset.dev, torch.device("cpu"))
    chosen = []
    for delay in delays:
        scores = scores_by_blank_penalty(
            model, dev, delay, _BLANK_PENALTIES, dataset.dev_references, dataset.target_tokenizer
        )
        chosen.append(max(scores, key=lambda penalty: (scores[penalty], -penalty)))
        shown = ", ".join(f"{penalty:g}: {score:.2f}" for penalty, score in scores.items())
        report(f"k={delay}: development BLEU by blank penalty {shown}")
    return tuple(chosen)


@dataclass(frozen=True, eq=False)
class Sorter:
    """A trained CTC+ASN model, its vocabularies and the delays it was trained for."""

    model: SortedCTCModel
    source: Tokenizer
    target: Tokenizer
    delays: tuple[int, ...]

    @staticmethod
    def load(run: Path, data: Path | None = None, device: torch.device | None = None) -> Sorter:
        """Load a finished run; `data` overrides its data directory."""
        model, config = load_model(run)
        if not isinstance(model, SortedCTCModel):
            raise CheckpointError(f"{run}: a '{config.system}' model has no sorting network; train with ctc+asn")
        if isinstance(model.translator, TransducerModel):
            raise CheckpointError(f"{run}: analyses decode CTC, without a label context; train with ctc+asn")
        data = _data_directory(run) if data is None else data
        source, target = Tokenizer.load(data / "source.model"), Tokenizer.load(data / "target.model")
        check_vocabularies(run, config, data, source, target)
        return Sorter(model.to(device).eval(), source, target, config.delays)

    def delay_or_default(self, delay: int | None) -> int:
        """Return `delay` after checking that the model was trained for it, or the smallest one for None."""
        delay = min(self.delays) if delay is None else delay
        trained = ", ".join(map(str, self.delays))
        require(delay in self.delays, f"delay {delay}: the model was trained for {trained}")
        return delay

    def encode(self, source: str, target: str) -> tuple[list[int], list[int]]:
        """Encode a pair, each side with END."""
        return [*self.source.encode(source), END], [*self.target.encode(target), END]


class Sorting(NamedTuple):
    """Sorting of one sentence: row r of Z weights the source tokens that form output position r."""

    source: list[int]
    target: list[int]
    Z: FloatArray
    path: list[int] | None  # target token of each frame, from 1, 0 for blank; None if the target does not fit
    mu: int


class HeatMap(NamedTuple):
    """Z with labels: source pieces for columns, target pieces for rows."""

    Z: FloatArray
    columns: list[str]
    rows: list[str]


class OracleOrder(NamedTuple):
    """Translations in oracle order and, with the same settings, in source order."""

    oracle: list[str]
    default: list[str]
    statistics: SortingStatistics


@torch.inference_mode()
def oracle_order(
    sorter: Sorter, pairs: Sequence[tuple[str, str]], delay: int, blank_penalty: float = 0.0
) -> OracleOrder:
    """Translate with states sorted by the Z of the references, and with Z = identity."""
    encoded = [sorter.encode(*pair) for pair in pairs]
    translator = sorter.model.translator
    results: list[list[str]] = [[""] * len(pairs), [""] * len(pairs)]
    matrices = []
    for numbers, lengths, H, Z in _batches(sorter, encoded, delay):
        matrices.append((Z, lengths))
        frames = (lengths * translator.mu).tolist()
        for texts, states in zip(results, (Z.to(H.dtype) @ H, H), strict=True):
            logits = translator.logits(translator.frames(states))
            logits[:, :, BLANK] -= blank_penalty
            for number, tokens in zip(numbers, collapse(logits.argmax(-1), frames), strict=True):
                texts[number] = sorter.target.decode(tokens)
    oracle, default = results
    return OracleOrder(oracle, default, SortingStatistics.of(matrices))


@torch.inference_mode()
def sorting_statistics(
    model: SortedCTCModel, store: DeviceStore, delay: int, batch_tokens: int = 4096
) -> SortingStatistics:
    """Measure the distance of Z from the identity on a token store."""
    batches = store.by_length(batch_tokens)
    with evaluation_mode(model):
        return SortingStatistics.of((model.sort(each, delay)[1], each.source_lengths) for _, each in batches)


def explained_variance(
    model: Seq2SeqModel, store: DeviceStore, delays: Sequence[int], proportional: bool, batch_tokens: int = 4096
) -> float:
    """Return the percentage of the variance of stability that the policy explains on a token store."""
    assert model.policy is not None, "a model without a policy"
    predicted, found = [], []
    with evaluation_mode(model), torch.no_grad():
        for delay, (_, batch) in product(delays, list(store.by_length(batch_tokens))):
            states, stability = model.stability(batch, delay, proportional_rates(batch) if proportional else None)
            predicted.append(model.policy(states).float().sigmoid())
            found.append(stability)
    errors, stability = torch.cat(predicted) - torch.cat(found), torch.cat(found)
    return 100 * float(1 - errors.square().mean() / stability.var(unbiased=False).clamp(min=1e-12))


def sort_pairs(sorter: Sorter, pairs: Sequence[tuple[str, str]], delay: int) -> list[Sorting]:
    """Return the sorting of each sentence pair, in order."""
    return _sort(sorter, [sorter.encode(*pair) for pair in pairs], delay)


def heat_map(sorter: Sorter, sorting: Sorting) -> HeatMap:
    """Return Z of a sentence with its labels."""
    symbols = [BLANK_LABEL, *(sorter.target.pieces[token] for token in sorting.target)]
    frames = [symbols[label] for label in sorting.path or [0] * (len(sorting.source) * sorting.mu)]
    rows = [" ".join(frames[start : start + sorting.mu]) for start in range(0, len(frames), sorting.mu)]
    return HeatMap(sorting.Z, [sorter.source.pieces[token] for token in sorting.source], rows)


def align_words(
    sorter: Sorter, pairs: Sequence[tuple[Words, Words]], delay: int, identity: bool = False
) -> list[set[Link] | None]:
    """Return the word links implied by Z, or None if the target does not fit its frames.

    A target piece maps to the output positions of its frames, an output position to the source piece with most of its
    mass, and pieces to their words. END is not linked. `identity` replaces Z with the identity, as a control.
    """
    sources = _pieces(sorter.source, [source for source, _ in pairs])
    targets = _pieces(sorter.target, [target for _, target in pairs])
    tokens = ([[*(token for token, _ in pieces), END] for pieces in side] for side in (sources, targets))
    sortings = _sort(sorter, list(zip(*tokens, strict=True)), delay, identity)
    return [_links(*each) for each in zip(sortings, sources, targets, strict=True)]


def viterbi(scores: NDArray[Any], labels: Sequence[int]) -> list[int] | None:
    """Return the best CTC path as label numbers from 1, 0 for blank; None if the labels do not fit.

    `scores` [U, 1 + T] holds the scores of the blank and of each label per frame.
    """
    columns = np.zeros(2 * len(labels) + 1, np.int64)  # the states: blank, 1, blank, 2, ..., blank
    columns[1::2] = np.arange(1, len(labels) + 1)
    may_skip = np.zeros(len(columns), bool)  # a blank may be skipped between two different labels
    may_skip[3::2] = np.not_equal(labels[1:], labels[:-1])
    best = np.full(len(columns), -np.inf)
    best[:2] = scores[0, columns[:2]]
    steps = np.zeros((len(scores), len(columns)), np.int64)
    for frame in range(1, len(scores)):
        arrivals = np.full((3, len(columns)), -np.inf)
        arrivals[0], arrivals[1, 1:] = best, best[:-1]
        arrivals[2, may_skip] = best[:-2][may_skip[2:]]
        steps[frame] = arrivals.argmax(0)
        best = arrivals.max(0) + scores[frame, columns]
    state = max(range(len(columns))[-2:], key=lambda end: best[end])
    if np.isneginf(best[state]):
        return None
    path = []
    for frame in reversed(range(len(scores))):
        path.append(int(columns[state]))
        state -= int(steps[frame, state])
    return path[::-1]


@torch.inference_mode()
def _sort(
    sorter: Sorter, encoded: Sequence[tuple[list[int], list[int]]], delay: int, identity: bool = False
) -> list[Sorting]:
    translator, sortings = sorter.model.translator, {}
    for numbers, _, H, Z in _batches(sorter, encoded, delay):
        if identity:
            Z = torch.eye(Z.shape[1], device=Z.device).expand_as(Z)
        logits = translator.logits(translator.frames(Z.to(H.dtype) @ H))
        for row, number in enumerate(numbers):
            source, target = encoded[number]
            # Every path has one symbol per frame, so unnormalised logits rank paths like log-probabilities.
            scores = logits[row, : len(source) * translator.mu, [BLANK, *target]].float().cpu().numpy()
            own = Z[row, : len(source), : len(source)].cpu().numpy()
            sortings[number] = Sorting(source, target, own, viterbi(scores, target), translator.mu)
    return [sortings[number] for number in range(len(encoded))]


def _batches(
    sorter: Sorter, encoded: Sequence[tuple[list[int], list[int]]], delay: int
) -> Iterator[tuple[list[int], Tensor, Float[Tensor, "B S D"], Float[Tensor, "B S S"]]]:
    """Yield batches of sentences of similar length, longest first: their numbers, source lengths, H and Z."""
    order = sorted(range(len(encoded)), key=lambda number: -len(encoded[number][0]))
    device = sorter.model.translator.target_embedding.weight.device
    while order:
        count = max(1, BATCH_TOKENS // len(encoded[order[0]][0]))
        numbers, order = order[:count], order[count:]
        source, target = (_padded(side, device) for side in zip(*(encoded[number] for number in numbers), strict=True))
        H, Z = sorter.model.sort(Batch(*source, *target), delay)
        yield numbers, source[1], H, Z


def _padded(sentences: Sequence[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return sentences as a padded batch on the device, and their lengths on the CPU."""
    tokens = pad_sequence([torch.tensor(sentence) for sentence in sentences], True, PAD)
    return tokens.to(device), torch.tensor([len(sentence) for sentence in sentences])


def _links(sorting: Sorting, source: _Pieces, target: _Pieces) -> set[Link] | None:
    """Link each target word to the source words with most of the weight in its frames; None if not aligned."""
    if sorting.path is None:
        return None
    nearest = sorting.Z.argmax(1)
    links: set[Link] = set()
    for frame, label in enumerate(sorting.path):
        column = int(nearest[frame // sorting.mu])
        if 1 <= label <= len(target) and column < len(source):
            links.update((i, j) for i in source[column][1] for j in target[label - 1][1])
    return links


def _pieces(tokenizer: Tokenizer, sentences: Sequence[Words]) -> list[_Pieces]:
    if tokenizer.spaced:
        return [
            [(token, [number]) for number, word in enumerate(words, start=1) for token in tokenizer.encode(word)]
            for words in sentences
        ]
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)
    return [_pieces_of_text(processor, words) for words in sentences]


def _pieces_of_text(processor: sentencepiece.SentencePieceProcessor, words: Words) -> _Pieces:
    """Map pieces to all words they share a character with, for text without spaces."""
    text, owners = _without_spaces(words)
    # As strings, unknown pieces show their text, so that the lengths add up.
    ends = list(accumulate(map(len, processor.encode(text, out_type=str))))
    spans = zip([0, *ends], ends, strict=False)
    words_of = [sorted({*owners[start:end]} - {0}) for start, end in spans]
    return list(zip(processor.encode(text), words_of, strict=True))


def _without_spaces(words: Words) -> tuple[str, list[int]]:
    """Return words as running text, and the word of each character; 0 for spaces between Latin words."""
    text, owners = "", []
    for number, word in enumerate(words, start=1):
        if text and text[-1].isascii() and word[0].isascii() and text[-1].isalnum() and word[0].isalnum():
            text += " "
            owners.append(0)
        text += word
        owners += [number] * len(word)
    return text, owners


def _data_directory(run: Path) -> Path:
    record = run / "run.json" if (run / "run.json").exists() else run.parent / "run.json"
    try:
        return Path(json.loads(record.read_text(encoding="utf-8"))["config"]["data"])
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(f"{run}: no run.json with its data directory; pass the data directory") from None
