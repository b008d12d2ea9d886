#!/usr/bin/env python3
"""Writes tests/fixtures/train: gradients and loss curves of both training stages.

An implementation of docs/methods.md in PyTorch that shares nothing with the C code:
attention in its dense form (every weight of a T x T matrix, no chunks, no states),
gradients by autograd, everything in float64. It first checks itself against the cases
of tests/fixtures/operator, then makes a tiny random model and one file a case.

    python tools/train-reference.py             make the fixtures
    python tools/train-reference.py --check DIR compare with operator cases in DIR only
    python tools/train-reference.py --float32   also measure what float32 does to them

Needs numpy and torch (the CPU is enough). Versions are noted in every file.

Shapes: B sequences, T tokens, H query heads, G kv heads, S = G where heads share maps
and selection, else H; D head size. Sizes that depend on the head come first:
q [B,H,T,D], k and v [B,G,T,D], routing [B,S,T].
"""
import argparse
import json
import math
import pathlib
import platform
import struct
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

ROOT = pathlib.Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "tests" / "fixtures"

# ---- safetensors ---------------------------------------------------------------------
# Written here, sorted, so that the same numbers always give the same bytes.

DTYPES = {"F64": "<f8", "F32": "<f4", "I32": "<i4"}


def write_tensors(path, tensors, metadata):
    """metadata: every value is written as JSON in a string."""
    header, blobs, at = {}, [], 0
    if metadata:
        header["__metadata__"] = {k: json.dumps(v) for k, v in metadata.items()}
    for name in sorted(tensors, key=lambda n: (-tensors[n].dtype.itemsize, n)):
        a = np.ascontiguousarray(tensors[name])
        kind = next(k for k, d in DTYPES.items() if np.dtype(d) == a.dtype)
        header[name] = {"dtype": kind, "shape": list(a.shape),
                        "data_offsets": [at, at + a.nbytes]}
        blobs.append(a.tobytes())
        at += a.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def read_tensors(path):
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8:8 + size])
    metadata = {k: json.loads(v) for k, v in header.pop("__metadata__", {}).items()}
    tensors = {}
    for name, h in header.items():
        a, b = h["data_offsets"]
        data = np.frombuffer(raw[8 + size + a:8 + size + b], DTYPES[h["dtype"]])
        tensors[name] = torch.from_numpy(data.reshape(h["shape"]).copy())
    return tensors, metadata


# ---- The attention operator ----------------------------------------------------------

EPS = 1e-6


@dataclass
class Method:
    chunk: int
    select: int
    cap: int  # -1: none
    shared: bool  # selection and map of k per kv head
    norm_preserved: bool
    exact: bool  # scaling: exact, else relative to the window's maximum
    gate: bool
    alpha: bool
    window: bool  # learned window factor


