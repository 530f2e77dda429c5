from __future__ import annotations

from collections import Counter
from itertools import combinations, product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from simulmt.model.bigrams import bigram_loss, inference_path_loss
from simulmt.model.ctc import Alignments, CTCConfig, CTCModel
from simulmt.model.layers import Batch
from simulmt.text import BLANK, END

from .helpers import randomise

V = 5
A, B, C = (symbol for symbol in range(V) if symbol != BLANK and symbol != END)


def collapsed(path: tuple[int, ...]) -> list[int]:
    kept = [symbol for i, symbol in enumerate(path) if i == 0 or symbol != path[i - 1]]
    return [symbol for symbol in kept if symbol != BLANK]


def bigrams(symbols: list[int]) -> Counter[tuple[int, int]]:
    return Counter(zip([-1, *symbols], symbols, strict=False))


def by_enumeration(p: Tensor, labels: list[int]) -> float:
    """Return 1 - F1, computed from the probabilities of all paths."""
    expected: Counter[tuple[int, int]] = Counter()
    for path in product(range(V), repeat=p.shape[0]):
        chance = float(torch.stack([p[frame, symbol] for frame, symbol in enumerate(path)]).prod())
        for bigram, count in bigrams(collapsed(path)).items():
            expected[bigram] += chance * count  # type: ignore[assignment]
    reference = bigrams(labels)
    matched = sum(min(float(expected[bigram]), count) for bigram, count in reference.items())
    return 1 - 2 * matched / (sum(expected.values()) + sum(reference.values()))


def loss_of(logits: Tensor, sentences: list[list[int]], frames: list[int]) -> Tensor:
    longest = max(map(len, sentences))
    target = torch.tensor([sentence + [0] * (longest - len(sentence)) for sentence in sentences])
    lengths = torch.tensor([len(sentence) for sentence in sentences])
    return bigram_loss(logits, torch.eye(V).to(logits), Alignments.of(target, lengths, torch.tensor(frames))).total


@pytest.mark.parametrize(
    "labels", [[A, END], [A, B, END], [A, A, END], [A, B, A, B, END], [A, A, A], [C, A, B, C, A, END], [END]]
)
@pytest.mark.parametrize("sharpness", [0.3, 3.0])
def test_equals_the_sum_over_all_paths(labels: list[int], sharpness: float) -> None:
    logits = torch.randn(1, 5, V, generator=torch.Generator().manual_seed(len(labels)), dtype=torch.float64) * sharpness
    found = loss_of(logits, [labels], [5]) / len(labels)
    assert float(found) == pytest.approx(by_enumeration(logits[0].softmax(-1), labels), abs=1e-9)


def one_hot(path: list[int]) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor([path]), V).double() * 60


def test_a_perfect_translation_has_no_loss() -> None:
    assert float(loss_of(one_hot([A, A, BLANK, B, BLANK, END]), [[A, B, END]], [6])) == pytest.approx(0, abs=1e-9)


def test_a_moved_phrase_costs_its_borders_only() -> None:
    """A B | C END against C | A B END: of four bigrams each, A B is in both."""
    assert float(loss_of(one_hot([C, A, B, END]), [[A, B, C, END]], [4])) / 4 == pytest.approx(1 - 1 / 4)


def test_a_repeated_bigram_counts_as_often_as_the_reference_has_it() -> None:
    written = one_hot([A, B, A, B, A, B])
    assert float(loss_of(written, [[A, B]], [6])) / 2 == pytest.approx(1 - 2 * 2 / (6 + 2))


def test_padding_changes_nothing() -> None:
    logits = torch.randn(2, 6, V, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    apart = loss_of(logits[:1], [[A, B, END]], [6]) + loss_of(logits[1:, :4], [[C, END]], [4])
    torch.testing.assert_close(loss_of(logits, [[A, B, END], [C, END]], [6, 4]), apart)


def test_sentences_without_labels_are_skipped() -> None:
    alignments = Alignments.of(torch.tensor([[A, END], [0, 0]]), torch.tensor([2, 0]), torch.tensor([4, 4]))
    loss = bigram_loss(torch.zeros(2, 4, V), torch.eye(V), alignments)
    assert (int(loss.tokens), int(loss.skipped)) == (2, 1)


def test_gradients_are_finite_where_blanks_are_certain() -> None:
    logits = one_hot([BLANK, BLANK, A, END]).requires_grad_()
    loss_of(logits, [[A, END]], [4]).backward()
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())


