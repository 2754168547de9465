"""A BitLinear of NumPy with its gradients, and classes with one mistake each: layers to be judged by `crossval linear`.

It is written apart from `crossval.linear.rules`, as an author writes a layer: a test judges it from outside.
"""

import numpy as np

half = np.float32(0.5)


def half_up(v):
    return np.floor(v + half)


def half_away(v):
    return np.sign(v) * np.floor(np.abs(v) + half)


class BitLinear:
    """Right in every line. What the classes below change are its attributes and methods."""

    levels, low, high, floor = 127, -128, 127, 1e-5
    x_axis, x_round, w_round = -1, staticmethod(np.rint), staticmethod(np.rint)

    def __init__(self, in_features, out_features, bias=False):
        self.weight = np.zeros((out_features, in_features), dtype=np.float32)
        if bias:
            self.bias = np.zeros(out_features, dtype=np.float32)

    def norm(self, x):
        return x

    def x_scale(self, x):
        largest = np.abs(x).max(axis=self.x_axis, keepdims=True)
        return np.float32(self.levels) / np.maximum(largest, np.float32(self.floor))

    def x_quantized(self, x, a):
        return np.clip(self.x_round(x * a), self.low, self.high)

    def w_scale(self):
        return np.maximum(np.abs(self.weight).mean(), np.float32(1e-5))

    def w_quantized(self, s):
        return np.clip(self.w_round(self.weight / s), -1, 1)

    def rescaled(self, acc, s, a):
        return acc * s / a

    def with_bias(self, y, s, a):
        return y + self.bias

    def __call__(self, x):
        self.x, self.n = x, self.norm(x)
        self.a, self.s = self.x_scale(self.n), self.w_scale()
        self.q, self.t = self.x_quantized(self.n, self.a), self.w_quantized(self.s)
        y = self.rescaled(self.q @ self.t.T, self.s, self.a)
        return self.with_bias(y, self.s, self.a) if hasattr(self, "bias") else y

    def dx(self, dy):
        return dy @ (self.t * self.s)

    def dw(self, dy):
        return self.flat(dy).T @ self.flat(self.q / self.a)

    def flat(self, values):
        return values.reshape(-1, values.shape[-1])

    def backward(self, dy):
        gradients = self.dx(dy), self.dw(dy)
        return (*gradients, self.flat(dy).sum(axis=0)) if hasattr(self, "bias") else gradients


# -- right ones of another kind ----------------------------------------------------------------------------------------


class Turned(BitLinear):
    """Its weight is stored as (in, out), and its arguments have other names."""

    def __init__(self, size_in, size_out, use_bias=False):
        super().__init__(size_in, size_out, use_bias)
        self.kernel = self.weight.T.copy()
        del self.weight

    def __call__(self, x):
        self.weight = self.kernel.T
        y = super().__call__(x)
        del self.weight
        return y

    def backward(self, dy):
        dx, dw, *rest = super().backward(dy)
        return dx, dw.T, *rest


class WithRMSNorm(BitLinear):
    def norm(self, x):
        self.r = np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(1e-5))
        return x / self.r

    def dx(self, dy):
        d = super().dx(dy)
        return (d - self.n * (d * self.n).mean(axis=-1, keepdims=True)) / self.r


class WithLayerNorm(BitLinear):
    def norm(self, x):
        centred = x - x.mean(axis=-1, keepdims=True)
        self.r = np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + np.float32(1e-5))
        return centred / self.r

    def dx(self, dy):
        d = super().dx(dy)
        d = d - self.n * (d * self.n).mean(axis=-1, keepdims=True)
        return (d - d.mean(axis=-1, keepdims=True)) / self.r


class LowFloor(BitLinear):
    floor = 1e-8


class ForInference(BitLinear):
    backward = None

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features)

    def __getattribute__(self, name):
        if name == "backward":
            raise AttributeError(name)
        return super().__getattribute__(name)


# -- activations -------------------------------------------------------------------------------------------------------


class PerTensor(BitLinear):
    x_axis = None


class PerSequence(BitLinear):
    x_axis = (1, 2)


class PerColumn(BitLinear):
    x_axis = (0, 1)

    def rescaled(self, acc, s, a):
        return (self.q / a) @ self.t.T * s


class Of128(BitLinear):
    levels = 128


class Of128NotCut(BitLinear):
    levels, high = 128, 128


class Of1275(BitLinear):
    levels = 127.5


class FourBits(BitLinear):
    levels, low, high = 7, -8, 7


class NotQuantized(BitLinear):
    def x_scale(self, x):
        return np.ones((*x.shape[:-1], 1), dtype=np.float32)

    def x_quantized(self, x, a):
        return x


class FloorTooHigh(BitLinear):
    floor = 1e-3


class NoFloor(BitLinear):
    def x_scale(self, x):
        with np.errstate(all="ignore"):
            return np.float32(127) / np.abs(x).max(axis=-1, keepdims=True)

    def x_quantized(self, x, a):
        with np.errstate(all="ignore"):
            return super().x_quantized(x, a)


class EpsAdded(BitLinear):
    eps = 1e-5

    def x_scale(self, x):
        return np.float32(127) / (np.abs(x).max(axis=-1, keepdims=True) + np.float32(self.eps))


class LowEpsAdded(EpsAdded):
    eps = 1e-8


class HalvesUp(BitLinear):
    x_round = staticmethod(half_up)


class HalvesAway(BitLinear):
    x_round = staticmethod(half_away)


