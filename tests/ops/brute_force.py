"""LoLCATs' formula and its relatives by brute force: numpy, float64, a loop a query. Uses nothing of hybridize's ops.

Window membership is written out again from the definition, so that a mistake in `hybridize.windows` shows.
"""

from __future__ import annotations

import numpy as np

EPSILON = 1e-12


def near_keys(kind: str, w: int, sinks: int, t: int) -> list[int]:
    if kind == "sliding":
        inside = set(range(max(0, t - w + 1), t + 1))
    else:
        block = t // w
        inside = {i for i in range(t + 1) if i // w in (block - 1, block)}
    return sorted(inside | set(range(min(sinks, t + 1))))


def far_keys(kind: str, w: int, sinks: int, overlap: bool, t: int) -> list[int]:
    if overlap:
        return list(range(t + 1))
    near = set(near_keys(kind, w, sinks, t))
    return [i for i in range(t + 1) if i not in near]


def hedgehog(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """softmax(xW) ++ softmax(-xW) over features, at least 1e-12."""
    y = x @ weight

    def softmax(z: np.ndarray) -> np.ndarray:
        e = np.exp(z - z.max())
        return e / e.sum()

    return np.maximum(np.concatenate([softmax(y), softmax(-y)]), 1e-12)


def guard(x: float) -> float:
    return x if abs(x) >= EPSILON else (-EPSILON if x < 0 else EPSILON)


def windowed_linear(
    q, k, v, w_q, w_k, *, kind, w, sinks, overlap, mix, softcap=None, mode="hybrid", removal="zero"
):
    """One sequence: q [T, H, D], k [T, G, D], v [T, G, V], maps [H, D, P]; `mix` a dict. Returns [T, H, V]."""
    length, heads, dim = q.shape
    groups = k.shape[1]
    out = np.zeros((length, heads, v.shape[-1]))
    for h in range(heads):
        g = h // (heads // groups)
        phi_k = [hedgehog(k[i, g], w_k[h if len(w_k) == heads else g]) for i in range(length)]
        for t in range(length):
            phi_q = hedgehog(q[t, h], w_q[h])
            near, far = near_keys(kind, w, sinks, t), far_keys(kind, w, sinks, overlap, t)
            score = {i: q[t, h] @ k[i, g] / np.sqrt(dim) for i in near}
            if softcap is not None:
                score = {i: softcap * np.tanh(s / softcap) for i, s in score.items()}
            c = max(score.values())
            e = {i: np.exp(s - c) for i, s in score.items()}
            near_num, near_den = sum(e[i] * v[i, g] for i in near), sum(e.values())
            far_num = sum((phi_q @ phi_k[i] * v[i, g] for i in far), np.zeros(v.shape[-1]))
            far_den = sum(phi_q @ phi_k[i] for i in far)
            all_num = sum(phi_q @ phi_k[i] * v[i, g] for i in range(t + 1))
            all_den = sum(phi_q @ phi_k[i] for i in range(t + 1))
            if mix["kind"] == "shared":
                gamma = mix["gamma"][h]
                eta = 1.0 if mix["eta"] == "one" else 1 - gamma
                nums = {
                    "hybrid": (gamma * near_num + eta * far_num, gamma * near_den + eta * far_den),
                    "softmax_only": (gamma * near_num, gamma * near_den),
                    "far_only": (eta * far_num, eta * far_den),
                    "linear_only": (eta * all_num, eta * all_den),
                }
                num, den = nums[mode]
                if removal == "zero":
                    den = nums["hybrid"][1]
                out[t, h] = num / guard(den)
                continue
            if "gate" in mix:
                gate = mix["gate"][h]
            else:
                lse = c + np.log(near_den)
                gate = 1 / (1 + np.exp(-(lse - np.log(max(far_den, EPSILON)) - mix["bias"][h])))
            a, b = gate, 1 - gate
            if not far and mix["empty_far"] == "renormalize":
                a = 1.0
            if removal == "renormalize" and mode != "hybrid":
                a, b = 1.0, 1.0
            near_o, far_o, all_o = near_num / near_den, far_num / guard(far_den), all_num / guard(all_den)
            out[t, h] = {
                "hybrid": a * near_o + b * far_o,
                "softmax_only": a * near_o,
                "far_only": b * far_o,
                "linear_only": b * all_o,
            }[mode]
    return out
