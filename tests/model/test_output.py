from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from simulmt.model.output import at_least_float32, project_and_loss

from .helpers import Allocations, assert_same

B, U, C, D, V = 3, 5, 4, 6, 11
CHUNKS = [1, 2, 4, 7, B * U, 1000]  # below a sentence, across sentences, above everything


class Case:
    """Random frames, a random table, and random soft labels over a few columns, some of them equal."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.frames = torch.randn(B, U, D, generator=generator, dtype=dtype, requires_grad=True)
        self.table = torch.randn(V, D, generator=generator, dtype=dtype, requires_grad=True)
        self.columns = torch.randint(V, (B, C), generator=generator)
        self.columns[:, -1] = self.columns[:, 0]
        lengths = torch.tensor([U, 2, 0])
        self.weights = (torch.arange(U) < lengths[:, None]).to(dtype)
        shares = torch.rand(B, U, C, generator=generator, dtype=dtype)
        self.soft = shares / shares.sum(-1, keepdim=True) * self.weights[:, :, None]

    def align(self, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        return -(log_probs * self.soft).sum(), self.soft

    def fused(self, smoothing: float, chunk: int = 4) -> tuple[Tensor, Tensor]:
        return project_and_loss(
            self.frames, self.table, self.columns, self.weights, self.align, smoothing=smoothing, chunk=chunk
        )

    def plain(self, smoothing: float) -> tuple[Tensor, Tensor]:
        log_probs = (self.frames @ self.table.T).log_softmax(-1)
        columns = self.columns[:, None, :].expand(-1, U, -1)
        negative = -(log_probs.gather(-1, columns) * self.soft).sum()
        uniform = -(log_probs.sum(-1) * self.weights).sum() / V
        return (1 - smoothing) * negative + smoothing * uniform, negative


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_values_and_gradients_are_those_of_a_full_log_softmax(chunk: int, smoothing: float) -> None:
    case = Case()
    (total, negative), (expected, expected_negative) = case.fused(smoothing, chunk), case.plain(smoothing)
    assert_same(total, expected)
    assert_same(negative, expected_negative.detach())
    inputs = (case.frames, case.table)
    # Not the gradient of the loss alone but of something computed from it.
    assert_same(torch.autograd.grad((total * 3.7) ** 2, inputs), torch.autograd.grad((expected * 3.7) ** 2, inputs))


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), chunk=st.integers(1, 20), smoothing=st.floats(0, 1))
def test_the_chunks_do_not_matter(seed: int, chunk: int, smoothing: float) -> None:
    case = Case(seed)
    total, _ = case.fused(smoothing, chunk)
    whole, _ = case.fused(smoothing, B * U)
    assert_same(total, whole)
    inputs = (case.frames, case.table)
    assert_same(torch.autograd.grad(total, inputs), torch.autograd.grad(whole, inputs))


def test_gradcheck() -> None:
    case = Case()

    def loss(frames: Tensor, table: Tensor) -> Tensor:
        return project_and_loss(frames, table, case.columns, case.weights, case.align, 0.1, 4)[0]

    assert torch.autograd.gradcheck(loss, (case.frames, case.table))


@pytest.mark.parametrize("alone", ["frames", "table"])
def test_one_input_may_need_no_gradient(alone: str) -> None:
    case, both = Case(), Case()
    other = {"frames": "table", "table": "frames"}[alone]
    getattr(case, other).requires_grad_(False)
    case.fused(0.1)[0].backward()
    both.fused(0.1)[0].backward()
    assert_same(getattr(case, alone).grad, getattr(both, alone).grad, 0)
    assert getattr(case, other).grad is None


def test_without_gradients_the_values_stay() -> None:
    case = Case()
    with torch.no_grad():
        total, negative = case.fused(0.1)
    assert not total.requires_grad
    assert_same(total, case.fused(0.1)[0].detach(), 0)
    assert_same(negative, case.fused(0.1)[1], 0)


def test_only_the_total_carries_a_gradient() -> None:
    total, negative = Case().fused(0.0)
    assert total.requires_grad
    assert not negative.requires_grad


def test_what_frames_without_weight_hold_does_not_matter() -> None:
    case, other = Case(), Case()
    with torch.no_grad():
        other.frames[case.weights == 0] = 50.0
    totals = [c.fused(0.1)[0] for c in (case, other)]
    assert_same(totals[0], totals[1])
    tables = [torch.autograd.grad(t, (c.table, c.frames)) for t, c in zip(totals, (case, other), strict=True)]
    assert_same(tables[0][0], tables[1][0])
    assert not tables[1][1][case.weights == 0].any()


def test_large_logits_do_not_overflow() -> None:
    case = Case(dtype=torch.float32)
    with torch.no_grad():
        case.frames *= 1000
    total, _ = case.fused(0.1)
    expected, _ = case.plain(0.1)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=0)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(total, (case.frames, case.table)))


@pytest.mark.parametrize("upstream", [torch.float32, torch.bfloat16])
def test_mixed_precision_keeps_the_loss_in_fp32_and_the_gradients_close(upstream: torch.dtype) -> None:
    case = Case(dtype=torch.float32)
    frames = case.frames.detach().to(upstream).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        total, negative = project_and_loss(frames, case.table, case.columns, case.weights, case.align, 0.1, 4)
    assert total.dtype == negative.dtype == torch.float32
    expected, _ = case.plain(0.1)
    torch.testing.assert_close(total, expected, rtol=0.02, atol=0)
    found = torch.autograd.grad(total, (frames, case.table))
    references = torch.autograd.grad(expected, (case.frames, case.table))
    assert [gradient.dtype for gradient in found] == [upstream, torch.float32]
    for gradient, reference in zip(found, references, strict=True):
        assert (gradient - reference).norm() < 0.03 * reference.norm()


def large_case(chunk: int) -> tuple[Tensor, Tensor, partial[tuple[Tensor, Tensor]]]:
    frames, table = torch.randn(4, 16, 3, requires_grad=True), torch.randn(200, 3, requires_grad=True)
    columns, weights = torch.randint(200, (4, 2)), torch.ones(4, 16)
    soft = torch.full((4, 16, 2), 0.5)

    def align(log_probs: Tensor) -> tuple[Tensor, Tensor]:
        return -(log_probs * soft).sum(), soft

    return frames, table, partial(project_and_loss, frames, table, columns, weights, align, 0.1, chunk)


@pytest.mark.parametrize("chunk", [1, 5, 32])
def test_never_more_than_one_chunk_of_frames_times_vocabulary_exists(chunk: int) -> None:
    torch.manual_seed(0)
    _, table, loss = large_case(chunk)
    with Allocations(4 * 16 * 200) as allocations:
        loss()[0].backward()
    assert table.grad is not None
    assert allocations.operations == []
    assert allocations.largest <= max(chunk * 200, table.numel())


def test_the_tracker_of_allocations_sees_a_chunk_of_everything() -> None:
    *_, loss = large_case(chunk=64)
    with Allocations(4 * 16 * 200) as allocations:
        loss()
    assert allocations.operations


def test_only_the_two_gradients_are_kept_for_backward() -> None:
    frames, table, loss = large_case(chunk=5)
    total, _ = loss()
    assert total.grad_fn is not None
    saved = total.grad_fn.saved_tensors  # type: ignore[attr-defined]
    assert sorted(tensor.shape for tensor in saved) == sorted([frames.shape, table.shape])


def test_at_least_float32() -> None:
    widths = {torch.bfloat16: torch.float32, torch.float32: torch.float32, torch.float64: torch.float64}
    for given_dtype, expected in widths.items():
        assert at_least_float32(torch.ones(1, dtype=given_dtype)).dtype == expected