class Floors(BitLinear):
    x_round = staticmethod(np.floor)


class Truncates(BitLinear):
    x_round = staticmethod(np.trunc)


class Stochastic(BitLinear):
    rng = np.random.default_rng(0)

    def x_round(self, v):
        return np.floor(v + self.rng.random(v.shape, dtype=np.float32))


# -- weights -----------------------------------------------------------------------------------------------------------


class Median(BitLinear):
    def w_scale(self):
        return np.maximum(np.median(np.abs(self.weight)), np.float32(1e-5))


class Largest(BitLinear):
    def w_scale(self):
        return np.maximum(np.abs(self.weight).max(), np.float32(1e-5))


class PerRow(BitLinear):
    def w_scale(self):
        return np.maximum(np.abs(self.weight).mean(axis=1), np.float32(1e-5))

    def w_quantized(self, s):
        return np.clip(np.rint(self.weight / s[:, None]), -1, 1)

    def dx(self, dy):
        return dy @ (self.t * self.s[:, None])


class PerGroup(BitLinear):
    def w_scale(self):
        groups = np.abs(self.weight).reshape(len(self.weight), -1, 64)
        return np.maximum(np.repeat(groups.mean(axis=2), 64, axis=1), np.float32(1e-5))

    def rescaled(self, acc, s, a):
        return self.q @ (self.t * s).T / a


class RootMeanSquare(BitLinear):
    def w_scale(self):
        return np.sqrt((self.weight**2).mean()) + np.float32(1e-8)


class Unscaled(BitLinear):
    def w_scale(self):
        return np.float32(1)


class WeightsHalvesUp(BitLinear):
    w_round = staticmethod(half_up)


class WeightsHalvesAway(BitLinear):
    w_round = staticmethod(half_away)


class WeightsTruncated(BitLinear):
    w_round = staticmethod(np.trunc)


class WeightsNotCut(BitLinear):
    def w_quantized(self, s):
        return np.rint(self.weight / s)


class Binary(BitLinear):
    def w_quantized(self, s):
        return np.where(self.weight > self.weight.mean(), np.float32(1), np.float32(-1))


class Threshold(BitLinear):
    def w_quantized(self, s):
        return np.sign(self.weight) * (np.abs(self.weight) > np.float32(0.7) * s)


class WeightsNotQuantized(BitLinear):
    def w_quantized(self, s):
        return self.weight / s


# -- rescaling and bias ------------------------------------------------------------------------------------------------


class ScaleMissing(BitLinear):
    def rescaled(self, acc, s, a):
        return acc / a


class ScaleDivides(BitLinear):
    def rescaled(self, acc, s, a):
        return acc / s / a


class ScaleTwice(BitLinear):
    def rescaled(self, acc, s, a):
        return acc * s * s / a


class ScaleTimesDensity(BitLinear):
    """The quantised weights are quantised again for their scale."""

    def rescaled(self, acc, s, a):
        return acc * np.abs(self.t * s).mean() / a


class ActivationScaleMissing(BitLinear):
    def rescaled(self, acc, s, a):
        return acc * s

    def dx(self, dy):
        return super().dx(dy) * self.a

    def dw(self, dy):
        return self.flat(dy).T @ self.flat(self.q)


class ActivationScaleMultiplies(BitLinear):
    def rescaled(self, acc, s, a):
        return acc * s * a

    def dx(self, dy):
        return super().dx(dy) * self.a**2

    def dw(self, dy):
        return self.flat(dy).T @ self.flat(self.q * self.a)


class ForgotLevels(BitLinear):
    def rescaled(self, acc, s, a):
        return acc * s / a / 127


class BiasInside(BitLinear):
    def with_bias(self, y, s, a):
        return y + self.bias * s / a


class BiasTimesScale(BitLinear):
    def with_bias(self, y, s, a):
        return y + self.bias * s


class BiasForgotten(BitLinear):
    def with_bias(self, y, s, a):
        return y


# -- gradients ---------------------------------------------------------------------------------------------------------


class NoWeightGradient(BitLinear):
    def dw(self, dy):
        return np.zeros_like(self.weight)


class ClippedWeights(BitLinear):
    def dw(self, dy):
        return super().dw(dy) * (np.abs(self.weight) <= self.s)


class ThroughTheScale(BitLinear):
    def dw(self, dy):
        g = super().dw(dy)
        return g + np.sign(self.weight) * (g * (self.t - self.weight / self.s)).sum() / self.weight.size


class OfUnquantized(BitLinear):
    def dw(self, dy):
        return self.flat(dy).T @ self.flat(self.n)


class GradientTimesScale(BitLinear):
    def dw(self, dy):
        return super().dw(dy) * self.s


class NoInputGradient(BitLinear):
    def dx(self, dy):
        return np.zeros_like(self.x)


class OfMasters(BitLinear):
    def dx(self, dy):
        return dy @ self.weight


class ThroughLargest(BitLinear):
    def dx(self, dy):
        g = super().dx(dy)
        largest = np.abs(self.x).max(axis=-1, keepdims=True)
        at = (np.abs(self.x) == largest) * np.sign(self.x) / largest
        return g + at * (g * (self.q / self.a - self.x)).sum(axis=-1, keepdims=True)


# -- storing -----------------------------------------------------------------------------------------------------------


class BakesDensity(BitLinear):
    """Stores -s, 0, +s in the place of its masters, and quantises them once more in each call."""

    def bake_weights(self):
        s = self.w_scale()
        self.weight[...] = self.w_quantized(s) * s
