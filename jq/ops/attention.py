"""Attention and position embeddings of transformers."""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from onnx import helper

from jq.errors import ModelError, UnsupportedOp
from jq.ops.table import Array, Context, astype, op


def _split_heads(x: Array, heads: int | None) -> Array:
    """(N, L, heads * D) as (N, heads, L, D); arrays with four dims are returned unchanged."""
    if x.ndim == 4:
        return x
    if not heads or x.shape[-1] % heads:
        raise ModelError(f"{x.shape[-1]} features do not divide into {heads} heads: check num_heads")
    return jnp.swapaxes(x.reshape(*x.shape[:2], heads, -1), 1, 2)


def _merge_heads(x: Array) -> Array:
    """(N, heads, L, D) as (N, L, heads * D)."""
    return jnp.swapaxes(x, 1, 2).reshape(x.shape[0], x.shape[2], -1)


def _extended(k: Array, v: Array, past_key: Array, past_value: Array) -> tuple[Array, Array]:
    """Keys and values behind those of earlier calls."""
    if (past_key is None) != (past_value is None):
        raise ModelError("past_key and past_value must be given together")
    if past_key is None:
        return k, v
    return jnp.concatenate([past_key, k], axis=2), jnp.concatenate([past_value, v], axis=2)


def _grouped(q: Array, k: Array) -> Array:
    """q @ k of (N, heads, L, D) where k has fewer heads: neighbouring heads of q share one, and k is not repeated."""
    (n, heads, length, width), shared = q.shape, k.shape[1]
    if heads % shared:
        raise ModelError(f"{heads} query heads do not divide into groups for {shared} key/value heads")
    return (q.reshape(n, shared, -1, width) @ k).reshape(n, heads, length, -1)


def _scores(q: Array, k: Array, scale: float | None) -> Array:
    """q @ k.T * scale, half of the scale on each side as ONNX defines it, which keeps half precision in range."""
    half = jnp.asarray(math.sqrt(1 / math.sqrt(q.shape[-1]) if scale is None else scale), q.dtype)
    return _grouped(q * half, jnp.swapaxes(k, -1, -2) * half)


def _softmax(scores: Array, masked: Array | None = None) -> Array:
    """Softmax over the keys; rows that may look nowhere become zero, not NaN, in the gradient too."""
    if masked is None:
        return jax.nn.softmax(scores, axis=-1)
    return jnp.where(masked, 0, jax.nn.softmax(jnp.where(masked, 0, scores), axis=-1))


def _allowed(
    queries: int, keys: int, offset: Array, causal: int, left: int = -1, right: int = -1, valid: Array = None
) -> Array:
    """Which key each query may see, (queries, keys) or (N, 1, queries, keys); None if all.

    Query i stands at position i + offset.
    """
    ahead = np.arange(keys) - np.arange(queries)[:, None] - offset  # how far a key is after the query
    rules = [ahead <= 0] if causal else []
    rules += [-ahead <= left] if left >= 0 else []
    rules += [ahead <= right] if right >= 0 else []
    rules += [] if valid is None else [np.arange(keys) < valid]
    return functools.reduce(operator.and_, rules) if rules else None


