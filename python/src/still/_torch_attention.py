"""The library's attention as an operator of PyTorch, with its gradient.

Tensors are read and written where they lie, on the CPU or on a GPU; PyTorch keeps the time
and the memory of everything else.
"""
# mypy: disable-error-code="import-not-found", disallow-subclassing-any=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

import contextlib
import ctypes as ct
import os
import threading
from typing import Any, Optional

import torch
from torch.autograd.function import once_differentiable

from . import _declarations as c
from ._errors import call
from ._handle import Handle
from ._library import lib
from ._method import Method, method_of

# Inputs that an adapter trains, in the order in which the operator takes them; their
# gradients are the same names with a d before them.
_PARAMETERS = ("alpha", "window_logit", "map_q", "map_k", "bias_q", "bias_k")
_INPUTS = ("q", "k", "v", "gate_logit", *_PARAMETERS)


class _Device(Handle):
    """Threads and scratch of a backend. Calls wait for each other."""

    _what = "device"

    def __init__(self, backend: str, threads: int, stream: int) -> None:
        self._own()
        p = c.still_attention_params(
            backend=backend.encode(), threads=threads, stream=stream or None)
        call(lib.still_attention_new, ct.byref(p), ct.byref(self._c))

    def _free(self) -> None:
        lib.still_attention_free(self._c)


# By backend, GPU, stream and threads; a process that was forked has threads of its own.
_devices: dict[tuple[object, ...], _Device] = {}
_devices_lock = threading.Lock()


def _device(backend: str, place: torch.device) -> _Device:
    stream, threads = 0, 0
    if place.type == "cuda":
        stream = torch.cuda.current_stream(place).cuda_stream
    else:
        threads = torch.get_num_threads()
    key = (os.getpid(), backend, str(place), stream, threads)
    with _devices_lock:
        if key not in _devices:
            _devices[key] = _Device(backend, threads, stream)
        return _devices[key]


class _Call:
    """One call: the C struct, and the tensors that it points to."""

    def __init__(self, method: Method, layer: int, layers: int, backend: str,
                 tensors: dict[str, Optional[torch.Tensor]]) -> None:
        q, k = tensors["q"], tensors["k"]
        assert q is not None and k is not None
        self.backend, self.place = backend, q.device
        self.kept: list[Any] = [method]
        self.args = c.still_attention_args(
            method=ct.pointer(method._c),
            layer=layer, layers=layers, batch=q.shape[0], tokens=q.shape[1],
            heads=q.shape[2], kv_heads=k.shape[2], head_dim=q.shape[3])
        for name, tensor in tensors.items():
            self.point(name, tensor)

    def point(self, name: str, tensor: Optional[torch.Tensor]) -> None:
        if tensor is None:
            return
        self.kept.append(tensor)
        kind = ct.c_int32 if name == "route" else ct.c_float
        setattr(self.args, name, ct.cast(tensor.data_ptr(), ct.POINTER(kind)))

    def run(self, function: Any) -> None:
        gpu = torch.cuda.device(self.place) if self.place.type == "cuda" else (
            contextlib.nullcontext())
        with gpu:
            device = _device(self.backend, self.place)
            with device._lock:
                call(function, device._handle, ct.byref(self.args))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, method: Method, layer: int, layers: int, backend: str,
                *inputs: Optional[torch.Tensor]) -> torch.Tensor:
        tensors = {name: None if x is None else x.detach().contiguous()
                   for name, x in zip(_INPUTS, inputs)}
        q, k = tensors["q"], tensors["k"]
        assert q is not None and k is not None
        choosers = q.shape[2] if method.per_head else k.shape[2]
        y = torch.empty_like(q)
        route = torch.empty((*q.shape[:2], choosers), dtype=torch.int32, device=q.device)
        work = _Call(method, layer, layers, backend, tensors)
        work.point("route", route)
        work.point("y", y)
        work.run(lib.still_attention_forward)
        ctx.save_for_backward(route, *tensors.values())
        ctx.settings = (method, layer, layers, backend)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Optional[torch.Tensor], ...]:
        route, *saved = ctx.saved_tensors
        tensors = dict(zip(_INPUTS, saved))
        method, layer, layers, backend = ctx.settings
        work = _Call(method, layer, layers, backend, tensors)
        work.point("route", route)
        work.point("dy", dy.contiguous())
        wanted = dict(zip(_INPUTS, ctx.needs_input_grad[4:]))
        # Gradients of parameters are added to; those that a method does not have stay 0.
        grads = {name: torch.zeros_like(x) if x is not None and wanted[name] else None
                 for name, x in tensors.items()}
        for name, grad in grads.items():
            work.point("d" + name, grad)
        work.run(lib.still_attention_backward)
        return (None, None, None, None, *grads.values())


