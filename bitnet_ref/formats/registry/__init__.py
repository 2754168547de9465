"""Models by name: a local store, filled from the Hugging Face hub (`add.pull`) or from local files (`add.add`).

The store is a folder (BITNET_REF_HOME; by default bitnet_ref in the user's cache folder). Each version of a model is a
folder in it, named by the hash of its content. An index maps names and revisions to versions: see `store`.
"""
