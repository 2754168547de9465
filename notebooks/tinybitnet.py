"""tinybitnet: a language model with weights of -1, 0 and +1, trained from nothing in a minute. NumPy, nothing else.

    python tinybitnet.py [TEXT]        # alice.txt beside this file, or a text of yours

It reads a book letter by letter and learns to guess the next letter. Then it packs four weights into each byte, and
writes a text of its own from the packed weights. This is BitNet b1.58 (arXiv:2402.17764), small but complete: its
losses, gradients and logits are those of the package bitnet_ref (tests/training/test_tinybitnet.py).

Shapes: B sequences of T letters, N = B T; D hidden size, F feed-forward size, H heads of d = D / H, V kinds of letters.
"""

import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # in products so small, threads only wait for each other

import numpy as np

D, F, H, LAYERS, T, B = 128, 256, 4, 3, 64, 8
STEPS, LR, SECOND_LR, WARMUP, DECAY = 1000, 6e-3, 4e-3, 20, 0.1
EPS, THETA = 1e-5, 10000.0
PROMPT = "Alice was "

# -- 1. The idea: two roundings (notebooks 1 and 2) --------------------------------------------------------------------
# A float matrix W, the "master", becomes one number times -1, 0, +1. The vector x of each letter becomes integers of 8
# bits over one number. The product W x is then sums and differences of integers, and one float factor for each result.


def ternary(W):
    """W ~ w_t s with w_t in {-1, 0, +1} and s = mean|W| ("absmean")."""
    s = np.maximum(np.abs(W).mean(dtype=np.float64).astype(np.float32), np.float32(1e-5))
    return np.clip(np.rint(W * (1 / s)), -1, 1), s


def absmax(x):
    """x ~ x_q / a with integers x_q: the largest of each row becomes 127."""
    a = 127 / np.maximum(np.abs(x).max(-1, keepdims=True), 1e-5)
    return np.clip(np.rint(x * a), -128, 127), a


# -- 2. The problem and the trick (notebook 9) -------------------------------------------------------------------------
# Rounding is a staircase. Its slope is 0 nearly everywhere: no gradient comes through, and nothing would ever learn.
# So round on the way forward, and on the way back behave as if nothing had been rounded: the "straight-through
# estimator". The masters take many small steps; now and then one crosses a threshold, and the network's weight flips.


class Network:
    """From letters to logits, and back. Each op returns its result y, and a function from dy, the gradient of the loss
    with respect to y, to dx; on the way it stores the gradients of the masters."""

    def __init__(self, w, w_t=None):
        """w: name -> float array. w_t: name -> (ternary matrix, s) of the linear layers, from w if not given."""
        self.w, self.w_t, self.grads = w, w_t or round_all(w), {}

    def rms_norm(self, x, name):
        """y = x / r * g, r the root of the mean square: every row gets the same length.   (N, K) -> (N, K)"""
        g = self.w[name]
        r = np.sqrt(np.square(x, dtype=np.float64).mean(-1, keepdims=True) + EPS).astype(x.dtype)
        n = x / r

        def backward(dy):
            self.grads[name] = (dy * n).sum(0)
            dn = dy * g
            return (dn - n * (dn * n).mean(-1, keepdims=True)) / r  # the mean, because r depends on all of x

        return n * g, backward

    def bit_linears(self, x, norm, names):
        """BitNet's linear layers of one input: norm, round, multiply.   (N, K) -> [(N, out), ...]"""
        h, norm_backward = self.rms_norm(x, norm)
        x_q, a = absmax(h)
        weights = [self.w_t[name] for name in names]  # (out, K) each
        ys = [x_q @ w_t.T * (s / a) for w_t, s in weights]  # float32 holds these sums of integers exactly

        def backward(dys):
            for name, dy in zip(names, dys, strict=True):
                self.grads[name] = dy.T @ (x_q / a)  # straight through: as if y = (x_q / a) W^T with the float W
            dh = sum(dy * s @ w_t for dy, (w_t, s) in zip(dys, weights, strict=True))
            return norm_backward(dh)  # straight through again: as if h had not been rounded

        return ys, backward

    # -- 3. The rest is a transformer (notebooks 3a and 3b) ------------------------------------------------------------

    def attention_block(self, x, layer, shape):
        """Each letter asks (q) all letters up to itself (k), and averages their answers (v).   (N, D) -> (N, D)"""

        def split(y):  # (N, D) -> (B, H, T, d)
            return y.reshape(*shape, H, -1).swapaxes(1, 2)

        def merge(y):
            return y.swapaxes(1, 2).reshape(len(x), -1)

        names = [f"{layer}.{name}" for name in ("q_proj", "k_proj", "v_proj")]
        qkv, qkv_backward = self.bit_linears(x, f"{layer}.attn_norm", names)
        z, attend_backward = attend(*map(split, qkv))
        (y,), o_backward = self.bit_linears(merge(z), f"{layer}.attn_sub_norm", [f"{layer}.o_proj"])

        def backward(dy):
            dz = split(o_backward([dy]))
            return qkv_backward([merge(d) for d in attend_backward(dz)])

        return y, backward

    def feed_forward(self, x, layer, shape):
        """down(norm(relu(gate x)^2 * up x))   (N, D) -> (N, D)"""
        names = [f"{layer}.gate_proj", f"{layer}.up_proj"]
        (gate, up), gate_backward = self.bit_linears(x, f"{layer}.ffn_norm", names)
        relu = np.maximum(gate, 0)
        (y,), down_backward = self.bit_linears(np.square(relu) * up, f"{layer}.ffn_sub_norm", [f"{layer}.down_proj"])

        def backward(dy):
            dh = down_backward([dy])
            return gate_backward([dh * up * 2 * relu, dh * np.square(relu)])

        return y, backward

    def logits(self, tokens):
        """tokens (B, T) -> logits (N, V): a number for each letter that may come next"""
        embed, passes = self.w["embed"], []
        x = embed[tokens.ravel()]
        for layer in range(LAYERS):
            for block in (self.attention_block, self.feed_forward):
                y, block_backward = block(x, layer, tokens.shape)
                x = x + y
                passes.append(block_backward)
        h, norm_backward = self.rms_norm(x, "final_norm")

        def backward(dy):
            dx = norm_backward(dy @ embed)
            for block_backward in reversed(passes):
                dx = dx + block_backward(dx)
            self.grads["embed"] = dy.T @ h  # the embedding is the head too: it has a gradient from either end
            np.add.at(self.grads["embed"], tokens.ravel(), dx)

        return h @ embed.T, backward


