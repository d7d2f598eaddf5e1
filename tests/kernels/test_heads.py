"""rotate and merge against equivalent formulas; on a GPU also the kernels."""

from __future__ import annotations

import pytest
import torch

from toolwise.kernels import kernel, torch_reference

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_a_rotation_and_its_transpose_keep_the_inner_product() -> None:
    x, y = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    cos, sin = torch.randn(2, 5, 8, dtype=torch.float64)
    forth, back = torch_reference.rotate(x, cos, sin), torch_reference.rotate(y, cos, sin, back=True)
    torch.testing.assert_close((forth * y).sum(), (x * back).sum())


def test_rotating_and_rotating_back_changes_nothing() -> None:
    x, angle = torch.randn(5, 3, 8, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64).repeat(1, 2)
    turned = torch_reference.rotate(x, angle.cos(), angle.sin())
    torch.testing.assert_close(torch_reference.rotate(turned, angle.cos(), -angle.sin()), x)
    torch.testing.assert_close(torch_reference.rotate(turned, angle.cos(), angle.sin(), back=True), x)
    torch.testing.assert_close(turned[2, 1, 3], x[2, 1, 3] * angle[2, 3].cos() - x[2, 1, 7] * angle[2, 3].sin())


def parts(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    """Attention of three tokens to six keys, of two of them to four more, and to all of these at once."""
    q, k, v = (torch.randn(n, 2, 8, dtype=torch.float64) for n in (3, 10, 10))
    scores = torch.einsum("qhd,khd->hqk", q, k)

    def attended(some: torch.Tensor, keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.einsum("hqk,khd->qhd", some[:, :, keys].softmax(-1), v[keys])
        return out.contiguous(), torch.logsumexp(some[:, :, keys], -1).contiguous()

    places = torch.tensor([2, 0])
    one, whole = attended(scores, slice(0, 6)), attended(scores, slice(0, 10))
    more = attended(scores[:, places], slice(6, 10))
    return (*(t.to(dtype) for t in (*one, *more, *whole)), places)


def test_two_attentions_are_merged_into_one() -> None:
    out, lse, more, its, whole, whole_lse, places = parts()
    untouched = out[1].clone(), lse[:, 1].clone()
    torch_reference.merge(out, lse, more, its, places)
    torch.testing.assert_close(out[places], whole[places])
    torch.testing.assert_close(lse[:, places], whole_lse[:, places])
    torch.testing.assert_close((out[1], lse[:, 1]), untouched)


@needs_gpu
@pytest.mark.parametrize(("heads", "size"), [(9, 64), (3, 64), (32, 128), (5, 80)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("back", [False, True])
def test_the_rotate_kernel_agrees_with_plain_torch(heads: int, size: int, dtype: torch.dtype, back: bool) -> None:
    for x in (torch.randn(70, heads, size), torch.randn(heads, 70, size).transpose(0, 1)):
        cos, sin = torch.randn(2, 70, size, device="cuda", dtype=dtype)
        mine = x.to("cuda", dtype)
        found = kernel("rotate", "cuda")(mine, cos, sin, back=back)
        assert found.is_contiguous()
        torch.testing.assert_close(found, torch_reference.rotate(mine, cos, sin, back=back), rtol=1e-2, atol=1e-2)
        if dtype == torch.float32:
            torch.testing.assert_close(found, torch_reference.rotate(mine, cos, sin, back=back), rtol=1e-5, atol=1e-5)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_merge_kernel_agrees_with_plain_torch(dtype: torch.dtype) -> None:
    out, lse, more, its, _, _, places = (t.cuda() for t in parts())
    ours = [out.to(dtype), lse.float()]
    theirs = [t.clone() for t in ours]
    kernel("merge", "cuda")(*ours, more.to(dtype), its.float(), places)
    torch_reference.merge(*theirs, more.to(dtype), its.float(), places)
    near = 1e-5 if dtype == torch.float32 else 1e-2
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=near, atol=near)


@needs_gpu
@pytest.mark.parametrize("first", [0, 1, 16, 37])
def test_the_merge_kernel_handles_contiguous_tokens(first: int) -> None:
    out, lse = torch.randn(80, 3, 64, device="cuda"), torch.randn(3, 80, device="cuda")
    more, its = torch.randn(20, 3, 64, device="cuda"), torch.randn(3, 20, device="cuda")
    theirs = out.clone(), lse.clone()
    kernel("merge", "cuda")(out, lse, more, its, slice(first, first + 20))
    torch_reference.merge(*theirs, more, its, torch.arange(first, first + 20, device="cuda"))
    torch.testing.assert_close((out, lse), theirs, rtol=1e-5, atol=1e-5)