def repeat(x, heads):
    """[B,S,...] -> [B,H,...]: head h belongs to group h / (H/S)."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def logits(q, k):
    return q @ repeat(k, q.shape[1]).transpose(-1, -2) / math.sqrt(q.shape[-1])


def head_scores(q, k, chunk):
    """The Self-Saliency Score by its definition -> [B,H,T]."""
    l, T = logits(q, k), q.shape[2]
    t, j = torch.arange(T)[:, None], torch.arange(T)[None, :]
    seen = (j <= t) & (j > t - chunk)
    a = l.masked_fill(~seen, -math.inf).softmax(-1)
    b = l.masked_fill(~(seen & (j != t)), -math.inf).softmax(-1).nan_to_num(0.0)
    return (a * ((a + EPS) / (b + EPS)).log()).sum(-1)


class Margin:
    """The smallest difference of scores that any decision hinged on."""

    def __init__(self):
        self.least, self.evicted = math.inf, 0

    def note(self, kept, dropped):
        if kept and dropped:
            self.least = min(self.least, min(kept) - max(dropped))


@torch.no_grad()
def route(q, k, m, margin=None):
    """fold [B,S,T]: the chunk at whose first token j is folded, T if it never is.
    Also the scores that selection used. In double, whatever q and k are."""
    score = head_scores(q.double(), k.double(), m.chunk)
    B, H, T = score.shape
    G = k.shape[1]
    if m.shared:
        score = score.view(B, G, H // G, T).mean(2)
    margin = margin or Margin()
    fold = torch.full(score.shape, T)
    for b in range(B):
        for s in range(score.shape[1]):
            x = score[b, s].tolist()
            best = lambda tokens: sorted(tokens, key=lambda j: (-x[j], j))
            salient = []
            for c in range(2, (T - 1) // m.chunk + 1):
                leaving = best(range((c - 2) * m.chunk, (c - 1) * m.chunk))
                stay, go = leaving[:m.select], leaving[m.select:]
                margin.note([x[j] for j in stay], [x[j] for j in go])
                salient = best(salient + stay)
                if m.cap >= 0:
                    out = salient[m.cap:]
                    salient = salient[:m.cap]
                    margin.note([x[j] for j in salient], [x[j] for j in out])
                    margin.evicted += len(out)
                    go = go + out
                fold[b, s, go] = c
    return fold, score


def features(x, w, norm_preserved):
    """[softmax(u), softmax(-u)], u = x w; x [B,H,T,D], w [H,D,F]."""
    u = x @ w
    if norm_preserved:
        square = (x * x).sum(-1, keepdim=True)
        length = torch.where(square > 0, square, 1.0).sqrt() * (square > 0)
        u = u / (u * u).sum(-1, keepdim=True).sqrt().clamp_min(1e-6) * length
    return torch.cat([u.softmax(-1), (-u).softmax(-1)], -1)


def attend(q, k, v, fold, m, p, gate_logit=None):
    """Output [B,H,T,D] and weights [B,H,T,T] of the method. Row t of the weights holds
    w_j / den for window and salient tokens, a phi(q_t).phi(k_j) / den for folded ones;
    the gate is not part of them. p: map_q, map_k and what the method has of alpha and
    window."""
    H, T = q.shape[1:3]
    t, j = torch.arange(T)[:, None], torch.arange(T)[None, :]
    folded = repeat(fold, H)[:, :, None, :] <= t // m.chunk
    exact = (j <= t) & ~folded
    l = logits(q, k)
    zero = torch.zeros(H, dtype=q.dtype)
    alpha = (p["alpha"] if m.alpha else zero)[:, None, None]
    top = l.detach().masked_fill(~exact, -math.inf).amax(-1, keepdim=True)
    if m.exact:
        some = folded.any(-1, keepdim=True)
        top = torch.where(some, torch.maximum(top, alpha.detach()), top)
        a = (alpha - top).exp()
    else:
        a = alpha.exp()
    w = (l - top).masked_fill(~exact, -math.inf).exp()
    if m.window:
        w = w * p["window"].sigmoid()[:, None, None]
    heads = k if m.shared else repeat(k, H)
    phi_q = features(q, p["map_q"], m.norm_preserved)
    phi_k = repeat(features(heads, p["map_k"], m.norm_preserved), H)
    linear = a * (phi_q @ phi_k.transpose(-1, -2)) * folded
    den = (w + linear).sum(-1, keepdim=True)
    value = repeat(v, H)
    far = linear @ value
    if m.gate:
        far = far * (2 * gate_logit.sigmoid())
    return (w @ value + far) / den, (w + linear) / den


def check_operator(folder):
    """Compares routing, scores, outputs and gradients with the cases of a folder."""
    paths = sorted(folder.glob("*.safetensors"))
    assert paths, f"{folder}: no operator cases"
    for path in paths:
        g, meta = read_tensors(path)
        m = Method(meta["chunk"], meta["lam"], meta["cap"],
                   meta["shared_kv_select_and_map"], meta["norm_preserved"],
                   meta["la_scale"] == "exact", meta["gate"], meta["alpha"],
                   meta["window_factor"])
        leaf = {n: g[n].clone().requires_grad_() for n in
                ("q", "k", "v", "map_q", "map_k", "gate_logit", "alpha",
                 "window_logit") if n in g}
        q, k, v = (leaf[n][None] for n in "qkv")
        fold, score = route(q, k, m)
        T = q.shape[2]
        want = g["out.fold_chunk"]
        want = repeat(torch.where(want < 0, T, want)[None], q.shape[1])
        assert torch.equal(repeat(fold, q.shape[1]), want), f"{path.name}: routing"
        p = dict(leaf, window=leaf.get("window_logit"))
        gate = leaf["gate_logit"][None] if m.gate else None
        y, _ = attend(q, k, v, fold, m, p, gate)
        (y[0] * g["in.dy"]).sum().backward()
        pairs = [(y[0].detach(), g["out.y"]),
                 (head_scores(q, k, m.chunk)[0].detach(), g["out.score_head"])]
        pairs += [(leaf[n].grad, g["grad." + n]) for n in leaf if "grad." + n in g]
        worst = max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))
                    if a is not None else float(b.abs().max()) for a, b in pairs)
        print(f"operator {path.stem:24s} routing equal, error {worst:.1e}")
        assert worst < 1e-9, f"{path.name}: {worst}"


# ---- The tiny model ------------------------------------------------------------------

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 3, 64, 4, 2, 16, 96, 320
THETA, NORM_EPS = 10000.0, 1e-5

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False,
    "bos_token_id": 1, "dtype": "float32", "eos_token_id": 2, "head_dim": HEAD_DIM,
    "hidden_act": "silu", "hidden_size": HIDDEN, "intermediate_size": FFN,
    "max_position_embeddings": 512, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": HEADS, "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS, "rms_norm_eps": NORM_EPS, "rope_theta": THETA,
    "tie_word_embeddings": False, "vocab_size": VOCAB,
}


def random_model(seed):
    """Weights in float32. Attention logits deviate by about 1.5, v is of order 1, and
    a layer adds about half of what the stream holds."""
    rng = np.random.default_rng(seed)
    normal = lambda scale, *shape: rng.normal(0, scale, shape).astype(np.float32)
    norm = lambda: (1 + rng.normal(0, 0.1, HIDDEN)).astype(np.float32)
    w = {"model.embed_tokens.weight": normal(0.7, VOCAB, HIDDEN)}
    for n in range(LAYERS):
        at = f"model.layers.{n}."
        w[at + "input_layernorm.weight"] = norm()
        w[at + "self_attn.q_proj.weight"] = normal(0.153, HEADS * HEAD_DIM, HIDDEN)
        w[at + "self_attn.k_proj.weight"] = normal(0.153, KV_HEADS * HEAD_DIM, HIDDEN)
        w[at + "self_attn.v_proj.weight"] = normal(0.125, KV_HEADS * HEAD_DIM, HIDDEN)
        w[at + "self_attn.o_proj.weight"] = normal(0.09, HIDDEN, HEADS * HEAD_DIM)
        w[at + "post_attention_layernorm.weight"] = norm()
        w[at + "mlp.gate_proj.weight"] = normal(0.125, FFN, HIDDEN)
        w[at + "mlp.up_proj.weight"] = normal(0.125, FFN, HIDDEN)
        w[at + "mlp.down_proj.weight"] = normal(0.08, HIDDEN, FFN)
    w["model.norm.weight"] = norm()
    w["lm_head.weight"] = normal(0.15, VOCAB, HIDDEN)
    return w


def rms_norm(x, w):
    return x * (x.pow(2).mean(-1, keepdim=True) + NORM_EPS).rsqrt() * w


def rope(x):
    """Pairs (i, i + D/2) turn by t * theta^(-2i/D); x [B,H,T,D]."""
    T, D = x.shape[-2:]
    rate = THETA ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    angle = torch.arange(T, dtype=torch.float64)[:, None] * rate
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    lo, hi = x[..., :D // 2], x[..., D // 2:]
    return torch.cat([lo * cos - hi * sin, hi * cos + lo * sin], -1)


def by_head(x):
    """[B,T,heads*D] -> [B,heads,T,D]"""
    return x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)


def forward(w, ids, attention, lora=None):
    """Logits [B,T,V]. attention(n, x, q, k, v) -> [B,H,T,D], x the normed input of
    layer n; lora(n, target, x): what is added to a projection's output."""
    lora = lora or (lambda n, target, x: 0)
    h = w["model.embed_tokens.weight"][ids]
    for n in range(LAYERS):
        at = f"model.layers.{n}."
        x = rms_norm(h, w[at + "input_layernorm.weight"])
        q, k, v = (by_head(x @ w[f"{at}self_attn.{p}_proj.weight"].T + lora(n, p, x))
                   for p in "qkv")
        y = attention(n, x, rope(q), rope(k), v).transpose(1, 2).flatten(2)
        h = h + y @ w[at + "self_attn.o_proj.weight"].T + lora(n, "o", y)
        x = rms_norm(h, w[at + "post_attention_layernorm.weight"])
        up = F.silu(x @ w[at + "mlp.gate_proj.weight"].T) * (
            x @ w[at + "mlp.up_proj.weight"].T)
        h = h + up @ w[at + "mlp.down_proj.weight"].T
    return rms_norm(h, w["model.norm.weight"]) @ w["lm_head.weight"].T


