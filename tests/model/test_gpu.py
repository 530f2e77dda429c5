"""Code that differs on a GPU gives the results of the CPU: pytest -m gpu."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from simulmt.model.asn import ASNConfig, SortedCTCModel, sinkhorn
from simulmt.model.ctc import Alignments, CTCConfig, CTCModel, alignment_likelihood, ctc_loss
from simulmt.model.layers import Batch, Loss, softmax_rows
from simulmt.model.risk import bigram_loss, policy_gradient
from simulmt.model.transducer import Lattice, forward_backward, transducer_loss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double().cpu() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("columns", [7, 1000, 32_000])
def test_softmax_kernel(dtype: torch.dtype, tolerance: float, columns: int) -> None:
    logits = torch.randn(33, columns, device="cuda", dtype=dtype) * 5
    weights = torch.rand(33, device="cuda")
    normalisers, softmax = softmax_rows(logits, weights)
    exact = logits.double().cpu()
    assert relative_error(normalisers, exact.logsumexp(-1)) < 1e-6
    assert softmax.dtype == dtype
    assert relative_error(softmax, exact.softmax(-1) * weights.double().cpu()[:, None]) < tolerance


def test_compiled_sinkhorn_and_its_gradient() -> None:
    X, by_Z = torch.randn(5, 20, 20), torch.randn(5, 20, 20)
    X[0, 15:, :15] = X[0, :15, 15:] = -torch.inf
    results = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        leaf = X.to(device, dtype).requires_grad_()
        Z = sinkhorn(leaf * 4, 16)
        (gradient,) = torch.autograd.grad(Z, leaf, by_Z.to(device, dtype))
        results.append((Z.detach(), gradient))
    (Z_exact, gradient_exact), (Z, gradient) = results
    assert relative_error(Z, Z_exact) < 1e-5
    assert relative_error(gradient, gradient_exact) < 1e-4


# In fp32 on the CPU the gradients are 2e-5 off, too: sums of log-probabilities over many frames are large numbers.
@pytest.mark.parametrize(
    ("loss_of", "dtype", "tolerance"),
    [
        (partial(ctc_loss, smoothing=0.1), torch.float32, 1e-4),
        (partial(ctc_loss, smoothing=0.1), torch.bfloat16, 2e-2),
        (bigram_loss, torch.float32, 1e-4),
        (bigram_loss, torch.bfloat16, 2e-2),
    ],
)
def test_fused_losses_and_their_gradients(loss_of: Callable[..., Loss], dtype: torch.dtype, tolerance: float) -> None:
    target = torch.randint(6, 500, (6, 9))
    target[:, 3] = target[:, 2]
    lengths, frames = torch.tensor([9, 7, 9, 1, 5, 9]), torch.tensor([24, 24, 20, 24, 3, 24])
    h, table = torch.randn(6, 24, 32), torch.randn(500, 32) / 3  # logits above 10 lose their fraction in bfloat16
    results = []
    for device, kind in (("cpu", torch.float64), ("cuda", dtype)):
        leaves = h.to(device, kind).requires_grad_(), table.to(device, kind).requires_grad_()
        loss = loss_of(*leaves, Alignments.of(target.to(device), lengths, frames), chunk=50)
        results.append((loss.total.detach(), *torch.autograd.grad(loss.total, leaves)))
    for found, exact in zip(results[1], results[0], strict=True):
        assert relative_error(found, exact) < tolerance


def test_ctc_kernel_on_long_sentences() -> None:
    """Many warps per sentence: neighbours must have written before they are read."""
    torch.manual_seed(1)
    B, U, T = 20, 600, 250
    target = torch.randint(6, 60, (B, T))
    lengths, frames = torch.randint(1, T + 1, (B,)), torch.randint(2 * T, U + 1, (B,))
    columns = Alignments.of(target, lengths, frames).columns
    log_probs = torch.randn(B, U, 60).log_softmax(-1).gather(-1, columns[:, None].expand(-1, U, -1))
    exact, exact_posterior = alignment_likelihood(log_probs.double(), Alignments.of(target, lengths, frames))
    on_gpu = Alignments.of(target.cuda(), lengths, frames)
    found, posterior = alignment_likelihood(log_probs.cuda(), on_gpu)
    assert relative_error(found, exact) < 1e-5
    # PyTorch adds up the places of a repeated label in the column of the first.
    column = torch.cat([torch.zeros(B, 1, dtype=torch.long), on_gpu.classes().cpu()], 1)[:, None].expand(-1, U, -1)
    folded = torch.zeros_like(log_probs).scatter_add_(2, column, posterior.cpu())
    assert relative_error(folded, exact_posterior) < 1e-3


def test_sorted_model_loss_is_the_cpus() -> None:
    torch.manual_seed(1)
    translator = CTCModel.build(CTCConfig(100, 100, width=32, inner=64, heads=4, layers=2, dropout=0.0))
    model = SortedCTCModel.build(translator, ASNConfig(layers=1)).eval()
    source, target = torch.randint(6, 100, (4, 12)), torch.randint(6, 100, (4, 10))
    lengths = torch.tensor([12, 12, 8, 3]), torch.tensor([10, 8, 10, 2])
    exact = model.loss(Batch(source, lengths[0], target, lengths[1]), delay=2).total.detach()
    model.cuda()
    found = model.loss(Batch(source.cuda(), lengths[0], target.cuda(), lengths[1]), delay=2).total.detach()
    assert relative_error(found, exact) < 1e-5


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_transducer_loss_and_its_gradients(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(1)
    target = torch.randint(6, 500, (6, 9))
    lengths, frames = torch.tensor([9, 7, 9, 1, 5, 9]), torch.tensor([24, 24, 20, 24, 3, 24])
    inputs = torch.randn(6, 24, 32), torch.randn(500, 32) / 3, torch.randn(6, 10, 16), torch.randn(500, 16) / 3
    results = []
    for device, kind in (("cpu", torch.float64), ("cuda", dtype)):
        leaves = h, table, contexts, context_table = [each.to(device, kind).requires_grad_() for each in inputs]
        lattice = Lattice.of(target.to(device), lengths, frames)
        loss = transducer_loss(h, table, contexts, context_table, lattice, smoothing=0.1, chunk=50)
        results.append((loss.total.detach(), *torch.autograd.grad(loss.total, leaves)))
    for found, exact in zip(results[1], results[0], strict=True):
        assert relative_error(found, exact) < tolerance


def test_transducer_kernel_on_long_sentences() -> None:
    torch.manual_seed(1)
    B, U, T = 20, 600, 250
    lengths, frames = torch.randint(1, T + 1, (B,)), torch.randint(T, U + 1, (B,))
    blank, label = torch.rand(2, B, U, T + 1).log()
    lattice = Lattice.of(torch.randint(6, 60, (B, T)), lengths, frames)
    exact = forward_backward(blank.double(), label.double(), lattice)
    from simulmt.model import triton_kernels  # Triton is installed with PyTorch for GPUs only

    found = triton_kernels.transducer_forward_backward(
        blank.cuda(), label.cuda(), *(each.cuda() for each in lattice[1:])
    )
    assert relative_error(found[0], exact[0]) < 1e-5
    assert relative_error(found[1].blank, exact[1].blank) < 1e-3
    assert relative_error(found[1].label, exact[1].label) < 1e-3


def test_policy_gradient_is_the_cpus() -> None:
    torch.manual_seed(1)
    B, N, U = 3, 4, 10
    inputs = torch.randn(B, U, 32), torch.randn(500, 32) / 3, torch.randn(B, N, U, 16), torch.randn(500, 16) / 3
    symbols, advantages, risk = torch.randint(0, 500, (B, N, U)), torch.randn(B, N, U), torch.zeros(())
    results = []
    for device, kind in (("cpu", torch.float64), ("cuda", torch.float32)):
        leaves = h, table, contexts, context_table = [each.to(device, kind).requires_grad_() for each in inputs]
        sampled = symbols.to(device), advantages.to(device), risk.to(device)
        total = policy_gradient(h, table, contexts, context_table, *sampled, chunk=20)
        results.append(torch.autograd.grad(total, leaves))
    for found, exact in zip(results[1], results[0], strict=True):
        assert relative_error(found, exact) < 1e-4
