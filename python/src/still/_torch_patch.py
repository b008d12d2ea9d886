"""Adapters in models of transformers: the attention of each layer that the method replaces
becomes the library's, with the adapter's numbers as parameters of PyTorch."""
# mypy: disable-error-code="import-not-found", disallow-subclassing-any=False
# mypy: disallow-untyped-calls=False

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, TypeVar

import torch
from torch import nn

from ._adapter import Adapter
from ._errors import FileError
from ._names import resolve
from ._torch_attention import hybrid_attention

if TYPE_CHECKING:
    from ._library import StrPath

M = TypeVar("M", bound=nn.Module)


class _LowRank(nn.Module):
    """A projection and its low-rank addition: W x + scale b (a x)."""

    def __init__(self, base: nn.Module, a: torch.Tensor, b: torch.Tensor,
                 scale: float) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        self.a, self.b = nn.Parameter(a), nn.Parameter(b)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x)
        low = (x.to(self.a.dtype) @ self.a.T) @ self.b.T
        return y + (self.scale * low).to(y.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE on [B,T,heads,D]; the two of a pair are half a head apart."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class HybridAttention(nn.Module):
    """In the place of transformers' LlamaAttention. Its parameters are those of the adapter:
    they can be trained on, and are in the model's state_dict."""

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    gate: Optional[nn.Module]
    alpha: Optional[torch.Tensor]
    window_logit: Optional[torch.Tensor]
    map_q: Optional[torch.Tensor]
    map_k: Optional[torch.Tensor]
    bias_q: Optional[torch.Tensor]
    bias_k: Optional[torch.Tensor]
    order: Optional[torch.Tensor]

    def __init__(self, attention: Any, adapter: Adapter, layers: int, paired: bool) -> None:
        super().__init__()
        self.config, self.layer_idx = attention.config, attention.layer_idx
        self.head_dim, self.layers = int(attention.head_dim), layers
        self.method = adapter.method
        weight = attention.q_proj.weight
        name = f"layers.{self.layer_idx}."

        def take(tensor: str) -> Optional[torch.Tensor]:
            if name + tensor not in adapter:
                return None
            return torch.from_numpy(adapter[name + tensor]).to(weight.device)

        for kind in ("alpha", "map_q", "map_k", "bias_q", "bias_k"):
            self._own(kind, take(kind))
        self._own("window_logit", take("window"))
        half = self.head_dim // 2
        places = torch.arange(self.head_dim, device=weight.device)
        # Where a number of the adapter's order lies in ours, and ours in the adapter's.
        self.register_buffer("order", places % 2 * half + places // 2 if paired else None,
                             persistent=False)
        back = places % half * 2 + places // half
        scale = adapter.lora_alpha / adapter.lora_rank if adapter.lora_rank else 0.0
        for target in ("q", "k", "v", "o"):
            projection = getattr(attention, target + "_proj")
            a, b = take(f"lora.{target}.a"), take(f"lora.{target}.b")
            if a is not None and b is not None:
                if paired and target in "qk":
                    b = b.view(-1, self.head_dim, b.shape[1])[:, back].reshape(b.shape)
                projection = _LowRank(projection, a, b, scale)
            setattr(self, target + "_proj", projection)
        gate = take("gate")
        if gate is not None:
            linear = nn.Linear(gate.shape[1], gate.shape[0], bias=False,
                               device=weight.device)
            with torch.no_grad():
                linear.weight.copy_(gate)
            a, b = take("lora.gate.a"), take("lora.gate.b")
            self.gate = linear if a is None or b is None else _LowRank(linear, a, b, scale)
        else:
            self.gate = None

    def _own(self, name: str, value: Optional[torch.Tensor]) -> None:
        self.register_parameter(name, None if value is None else nn.Parameter(value))

    def forward(self, hidden_states: torch.Tensor,
                position_embeddings: tuple[torch.Tensor, torch.Tensor],
                attention_mask: Optional[torch.Tensor] = None,
                past_key_values: Any = None,
                **rest: Any) -> tuple[torch.Tensor, None]:
        """attention_mask is not read: it is causal, and `patch` refuses padding in front."""
        if past_key_values is not None:
            raise ValueError("hybrid attention computes whole sequences and keeps no cache: "
                             "give use_cache=False (still.Model generates token by token, in "
                             "constant memory)")
        B, T, _ = hidden_states.shape

        def heads(x: torch.Tensor) -> torch.Tensor:
            return x.view(B, T, -1, self.head_dim)

        cos, sin = (x.unsqueeze(2) for x in position_embeddings)
        q = _rotate(heads(self.q_proj(hidden_states)), cos, sin)
        k = _rotate(heads(self.k_proj(hidden_states)), cos, sin)
        v = heads(self.v_proj(hidden_states))
        if self.order is not None:
            q, k = q[..., self.order], k[..., self.order]
        gate = None
        if self.gate is not None:
            kind = next(self.gate.parameters()).dtype
            gate = heads(self.gate(hidden_states.to(kind))).float()

        def wide(x: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
            return None if x is None else x.float()  # model.half() narrows them

        y = hybrid_attention(q.float(), k.float(), v.float(), method=self.method,
                             gate_logit=gate, alpha=wide(self.alpha),
                             window_logit=wide(self.window_logit), map_q=wide(self.map_q),
                             map_k=wide(self.map_k), bias_q=wide(self.bias_q),
                             bias_k=wide(self.bias_k), layer=self.layer_idx,
                             layers=self.layers)
        out: torch.Tensor = self.o_proj(y.reshape(B, T, -1).to(hidden_states.dtype))
        return out, None


def _refuse_padding(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook: tokens that others must not see may only come after all that count."""
    mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
    if mask is None:
        return
    if mask.dim() != 2:
        raise ValueError(f"attention_mask has the shape {tuple(mask.shape)}, and hybrid "
                         "attention is causal: expected none, or [batch, tokens]")
    seen = mask != 0
    if not bool(seen[:, 0].all()) or bool((seen[:, 1:] & ~seen[:, :-1]).any()):
        raise ValueError("attention_mask leaves out tokens in front of others, and hybrid "
                         "attention counts positions from the first: pad on the right "
                         "(tokenizer.padding_side = 'right')")


def patch(model: M, adapter: StrPath, *, paired: bool | None = None) -> M:
    """Puts a trained adapter into a Llama of transformers, in place; the model.

    model: LlamaForCausalLM with the weights that the adapter was trained on, or nearly; or
    what `still export --to safetensors` wrote, with the same folder as adapter. adapter: a
    name or path as for Model.from_pretrained ("smollm2-still"). Its logits are then those of
    still.Model, up to the length that the model was trained for (longer sessions cap
    positions, which whole sequences cannot).

    paired: whether the adapter's base was a GGUF file, which orders q and k otherwise; None:
    find out from the base that it names, which has to be on this machine.

    The model computes whole sequences, so use_cache becomes False; padding goes to the
    right."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "model_type", None) != "llama":
        raise TypeError(f"{type(model).__name__} is not a Llama of transformers "
                        f"(model_type {getattr(config, 'model_type', None)!r})")
    decoder: Any = getattr(model, "model", model)
    path = Path(adapter)
    if paired is None or not path.exists():
        try:
            found = resolve(adapter, download=False)
        except FileError as error:
            raise FileError(f"{error} (or give patch a path and paired=True if the base is a "
                            "GGUF file, False if it is a folder)") from None
        if found.adapter is None:
            raise ValueError(f"{adapter} is no adapter: expected what `still linearize` wrote")
        path = found.adapter
        if paired is None:
            paired = found.model.name.endswith(".gguf")
    with Adapter(path) as numbers:
        layers = list(decoder.layers)
        last = numbers.method.last_layer
        last = len(layers) - 1 if last < 0 else last
        made = {}
        for i in range(numbers.method.first_layer, last + 1):
            if i >= len(layers):
                raise ValueError(f"{path}: converts layer {i}, and the model has "
                                 f"{len(layers)}: it is of another model")
            _check_shapes(numbers, i, config, layers[i].self_attn, path)
            made[i] = HybridAttention(layers[i].self_attn, numbers, len(layers), paired)
    for i, attention in made.items():
        layers[i].self_attn = attention.train(model.training)
    config.use_cache = False
    if getattr(model, "generation_config", None) is not None:
        generation: Any = model.generation_config
        generation.use_cache = False
    decoder.register_forward_pre_hook(_refuse_padding, with_kwargs=True)
    return model


def _check_shapes(numbers: Adapter, layer: int, config: Any, attention: Any,
                  path: Path) -> None:
    """Whether the adapter's tensors of a layer are for this model."""
    if isinstance(attention, HybridAttention):
        raise ValueError("the model has an adapter already")
    H, G = config.num_attention_heads, config.num_key_value_heads
    D, hidden = attention.head_dim, config.hidden_size
    S, rank = (H if numbers.method.per_head else G), numbers.lora_rank
    expected: dict[str, tuple[int, ...]] = {
        "alpha": (H,), "window": (H,), "map_q": (H, D, D), "map_k": (S, D, D),
        "bias_q": (H,), "bias_k": (S,), "gate": (H * D, hidden)}
    sides = {"q": (hidden, H * D), "k": (hidden, G * D), "v": (hidden, G * D),
             "o": (H * D, hidden), "gate": (hidden, H * D)}
    for target, (size_in, size_out) in sides.items():
        expected[f"lora.{target}.a"] = (rank, size_in)
        expected[f"lora.{target}.b"] = (size_out, rank)
    for name, shape in numbers.shapes.items():
        own = name.removeprefix(f"layers.{layer}.")
        if own == name:
            continue
        if expected.get(own) != shape:
            raise ValueError(f"{path}: {name} has the shape {shape}, and this model has a "
                             f"place for {expected.get(own)}: it is of another model")
