# %% [markdown]
# # Power-of-two calibration, looked at closely
#
# **Question.** The exponent of each tensor is chosen for the least squared error of that tensor alone. Is it also the exponent
# that gives the network the least error?

# %%
import dataclasses

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Markdown, display

import jq

calibration, _ = jq.zoo.calibration_set()
config = jq.presets["XINT8"].replace(error_parts=True)  # keep what clipping causes apart
graph = jq.prepare(jq.load(jq.zoo.path("fashion_mobilenet")), config)
graph = jq.equalize(graph, config, calibration[:128])
stats = jq.calibrate(graph, calibration[:128], config)
plan = jq.make_plan(graph, stats, config)
plan

# %% [markdown]
# ## One tensor
#
# A power of two leaves little choice: twice the step is twice the range. Calibration sums the squared error at six exponents,
# over all values of all images, in a single pass. A coarse step rounds a lot, and a fine one clips.

# %%
tensor = max(
    (t for t in plan.activations if t in stats.tensors), key=lambda t: stats.errors(t)["clipped"].max(initial=0)
)
table = stats.errors(tensor)
share = {k: table[k][: table["exponent"].size] / table["power"] for k in ("total", "clipped")}
figure, axis = plt.subplots(figsize=(6, 3))
axis.bar(table["exponent"], share["total"] - share["clipped"], label="rounding")
axis.bar(table["exponent"], share["clipped"], bottom=share["total"] - share["clipped"], label="clipping")
axis.axvline(int(plan[tensor].exponent), color="black", linestyle=":", label="chosen")
axis.set(yscale="log", xlabel="exponent", ylabel="squared error / power", title=tensor)
axis.legend()
print({int(e): f"{t:.2e}" for e, t in zip(table["exponent"], share["total"], strict=True)})

# %% [markdown]
# ## Every tensor, by its effect on the output
#
# The plan is data, so a shift of every tensor's exponent is an argument of one compiled function. Here it shifts each
# tensor by -2 to 2, and leaves the others unchanged. The loss is the squared error of the logits against the float network's, on
# 64 of the calibration images.

# %%
qfn, fn = jq.fake_quant(graph), jq.trace(graph)
names = [t for t in plan.activations if t in stats.tensors]


def loss(shifts, images, targets):
    moved = {n: dataclasses.replace(plan[n], scale=plan[n].scale * 2.0 ** shifts[i]) for i, n in enumerate(names)}
    logits = qfn(graph.params, plan.replace(moved), {"input": images})["logits"]
    return jnp.mean((logits - targets) ** 2) / jnp.mean(targets**2)


steps = np.arange(-2, 3)
candidates = np.concatenate([np.eye(len(names))[i] * steps[:, None] for i in range(len(names))]).astype(np.float32)
seen = calibration[:64]
targets = fn(graph.params, {"input": seen})["logits"]
search = jax.jit(lambda shifts: jax.lax.map(lambda s: loss(s, seen, targets), shifts))
losses = np.asarray(search(candidates)).reshape(len(names), len(steps))
best = steps[losses.argmin(1)]
print(f"{len(names)} tensors, {losses.size} quantizations")
print("shift that is best for the output:", {int(s): int((best == s).sum()) for s in steps})

# %%
here = losses[0, 2]  # of the plan itself
figure, axis = plt.subplots(figsize=(10, 3))
for shift, color in zip(steps, plt.cm.coolwarm(np.linspace(0, 1, len(steps))), strict=True):
    axis.plot(losses[:, shift + 2] / here, ".-", color=color, label=f"{shift:+d}")
axis.set(yscale="log", xlabel="tensor, in the order of the graph", ylabel="loss / loss of the plan")
axis.legend(title="exponent", ncol=5)
plt.show()

# %% [markdown]
# ## Does it help to follow the output?
#
# First all tensors take their own best shift at once, then one after the other, each given those before it. Both are judged on
# images that the search did not use. (Moving exponents may break the NPU's constraints, which this notebook ignores.)

# %%
fresh = jq.zoo.calibration_set()[0][256:512]
fresh_targets = fn(graph.params, {"input": fresh})["logits"]
judge = jax.jit(lambda s: loss(s, fresh, fresh_targets))
greedy = np.zeros(len(names), np.float32)
for i in range(len(names)):
    tries = np.tile(greedy, (3, 1))
    tries[:, i] += (-1, 0, 1)
    greedy = tries[np.asarray(search(tries)).argmin()]
found = {
    "each tensor's own error": np.zeros(len(names), np.float32),
    "the output, all at once": best.astype(np.float32),
    "the output, one by one": greedy,
}
decibels = {k: float(-10 * np.log10(judge(v))) for k, v in found.items()}
for kind, value in decibels.items():
    print(f"{kind:26} {value:6.2f} dB, {int(np.count_nonzero(found[kind]))} tensors moved")

# %% [markdown]
# ## Answer

# %%
agree = int((best == 0).sum())
most = 100 * (1 - losses.min() / here)
start, together, ordered = decibels.values()
display(
    Markdown(
        f"For {agree} of {len(names)} tensors the exponent of least squared error is also the best one for the output, among "
        f"shifts of up to two. Where it is not, moving that tensor alone lowers the loss by {most:.1f} % at most. Moving all of "
        f"them at once changes the signal-to-noise ratio of the logits on fresh images from {start:.2f} to {together:.2f} dB, "
        f"one by one to {ordered:.2f} dB."
    )
)