def attend(q, k, v):
    """z = softmax(q k^T / sqrt(d)) v, after RoPE   (B, H, T, d)"""
    q, k = rotate(q), rotate(k)
    wide_q, wide_k, wide_v = (x.astype(np.float64) for x in (q, k, v))  # then any order of sums rounds alike
    scores = (wide_q @ wide_k.swapaxes(2, 3) * q.shape[-1] ** -0.5).astype(q.dtype)
    scores[..., np.triu(np.ones(scores.shape[2:], bool), 1)] = -np.inf  # no letter sees those after it
    e = np.exp((scores - scores.max(-1, keepdims=True)).astype(np.float64))
    p = (e / e.sum(-1, keepdims=True)).astype(q.dtype)

    def backward(dz):
        dp = dz @ v.swapaxes(2, 3)
        ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * q.shape[-1] ** -0.5
        return rotate(ds @ k, -1), rotate(ds.swapaxes(2, 3) @ q, -1), p.swapaxes(2, 3) @ dz

    return (p.astype(np.float64) @ wide_v).astype(q.dtype), backward


def rotate(x, sign=1):
    """RoPE: turn the pair (x[j], x[j + d/2]) by an angle that grows with the letter's place; back with sign -1."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[2])[:, None] * THETA ** -(np.arange(half) / half)
    cos, sin = np.cos(angles).astype(x.dtype), sign * np.sin(angles).astype(x.dtype)
    x1, x2 = x[..., :half], x[..., half:]
    return np.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)


# -- 4. Training (notebook 9) ------------------------------------------------------------------------------------------


def new_masters(V, rng):
    """Matrices of small random numbers, norms of 1."""
    sizes = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), (D, D)) | {"down_proj": (D, F)}
    sizes |= dict.fromkeys(("gate_proj", "up_proj"), (F, D)) | {"ffn_sub_norm": (F,)}
    sizes |= dict.fromkeys(("attn_norm", "attn_sub_norm", "ffn_norm"), (D,))
    sizes = {f"{layer}.{name}": size for layer in range(LAYERS) for name, size in sizes.items()}
    sizes |= {"embed": (V, D), "final_norm": (D,)}
    return {n: np.float32(rng.normal(0, 0.12, s) if len(s) > 1 else np.ones(s)) for n, s in sizes.items()}


def round_all(w):
    """The network that the masters stand for."""
    return {name: ternary(W) for name, W in w.items() if name.endswith("proj")}


def loss_and_gradients(w, tokens):
    """The mean of -log p(next letter), and its gradient for each master.   tokens (B, T + 1)"""
    network, targets = Network(w), tokens[:, 1:].ravel()
    logits, backward = network.logits(tokens[:, :-1])
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    chosen = np.arange(len(targets)), targets
    loss = -np.log(p[chosen]).mean(dtype=np.float64)
    p[chosen] -= 1  # d loss / d logits: p, less 1 at the letter that came
    backward(p / len(targets))
    return loss, network.grads


def adamw(w, grads, m, v, step, lr, decay):
    """Step 1, 2, ...: move each master against its mean gradient, by about lr; matrices also shrink a little."""
    for name, g in grads.items():
        m[name] = 0.9 * m.get(name, 0) + (1 - 0.9) * g
        v[name] = 0.95 * v.get(name, 0) + (1 - 0.95) * np.square(g)
        w[name] *= 1 - lr * decay if g.ndim > 1 else 1
        w[name] -= lr / (1 - 0.9**step) * m[name] / (np.sqrt(v[name] / (1 - 0.95**step)) + 1e-8)


def schedule(step):
    """Two stages. In the second nothing decays, and every step is smaller: the loss drops again."""
    left = 1 - step / STEPS
    lr, decay = (LR, DECAY) if left > 0.5 else (SECOND_LR, 0.0)
    return lr * left * min(1, (step + 1) / WARMUP), decay


# -- 5. Two bits for each weight (notebook 1), and a text from them (notebook 7a) --------------------------------------


def pack(w_t):
    """Four weights in a byte, as codes 0, 1, 2, the first in the lowest bits.   (out, K) -> (out, K/4) uint8"""
    codes = (w_t + 1).astype(np.uint8)
    return codes[:, 0::4] | codes[:, 1::4] << 2 | codes[:, 2::4] << 4 | codes[:, 3::4] << 6


def unpack(packed):
    """(out, K/4) uint8 -> (out, K) of -1, 0, +1"""
    codes = packed[:, :, None] >> np.array([0, 2, 4, 6], np.uint8) & 3
    return codes.reshape(len(packed), -1).astype(np.float32) - 1


def write(w, packed, tokens, n, rng, temperature=0.7):
    """Yields n letters drawn from the model's probabilities; it sees the last T letters."""
    for _ in range(n):
        network = Network(w, {name: (unpack(data), s) for name, (data, s) in packed.items()})
        logits = network.logits(np.array([tokens[-T:]]))[0][-1] / temperature
        p = np.exp((logits - logits.max()).astype(np.float64))
        tokens = [*tokens, int(rng.choice(len(p), p=p / p.sum()))]
        yield tokens[-1]


