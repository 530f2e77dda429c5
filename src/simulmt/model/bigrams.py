"""A second stage of training, on the very path that inference takes: how many of the reference's bigrams are written.

CTC asks for the reference in its order, which a translator that may not wait cannot always give. Bigrams that are
matched anywhere leave it the order of the phrases. The loss is 1 - F1 between the bigrams of the reference and those
the model is expected to write, over all alignments; short output costs recall, and so does doubled output precision.

A bigram (u, v) is written at frames i < j if frame i shows u, frame j shows v, and all frames between show the blank:

    E[u v] = sum over i < j of p_i(u) * p_j(v) * product over i < m < j of p_m(blank)

but for u = v not at j = i + 1, where the two would be one symbol. Every sentence begins with a symbol of its own in a
frame of its own, so the first word has a bigram, too.

Axis letters: B batch, U frames, V vocabulary, T labels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from simulmt.model.ctc import Alignments, CTCModel
from simulmt.model.output import Loss, at_least_float32
from simulmt.text import BLANK

BEGIN = -1  # stands before the first label; no symbol of the vocabulary


def inference_path_loss(
    model: CTCModel,
    source: Int[Tensor, "B S"],
    source_lengths: Int[Tensor, " B"],
    target: Int[Tensor, "B T"],
    target_lengths: Int[Tensor, " B"],
    delay: int = 1,
) -> Loss:
    """The bigram loss of what a translator would write, in source order; stores frames x V."""
    logits = model(source, source_lengths, delay)
    return bigram_loss(logits, Alignments.of(target, target_lengths, source_lengths * model.mu))


def bigram_loss(logits: Float[Tensor, "B U V"], alignments: Alignments) -> Loss:
    """1 - F1 of each sentence, weighted by its labels; sentences without labels or frames add nothing."""
    lengths = alignments.label_lengths
    matched, written = _matched_and_written(logits, alignments)
    f1 = 2 * matched / (written + lengths).clamp(min=1e-6)
    counted = (lengths > 0) & (alignments.frame_lengths > 0)
    total = ((1 - f1) * lengths * counted).sum()
    return Loss(total, total.detach(), (lengths * counted).sum(), len(lengths) - counted.sum())


def _matched_and_written(logits: Tensor, alignments: Alignments) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """The expected number of reference bigrams that are written, and of all bigrams that are."""
    p, log_blank = _frames_with_begin(logits, alignments.frame_lengths)
    labels = alignments.columns[:, 1:]
    begin = F.one_hot(torch.zeros_like(labels[:, 0]), p.shape[1])[:, :, None]  # only the first frame shows it
    shown = p.gather(-1, labels[:, None, :].expand(-1, p.shape[1], -1))  # [B U+1 T]
    shown = torch.cat([begin.to(p.dtype), shown], -1)
    written_at = 1 - log_blank.exp()  # a symbol other than the blank, which padding counts as
    paths = blank_paths(log_blank)

    before = paths.transpose(1, 2) @ shown  # [B U+1 T+1]: label t, then only blanks up to this frame
    expected = (before[:, :, :-1] * shown[:, :, 1:]).sum(1)  # [B T]
    bigrams = torch.stack([F.pad(labels[:, :-1], (1, 0), value=BEGIN), labels], -1)
    merged = (shown[:, :-1, :-1] * shown[:, 1:, 1:]).sum(1) * (bigrams[:, :, 0] == bigrams[:, :, 1])
    first, count = _occurrences(bigrams, alignments.label_lengths)
    matched = ((expected - merged).minimum(count) * first).sum(-1)

    all_pairs = (written_at[:, None, :] @ paths.transpose(1, 2) @ written_at[:, :, None]).flatten()
    same = p[:, :-1] * p[:, 1:]
    all_merged = (same.sum(-1) - same[:, :, BLANK]).sum(-1)
    return matched, all_pairs - all_merged


def _frames_with_begin(logits: Tensor, lengths: Int[Tensor, " B"]) -> tuple[Float[Tensor, "B U+1 V"], Tensor]:
    """Probabilities, zero in the first frame and in padding, and the blank's logarithm, which is zero in padding."""
    log_p = at_least_float32(logits).log_softmax(-1)
    inside = torch.arange(logits.shape[1], device=logits.device) < lengths[:, None]  # [B U]
    p = F.pad(log_p.exp() * inside[:, :, None], (0, 0, 1, 0))
    log_blank = F.pad(log_p[:, :, BLANK] * inside, (1, 0), value=-torch.inf)
    return p, log_blank


def blank_paths(log_blank: Float[Tensor, "B U"]) -> Float[Tensor, "B U U"]:
    """The probability that all frames between i and j show the blank; zero unless i < j."""
    until = log_blank.nan_to_num(neginf=0.0).cumsum(1)  # the first frame is between no two others
    between = F.pad(until[:, :-1], (1, 0))[:, None, :] - until[:, :, None]
    later = torch.ones_like(between, dtype=torch.bool).triu(1)
    return between.masked_fill(~later, -torch.inf).exp()


def _occurrences(
    bigrams: Int[Tensor, "B T 2"], lengths: Int[Tensor, " B"]
) -> tuple[Bool[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Which bigrams of a reference are the first of their kind, and how often it has them."""
    inside = torch.arange(bigrams.shape[1], device=bigrams.device) < lengths[:, None]
    equal = (bigrams[:, :, None] == bigrams[:, None, :]).all(-1) & inside[:, :, None] & inside[:, None, :]
    return inside & ~equal.tril(-1).any(-1), equal.sum(-1).to(torch.float32)
