# %% [markdown]
# # Calibrate on many devices
#
# **Question.** Batches of calibration data can be split over devices. Do the exponents stay the same, and how much time does it
# save?
#
# JAX splits one CPU into the number of devices that you ask for before anything else runs. The code is the same on GPUs.

# %%
import os
import time

import jax

jax.config.update("jax_num_cpu_devices", 4)

# %%
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Markdown, display

import jq

cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
images = np.concatenate([jq.zoo.calibration_set()[0]] * 2)
graph = jq.prepare(jq.load(jq.zoo.path("fashion_mobilenet")), "XINT8")
print(f"devices: {len(jax.devices())}, cores: {cores}, images: {len(images)}")

# %% [markdown]
# ## One, two, four
#
# `mesh` selects the devices that share the work; by default all of them do. The first call of each compiles and is not counted.

# %%
found, seconds = {}, {}
for count in (1, 2, 4):
    mesh = jax.make_mesh((count,), ("batch",), devices=jax.devices()[:count])
    found[count] = jq.calibrate(graph, images, "XINT8", mesh=mesh)
    rounds = []
    for _ in range(2):
        start = time.perf_counter()
        jq.calibrate(graph, images, "XINT8", mesh=mesh)
        rounds.append(time.perf_counter() - start)
    seconds[count] = min(rounds)
    print(f"{count} devices: {len(images) / seconds[count]:7.0f} images/s")

# %%
figure, axis = plt.subplots(figsize=(5, 3))
axis.plot(list(seconds), [len(images) / s for s in seconds.values()], "o-")
axis.axvline(cores, color="black", linestyle=":", label="cores")
axis.set(xlabel="devices", ylabel="images per second", ylim=0)
axis.legend()
plt.show()

# %% [markdown]
# ## Are they the same?

# %%
exponents = {n: {t: stats.best_exponent(t) for t in stats.tensors} for n, stats in found.items()}
ranges = {n: {t: stats.range(t) for t in stats.tensors} for n, stats in found.items()}
other = {n: sum(exponents[n][t] != exponents[1][t] for t in exponents[1]) for n in exponents}
print("tensors with another exponent than on one device:", other)
print("tensors with another range:", {n: sum(ranges[n][t] != ranges[1][t] for t in ranges[1]) for n in ranges})

# %% [markdown]
# ## Other runs, merged
#
# Data that are stored elsewhere can be calibrated there. The second run places its candidates where the first one has them, and
# then the two can be merged.

# %%
first = jq.calibrate(graph, images[:256], "XINT8")
second = jq.calibrate(graph, images[256:512], "XINT8", like=first)
merged, whole = first.merge(second), jq.calibrate(graph, images[:512], "XINT8")
unlike = sum(merged.best_exponent(t) != whole.best_exponent(t) for t in whole.tensors)
print(f"{merged.samples} samples; tensors with another exponent than in one run: {unlike} of {len(whole.tensors)}")

# %% [markdown]
# ## Answer

# %%
changed = sum(other.values())
times = {count: seconds[count] / seconds[1] for count in seconds}
display(
    Markdown(
        f"{changed} exponents of {len(exponents[1])} tensors change when 2 or 4 devices share the data, and {unlike} when two runs "
        f"are merged. Cores at hand: {cores}. With them, 2 devices take {times[2]:.2f} of the time of one, 4 take {times[4]:.2f}."
    )
)
