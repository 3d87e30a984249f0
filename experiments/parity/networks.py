"""Small torch networks of many kinds with random weights, as ONNX: python networks.py FOLDER SEED, by a Python with torch."""

import functools
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


def randomized(module):
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.normal_(0, 0.3)
            part.running_var.uniform_(0.3, 2)
            part.weight.data.uniform_(0.4, 1.6)
            part.bias.data.normal_(0, 0.3)
    return module.eval()


def cbr(i, o, k=3, s=1, g=1, act=nn.ReLU, d=1):
    conv = nn.Conv2d(i, o, k, s, d * (k // 2), groups=g, bias=False, dilation=d)
    return nn.Sequential(conv, nn.BatchNorm2d(o), act())


class SEH(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.a = nn.Conv2d(c, c // 2, 1)
        self.b = nn.Conv2d(c // 2, c, 1)

    def forward(self, x):
        return x * F.hardsigmoid(self.b(F.relu(self.a(F.adaptive_avg_pool2d(x, 1)))))


class MBv3(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = cbr(3, 16, 3, 2, act=nn.Hardswish)
        self.b = cbr(16, 32, 1, act=nn.Hardswish)
        self.c = cbr(32, 32, 5, 1, 32, act=nn.Hardswish)
        self.se = SEH(32)
        self.d = nn.Sequential(nn.Conv2d(32, 16, 1, bias=False), nn.BatchNorm2d(16))
        self.h = nn.Hardswish()
        self.f = nn.Linear(16, 10)

    def forward(self, x):
        y = self.a(x)
        y = y + self.d(self.se(self.c(self.b(y))))
        return self.f(self.h(F.adaptive_avg_pool2d(y, 1).flatten(1)))


class Yolo(nn.Module):
    def __init__(self):
        super().__init__()
        A = nn.SiLU
        self.a = cbr(3, 16, 3, 2, act=A)
        self.b = cbr(16, 32, 3, 2, act=A)
        self.m1 = cbr(16, 16, 3, act=A)
        self.m2 = cbr(16, 16, 3, act=A)
        self.c = cbr(48, 32, 1, act=A)
        self.p = nn.MaxPool2d(5, 1, 2)
        self.sp = cbr(128, 32, 1, act=A)
        self.u = nn.Upsample(scale_factor=2, mode="nearest")
        self.o = cbr(48, 16, 3, act=A)
        self.h = nn.Conv2d(16, 12, 1)

    def forward(self, x):
        x1 = self.a(x)
        x2 = self.b(x1)
        p, q = x2.chunk(2, 1)
        r = self.m2(self.m1(q)) + q
        x3 = self.c(torch.cat([p, q, r], 1))
        p1 = self.p(x3)
        p2 = self.p(p1)
        p3 = self.p(p2)
        x4 = self.sp(torch.cat([x3, p1, p2, p3], 1))
        y = self.o(torch.cat([self.u(x4), x1], 1))
        return self.h(y).permute(0, 2, 3, 1).reshape(x.shape[0], -1, 12).sigmoid()


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        L = functools.partial(nn.LeakyReLU, 0.1)
        self.a = cbr(3, 12, act=L)
        self.b = cbr(12, 24, 3, 2, act=L)
        self.c = cbr(24, 24, 3, act=L, d=2)
        self.u = nn.ConvTranspose2d(24, 12, 2, 2)
        self.e = cbr(24, 12, 3, act=L)
        self.f = nn.Conv2d(12, 3, 3, padding=1)
        self.pr = nn.PReLU(12)

    def forward(self, x):
        a = self.a(x)
        c = self.c(self.b(a))
        u = self.pr(self.u(c))
        return torch.tanh(self.f(self.e(torch.cat([u, a], 1))))


class Res(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = cbr(3, 16, 7, 2)
        self.p = nn.MaxPool2d(3, 2, 1)
        self.b1 = cbr(16, 16)
        self.b2 = nn.Sequential(nn.Conv2d(16, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16))
        self.c1 = cbr(16, 32, 3, 2)
        self.c2 = nn.Sequential(nn.Conv2d(32, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32))
        self.d = nn.Sequential(nn.Conv2d(16, 32, 1, 2, bias=False), nn.BatchNorm2d(32))
        self.f = nn.Linear(32, 10)

    def forward(self, x):
        x = self.p(self.a(x))
        x = F.relu(self.b2(self.b1(x)) + x)
        x = F.relu(self.c2(self.c1(x)) + self.d(x))
        return F.softmax(self.f(x.mean((2, 3))), 1)


class Mobile(nn.Module):
    def __init__(self):
        super().__init__()
        R = nn.ReLU6
        self.a = cbr(3, 16, 3, 2, act=R)
        self.b = cbr(16, 32, 1, act=R)
        self.c = cbr(32, 32, 3, 1, 32, act=R)
        self.d = nn.Sequential(nn.Conv2d(32, 16, 1, bias=False), nn.BatchNorm2d(16))
        self.g = cbr(16, 32, 3, 2, 4, act=R)
        self.f = nn.Linear(32, 10)

    def forward(self, x):
        x = self.a(x)
        x = x + self.d(self.c(self.b(x)))
        x = self.g(x)
        return self.f(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class Incep(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = cbr(3, 16)
        self.b = cbr(16, 8, 1)
        self.c = cbr(16, 8, 3)
        self.d = cbr(16, 8, 5)
        self.ap = nn.AvgPool2d(3, 1, 1)
        self.e = cbr(16, 8, 1)
        self.f = nn.Conv2d(32, 10, 1)
        self.g = nn.AvgPool2d(2)

    def forward(self, x):
        x = self.a(x)
        y = torch.cat([self.b(x), self.c(x), self.d(x), self.e(self.ap(x))], 1)
        y = self.g(y)
        return self.f(F.adaptive_avg_pool2d(y, 1)).flatten(1)


class Trans(nn.Module):
    def __init__(self):
        super().__init__()
        self.p = nn.Conv2d(3, 32, 8, 8)
        self.n = nn.LayerNorm(32)
        self.q = nn.Linear(32, 96)
        self.o = nn.Linear(32, 32)
        self.n2 = nn.LayerNorm(32)
        self.f1 = nn.Linear(32, 64)
        self.f2 = nn.Linear(64, 32)
        self.h = nn.Linear(32, 10)

    def forward(self, x):
        x = self.p(x).flatten(2).transpose(1, 2)
        q, k, v = self.q(self.n(x)).chunk(3, -1)
        a = torch.softmax(q @ k.transpose(1, 2) / 5.65, -1) @ v
        x = x + self.o(a)
        x = x + self.f2(F.gelu(self.f1(self.n2(x))))
        return self.h(x.mean(1))


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 16, 3, padding=1)
        self.bn = nn.BatchNorm2d(16)
        self.b = nn.Conv2d(16, 16, 3, padding=1)
        self.c = nn.Conv2d(16, 16, 1)
        self.pool = nn.AvgPool2d(5, 2, 2)
        self.k = nn.Parameter(torch.randn(1, 16, 1, 1))

    def forward(self, x):
        x = F.relu(self.a(x))
        y = self.bn(F.max_pool2d(x, 2))
        z = F.pad(y, (1, 1, 1, 1))
        z = self.b(z)[:, :, 1:-1, 1:-1]
        w = self.pool(self.c(y) * self.k - 0.5)
        z = F.interpolate(z, scale_factor=2.0, mode="bilinear", align_corners=False)
        return torch.cat([z.mean((2, 3)), w.amax((2, 3)), torch.clamp(w, -1, 1).mean((2, 3))], 1)


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = cbr(3, 16, 3, 2)
        self.n1 = nn.BatchNorm2d(16)
        self.c1 = nn.Conv2d(16, 12, 3, padding=1, bias=False)
        self.n2 = nn.BatchNorm2d(28)
        self.c2 = nn.Conv2d(28, 12, 3, padding=1, bias=False)
        self.n3 = nn.BatchNorm2d(40)
        self.t = nn.Conv2d(40, 20, 1)
        self.p = nn.AvgPool2d(2)
        self.f = nn.Linear(20, 10)

    def forward(self, x):
        x = self.a(x)
        x = torch.cat([x, self.c1(F.relu(self.n1(x)))], 1)
        x = torch.cat([x, self.c2(F.relu(self.n2(x)))], 1)
        x = self.p(self.t(F.relu(self.n3(x))))
        return self.f(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Shuffle(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = cbr(3, 16, 3, 2)
        self.b1 = cbr(8, 8, 1)
        self.b2 = nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1, groups=8, bias=False), nn.BatchNorm2d(8))
        self.b3 = cbr(8, 8, 1)
        self.f = nn.Linear(16, 10)

    def forward(self, x):
        x = self.a(x)
        a, b = x.chunk(2, 1)
        x = torch.cat([a, self.b3(self.b2(self.b1(b)))], 1)
        n, h, w = 1, 16, 16
        x = x.view(n, 2, 8, h, w).transpose(1, 2).reshape(n, 16, h, w)
        return self.f(x.mean((2, 3)))


class Eff(nn.Module):
    def __init__(self):
        super().__init__()
        A = nn.SiLU
        self.a = cbr(3, 16, 3, 2, act=A)
        self.b = cbr(16, 32, 1, act=A)
        self.c = cbr(32, 32, 3, 2, 32, act=A)
        self.se1 = nn.Conv2d(32, 4, 1)
        self.se2 = nn.Conv2d(4, 32, 1)
        self.d = nn.Sequential(nn.Conv2d(32, 16, 1, bias=False), nn.BatchNorm2d(16))
        self.h = cbr(16, 40, 1, act=A)
        self.f = nn.Linear(40, 10)

    def forward(self, x):
        x = self.c(self.b(self.a(x)))
        e = self.se2(F.silu(self.se1(F.adaptive_avg_pool2d(x, 1))))
        x = self.d(x * e.sigmoid())
        return self.f(F.adaptive_avg_pool2d(self.h(x), 1).flatten(1))


class Seg(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = cbr(3, 16, 3, 2)
        self.b = cbr(16, 32, 3, 2)
        self.c = cbr(32, 32, 3, d=2)
        self.l = nn.Conv2d(16, 8, 1)
        self.m = nn.Conv2d(32, 8, 1)
        self.o = nn.Conv2d(8, 4, 3, padding=1)
        self.i = nn.InstanceNorm2d(8, affine=True)

    def forward(self, x):
        low = self.a(x)
        h = self.c(self.b(low))
        g = F.adaptive_avg_pool2d(h, 1)
        h = h * g
        y = F.interpolate(self.m(h), size=(16, 16), mode="bilinear", align_corners=False) + self.l(low)
        y = self.i(y)
        return F.interpolate(self.o(F.relu(y)), scale_factor=2.0, mode="nearest").softmax(1)


class SR(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 16, 5, padding=2)
        self.p = nn.PReLU()
        self.b = nn.Conv2d(16, 16, 3, padding=1)
        self.c = nn.Conv2d(16, 12, 3, padding=1)
        self.s = nn.PixelShuffle(2)

    def forward(self, x):
        y = self.p(self.a(x))
        y = torch.relu(self.b(y)) + y * 0.1
        return torch.clamp(self.s(self.c(y)), 0, 1)


class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = cbr(3, 16, 3, 2, act=nn.ELU)
        self.b = nn.Conv2d(16, 16, 3, padding=1, groups=4)
        self.g = nn.GELU()
        self.c = nn.Conv2d(16, 16, 1)
        self.t = nn.Conv2d(16, 16, (1, 7), padding=(0, 3))
        self.u = nn.Conv2d(16, 16, (7, 1), padding=(3, 0))
        self.f = nn.Linear(256, 10)

    def forward(self, x):
        x = self.a(x)
        y = self.g(self.b(x))
        z = torch.max(self.c(y), x) - torch.min(y, x)
        z = self.u(F.relu6(self.t(z)))
        z = F.max_pool2d(z, 3, 2, 1)
        z = F.avg_pool2d(z, (2, 1))
        z = F.adaptive_avg_pool2d(z, (4, 4))
        return F.log_softmax(self.f(z.flatten(1)), 1)


NETWORKS = {
    17: (MBv3, Yolo, UNet, Res, Mobile, Incep, Trans, Odd),
    13: (Dense, Shuffle, Eff, Seg, SR, Mix),
}


def main(folder, seed):
    torch.manual_seed(seed)
    for opset, networks in NETWORKS.items():
        for network in networks:
            path = str(Path(folder) / f"{network.__name__}.onnx")
            example = (torch.randn(1, 3, 32, 32),)
            options = {"input_names": ["x"], "output_names": ["y"], "opset_version": opset, "dynamo": False}
            torch.onnx.export(randomized(network()), example, path, **options)
    samples = np.random.default_rng(seed).standard_normal((24, 3, 32, 32), np.float32) * np.float32(1.3)
    np.save(Path(folder) / "samples.npy", samples)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
