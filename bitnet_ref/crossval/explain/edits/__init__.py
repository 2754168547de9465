"""Small edits of one step of a run: what an engine may have computed instead of it. Each has a cost; simple ones cost less.

Two kinds of edits apply to every step. One changes an input or the result: it is moved, scaled, rounded, left out or
replaced by another tensor of the run (`changes`). The other replaces the step's formula, by a row of a table of
formulas: `by_token`, `attention`, `products`. A `Family` is an edit with an unknown constant (`constants`), for
which `site` solves. `site` tries the edits and returns those that give the engine's tensor.
"""