@torch.no_grad()
def teacher(w, ids):
    """Its logits and, per layer, (x, q, k, v, attention weights, attention output)."""
    seen = []

    def softmax(n, x, q, k, v):
        T = q.shape[2]
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        a = logits(q, k).masked_fill(future, -math.inf).softmax(-1)
        y = a @ repeat(v, HEADS)
        seen.append((x, q, k, v, a, y))
        return y

    return forward(w, ids, softmax), seen


# ---- The two stages ------------------------------------------------------------------


@dataclass
class Case:
    name: str
    method: str
    stage: int
    steps: int
    seed: int
    loss: str = "mse"  # stage 1: mse or weights
    kd: float = 0.0  # stage 2: weight of KL(teacher || student)

    @property
    def lr(self):
        return 1e-2 if self.stage == 1 else 5e-3


METHODS = {
    "still": Method(chunk=8, select=2, cap=3, shared=True, norm_preserved=True,
                    exact=True, gate=True, alpha=True, window=False),
    "lolcats": Method(chunk=8, select=0, cap=0, shared=False, norm_preserved=False,
                      exact=False, gate=False, alpha=False, window=True),
}
MODEL_SEED = 20
CASES = [
    Case("still-stage1", "still", 1, 40, seed=26),
    Case("lolcats-stage1", "lolcats", 1, 40, seed=2),
    Case("still-stage2", "still", 2, 40, seed=53),
    Case("lolcats-stage2", "lolcats", 2, 40, seed=4),
    Case("still-stage2-kd", "still", 2, 1, seed=5, kd=0.5),
    Case("still-weights", "still", 1, 1, seed=6, loss="weights"),
    Case("lolcats-weights", "lolcats", 1, 1, seed=7, loss="weights"),
]
BATCH, TOKENS = 2, 40
RANK, LORA_ALPHA = 4, 8
WARM_UP, CLIP, BETAS, ADAM_EPS = 0.05, 1.0, (0.9, 0.95), 1e-8
LEAST_MARGIN = 1e-5  # of the scores; below it float32 might route otherwise