@op("Attention", since=23)
def attention(
    q: Array, k: Array, v: Array, mask: Array | None = None, past_key: Array | None = None,
    past_value: Array | None = None, nonpad_kv_seqlen: Array | None = None, *, is_causal: int, kv_num_heads: int | None,
    left_window_size: int = -1, q_num_heads: int | None, qk_matmul_output_mode: int, right_window_size: int = -1,
    scale: float | None, softcap: float, softmax_precision: int | None,
) -> tuple[Array, Array, Array, Array]:  # fmt: skip
    packed = q.ndim == 3
    q, k, v = _split_heads(q, q_num_heads), _split_heads(k, kv_num_heads), _split_heads(v, kv_num_heads)
    if past_key is not None and nonpad_kv_seqlen is not None:
        raise ModelError("past_key and nonpad_kv_seqlen are mutually exclusive")
    k, v = _extended(k, v, past_key, past_value)
    queries, keys = q.shape[2], k.shape[2]
    valid = None if nonpad_kv_seqlen is None else nonpad_kv_seqlen.reshape(-1, 1, 1, 1)
    offset = valid - queries if valid is not None else 0 if past_key is None else past_key.shape[2]
    allowed = _allowed(queries, keys, offset, is_causal, left_window_size, right_window_size, valid)
    if mask is not None:
        fill = False if mask.dtype == bool else -jnp.inf
        mask = jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, keys - mask.shape[-1])], constant_values=fill)
        mask = jnp.where(mask, 0, -jnp.inf).astype(q.dtype) if mask.dtype == bool else mask
    bias = mask if allowed is None else jnp.where(allowed, 0 if mask is None else mask, -jnp.inf).astype(q.dtype)

    shown = raw = _scores(q, k, scale)
    scores = jnp.tanh(raw / softcap) * softcap if softcap else raw
    shown = scores if qk_matmul_output_mode == 1 else shown
    scores = scores if bias is None else scores + bias
    shown = scores if qk_matmul_output_mode == 2 else shown
    if softmax_precision is not None:
        scores = astype(scores, helper.tensor_dtype_to_np_dtype(softmax_precision))
    blind = None if bias is None else jnp.max(bias, axis=-1, keepdims=True) == -jnp.inf
    weights = _softmax(scores, blind).astype(q.dtype)
    shown = weights if qk_matmul_output_mode == 3 else shown
    y = _grouped(weights, v)
    return (_merge_heads(y) if packed else y), k, v, shown


@op("FlexAttention", domain="ai.onnx.preview")
def flex_attention(
    q: Array, k: Array, v: Array, *, prob_mod: Any, scale: float | None, score_mod: Any, softmax_precision: int | None,
    ctx: Context,
) -> Array:  # fmt: skip
    """Return attention whose scores and weights go through the node's subgraphs."""
    precision = jnp.promote_types(q.dtype, jnp.float32)
    if softmax_precision is not None:
        precision = helper.tensor_dtype_to_np_dtype(softmax_precision)
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = astype(_grouped(q, jnp.swapaxes(k, -1, -2)), precision) * factor
    scores = scores if score_mod is None else ctx.run(score_mod, [scores])[0]
    weights = _softmax(scores)
    weights = weights if prob_mod is None else ctx.run(prob_mod, [weights])[0]
    return _grouped(weights.astype(q.dtype), v)


