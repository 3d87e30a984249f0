# %% [markdown]
# # The chip on the desk
#
# **Question.** onnxruntime runs an XINT8 model on the desk, the NPU runs it in the field. Where do the two part, and does it
# matter?
#
# What is simulated here is AMD's public reference emulators of the NPU, not silicon.

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Markdown, display

import jq

names, targets = jq.zoo.models(), ("ort", "dpu", "aie2_x1", "aie2_even")
calibration, _ = jq.zoo.calibration_set()
images, labels = jq.zoo.evaluation_set()
for name in names:
    jq.quantize(jq.zoo.path(name), calibration[:128], "XINT8", output=f"{name}.onnx")

# %% [markdown]
# ## Every integer, twice
#
# `explain` computes each node twice on the same integers: as the chip does, and as onnxruntime does. A difference is then
# the node's own, and is given a cause.

# %%
logs = {}
for name in names:
    for target in targets:
        chip = jq.integer.load(f"{name}.onnx", target=target)
        logs[name, target] = chip.explain({"input": images[:64]})[1]
    print(name)
    print(logs[name, "aie2_x1"].summary())

# %%
causes = sorted({c for log in logs.values() for row in log.rows for c in row.causes})
print(f"{'':30}{'integers':>12}{'ties':>10}{'differ':>10}{'unexplained':>13}  causes")
for (name, target), log in logs.items():
    total = {k: sum(getattr(r, k) for r in log.rows) for k in ("elements", "ties", "differs", "unexplained")}
    counts = {c: sum(r.causes.get(c, 0) for r in log.rows) for c in causes}
    named = ", ".join(f"{c} {n}" for c, n in counts.items() if n)
    figures = "{elements:12}{ties:10}{differs:10}{unexplained:13}".format(**total)
    print(f"{name + ', ' + target:30}{figures}  {named}")

# %% [markdown]
# ## Along the network
#
# Solid: differences that a node makes itself, on onnxruntime's integers. Dashed: the whole run, where differences flow on.

# %%
figure, axes = plt.subplots(1, 2, figsize=(11, 3.2), sharey=True)
for axis, name in zip(axes, names, strict=True):
    for target, color in zip(targets[1:], ("C0", "C1", "C2"), strict=True):
        rows = logs[name, target].rows
        own = [max(r.differs / r.elements, 1e-6) for r in rows]
        whole = [max(r.diverged / r.elements, 1e-6) for r in rows]
        axis.plot(own, ".", color=color, label=target)
        axis.plot(whole, "--", color=color, linewidth=1)
    axis.set(yscale="log", title=name, xlabel="place where the chip rounds", ylabel="share of integers that differ")
    axis.legend()

# %% [markdown]
# ## The pool
#
# The network ends with a mean over a window. The chip multiplies by a whole number and shifts, and so is off by a factor.

# %%
for name in names:
    for row in logs[name, "aie2_x1"].rows:
        if row.factor_error:
            print(f"{name}: {row.node} ({row.operators}), off by {100 * row.factor_error:+.2f} %")

# %% [markdown]
# ## Does it matter?

# %%
guesses = {}
for name in names:
    guesses[name, "onnxruntime"] = jq.evaluate.model_scores(f"{name}.onnx", images).values.argmax(-1)
    for target in targets:
        program, params = jq.integer.load(f"{name}.onnx", target=target).trace()
        logits = jax.jit(jq.chunked(program))(params, {"input": images})["logits"]
        guesses[name, target] = np.asarray(logits).argmax(-1)
same = {key: 100 * np.mean(guess == guesses[key[0], "onnxruntime"]) for key, guess in guesses.items()}
top1 = {key: 100 * np.mean(guess == labels) for key, guess in guesses.items()}
for key in guesses:
    print(f"{key[0]:18} {key[1]:12} top-1 {top1[key]:6.2f} %  same class as onnxruntime {same[key]:6.2f} %")

# %% [markdown]
# ## Answer

# %%
lines = []
for name in names:
    log, target = logs[name, "aie2_x1"], (name, "aie2_x1")
    differs, elements = sum(r.differs for r in log.rows), sum(r.elements for r in log.rows)
    by = {c: sum(r.causes.get(c, 0) for r in log.rows) for c in causes}
    largest = max(by, key=by.get)
    first = log.first_divergence.tensor if log.first_divergence else "no tensor"
    lines.append(
        f"- `{name}` on `aie2_x1`: {100 * differs / elements:.3f} % of all integers differ from onnxruntime's on the same inputs, "
        f"{100 * by[largest] / max(1, differs):.0f} % of them because of *{largest}*; {log.unexplained} have no known cause. "
        f"The whole run first parts at `{first}`. {100 - same[target]:.2f} % of 3000 images get another class; top-1 goes "
        f"from {top1[name, 'onnxruntime']:.2f} to {top1[target]:.2f} %."
    )
unlike = sum(r.differs for (_, target), log in logs.items() if target == "ort" for r in log.rows)
lines.append(f"- The target `ort` differs from onnxruntime in {unlike} integers.")
display(Markdown("\n".join(lines)))