def random_ids(rng, steps):
    """[steps,B,T]: a Markov chain over 32 of the ids, each with four successors. Chains
    that repeat themselves more would repeat whole windows, whose scores in layer 0 are
    equal."""
    alphabet = rng.choice(np.arange(3, VOCAB), 32, replace=False)
    n = len(alphabet)
    step = np.array([rng.choice(np.arange(1, n), 4, replace=False) for _ in range(n)])
    ids = np.empty((steps, BATCH, TOKENS), np.int32)
    for row in ids.reshape(-1, TOKENS):
        state = rng.integers(n)
        for t in range(TOKENS):
            row[t] = alphabet[state]
            state = (state + step[state, rng.choice(4, p=(0.4, 0.3, 0.2, 0.1))]) % n
    return ids


def random_start(case, rng):
    """Initial values, float32, of all that the student has."""
    m = METHODS[case.method]
    noise = lambda scale, *shape: rng.normal(0, scale, shape)
    start = {}
    for n in range(LAYERS):
        maps = lambda heads: np.eye(HEAD_DIM) + noise(0.1, heads, HEAD_DIM, HEAD_DIM)
        add = {"map_q": maps(HEADS), "map_k": maps(KV_HEADS if m.shared else HEADS)}
        if m.alpha:
            add["alpha"] = noise(0.5, HEADS)
        if m.window:
            add["window"] = math.log(0.1 / 0.9) + noise(0.5, HEADS)
        if m.gate and case.loss != "weights":
            add["gate"] = noise(0.05, HEADS * HEAD_DIM, HIDDEN)
        if case.stage == 2:
            q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
            sizes = {"q": (HIDDEN, q), "k": (HIDDEN, kv), "v": (HIDDEN, kv),
                     "o": (q, HIDDEN)}
            if m.gate:
                sizes["gate"] = (HIDDEN, q)
            for target, (inner, outer) in sizes.items():
                add[f"lora.{target}.a"] = noise(0.1, RANK, inner)
                add[f"lora.{target}.b"] = noise(0.02, outer, RANK)
        start.update({f"layers.{n}.{k}": v.astype(np.float32) for k, v in add.items()})
    return start