@op("LinearAttention", since=27)
def linear_attention(
    q: Array, k: Array, v: Array, past_state: Array | None = None, decay: Array | None = None,
    beta: Array | None = None, *, kv_num_heads: int, q_num_heads: int, scale: float, update_rule: str,
) -> tuple[Array, Array]:  # fmt: skip
    """Return q read from a state S: S = exp(decay) S, then S += k (x) v, or k (x) beta (v - S k) with a delta rule."""
    gated, delta = update_rule in ("gated", "gated_delta"), update_rule in ("delta", "gated_delta")
    if gated != (decay is not None) or delta != (beta is not None):
        raise ModelError(f"{update_rule!r} needs {'a' if gated else 'no'} decay and {'a' if delta else 'no'} beta")
    state_dtype = q.dtype if past_state is None else past_state.dtype
    n, length, width = q.shape[0], q.shape[1], q.shape[2] // q_num_heads

    def steps(x: Array, heads: int) -> Array:  # (L, N, heads, D) in single precision
        return None if x is None else x.astype(jnp.float32).reshape(n, length, heads, -1).swapaxes(0, 1)

    heads = [kv_num_heads, kv_num_heads, kv_num_heads, 1 if beta is None else beta.shape[-1]]
    xs = [steps(q, 1).reshape(length, n, kv_num_heads, -1, width), *map(steps, (k, v, decay, beta), heads)]
    factor = scale or 1 / math.sqrt(width)

    def step(state: Array, x: list[Array]) -> tuple[Array, Array]:
        q, k, v, decay, beta = x  # the query heads of a group, (N, kv_num_heads, group, D), share one state
        state = state if decay is None else state * jnp.exp(decay)[..., None]
        v = v if beta is None else beta * (v - jnp.einsum("nhkv,nhk->nhv", state, k))
        state = state + k[..., :, None] * v[..., None, :]
        return state, q @ state * factor

    start = jnp.zeros((n, kv_num_heads, width, v.shape[2] // kv_num_heads)) if past_state is None else past_state
    state, y = lax.scan(step, start.astype(jnp.float32), xs)
    return y.swapaxes(0, 1).reshape(n, length, -1).astype(q.dtype), state.astype(state_dtype)


def _rotated(x: Array, cos: Array, sin: Array, interleaved: int) -> Array:
    """x with the pairs of its last axis, neighbours or halves, turned by an angle; the rest of that axis is kept."""
    width = 2 * cos.shape[-1]
    turned, kept = x[..., :width], x[..., width:]
    pairs = turned.reshape(*x.shape[:-1], *((width // 2, 2) if interleaved else (2, width // 2)))
    axis = -1 if interleaved else -2
    a, b = jnp.take(pairs, 0, axis), jnp.take(pairs, 1, axis)
    turned = jnp.stack([cos * a - sin * b, sin * a + cos * b], axis).reshape(turned.shape)
    return jnp.concatenate([turned, kept], axis=-1)


@op("RotaryEmbedding", since=23)
def rotary_embedding(
    x: Array, cos: Array, sin: Array, position_ids: Array | None = None, *, interleaved: int, num_heads: int | None,
    rotary_embedding_dim: int,
) -> Array:  # fmt: skip
    if position_ids is not None:
        cos, sin = cos[position_ids], sin[position_ids]
    heads = _split_heads(x, num_heads)
    width = rotary_embedding_dim or heads.shape[-1]
    if cos.shape[-1] * 2 != width:
        raise ModelError(
            f"the caches hold {cos.shape[-1]} angles, but {width} features are rotated: expected half as many angles"
        )
    y = _rotated(heads, cos[:, None], sin[:, None], interleaved)
    return y if x.ndim == 4 else _merge_heads(y)


@op("RotaryEmbedding", domain="com.microsoft")
def rotary_embedding_microsoft(
    x: Array, position_ids: Array, cos: Array, sin: Array, *, interleaved: int = 0, is_packed_batching: int = 0,
    num_heads: int = 0, rotary_embedding_dim: int = 0, scale: float = 1.0,
) -> Array:  # fmt: skip
    """Like ONNX's, but the position ids come second and may be one offset for all."""
    if is_packed_batching or scale != 1:
        raise UnsupportedOp("is_packed_batching and scale are not supported: export without them")
    heads = _split_heads(x, num_heads or (x.shape[-1] // (2 * cos.shape[-1])))
    if position_ids.size == 1:
        position_ids = position_ids.reshape(1, 1) + jnp.arange(heads.shape[2])
    y = _rotated(heads, cos[position_ids][:, None], sin[position_ids][:, None], interleaved)
    return y if x.ndim == 4 else _merge_heads(y)


def _key_bias(mask: Array | None, n: int, keys: int, fill: float, dtype: Any) -> Array | None:
    """com.microsoft's mask as a bias on scores: lengths (N,), ends and starts of the keys (2N,), or 0/1 per key."""
    if mask is None:
        return None
    if mask.ndim == 1 and mask.shape[0] in (n, 2 * n):
        places = jnp.arange(keys)
        mask = mask.reshape(-1, n, 1)
        seen = places < mask[0]
        seen = seen if len(mask) == 1 else seen & (places >= mask[1])
    elif mask.ndim in (2, 3) and mask.shape[-1] == keys:
        seen = mask > 0
    else:
        raise UnsupportedOp(
            f"a mask of shape {list(mask.shape)} is not supported: use lengths, ({n},), or 0/1 per key, ({n}, {keys})"
        )
    return jnp.where(seen[:, None, None] if seen.ndim == 2 else seen[:, None], 0, fill).astype(dtype)


def _attend(
    q: Array, k: Array, v: Array, past: tuple[Array, Array], mask: Array, bias: Array, fill: float, scale: float,
    causal: int,
) -> tuple[Array, Array, Array, Array]:  # fmt: skip
    """Attention as com.microsoft computes it, its keys and values, and the scores before the softmax."""
    before = 0 if past[0] is None else past[0].shape[2]
    k, v = _extended(k, v, *past)
    scores = _grouped(q, jnp.swapaxes(k, -1, -2)) * jnp.asarray(scale or 1 / math.sqrt(q.shape[-1]), q.dtype)
    for term in (bias, _key_bias(mask, q.shape[0], k.shape[2], fill, q.dtype)):
        scores = scores if term is None else scores + term
    if causal:
        scores = jnp.where(_allowed(q.shape[2], k.shape[2], before, causal), scores, jnp.finfo(scores.dtype).min)
    return _merge_heads(_grouped(_softmax(scores), v)), k, v, scores


@op("Attention", domain="com.microsoft")
def attention_microsoft(
    x: Array, w: Array, b: Array | None = None, mask_index: Array | None = None, past: Array | None = None,
    attention_bias: Array | None = None, past_sequence_length: Array | None = None, *, do_rotary: int = 0,
    mask_filter_value: float = -10000.0, num_heads: int, past_present_share_buffer: int = 0, qkv_hidden_sizes: Any,
    scale: float = 0.0, unidirectional: int = 0,
) -> tuple[Array, Array | None]:  # fmt: skip
    if do_rotary or past_present_share_buffer or past_sequence_length is not None:
        raise UnsupportedOp(
            "do_rotary, past_present_share_buffer and past_sequence_length are not supported: export without them"
        )
    packed = x @ w
    packed = packed if b is None else packed + b
    sizes = qkv_hidden_sizes or (packed.shape[-1] // 3,) * 3
    q, k, v = (_split_heads(part, num_heads) for part in jnp.split(packed, np.cumsum(sizes)[:2].tolist(), axis=-1))
    before = (None, None) if past is None else (past[0], past[1])
    y, k, v, _ = _attend(q, k, v, before, mask_index, attention_bias, mask_filter_value, scale, unidirectional)
    return y, jnp.stack([k, v]) if k.shape == v.shape else None


@op("MultiHeadAttention", domain="com.microsoft")
def multi_head_attention(
    q: Array, k: Array | None = None, v: Array | None = None, b: Array | None = None,
    key_padding_mask: Array | None = None, attention_bias: Array | None = None, past_key: Array | None = None,
    past_value: Array | None = None, past_sequence_length: Array | None = None, cache_indirection: Array | None = None,
    *, mask_filter_value: float = -10000.0, num_heads: int, scale: float = 0.0, unidirectional: int = 0,
) -> tuple[Array, Array, Array, Array]:  # fmt: skip
    if past_sequence_length is not None or cache_indirection is not None:
        raise UnsupportedOp(
            "past_sequence_length and cache_indirection are not supported: export without a shared cache buffer"
        )
    if q.ndim == 5:  # (N, L, heads, 3, D)
        q, k, v = (jnp.swapaxes(q[:, :, :, i], 1, 2) for i in range(3))
    elif k is not None and k.ndim == 5:  # (N, L, heads, 2, D)
        k, v = (jnp.swapaxes(k[:, :, :, i], 1, 2) for i in range(2))
    if k is None or v is None:
        raise UnsupportedOp("without key and value, the query must pack all three: (batch, length, heads, 3, size)")
    parts = [_split_heads(x, num_heads) for x in (q, k, v)]
    if b is not None:
        sizes = np.cumsum([x.shape[1] * x.shape[3] for x in parts])[:2].tolist()
        parts = [x + part.reshape(x.shape[1], 1, -1) for x, part in zip(parts, jnp.split(b, sizes), strict=True)]
    q, k, v = parts
    past, mask = (past_key, past_value), key_padding_mask
    return _attend(q, k, v, past, mask, attention_bias, mask_filter_value, scale, unidirectional)