def _check(name: str, x: torch.Tensor, shape: tuple[int, ...], what: str,
           place: torch.device) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}, expected a tensor")
    if x.dtype != torch.float32:
        raise TypeError(f"{name} is of {x.dtype}, and hybrid attention computes in "
                        f"torch.float32: give {name}.float()")
    if x.device != place:
        raise ValueError(f"{name} is on {x.device} and q on {place}: move one of them")
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} has the shape {tuple(x.shape)}, expected {shape}: {what}")


def hybrid_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
                     method: Method | str = "still",
                     gate_logit: torch.Tensor | None = None,
                     alpha: torch.Tensor | None = None,
                     window_logit: torch.Tensor | None = None,
                     map_q: torch.Tensor | None = None, map_k: torch.Tensor | None = None,
                     bias_q: torch.Tensor | None = None,
                     bias_k: torch.Tensor | None = None,
                     layer: int = 0, layers: int = 0,
                     backend: str | None = None) -> torch.Tensor:
    """Causal attention of a method over whole sequences: window, salient tokens, linear
    state (docs/methods.md has the equations). Differentiable once in every tensor; which
    tokens stay exact is a constant of the gradient.

    q [B,T,H,D], k and v [B,T,G,D], q and k after RoPE, not scaled; float32, all on one
    device, CPU or CUDA. Dense tensors are read in place, others are copied first. The
    result is [B,T,H,D].

    Trained inputs; None has the value that training starts with: gate_logit [B,T,H,D], the
    linear term times 2 sigmoid(gate_logit); alpha [H], its weight exp(alpha); map_q [H,D,D],
    map_k [S,D,D], feature maps as [in, out]; of lolcats window_logit [H]; of t2r bias_q [H],
    bias_k [S]. S is H for a method that is per_head, else G.

    layer, layers: which layer of how many this is, for methods with caps of single layers.
    backend: None is the device's own, cpu or cuda; "ref" computes in double, slowly, what
    the others must agree with.
    """
    chosen = method_of(method)
    assert chosen is not None
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}, expected a tensor")
        if x.dim() != 4:
            raise ValueError(f"{name} has the shape {tuple(x.shape)}, expected four "
                             "dimensions: batch, tokens, heads, head size")
    if q.device.type not in ("cpu", "cuda"):
        raise ValueError(f"q is on {q.device}, expected a CPU or CUDA tensor")
    if backend is None:
        backend = q.device.type
    if (backend == "cuda") != (q.device.type == "cuda"):
        raise ValueError(f"q is on {q.device}, where backend {backend} does not compute")
    B, T, H, D = q.shape
    G = k.shape[2]
    if min(B, T, H, D, G) < 1 or H % G:
        raise ValueError(f"q has the shape {tuple(q.shape)} and k {tuple(k.shape)}, expected "
                         "at least one of everything, and heads of q a multiple of k's")
    S = H if chosen.per_head else G
    shapes = {"q": (B, T, H, D), "k": (B, T, G, D), "v": (B, T, G, D),
              "gate_logit": (B, T, H, D), "alpha": (H,), "window_logit": (H,),
              "map_q": (H, D, D), "map_k": (S, D, D), "bias_q": (H,), "bias_k": (S,)}
    words = {"q": "[B,T,H,D]", "k": "[B,T,G,D]", "v": "[B,T,G,D]",
             "gate_logit": "that of q", "alpha": "a number a head",
             "window_logit": "a number a head", "map_q": "[H,D,D]", "map_k": "[S,D,D]",
             "bias_q": "a number a head", "bias_k": "a number for each map of keys"}
    inputs = (q, k, v, gate_logit, alpha, window_logit, map_q, map_k, bias_q, bias_k)
    for name, given in zip(_INPUTS, inputs):
        if given is not None:
            _check(name, given, shapes[name], words[name], q.device)
    out: torch.Tensor = _Attention.apply(chosen.copy(), layer, layers, backend, *inputs)
    return out
