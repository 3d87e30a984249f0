# %% [markdown]
# # Quick start
#
# **Question.** What does 8-bit quantization with power-of-two scales (XINT8) cost two small networks, and which tensors
# are to blame?
#
# Both networks are bundled and classify pictures of clothes. One is a plain residual network, the other a MobileNet whose channels
# differ widely in size, like those of real MobileNets.

# %%
import matplotlib.pyplot as plt
from IPython.display import Markdown, display

import jq

names = jq.zoo.models()
calibration, _ = jq.zoo.calibration_set()
images, labels = jq.zoo.evaluation_set()
jq.load(jq.zoo.path("fashion_mobilenet"))

# %% [markdown]
# ## Find problems first
#
# `lint` needs no data.

# %%
for finding in jq.lint(jq.zoo.path("fashion_mobilenet"), "XINT8"):
    print(finding)

# %% [markdown]
# ## Quantize
#
# Each network is quantized twice: plainly, with only the exponents that 128 calibration images give, and with the whole preset,
# which also equalizes channels and corrects biases.

# %%
plain = jq.presets["XINT8"].replace(cle=False, bias_correction=False)
results = {
    (name, kind): jq.quantize(jq.zoo.path(name), calibration[:128], config, output=f"{name}_{kind}.onnx")
    for name in names
    for kind, config in (("plain", plain), ("XINT8", jq.presets["XINT8"]))
}
results["fashion_mobilenet", "XINT8"].plan

# %% [markdown]
# ## Accuracy
#
# onnxruntime runs the files on 3000 images that were used neither for training nor for calibration.


# %%
def top1(model):
    """Percent of the evaluation images that a model classifies rightly."""
    return 100 * jq.metrics.topk(jq.evaluate.model_scores(model, images).values, labels)


accuracy = {(name, "float"): top1(jq.zoo.path(name)) for name in names}
accuracy |= {key: top1(f"{key[0]}_{key[1]}.onnx") for key in results}
for name in names:
    print(f"{name:18}" + "".join(f"  {kind} {accuracy[name, kind]:6.2f} %" for kind in ("float", "plain", "XINT8")))

# %% [markdown]
# ## Where the error is made
#
# `compare` runs the float and the quantized model side by side. Its rows show the signal-to-noise ratio of each tensor, and a
# reason. `report.to_html(path)` writes the whole page; a notebook shows the worst rows.

# %%
hard = "fashion_mobilenet"
reports = {kind: jq.compare(jq.zoo.path(hard), f"{hard}_{kind}.onnx", calibration[:64]) for kind in ("plain", "XINT8")}
reports["plain"]

# %%
figure, axis = plt.subplots(figsize=(9, 3))
for kind, report in reports.items():
    rows = sorted((r for r in report.rows if r.kind == "activation"), key=lambda r: r.depth)
    axis.plot([r.depth for r in rows], [r.sqnr for r in rows], ".-", label=kind)
axis.set(title=hard, xlabel="depth in the network", ylabel="signal to noise, dB")
axis.legend()
plt.show()

# %% [markdown]
# ## Answer
#
# A tensor with a low ratio may only pass on what came in. `report.attribution` says which layers the outputs' error comes from, and
# whether it is their rounding, their weights or something else.

# %%
lost = {key: accuracy[key[0], "float"] - accuracy[key] for key in results}
lines = [
    f"- `{name}` loses {lost[name, 'plain']:.1f} points plainly, and {lost[name, 'XINT8']:.1f} with the whole preset."
    for name in names
]
lines += [
    f"- `{hard}`, {kind}: the layer `{layer.name}` causes {layer.effect:.0%} of the outputs' error, most of it by *{layer.cause}*."
    for kind, report in reports.items()
    for layer in report.attribution.layers[:1]
]
display(Markdown("\n".join(lines) + "\n\nOn 3000 images, one figure has a standard error of about 0.5 points."))