def test_the_loss_of_a_model_is_on_the_inference_path() -> None:
    model = randomise(CTCModel.build(CTCConfig(9, V, width=8, inner=8, heads=2, layers=1)))
    source, lengths = torch.tensor([[6, 7, 8], [6, 5, 0]]), torch.tensor([3, 2])
    target, target_lengths = torch.tensor([[A, B, END], [C, END, 0]]), torch.tensor([3, 2])
    expected = loss_of(model(source, lengths, 2), [[A, B, END], [C, END]], [6, 4])
    batch = Batch(source, lengths, target, target_lengths)
    torch.testing.assert_close(inference_path_loss(model, batch, delay=2).total, expected)


def test_in_chunks_it_is_the_loss_of_plain_probabilities_and_so_are_its_gradients() -> None:
    """Chunks that end inside sentences, between them and at the end; padding; labels that occur twice."""
    generator = torch.Generator().manual_seed(3)
    target = torch.randint(BLANK + 1, 9, (3, 6), generator=generator)
    target[0, 3:5] = target[0, :2]
    alignments = Alignments.of(target, torch.tensor([6, 4, 1]), torch.tensor([8, 8, 5]))
    frames = torch.randn(3, 8, 4, generator=generator, dtype=torch.float64).requires_grad_()
    table = torch.randn(9, 4, generator=generator, dtype=torch.float64).requires_grad_()
    expected = [plain_loss(frames @ table.T, alignments)]
    expected += torch.autograd.grad(expected[0], (frames, table))
    for chunk in (1, 2, 5, 8, 23, 24, 100):
        found = [bigram_loss(frames, table, alignments, chunk).total]
        found += torch.autograd.grad(found[0], (frames, table))
        torch.testing.assert_close(found, expected)


def plain_loss(logits: Tensor, alignments: Alignments) -> Tensor:
    """Return the loss with all pairs of frames and symbols stored, per sentence; the start symbol comes last."""
    total = logits.new_zeros(())
    is_symbol = torch.arange(logits.shape[-1] + 1) != BLANK
    for scores, labels, U, T in zip(logits, alignments.columns[:, 1:], *alignments[1:3], strict=True):
        p = F.pad(scores[:U].softmax(-1), (0, 1, 1, 0)) + F.pad(torch.ones(1, 1), (scores.shape[-1], 0, 0, int(U)))
        E = p.new_zeros(len(is_symbol), len(is_symbol))
        for i, j in combinations(range(int(U) + 1), 2):
            pair = p[i][:, None] * p[j] * p[i + 1 : j, BLANK].prod()
            E = E + (pair if j > i + 1 else pair - pair.diag().diag())
        written = E[is_symbol][:, is_symbol].sum()
        matched = sum(E[u, v].clamp(max=n) for (u, v), n in bigrams(labels[:T].tolist()).items())
        total = total + (1 - 2 * matched / (written + T)) * T
    return total


def test_in_half_precision_it_is_nearly_the_same() -> None:
    """As in training: network and backward pass under autocast, weights and loss in fp32."""
    generator = torch.Generator().manual_seed(4)
    target = torch.randint(BLANK + 1, 40, (4, 6), generator=generator)
    alignments = Alignments.of(target, torch.tensor([6, 4, 1, 6]), torch.tensor([12, 12, 5, 9]))
    frames = torch.randn(4, 12, 16, generator=generator).requires_grad_()
    table = torch.randn(40, 16, generator=generator).requires_grad_()
    exact = bigram_loss(frames.double(), table.double(), alignments).total
    expected = torch.autograd.grad(exact, (frames, table))
    with torch.autocast("cpu", torch.bfloat16):
        loss = bigram_loss(frames, table, alignments, chunk=20).total
        found = torch.autograd.grad(loss, (frames, table))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=2e-3)
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).norm() / other.norm()) < 2e-2
