# %% [markdown]
# # Quick start
#
# **Question.** What does 8-bit quantization with power-of-two scales (XINT8) cost two small networks, and which tensors
# are to blame?
#
# Both are bundled, and classify pictures of clothes: a plain residual network, and a MobileNet whose channels are of very
# uneven size, as those of real MobileNets are.

# %%
import matplotlib.pyplot as plt
from IPython.display import Markdown, display

import jq

names = jq.zoo.models()
calibration, _ = jq.zoo.calibration_set()
images, labels = jq.zoo.evaluation_set()
jq.load(jq.zoo.path("fashion_mobilenet"))

# %% [markdown]
# ## What will not go well
#
# `lint` needs no data.

# %%
for finding in jq.lint(jq.zoo.path("fashion_mobilenet"), "XINT8"):
    print(finding)

# %% [markdown]
# ## Quantize
#
# Once plainly, with only the exponents that 128 calibration images give; and once with the whole preset, which also
# equalizes channels and corrects biases.

# %%
plain = jq.presets["XINT8"].replace(cle=False, bias_correction=False)
results = {
    (name, kind): jq.quantize(jq.zoo.path(name), calibration[:128], config, output=f"{name}_{kind}.onnx")
    for name in names
    for kind, config in (("plain", plain), ("XINT8", jq.presets["XINT8"]))
}
results["fashion_mobilenet", "XINT8"].plan

# %% [markdown]
# ## How often it is right
#
# onnxruntime runs the files, on 3000 images that nothing was trained or calibrated on.


# %%
def top1(model):
    """Percent of the evaluation images that a model classifies rightly."""
    return 100 * jq.metrics.topk(jq.evaluate.model_scores(model, images).values, labels)


accuracy = {(name, "float"): top1(jq.zoo.path(name)) for name in names}
accuracy |= {key: top1(f"{key[0]}_{key[1]}.onnx") for key in results}
for name in names:
    print(f"{name:18}" + "".join(f"  {kind} {accuracy[name, kind]:6.2f} %" for kind in ("float", "plain", "XINT8")))

# %% [markdown]
# ## Where it is lost
#
# `compare` runs the float and the quantized model side by side. Its rows have the signal-to-noise ratio of each tensor, and a
# reason. `report.to_html(path)` makes the whole page; a notebook shows the worst rows.

# %%
reports = {key: jq.compare(jq.zoo.path(key[0]), f"{key[0]}_{key[1]}.onnx", calibration[:64]) for key in results}
reports["fashion_mobilenet", "plain"]

# %%
figure, axes = plt.subplots(1, 2, figsize=(11, 3.2), sharey=True)
for axis, name in zip(axes, names, strict=True):
    for kind in ("plain", "XINT8"):
        rows = [r for r in reports[name, kind].rows if r.kind == "activation" and r.depth is not None]
        rows.sort(key=lambda r: r.depth)
        axis.plot([r.depth for r in rows], [r.sqnr for r in rows], ".-", label=kind)
    axis.set(title=name, xlabel="depth in the network", ylabel="signal to noise, dB")
    axis.legend()

# %% [markdown]
# ## Answer

# %%
worst = {
    key: next(r for r in report.rows if r.reason not in ("changed", "upstream")) for key, report in reports.items()
}
lines = [
    f"- `{name}` loses {accuracy[name, 'float'] - accuracy[name, 'plain']:.1f} points plainly, and "
    f"{accuracy[name, 'float'] - accuracy[name, 'XINT8']:.1f} with the whole preset. The tensor that itself loses most plainly is "
    f"the {worst[name, 'plain'].kind} `{worst[name, 'plain'].tensor}`, {worst[name, 'plain'].sqnr:.1f} dB, for reason of "
    f"*{worst[name, 'plain'].reason}*; with the preset the worst has {worst[name, 'XINT8'].sqnr:.1f} dB."
    for name in names
]
display(Markdown("\n".join(lines) + "\n\nOn 3000 images, 0.5 points are one standard error of one figure."))
