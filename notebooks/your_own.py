# %% [markdown]
# # Write your own
#
# **Question.** How much code is an idea? This notebook tries four small ideas on one network, each a value or a function of a
# few lines: a statistic, a search for scales, a rounding, and a chip. Is any of them good?

# %%
import dataclasses

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Markdown, display

import jq
from jq.calibration.observers import Observer

calibration, _ = jq.zoo.calibration_set()
config = jq.presets["XINT8"].replace(error_parts=True)
graph = jq.prepare(jq.load(jq.zoo.path("fashion_mobilenet")), config)
graph = jq.equalize(graph, config, calibration[:128])

# %% [markdown]
# ## An observer
#
# The fourth moment says how heavy a tensor's tails are. An observer is `init`, `observe` and `merge` on small arrays that lead with
# an axis of rows, here one row per tensor. It runs beside the others in the same compiled pass.


# %%
@dataclasses.dataclass(frozen=True)
class Tails(Observer):
    """Sums of the second and the fourth powers."""

    def init(self, rows, place):
        return {"count": jnp.zeros(rows), "second": jnp.zeros(rows), "fourth": jnp.zeros(rows)}

    def observe(self, x, place):
        x = self._by_row(x)
        rest = tuple(range(1, x.ndim))
        count = jnp.full(x.shape[0], float(np.prod(x.shape[1:])))
        return {"count": count, "second": (x**2).sum(rest), "fourth": (x**4).sum(rest)}

    def merge(self, a, b):
        return {k: a[k] + b[k] for k in a}


stats = jq.calibrate(graph, calibration[:128], config, observers={"tails": Tails()})


def kurtosis(tensor):
    """3 for a normal distribution around zero."""
    s = {k: float(v[0]) for k, v in stats.rows(tensor, "tails").items()}
    return s["count"] * s["fourth"] / s["second"] ** 2


plan = jq.make_plan(graph, stats, config)
tensors = [t for t in plan.activations if t in stats.tensors]


def clipped(tensor):
    """Share of the chosen exponent's squared error that clipping causes."""
    table = stats.errors(tensor)
    (at,) = np.flatnonzero(table["exponent"] == int(plan[tensor].exponent))[:1]
    return table["clipped"][at] / table["total"][at]


heavy, cut = np.array([kurtosis(t) for t in tensors]), np.array([clipped(t) for t in tensors])
ranks = [np.argsort(np.argsort(v)) for v in (heavy, cut)]
correlation = float(np.corrcoef(ranks)[0, 1])
plt.figure(figsize=(5, 3))
plt.plot(heavy, 100 * cut, ".")
plt.xlabel("kurtosis"), plt.ylabel("of the error, by clipping, %"), plt.xscale("log")
print(f"rank correlation of tails and clipping: {correlation:.2f}, {len(tensors)} tensors")

# %% [markdown]
# ## A search for scales
#
# MinMSE weighs clipping and rounding equally. Here clipping counts `weight` times. A search is a function from statistics to
# scales, which `make_plan` uses in place of its own before it applies the NPU's constraints.


# %%
def searched(weight):
    """The plan with exponents of least rounding + weight x clipping."""
    moved = {}
    for tensor in tensors:
        table = stats.errors(tensor)
        best = table["exponent"][np.argmin(table["total"] + (weight - 1) * table["clipped"])]
        moved[tensor] = dataclasses.replace(plan[tensor], scale=np.float32(2.0**best))
    return jq.make_plan(graph, stats, config, scales=moved)


qfn, fn = jq.fake_quant(graph), jq.trace(graph)
fresh = calibration[256:512]
wanted = jax.jit(fn)(graph.params, {"input": fresh})["logits"]


@jax.jit
def decibels(params, plan):
    """Signal to noise of the logits, on images that nothing here has seen."""
    logits = qfn(params, plan, {"input": fresh})["logits"]
    return 10 * jnp.log10((wanted**2).sum() / ((logits - wanted) ** 2).sum())


weights = (0.25, 1.0, 4.0, 16.0)
by_weight = {w: float(decibels(graph.params, searched(w))) for w in weights}
print({w: f"{v:.2f} dB" for w, v in by_weight.items()})

# %% [markdown]
# ## A way to round
#
# Round the last layer's weights up or down at random, 64 times, in one compiled call, and keep the result with the least error
# of the logits on 64 calibration images. `vmap` replaces the loop.

# %%
last = graph.nodes[-1]
weight, scale = last.inputs[1], plan[last.inputs[1]].scale
seen = calibration[:64]
seen_targets = jax.jit(fn)(graph.params, {"input": seen})["logits"]


def tried(key):
    """The loss of weights that a key rounds, and the weights."""
    low = jnp.floor(graph.params[weight] / scale)
    up = jax.random.uniform(key, low.shape) < graph.params[weight] / scale - low
    rounded = (low + up) * scale
    logits = qfn({**graph.params, weight: rounded}, plan, {"input": seen})["logits"]
    return jnp.mean((logits - seen_targets) ** 2), rounded


losses, candidates = jax.jit(jax.vmap(tried))(jax.random.split(jax.random.key(0), 64))
chosen = {**graph.params, weight: candidates[losses.argmin()]}
rounding = {"nearest": float(decibels(graph.params, plan)), "best of 64": float(decibels(chosen, plan))}
print({k: f"{v:.2f} dB" for k, v in rounding.items()})

# %% [markdown]
# ## A chip
#
# A target is data. This one has no adder for rounding, so it floors.

# %%
jq.export(graph, plan, path="model.onnx")
floors = dataclasses.replace(jq.integer.AIE2_X1, name="floors", rounding="floor")
chips = {}
for target in (jq.integer.AIE2_X1, floors):
    logits = jq.integer.load("model.onnx", target=target)({"input": fresh})["logits"]
    chips[target.name] = jq.metrics.sqnr(np.asarray(wanted), np.asarray(logits))
print({k: f"{v:.2f} dB" for k, v in chips.items()})

# %% [markdown]
# ## Answer

# %%
best = max(by_weight, key=by_weight.get)
gain = rounding["best of 64"] - rounding["nearest"]
display(
    Markdown(
        f"- The statistic: tails and clipping have a rank correlation of {correlation:.2f}.\n"
        f"- The search: clipping counted {best:g} times is best of {len(weights)}, {by_weight[best]:.2f} dB against "
        f"{by_weight[1.0]:.2f} of MinMSE.\n"
        f"- Rounding by chance: {gain:+.2f} dB against rounding to nearest, on fresh images.\n"
        f"- The chip without a rounding adder: {chips['floors'] - chips['aie2_x1']:+.1f} dB.\n\n"
        "One network, 256 images: these say how such ideas are tried, not how good they are."
    )
)
