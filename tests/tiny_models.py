"""Bundles of untrained networks, small enough to be exported in every run, and reference translations by PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, groupby
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn

from simulmt.model.beam import BeamConfig, beam_search
from simulmt.model.ctc import CTCConfig, CTCModel
from simulmt.model.layers import Encoder, KeysValues
from simulmt.model.seq2seq import DecoderState, Seq2SeqConfig, Seq2SeqModel
from simulmt.model.transducer import TransducerConfig, TransducerModel
from simulmt.runtime.bundle import Kind
from simulmt.runtime.stream import Commit, Translator, load
from simulmt.text import BLANK, END, MASK, SPECIAL_SYMBOLS, START, Tokenizer
from simulmt.train import export as exporting
from simulmt.train.export import ExportConfig, TrainedModel, export
from simulmt.train.graph import Precision

DELAYS = (1, 2, 3, 5)
BONUS = -3.0  # a penalty below zero: untrained networks hardly ever choose the blank by themselves
LONGEST = 40
STABILITIES = (0.6, 0.75, 0.82, 0.7)  # thresholds of the delays; untrained policies predict anything from 0 to 1
MAX_WAITS = (1, 2, 3, 0)


def trained(
    kind: Kind, source: Tokenizer, target: Tokenizer, whole_words: bool = False, policy: bool = False
) -> TrainedModel:
    """Make an untrained network with random biases and gains, so that none can hide a mistake.

    With a policy, a wait-k network has the same other weights as without.
    """
    vocabularies = (source.size, target.size)
    model: CTCModel | Seq2SeqModel
    if kind == "ctc":
        config = CTCConfig(*vocabularies, width=16, inner=24, heads=2, layers=3, whole_words=whole_words)
        model = CTCModel.build(config)
    elif kind == "transducer":
        sizes = {"width": 16, "inner": 24, "heads": 2, "layers": 3, "look_ahead_layer": 1}
        sizes |= {"context_symbols": 3, "context_inner": 12, "context_rank": 8}
        model = TransducerModel.build(TransducerConfig(*vocabularies, whole_words=whole_words, **sizes))
    else:
        layers = {"encoder_layers": 2, "decoder_layers": 2, "policy_inner": 12 if policy else 0}
        model = Seq2SeqModel.build(Seq2SeqConfig(*vocabularies, kind == "wait-k", 16, 24, 2, **layers))
    _randomise(model)
    model.encoder.mark_words(source.word_starts)
    if isinstance(model, Seq2SeqModel):
        with torch.no_grad():  # symbols that may never be written are made tempting
            contrast = torch.tensor([1.0, -1.0]).repeat(8)
            model.target_embedding.weight[BLANK] = contrast
            model.target_embedding.weight[MASK] = -contrast
            model.target_embedding.weight[END] *= 2  # or nothing would end before its limit
            if model.policy is not None:
                model.policy.contract.weight *= 2  # so that stabilities vary
    return TrainedModel(model.eval(), source, target)


def export_config(kind: Kind, precision: Precision, **settings: object) -> ExportConfig:
    delays = () if kind == "full-sentence" else DELAYS
    penalties = (BONUS, BONUS / 2, BONUS, 0.0) if kind in ("ctc", "transducer") else ()
    table = {"delays": delays, "blank_penalties": penalties, "longest": LONGEST, "min_agreement": 0.5, **settings}
    return ExportConfig("en", "de", precision=precision, **table)  # type: ignore[arg-type]


def translator(
    model: TrainedModel, kind: Kind, precision: Precision, directory: Path, name: str = "", **settings: object
) -> Translator:
    """Export a network without the slow comparison with PyTorch, which test_export.py and test_stream.py make."""
    path = directory / (name or f"{kind}-{precision}")
    with patch.object(exporting, "check_fp32", return_value={"fp32_largest_difference": 0.0}):
        export(model, path, export_config(kind, precision, **settings))
    return load(path, threads=1)


@torch.inference_mode()
def reference(model: TrainedModel, sentence: str, delay: int | None, beam: int = 1, stop_at_end: bool = False) -> str:
    """Translate a whole sentence with PyTorch."""
    tokens = [*model.source.encode(sentence), END]
    source, lengths = torch.tensor([tokens]), torch.tensor([len(tokens)])
    if isinstance(model.model, TransducerModel):
        assert delay is not None
        frames = model.model.frames(model.model.encoder(source, None, delay))
        return model.target.decode(model.model.write(frames, penalty_of(delay))[0, 0].tolist())
    if isinstance(model.model, CTCModel):
        assert delay is not None
        return model.target.decode(collapse(model.model(source, lengths, delay)[0], penalty_of(delay)))
    config = BeamConfig(beam=beam, length_penalty=1.0 if beam > 1 else 0.0, reads_on=beam == 1 and not stop_at_end)
    return model.target.decode(beam_search(model.model, source, lengths, config, delay)[0][0].tokens)


class FirstLook(NamedTuple):
    """What a target position sees at first."""

    seen: int  # source words
    read: int  # words read by then, which may be more after the delay has fallen
    delay: int


@torch.inference_mode()
def by_policy(
    model: TrainedModel,
    words: Sequence[Sequence[int]],
    schedule: Sequence[int],
    max_waits: Sequence[int] = (0,) * len(DELAYS),
) -> list[tuple[int, int]]:
    """Translate words with PyTorch, each read at its own delay, where STABILITIES and `max_waits` decide when to write.

    Return the tokens, END included, and how many words had been read when each was written; END is a word as well.
    """
    assert isinstance(model.model, Seq2SeqModel)
    words = [*words, [END]]
    ends, source = list(accumulate(map(len, words))), list(chain(*words))
    longest = int(1.2 * len(source)) + 10
    looks = first_looks(ends, [*schedule, schedule[-1]])
    written: list[tuple[int, int]] = []
    visible: list[int] = []  # source tokens that each position saw
    least, token = 0, START
    while len(written) < longest and token != END:
        seen, read, threshold, max_wait, waited = len(words), len(words), 0.0, 0, 0
        if len(written) < len(looks):
            seen, read, delay = looks[len(written)]
            threshold, max_wait = STABILITIES[DELAYS.index(delay)], max_waits[DELAYS.index(delay)]
        seen, is_written = max(seen, least), False
        while not is_written:
            tokens = [each for each, _ in written]
            token, stability = next_token(model.model, source, tokens, [*visible, ends[seen - 1]])
            share = max(0.0, 1 - waited / max_wait) if max_wait else 1.0  # of the threshold, falling word by word
            is_stable = stability >= share * threshold
            is_written = seen == len(words) or (token != END and is_stable)
            if not is_written:
                seen = least = seen + 1
                waited = 0 if token == END else waited + 1
        written.append((token, max(seen, read)))
        visible.append(ends[seen - 1])
    return written


def next_token(
    model: Seq2SeqModel, source: Sequence[int], written: Sequence[int], visible: Sequence[int]
) -> tuple[int, float]:
    """Return the most likely next token and its predicted stability; position t sees visible[t] source tokens."""
    assert model.policy is not None
    H = model.encoder(torch.tensor([source]))
    x = model.target_embedding.embed(torch.tensor([[START, *written]]))
    seen = torch.arange(len(source)) < torch.tensor(visible)[:, None]
    for layer in model.layers:
        x, _ = layer(x, layer.cross_attention.project(H), seen, causal=True)
    state = model.final_norm(x)[0, -1]
    allowed = [*range(len(SPECIAL_SYMBOLS), model.target_embedding.num_embeddings), *([END] if written else [])]
    scores = model.target_embedding.weight[allowed] @ state
    return allowed[int(scores.argmax())], float(model.policy(state).sigmoid())


def first_looks(ends: Sequence[int], schedule: Sequence[int]) -> list[FirstLook]:
    """Return what target positions see at first, given the end of each word in tokens and the delay it is read at."""
    looks: list[FirstLook] = []
    for read, (tokens, delay) in enumerate(zip(ends, schedule, strict=True), start=1):
        while len(looks) + delay <= tokens:
            seen = next(word for word, end in enumerate(ends, start=1) if len(looks) + delay <= end)
            looks.append(FirstLook(seen, read, delay))
    return looks


def penalty_of(delay: int) -> float:
    return (BONUS, BONUS / 2, BONUS, 0.0)[DELAYS.index(delay)]


def collapse(logits: Tensor, penalty: float) -> list[int]:
    """Return the symbols that frames [F V] write."""
    logits = logits.clone()
    logits[:, BLANK] -= penalty
    return [symbol for symbol, _ in groupby(logits.argmax(-1).tolist()) if symbol != BLANK]


def joined(commits: Sequence[Commit]) -> str:
    return "".join(commit.text for commit in commits)


def facts(commits: Sequence[Commit]) -> list[tuple[int, str, int, int]]:
    """Return the parts of a commit that must not depend on chunks, batches or the clock."""
    return [(commit.seq, commit.text, commit.source_words, commit.sentence) for commit in commits]


def _randomise(network: nn.Module) -> None:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if not parameter.requires_grad:
                continue  # it says where words begin
            if name.startswith("policy."):
                parameter.zero_()  # its biases are drawn by PyTorch
            if parameter.ndim == 1:
                parameter.add_(torch.empty_like(parameter).normal_(std=0.3, generator=generator))
            else:
                std = 0.3 if "embedding" in name else 2.0 / parameter.shape[1] ** 0.5
                parameter.normal_(std=std, generator=generator)


def states_with_visible_keys(encoder: Encoder, source: Tensor, visible: Sequence[int]) -> Tensor:
    """Run a plain encoder, where state t sees the first visible[t] tokens in the layer with look-ahead."""
    x = encoder.embedding.embed(source)
    ahead = torch.arange(source.shape[1])[None, :] < torch.tensor(visible)[:, None]
    causal = torch.ones_like(ahead).tril()
    for index, layer in enumerate(encoder.layers):
        x = layer(x, ahead if index == encoder.look_ahead_layer else causal)
    return encoder.final_norm(x)


def seeing(state: DecoderState, read: int) -> DecoderState:
    """Return the state after the first tokens of the source only, as a causal encoder leaves it."""
    return state._replace(context=tuple(KeysValues(*(side[:, :, :read] for side in each)) for each in state.context))
