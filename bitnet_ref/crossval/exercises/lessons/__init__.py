"""The exercises, a module for each notebook that has some. Importing this declares them all."""

from .. import quiz
from . import analysis, generation, kernels, one_head, quantised, text, training, transformer, whole_model

MODULES = (quiz, text, quantised, one_head, transformer, whole_model, kernels, analysis, generation, training)
