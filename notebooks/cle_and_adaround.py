# %% [markdown]
# # Equalization and AdaRound, an ablation
#
# **Question.** A MobileNet in XINT8 falls apart. What mends it: equalizing channels, correcting biases, or tuning how weights
# are rounded? And is one of them enough?

# %%
import time

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Markdown, display

import jq

name = "fashion_mobilenet"
calibration, _ = jq.zoo.calibration_set()
images, labels = jq.zoo.evaluation_set()

# %% [markdown]
# ## What is wrong with it
#
# One scale serves all channels of a weight. Where one channel's weights are forty times another's, the small one gets few codes.

# %%
graphs = {"before": jq.prepare(jq.load(jq.zoo.path(name)), "XINT8")}
graphs["equalized"] = jq.equalize(graphs["before"], "XINT8", calibration[:128])


def unevenness(graph):
    """Of each convolution, the largest channel's range over the median channel's."""
    weights = [graph.params[n.inputs[1]] for n in graph.nodes if n.op_type == "Conv"]
    ranges = [np.abs(w).reshape(len(w), -1).max(1) for w in weights]
    return np.array([r.max() / np.median(r) for r in ranges])


uneven = {kind: unevenness(graph) for kind, graph in graphs.items()}
figure, axis = plt.subplots(figsize=(9, 3))
for kind, values in uneven.items():
    axis.plot(values, ".-", label=kind)
axis.set(yscale="log", xlabel="convolution", ylabel="largest / median channel")
axis.legend()
print({kind: f"median {np.median(v):.1f}, largest {v.max():.1f}" for kind, v in uneven.items()})

# %% [markdown]
# ## The runs
#
# Each differs from the preset in what it says. Finetuning sets biases itself, so that correction is off with it. The
# signal-to-noise ratio is of the logits on 3000 fresh images, by onnxruntime.

# %%
variants = {
    "nothing": {"cle": False, "bias_correction": False},
    "bias correction": {"cle": False},
    "equalization": {"bias_correction": False},
    "both (XINT8)": {},
    "AdaRound alone": {"cle": False, "bias_correction": False, "finetune": "adaround"},
    "equalization, AdaRound": {"bias_correction": False, "finetune": "adaround"},
}
reference = jq.evaluate.model_scores(jq.zoo.path(name), images).values
right = {"float": reference.argmax(-1) == labels}
sqnr, seconds = {}, {}
for variant, changes in variants.items():
    start = time.perf_counter()
    jq.quantize(jq.zoo.path(name), calibration[:128], jq.presets["XINT8"].replace(**changes), output="run.onnx")
    seconds[variant] = time.perf_counter() - start
    scores = jq.evaluate.model_scores("run.onnx", images).values
    right[variant], sqnr[variant] = scores.argmax(-1) == labels, jq.metrics.sqnr(reference, scores)
    accuracy = 100 * right[variant].mean()
    print(f"{variant:24} top-1 {accuracy:6.2f} %  {sqnr[variant]:6.2f} dB  {seconds[variant]:5.1f} s")
print(f"{'float':24} top-1 {100 * right['float'].mean():6.2f} %")

# %%
figure, axes = plt.subplots(1, 2, figsize=(11, 3), sharey=True)
axes[0].barh(list(variants), [100 * right[v].mean() for v in variants])
axes[0].axvline(100 * right["float"].mean(), color="black", linestyle=":")
axes[0].set(xlabel="top-1, %; dotted: float")
axes[1].barh(list(variants), [sqnr[v] for v in variants], color="C1")
axes[1].set(xlabel="signal to noise of the logits, dB")
axes[0].invert_yaxis()

# %% [markdown]
# ## Is the difference more than chance?
#
# Two models judged on the same images differ where one alone is right. The sign test says how likely such a split is if they
# are equally good.


# %%
def p_value(one, other):
    """Of the hypothesis that two models are equally often right."""
    return jq.metrics.sign_test(int((right[one] & ~right[other]).sum()), int((right[other] & ~right[one]).sum()))


pairs = (("nothing", "equalization"), ("float", "both (XINT8)"), ("both (XINT8)", "equalization, AdaRound"))
for one, other in pairs:
    print(f"{one} against {other}: p = {p_value(one, other):.3g}")

# %% [markdown]
# ## Answer

# %%
lost = {v: 100 * (right["float"].mean() - right[v].mean()) for v in variants}
whole, tuned = "both (XINT8)", "equalization, AdaRound"
p = p_value(whole, tuned)
apart = "differ" if p < 0.05 else "cannot be told apart"
display(
    Markdown(
        f"Without help the network loses {lost['nothing']:.1f} points. Equalization alone leaves {lost['equalization']:.1f} of "
        f"them, bias correction alone {lost['bias correction']:.1f}, AdaRound alone {lost['AdaRound alone']:.1f}. Equalization "
        f"with AdaRound leaves {lost[tuned]:.1f} and takes {seconds[tuned]:.0f} s; the preset XINT8 leaves {lost[whole]:.1f} and "
        f"takes {seconds[whole]:.0f} s. By top-1 on 3000 images these two {apart} (p = {p:.2g}); their logits have "
        f"{sqnr[tuned]:.1f} and {sqnr[whole]:.1f} dB."
    )
)
