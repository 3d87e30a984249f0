# %% [markdown]
# # Equalization and AdaRound, an ablation
#
# **Question.** A MobileNet in XINT8 falls apart. What repairs it: equalizing channels, correcting biases, or tuning how weights
# are rounded? And is one of them enough?

# %%
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Markdown, display

import jq
from jq.research import Experiment, Subject, ablate

name = "fashion_mobilenet"
calibration, _ = jq.zoo.calibration_set()

# %% [markdown]
# ## What goes wrong
#
# One scale serves all channels of a weight. If one channel's weights are forty times as large as another's, the small one gets
# only a few codes.

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
# Each run differs from the preset by the options it names. Finetuning sets biases itself, so bias correction is off there. `ablate`
# computes steps that several runs share only once, and measures the quantized networks on 3000 images that they have not seen.

# %%
changes = {
    "nothing": {"cle": False, "bias_correction": False},
    "bias correction": {"cle": False},
    "equalization": {"bias_correction": False},
    "both (XINT8)": {},
    "AdaRound alone": {"cle": False, "bias_correction": False, "finetune": "adaround"},
    "equalization, AdaRound": {"bias_correction": False, "finetune": "adaround"},
}
configs = {variant: jq.presets["XINT8"].replace(**change) for variant, change in changes.items()}
results = ablate(Experiment(subjects={name: Subject.bundled(name, samples=128)}, configs=configs))
results

# %%
rows = {row["config"]: row for row in results.rows}
whole = rows["nothing"]["float_top1"]
figure, axes = plt.subplots(1, 2, figsize=(11, 3), sharey=True)
axes[0].barh(list(rows), [100 * row["top1"] for row in rows.values()])
axes[0].axvline(100 * whole, color="black", linestyle=":")
axes[0].set(xlabel="top-1, %; dotted: float")
axes[1].barh(list(rows), [row["sqnr"] for row in rows.values()], color="C1")
axes[1].set(xlabel="signal to noise of the logits, dB")
axes[0].invert_yaxis()

# %% [markdown]
# ## Answer

# %%
lost = {variant: 100 * (whole - row["top1"]) for variant, row in rows.items()}
error = 100 * jq.metrics.standard_error(whole, 3000)
preset, tuned = rows["both (XINT8)"], rows["equalization, AdaRound"]
display(
    Markdown(
        f"Without help the network loses {lost['nothing']:.1f} points. Bias correction alone leaves {lost['bias correction']:.1f} "
        f"of them, AdaRound alone {lost['AdaRound alone']:.1f}, equalization alone {lost['equalization']:.1f}. Equalization with "
        f"bias correction, the preset XINT8, leaves {lost['both (XINT8)']:.1f}, and with AdaRound "
        f"{lost['equalization, AdaRound']:.1f}, where one accuracy has a standard error of {error:.1f}. The logits have "
        f"{preset['sqnr']:.1f} and {tuned['sqnr']:.1f} dB. The preset took {preset['seconds']:.0f} s, the first run with AdaRound "
        f"{rows['AdaRound alone']['seconds']:.0f} s, and the second, with the same compiled programs, {tuned['seconds']:.0f} s."
    )
)
