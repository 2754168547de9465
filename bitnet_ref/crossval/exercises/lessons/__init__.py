"""The exercises, a module for each notebook that has some. Importing this declares them all."""

from . import analysis, generation, kernels, one_head, quantised, training, transformer, whole_model

__all__ = ["analysis", "generation", "kernels", "one_head", "quantised", "training", "transformer", "whole_model"]