def main():
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("alice.txt")
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if len(text) <= 10 * T:  # the last tenth is the pages it never saw
        sys.exit(f"{path} is no text of enough letters: some 700 are needed")
    letters, rng = sorted({*text, *PROMPT}), np.random.default_rng(1)
    data = np.array([letters.index(c) for c in text])
    train, unseen = np.split(data, [len(data) * 9 // 10])

    def batch(part, rng):
        return part[rng.integers(0, len(part) - T, B)[:, None] + np.arange(T + 1)]

    w, m, v, start = new_masters(len(letters), rng), {}, {}, time.perf_counter()
    print(f"{path.name}: {len(text):,} letters of {len(letters)} kinds; {sum(W.size for W in w.values()):,} weights")
    for step in range(STEPS + 1):
        if step % (STEPS // 10) == 0:
            loss = np.mean([loss_and_gradients(w, batch(unseen, np.random.default_rng(i)))[0] for i in range(8)])
            seconds = time.perf_counter() - start
            print(f"step {step:4}   loss on pages it never saw {loss:.3f}   {seconds:3.0f} s", flush=True)
        adamw(w, loss_and_gradients(w, batch(train, rng))[1], m, v, step + 1, *schedule(step))
    packed = {name: (pack(w_t), s) for name, (w_t, s) in round_all(w).items()}
    before, after = sum(w[name].nbytes for name in packed), sum(data.nbytes for data, _ in packed.values())
    print(f"{before:,} bytes of masters packed into {after:,}\n\n{PROMPT}", end="")
    for token in write(w, packed, [letters.index(c) for c in PROMPT], 500, rng):
        print(letters[token], end="", flush=True)


if __name__ == "__main__":
    main()
