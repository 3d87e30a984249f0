# %% [markdown]
# # The chip on the desk
#
# **Question.** onnxruntime runs an XINT8 model on the desk, the NPU runs it in the field. Where do the two differ, and does it
# matter?
#
# This simulates AMD's public reference emulators of the NPU, not silicon.

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Markdown, display

import jq

targets = ("ort", "dpu", "aie2_x1")
calibration, _ = jq.zoo.calibration_set()
images, labels = jq.zoo.evaluation_set()
result = jq.quantize(jq.zoo.path("fashion_mobilenet"), calibration[:128], "XINT8", output="model.onnx")

# %% [markdown]
# ## Every integer, twice
#
# `explain` computes each node twice on the same integers: as the chip does, and as onnxruntime does. A difference then comes from
# the node itself, and gets a cause. The target `ort` should equal onnxruntime.

# %%
logs = {}
for target in targets:
    logs[target] = jq.integer.load("model.onnx", target=target).explain({"input": images[:64]})[1]
    print(logs[target].summary(), end="\n\n")


# %%
def by_cause(log):
    """How many differences have which cause."""
    causes = sorted({c for row in log.rows for c in row.causes})
    return {c: sum(row.causes.get(c, 0) for row in log.rows) for c in causes}


for target, log in logs.items():
    total = {k: sum(getattr(row, k) for row in log.rows) for k in ("elements", "ties", "differs")}
    print(
        f"{target:10} of {total['elements']:,} integers {total['ties']:,} are ties, {total['differs']:,} differ: {by_cause(log)}"
    )

# %% [markdown]
# ## Along the network
#
# Dots show the share of integers that differ at a place by itself, given onnxruntime's integers as inputs. The dashed line is
# for the whole run, where differences propagate.

# %%
figure, axis = plt.subplots(figsize=(9, 3.2))
for target, color in (("dpu", "C0"), ("aie2_x1", "C1")):
    rows = logs[target].rows
    axis.plot([row.differs / row.elements for row in rows], "o", color=color, label=target)
    axis.plot([row.diverged / row.elements for row in rows], "--", color=color, linewidth=1)
axis.set(xlabel="place where the chip rounds", ylabel="share of integers that differ")
axis.set_yscale("symlog", linthresh=1e-4)
axis.legend()
plt.show()

# %% [markdown]
# ## The pool
#
# The network ends with a mean over a window. The chip multiplies by a whole number and shifts, and so is off by a factor. The
# quantizer has put the same factor into the model, so that onnxruntime uses it, too.

# %%
for row in logs["aie2_x1"].rows:
    if row.factor_error:
        causes = dict(row.causes) or "none"
        print(f"{row.operators}: off by {100 * row.factor_error:+.2f} %; causes of differences there: {causes}")

# %% [markdown]
# ## Does it matter?
#
# The integer program is a pure function. Here it runs on all 3000 images.

# %%
program, params = jq.integer.load("model.onnx", target="aie2_x1").trace()
logits = jax.jit(jq.chunked(program))(params, {"input": images})["logits"]
guesses = {
    "onnxruntime": jq.evaluate.model_scores("model.onnx", images).values.argmax(-1),
    "aie2_x1": np.asarray(logits).argmax(-1),
}
top1 = {kind: 100 * np.mean(guess == labels) for kind, guess in guesses.items()}
other = guesses["onnxruntime"] != guesses["aie2_x1"]
print({kind: f"{value:.2f} %" for kind, value in top1.items()}, f"another class: {other.sum()} images")

# %% [markdown]
# ## Answer

# %%
log = logs["aie2_x1"]
differs, elements = sum(row.differs for row in log.rows), sum(row.elements for row in log.rows)
causes, exact = by_cause(log), sum(row.differs for row in logs["ort"].rows)
largest = max(causes, key=causes.get)
first = log.first_divergence.tensor if log.first_divergence else "no tensor"
last = log.rows[-1].diverged / log.rows[-1].elements
display(
    Markdown(
        f"On `aie2_x1`, {100 * differs / elements:.2f} % of all integers differ from onnxruntime's on the same inputs, "
        f"{100 * causes[largest] / differs:.0f} % of these because of *{largest}*; {log.unexplained} have no known cause. "
        f"The whole run first parts at `{first}`, and at the end {100 * last:.0f} % of the logits' integers are others. "
        f"Of 3000 images {other.sum()} get another class; top-1 goes from {top1['onnxruntime']:.2f} to {top1['aie2_x1']:.2f} %. "
        f"The target `ort` differs from onnxruntime in {exact} integers."
    )
)
