"""Scripts that run another engine and write what it computed as a trace, each in an interpreter that has the engine.

They are run as files, not imported: an engine may live in an environment of its own, which needs NumPy beside it and
nothing of this package. Each reads a list of jobs, as JSON, so that an engine is started once for many models.
"""