def layer_params(p, n):
    at = f"layers.{n}."
    return {k[len(at):]: v for k, v in p.items() if k.startswith(at)}


def stage1_loss(case, w, p, ids, margin):
    m, total = METHODS[case.method], 0
    for n, (x, q, k, v, weights, target) in enumerate(teacher(w, ids)[1]):
        own = layer_params(p, n)
        fold, _ = route(q, k, m, margin)
        gate = by_head(x @ own["gate"].T) if "gate" in own else torch.zeros_like(q)
        y, b = attend(q, k, v, fold, m, own, gate)
        if case.loss == "mse":
            total = total + 1000 * (y - target).pow(2).mean()
        else:
            past = torch.ones_like(b, dtype=torch.bool).tril()
            total = total - (weights * torch.where(past, b, 1.0).log()).sum(-1).mean()
    return total / LAYERS


def student(case, w, p, ids, margin):
    """Logits of the linearized model with its LoRA."""
    m = METHODS[case.method]

    def lora(n, target, x):
        at = f"layers.{n}.lora.{target}."
        if at + "a" not in p:
            return 0
        return LORA_ALPHA / RANK * (x @ p[at + "a"].T) @ p[at + "b"].T

    def attention(n, x, q, k, v):
        own = layer_params(p, n)
        gate = by_head(x @ own["gate"].T + lora(n, "gate", x)) if m.gate else None
        return attend(q, k, v, route(q, k, m, margin)[0], m, own, gate)[0]

    return forward(w, ids, attention, lora)


def stage2_loss(case, w, p, ids, margin):
    logp = student(case, w, p, ids, margin)[:, :-1].log_softmax(-1)
    loss = -logp.gather(-1, ids[:, 1:, None]).mean()
    if case.kd:
        target = teacher(w, ids)[0][:, :-1].log_softmax(-1)
        loss = loss + case.kd * (target.exp() * (target - logp)).sum(-1).mean()
    return loss


def learning_rate(case, step):
    warm = math.ceil(WARM_UP * case.steps)
    if step < warm:
        return case.lr * (step + 1) / warm
    along = (step - warm) / (case.steps - warm)
    return case.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * along)))


