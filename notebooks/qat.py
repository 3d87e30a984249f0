# %% [markdown]
# # Quantization-aware training
#
# **Question.** What does training bring back of what weights of 4 bits lose? A MobileNet with power-of-two scales, trained from
# its ONNX file in JAX: weights, biases and exponents together, on the 512 bundled calibration images, without labels. No step sees
# the 3000 evaluation images.

# %%
import dataclasses

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from IPython.display import Markdown, display

import jq
from jq.arithmetic.numerics import nearest
from jq.npu.constraints import moving_together

config = jq.presets["XINT8"].replace(weight=jq.formats.INT4, bias="int32")
images, _ = jq.zoo.calibration_set()
images = np.concatenate([images, images[..., ::-1]])  # and mirrored
held_out, labels = jq.zoo.evaluation_set()

# %% [markdown]
# ## From ONNX to a plan
#
# This is what `jq.quantize` does before it exports.

# %%
graph = jq.prepare(jq.load(jq.zoo.path("fashion_mobilenet")), config)
graph = jq.equalize(graph, config, images[:128])
stats = jq.calibrate(graph, images[:128], config)
plan = jq.make_plan(graph, stats, config)
fn, qfn = jq.trace(graph), jq.fake_quant(graph)
teacher = np.asarray(jax.jit(fn)(graph.params, {"input": images})["logits"])

# %% [markdown]
# ## Train
#
# Rounding has a straight-through gradient, and the scale that of trained thresholds
# ([Jain et al.](https://arxiv.org/abs/1903.08066)). An exponent is learned as a float that is rounded with the same
# straight-through gradient, so that every step computes with powers of two; tensors that must share one are learned together.
# The loss is the KL divergence from the float network's outputs.

# %%
steps, batch = 200, 32
groups = moving_together(graph, plan, config)
state = {
    "params": {k: v for k, v in graph.params.items() if v.dtype == np.float32},
    "exponents": [jnp.log2(plan[group[0]].scale) for group in groups],
}


def scales(exponents):
    """The qparams of all tensors, by name."""
    pairs = [(t, jnp.exp2(nearest(e))) for group, e in zip(groups, exponents, strict=True) for t in group]
    return {t: dataclasses.replace(plan[t], scale=scale) for t, scale in pairs}


def loss(state, x, target):
    logits = qfn({**graph.params, **state["params"]}, plan.replace(scales(state["exponents"])), {"input": x})["logits"]
    return optax.losses.kl_divergence(jax.nn.log_softmax(logits), jax.nn.softmax(target)).mean()


rate = optax.warmup_cosine_decay_schedule(0.0, 5e-4, steps // 10, steps)
optimizer = optax.multi_transform(
    {"params": optax.adam(rate), "exponents": optax.adam(2e-2)},
    {"params": "params", "exponents": "exponents"},
)


@jax.jit
def step(state, moments, x, target):
    value, gradient = jax.value_and_grad(loss)(state, x, target)
    updates, moments = optimizer.update(gradient, moments, state)
    return optax.apply_updates(state, updates), moments, value


rng, moments, losses = np.random.default_rng(0), optimizer.init(state), []
for _ in range(steps):
    at = rng.choice(len(images), batch, replace=False)
    state, moments, value = step(state, moments, images[at], teacher[at])
    losses.append(float(value))
plt.figure(figsize=(5, 3))
plt.semilogy(losses)
plt.xlabel("step"), plt.ylabel("KL divergence, training batch")

# %% [markdown]
# ## Export
#
# `make_plan` takes the learned exponents in place of those that it would choose, and applies the NPU's constraints to them.

# %%
own = {
    t: jax.tree.map(np.asarray, q)
    for t, q in scales(state["exponents"]).items()
    if t in plan.weights or t in stats.tensors
}
trained = jq.make_plan(graph, stats, config, scales=own)
jq.export(graph, plan, path="rounded.onnx")
jq.export(graph, trained, params={**graph.params, **state["params"]}, path="trained.onnx")
moved = sum(int(trained[k].exponent) != int(plan[k].exponent) for k in plan)
print(f"{moved} of {len(plan)} exponents moved")

# %% [markdown]
# ## Answer
#
# Both files in onnxruntime, on images that no step has seen, each beside the float network.

# %%
files = {"rounded": "rounded.onnx", "trained": "trained.onnx"}
scores = {"float": jq.evaluate.model_scores(jq.zoo.path("fashion_mobilenet"), held_out)}
scores |= {name: jq.evaluate.model_scores(path, held_out) for name, path in files.items()}
found = jq.evaluate.classify(scores, jq.evaluate.Labels(labels))
display(Markdown("\n".join(f"- **{name}**, beside the float network: {found.paired[name]}" for name in files)))
