"""The exercises, a module for each notebook that has some. Importing this declares them all."""

from .. import quiz
from . import analysis, byte_pairs, generation, kernels, one_head, quantised, training, transformer, whole_model

MODULES = (quiz, byte_pairs, quantised, one_head, transformer, whole_model, kernels, analysis, generation, training)