def run(case, weights, dtype):
    """Trains; -> ids, start, gradients of the first step, losses, norms, margin."""
    rng = np.random.default_rng([MODEL_SEED, case.seed])
    ids, start = random_ids(rng, case.steps), random_start(case, rng)
    w = {k: torch.from_numpy(v).to(dtype) for k, v in weights.items()}
    p = {k: torch.from_numpy(v).to(dtype) for k, v in start.items()}
    # W_g stands still in stage 2: its LoRA trains in its place.
    trained = {k: v.requires_grad_() for k, v in p.items()
               if not (case.stage == 2 and k.endswith(".gate"))}
    optimizer = torch.optim.AdamW(trained.values(), betas=BETAS, eps=ADAM_EPS,
                                  weight_decay=0)
    loss_of = stage1_loss if case.stage == 1 else stage2_loss
    margin, losses, norms, grads = Margin(), [], [], None
    for step in range(case.steps):
        optimizer.zero_grad()
        loss = loss_of(case, w, p, torch.from_numpy(ids[step]).long(), margin)
        loss.backward()
        if step == 0:
            grads = {k: v.grad.double().numpy().copy() for k, v in trained.items()}
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(case, step)
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
    return ids, start, grads, np.array(losses), np.array(norms), margin


def relative(got, want):
    return float(np.abs(got - want).max() / np.abs(want).max())


def make_case(case, weights, folder, versions, float32):
    ids, start, grads, losses, norms, margin = run(case, weights, torch.float64)
    m = METHODS[case.method]
    assert margin.least >= LEAST_MARGIN, f"{case.name}: margin {margin.least:.1e}"
    assert all(np.abs(g).max() > 0 for g in grads.values())
    tensors = {"start." + k: v for k, v in start.items()}
    tensors |= {"grad." + k: v.astype(np.float32) for k, v in grads.items()}
    tensors |= {"ids": ids, "loss": losses, "norm": norms}
    metadata = {
        "method": case.method, "chunk": m.chunk, "select": m.select, "cap": m.cap,
        "heads": "shared" if m.shared else "per-head",
        "norm_preserved": m.norm_preserved,
        "la_scale": "exact" if m.exact else "window",
        "gate": m.gate, "alpha": m.alpha, "window_factor": m.window,
        "stage": case.stage, "loss": case.loss, "kd": case.kd, "steps": case.steps,
        "lr": case.lr, "warm": math.ceil(WARM_UP * case.steps), "clip": CLIP,
        "betas": BETAS, "eps": ADAM_EPS, "lora_rank": RANK if case.stage == 2 else 0,
        "lora_alpha": LORA_ALPHA if case.stage == 2 else 0, "seed": case.seed,
        "margin": margin.least if m.select else None, **versions,
    }
    write_tensors(folder / f"{case.name}.safetensors", tensors, metadata)
    print(f"{case.name:16s} loss {losses[0]:.6f} .. {losses[-1]:.6f}, norm "
          f"{norms[0]:.4f} .. {norms[-1]:.4f}, margin {margin.least:.1e}, "
          f"{margin.evicted} evictions")
    if float32:
        _, _, grads32, losses32, norms32, _ = run(case, weights, torch.float32)
        worst = max((relative(grads32[k], grads[k]), k) for k in grads)
        print(f"{'':16s} float32: gradients {worst[0]:.1e} ({worst[1]}), losses "
              f"{np.abs(losses32 / losses - 1).max():.1e}, norms "
              f"{np.abs(norms32 / norms - 1).max():.1e}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=FIXTURES / "train")
    parser.add_argument("--check", type=pathlib.Path, metavar="DIR")
    parser.add_argument("--float32", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)  # one order of summation
    check_operator(args.check or FIXTURES / "operator")
    if args.check:
        return
    versions = {"torch": torch.__version__, "numpy": np.__version__,
                "python": platform.python_version()}
    weights = random_model(MODEL_SEED)
    model = args.out / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    write_tensors(model / "model.safetensors", weights, {})
    for case in CASES:
        make_case(case, weights, args.out, versions, args.float32)


if __name__ == "__main__":
    main()
