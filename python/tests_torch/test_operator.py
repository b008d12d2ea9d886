"""The operator against its definition, which is written out below in double, against `ref`
and against finite differences."""
# mypy: disable-error-code="import-not-found", disallow-untyped-calls=False

from __future__ import annotations

import math
import unittest
from typing import Any

import still
import torch
from still.torch import hybrid_attention

B, T, H, G, D = 2, 45, 4, 2, 16
INPUTS = {"q": (B, T, H, D), "k": (B, T, G, D), "v": (B, T, G, D), "gate_logit": (B, T, H, D),
          "alpha": (H,), "map_q": (H, D, D), "map_k": (G, D, D)}


def attention(x: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    every: dict[str, Any] = {**x, **options}
    return hybrid_attention(**every)


def problem(seed: int = 1) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    scale = {"alpha": 0.5, "map_q": D**-0.5, "map_k": D**-0.5}
    return {name: scale.get(name, 1.0) * torch.randn(shape, generator=random)
            for name, shape in INPUTS.items()}


def score(q: torch.Tensor, k: torch.Tensor, chunk: int) -> list[float]:
    """Self-Saliency Score of every token, for one head: [T,D], [T,D]."""
    out, eps = [], 1e-6
    for t in range(len(q)):
        logits = k[max(0, t - chunk + 1) : t + 1] @ q[t] / math.sqrt(D)
        with_self = torch.softmax(logits, 0)
        without = torch.cat((torch.softmax(logits[:-1], 0), torch.zeros(1).double()))
        out.append(float((with_self * torch.log((with_self + eps) / (without + eps))).sum()))
    return out


def folds(scores: list[float], chunk: int, select: int, cap: int) -> torch.Tensor:
    """The chunk at whose first token each token is folded; -1: it stays exact."""
    fold = torch.full((len(scores),), -1)
    salient: list[int] = []
    for c in range(2, (len(scores) + chunk - 1) // chunk):
        leaving = sorted(range((c - 2) * chunk, (c - 1) * chunk), key=lambda j: (-scores[j], j))
        salient = sorted(salient + leaving[:select], key=lambda j: (-scores[j], j))
        for j in leaving[select:] + salient[cap:]:
            fold[j] = c
        salient = salient[:cap]
    return fold


def features(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    u = x @ w
    u = u / u.norm(dim=-1, keepdim=True) * x.norm(dim=-1, keepdim=True)
    return torch.cat((torch.softmax(u, -1), torch.softmax(-u, -1)), -1)


def plain(x: dict[str, torch.Tensor], chunk: int, select: int, cap: int) -> torch.Tensor:
    """The operator token by token and head by head, as docs/methods.md defines it."""
    rows = torch.arange(T)
    age = rows[:, None] // chunk - rows[None] // chunk
    past = rows[None] <= rows[:, None]
    y = []
    for b in range(B):
        for h in range(H):
            g = h // (H // G)
            group = range(g * (H // G), (g + 1) * (H // G))
            with torch.no_grad():
                each = [score(x["q"][b, :, i], x["k"][b, :, g], chunk) for i in group]
                fold = folds([sum(s) / len(s) for s in zip(*each)], chunk, select, cap)
            q, k, v = x["q"][b, :, h], x["k"][b, :, g], x["v"][b, :, g]
            folded = (age > 1) & (fold >= 0)[None] & (fold[None] <= (rows // chunk)[:, None])
            logits = q @ k.T / math.sqrt(D)
            weights = torch.exp(logits) * (past & ~folded)
            linear = torch.exp(x["alpha"][h]) * folded * (
                features(q, x["map_q"][h]) @ features(k, x["map_k"][g]).T)
            gate = 2 * torch.sigmoid(x["gate_logit"][b, :, h])
            y.append((weights @ v + (linear @ v) * gate) /
                     (weights.sum(1) + linear.sum(1))[:, None])
    return torch.stack(y).view(B, H, T, D).transpose(1, 2)


class Operator(unittest.TestCase):
    def setUp(self) -> None:
        self.method = still.Method("still", chunk=8, select=3, cap=5)

    def run_with(self, x: dict[str, torch.Tensor], **options: Any
                 ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The output, and the gradients of a sum with fixed weights."""
        own = {name: t.detach().clone().requires_grad_() for name, t in x.items()}
        if "plain" in options:
            y = plain(own, 8, 3, 5)
        else:
            y = attention(own, **options)
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(9))
        (y * weights.to(y.dtype)).sum().backward()
        grads = {}
        for name, t in own.items():
            assert t.grad is not None, name
            grads[name] = t.grad
        return y.detach(), grads

    def near(self, x: torch.Tensor, want: torch.Tensor, tolerance: float, what: str) -> None:
        off = float((x.double() - want.double()).abs().max()) / float(want.abs().max())
        self.assertLess(off, tolerance, what)

    def test_definition(self) -> None:
        x = problem()
        y, grads = self.run_with(x, method=self.method)
        want, want_grads = self.run_with({n: t.double() for n, t in x.items()}, plain=True)
        self.near(y, want, 1e-5, "y")
        for name, grad in grads.items():
            self.assertGreater(float(grad.abs().max()), 0, name)
            self.near(grad, want_grads[name], 1e-4, name)

    def test_reference(self) -> None:
        for method in (self.method, still.Method("still", chunk=8, per_head=True),
                       still.Method("still", chunk=8, score="distinct", select=8, cap=6,
                                    gate=False)):
            x = problem()
            if method.per_head:
                x["map_k"] = x["map_q"].flip(0)
            if not method.gate:
                del x["gate_logit"]
            y, grads = self.run_with(x, method=method)
            want, want_grads = self.run_with(x, method=method, backend="ref")
            self.near(y, want, 1e-5, repr(method))
            for name, grad in grads.items():
                self.near(grad, want_grads[name], 1e-4, f"{name} of {method}")

    def test_finite_differences(self) -> None:
        # Without selection no step changes which tokens are folded.
        method = still.Method("still", chunk=8, select=0)
        x = problem(2)
        _, grads = self.run_with(x, method=method)
        random = torch.Generator().manual_seed(9)
        weights = torch.randn((B, T, H, D), generator=random).double()
        for name in x:
            way = torch.randn(x[name].shape, generator=random)
            ends = []
            for step in (1e-2, -1e-2):
                moved = {**x, name: x[name] + step * way}
                y = attention(moved, method=method, backend="ref")
                ends.append(float((y.double() * weights).sum()))
            slope = (ends[0] - ends[1]) / 2e-2
            along = float((grads[name].double() * way.double()).sum())
            size = float(grads[name].norm() * way.norm())
            self.assertLess(abs(slope - along), 2e-3 * size, name)

    def test_other_layouts_and_starts(self) -> None:
        x = problem()
        y = hybrid_attention(x["q"], x["k"], x["v"], method=self.method)
        by_head = [x[n].transpose(1, 2).contiguous().transpose(1, 2) for n in "qkv"]
        self.assertFalse(by_head[0].is_contiguous())
        self.assertTrue(torch.equal(y, hybrid_attention(*by_head, method=self.method)))
        inside = torch.zeros(B * T * H * D + 1)[1:].view(B, T, H, D)  # not aligned
        inside.copy_(x["q"])
        self.assertTrue(torch.equal(
            y, hybrid_attention(inside, x["k"], x["v"], method=self.method)))

    def test_nothing_is_copied(self) -> None:
        """The tensors that the gradient needs later are the caller's own."""
        x = {n: t.requires_grad_() for n, t in problem().items()}
        kept: list[int] = []

        def note(t: torch.Tensor) -> torch.Tensor:
            kept.append(t.data_ptr())
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            attention(x, method=self.method)
        for name, t in x.items():
            self.assertIn(t.data_ptr(), kept, name)

    def test_softmax_is_torch(self) -> None:
        x = problem()
        q, k, v = (x[n].transpose(1, 2) for n in "qkv")
        want = torch.nn.functional.scaled_dot_product_attention(
            q, k.repeat_interleave(H // G, 1), v.repeat_interleave(H // G, 1), is_causal=True)
        self.near(hybrid_attention(x["q"], x["k"], x["v"], method="softmax"),
                  want.transpose(1, 2), 1e-5, "softmax")

    def test_refusals(self) -> None:
        x = problem()
        q, k, v = x["q"], x["k"], x["v"]
        for error, says, arguments in (
                (TypeError, "float64.*q.float", {"q": q.double()}),
                (TypeError, "k is of torch.bfloat16", {"k": k.bfloat16()}),
                (TypeError, "v is a list", {"v": v.tolist()}),
                (ValueError, "four dimensions", {"q": q[0]}),
                (ValueError, r"v has the shape \(2, 44", {"v": v[:, 1:]}),
                (ValueError, "a multiple", {"k": x["q"][:, :, :3], "v": x["q"][:, :, :3]}),
                (ValueError, "at least one", {"q": q[:, :0]}),
                (ValueError, "map_k.*expected", {"map_k": x["map_q"]}),
                (ValueError, "alpha has the shape", {"alpha": x["alpha"][1:]}),
                (ValueError, "k is on meta", {"k": k.to("meta")}),
                (ValueError, "CPU or CUDA", {"q": q.to("meta")}),
                (ValueError, "does not compute", {"backend": "cuda"}),
                (still.UnsupportedError, "liger", {"method": "liger"}),
                (still.ArgumentError, "select", {"method": still.Method("still", chunk=8,
                                                                        select=9)}),
                (still.ArgumentError, "abacus", {"backend": "abacus"})):
            given: dict[str, Any] = {"q": q, "k": k, "v": v, "method": self.method}
            given.update(arguments)
            with self.assertRaisesRegex(error, says):
                hybrid_attention(**given)

    def test_gradient_of_gradient_is_refused(self) -> None:
        x = {n: t.requires_grad_() for n, t in problem().items()}
        y = attention(x, method=self.method)
        (grad,) = torch.autograd.grad(y.square().sum(), x["q"], create_graph=True)
        with self.assertRaisesRegex(RuntimeError, "once_differentiable"):
            grad.sum().backward()


@unittest.skipUnless(torch.cuda.is_available(), "there is no GPU")
class Gpu(unittest.TestCase):
    def test_cpu_is_gpu(self) -> None:
        x = {n: t.cuda().requires_grad_() for n, t in problem().items()}
        method = still.Method("still", chunk=8, select=3, cap=5)
        with torch.cuda.stream(torch.cuda.Stream()):
            y = attention(x, method=method)
            y.square().sum().backward()
            torch.cuda.current_stream().synchronize()
        own = {n: t.detach().cpu().requires_grad_() for n, t in x.items()}
        want = attention(own, method=method)
        want.square().sum().backward()
        for name, (a, b) in {"y": (y, want), **{n: (x[n].grad, own[n].grad) for n in x}}.items():
            assert a is not None and b is not None
            off = float((a.detach().cpu() - b.detach()).abs().max() / b.detach().abs().max())
            self.assertLess(off, 2e-2, name)  # half precision


if __name__ == "__main__":
    unittest.main()
